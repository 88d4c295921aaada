"""Where a run is computed: bits agree on one kind of processor, and may differ between two."""

import os
import platform
import re
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedld.records.schema import Environment

Key = Literal["processor", "instructions", "torch", "blas"]


def environment() -> Environment:
    """The machine and the libraries of this process."""
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "blas": blas[1] if blas else "unknown",
    }


def changed(before: Environment, now: Environment) -> str | None:
    """A sentence if a run is continued where its bits may come out differently; None if they agree."""
    keys: tuple[Key, ...] = ("processor", "instructions", "torch", "blas")
    parts = [f"{key} {before.get(key)} before, {now[key]} now" for key in keys if before.get(key) != now[key]]
    if not parts:
        return None
    return f"this run was begun elsewhere ({'; '.join(parts)}): bits may differ from a run made in one place"


def _processor() -> str:
    """The processor's name: from the kernel where it tells, else from Python."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
