"""What the benchmarks share: which machine it is, other work beside us, spreads, the memory of processes."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fedld.engine.hardware import environment

MIB = 2**20


def describe() -> str:
    """The processor, and how busy the machine is as a benchmark begins: figures of a busy one are bounds."""
    facts = environment()
    return (
        f"{facts['processor']}, {facts['cpus']} cores, {facts['instructions']}, torch {facts['torch']}, "
        f"load {os.getloadavg()[0]:.1f}"
    )


def spread(values: list[float], digits: int = 2) -> str:
    """Median, smallest and largest."""
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def product_rate(threads: int) -> float:
    """Flop/s of a large float32 product: what training is measured against."""
    torch.set_num_threads(threads)
    a, best = torch.randn(2048, 2048), float("inf")
    for _ in range(7):
        start = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best


@contextmanager
def busy_process(wanted: bool, core: int | None = None) -> Iterator[None]:
    """One process beside us that never rests, as on a shared machine; on one core, or wherever it is put."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        if other is not None and core is not None:
            os.sched_setaffinity(other.pid, {core})
        yield
    finally:
        if other is not None:
            other.kill()
            other.wait()


def descendants(pid: int) -> list[int]:
    """Processes started by a process, and theirs."""
    try:
        files = list(Path(f"/proc/{pid}/task").glob("*/children"))
        children = [int(child) for file in files for child in file.read_text().split()]
    except OSError:  # it has ended
        return []
    return children + [d for child in children for d in descendants(child)]


def proportional(parent: int) -> int:
    """Proportional set size of a process and its descendants, in bytes: shared pages count once."""
    total = 0
    for pid in [parent, *descendants(parent)]:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
        except (OSError, IndexError):
            continue
    return total
