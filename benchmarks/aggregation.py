"""Time and memory of aggregation on tensors shaped like ResNet-50's, as ratios within one run.

    python benchmarks/aggregation.py [--repeats 7] [--busy] [--threads 2 | --cpu] [--parts speed naive ...]

Prints the tables of docs/performance-aggregation.md. Every ratio compares two things measured one after the
other in the same repeat. Median, smallest and largest are given, since other work disturbs repeats.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from machine import MIB, busy_process, describe, spread
from safetensors.torch import save_file
from scipy.optimize import nnls

from fedld.aggregation import RULES, aggregate


def resnet50(classes: int = 1000) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of ResNet-50's 161 parameters (25.6 M)."""
    tensors: list[tuple[str, tuple[int, ...]]] = [("conv1.weight", (64, 3, 7, 7)), *norm("bn1", 64)]
    channels = 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], start=1):
        for block in range(blocks):
            at = f"layer{stage}.{block}"
            convs = [(channels, width, 1), (width, width, 3), (width, 4 * width, 1)]
            for i, (inside, outside, kernel) in enumerate(convs, start=1):
                tensors += [(f"{at}.conv{i}.weight", (outside, inside, kernel, kernel))]
                tensors += norm(f"{at}.bn{i}", outside)
            if block == 0:
                tensors += [(f"{at}.downsample.0.weight", (4 * width, channels, 1, 1))]
                tensors += norm(f"{at}.downsample.1", 4 * width)
            channels = 4 * width
    return [*tensors, ("fc.weight", (classes, channels)), ("fc.bias", (classes,))]


def norm(name: str, channels: int) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"{name}.weight", (channels,)), (f"{name}.bias", (channels,))]


TENSORS = [(name, int(torch.Size(shape).numel())) for name, shape in resnet50()]
D = sum(size for _, size in TENSORS)


def tensors_up_to(d: int) -> list[tuple[str, int]]:
    """The last tensors of the list (the large ones) with about d parameters."""
    chosen: list[tuple[str, int]] = []
    for name, size in reversed(TENSORS):
        if sum(s for _, s in chosen) >= d:
            break
        chosen.append((name, size))
    return chosen


def axes_of(G: torch.Tensor, keep: float = 0.8) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Eq. 4-6 in parameter space: weights and oriented principal axes."""
    m = len(G)
    values, vectors = torch.linalg.eigh(G @ G.T)
    L = int(keep * m)
    values, vectors = values.flip(0)[:L], vectors.flip(1)[:, :L]
    axes = [G.T @ vectors[:, axis] for axis in range(L)]
    average = G.mean(dim=0)
    return values / values.norm(), [axis if torch.dot(axis, average) >= 0 else -axis for axis in axes]


def loops(G: torch.Tensor, p: torch.Tensor, omega: torch.Tensor, axes: list[torch.Tensor]) -> torch.Tensor:
    """Eq. 7 as it is written: every client is projected on every axis in parameter space."""
    update = torch.zeros(G.shape[1])
    for i in range(len(G)):
        revised = torch.zeros(G.shape[1])
        for weight, axis in zip(omega, axes, strict=True):
            projection = torch.dot(G[i], axis) / torch.dot(axis, axis) * axis
            revised += weight * G[i].norm() / projection.norm() * projection
        update += p[i] * revised
    return update


clock = time.perf_counter


def seconds(call, *arguments, **options) -> float:
    start = clock()
    call(*arguments, **options)
    return clock() - start


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def table(*heads: str) -> None:
    print()
    row(*heads)
    row(*["---"] * len(heads))


def machine(repeats: int) -> tuple[float, float]:
    """Measured read bandwidth in bytes/s and sgemm rate in flop/s: the best of several."""
    x, a = torch.ones(64 * MIB), torch.randn(2048, 2048)
    bandwidth = max(4 * x.numel() / seconds(x.sum) for _ in range(repeats + 2))
    sgemm = max(2 * 2048**3 / seconds(torch.mm, a, a) for _ in range(repeats + 2))
    print(
        f"{torch.get_num_threads()} threads, read bandwidth {bandwidth / 1e9:.1f} GB/s, "
        f"sgemm {sgemm / 1e9:.0f} Gflop/s"
    )
    return bandwidth, sgemm


def speed(clients: list[int], repeats: int, busy: bool) -> None:
    """Against one matrix-vector product over the same memory, alone and beside a busy process."""
    bandwidth, sgemm = machine(repeats)
    heads = [f"{name} / p @ G" for name in CALLS]
    table("m", "d", "beside", "p @ G, s", *heads, "GB/s of principal", "Gflop/s")
    for m in clients:
        tensors = TENSORS if m <= 100 else tensors_up_to(2_000_000)
        d = sum(size for _, size in tensors)
        G = torch.randn(m, d)
        for beside in ("nothing", "one busy process") if busy else ("nothing",):
            with busy_process(beside != "nothing"):
                times = timed(G, tensors, repeats)
            ratios = [
                spread([a / b for a, b in zip(times[name], times["base"], strict=True)])
                if name in times
                else "-"
                for name in CALLS
            ]
            best = min(times.get("principal", times["principal, sketched"]))
            bytes_rate, flops = (2 * m + 1) * d * 4 / best, m * (m + 1) * d / best
            rates = [f"{bytes_rate / 1e9:.1f} ({bytes_rate / bandwidth:.0%} of read)"]
            rates += [f"{flops / 1e9:.1f} ({flops / sgemm:.0%} of sgemm)" if "principal" in times else "-"]
            row(m, d, beside, spread(times["base"], 3), *ratios, *rates)


CALLS = {
    "mean without report": {"rule": "mean", "report": False},
    "principal": {"gram": "exact"},
    "principal, sketched": {"gram": "sketch"},
    "principal per tensor": {"granularity": "tensor"},
    "consensus": {"rule": "consensus", "gram": "exact"},
}


def timed(G: torch.Tensor, tensors: list[tuple[str, int]], repeats: int) -> dict[str, list[float]]:
    """Seconds of `p @ G` and of every call; exact Gram matrices of hundreds of clients are left out."""
    m, times = len(G), {}
    p = torch.full((m,), 1 / m)
    calls = {
        k: v for k, v in CALLS.items() if m <= 100 or v.get("gram") == "sketch" or not v.get("report", True)
    }
    for repeat in range(repeats + 1):
        found = {"base": seconds(torch.mv, G.T, p)}
        for name, options in calls.items():
            found[name] = seconds(aggregate, G, [1.0] * m, tensors=tensors, **options)
        for name, value in found.items():
            times.setdefault(name, []).extend([value] if repeat else [])  # the first warms up
    return times


def naive(clients: list[int], repeats: int) -> None:
    """Against the loops of the equations. They cost the same for every client, so a few clients are timed."""
    table("m", "d", "loops, s", "loops / principal")
    for m in clients:
        tensors = TENSORS if m < 50 else tensors_up_to(D // 2)
        d = sum(size for _, size in tensors)
        G, p, timed = torch.randn(m, d), torch.full((m,), 1 / m), min(m, 3)
        start = clock()
        omega, axes = axes_of(G)
        axes_time, ratios, times = clock() - start, [], []
        aggregate(G, [1.0] * m, tensors=tensors)
        for _ in range(max(1, min(3, repeats))):
            ours = seconds(aggregate, G, [1.0] * m, tensors=tensors)
            times.append(axes_time + m / timed * seconds(loops, G[:timed], p, omega, axes))
            ratios.append(times[-1] / ours)
        row(m, d, spread(times), spread(ratios, 0))


def linear(repeats: int, m: int = 12) -> None:
    """Time against the number of parameters."""
    table("d", f"principal, m = {m}, ns per parameter")
    for share in (16, 8, 4, 2, 1):
        tensors = tensors_up_to(D // share)
        d = sum(size for _, size in tensors)
        G = torch.randn(m, d)
        aggregate(G, [1.0] * m, tensors=tensors)
        row(
            d,
            spread([1e9 * seconds(aggregate, G, [1.0] * m, tensors=tensors) / d for _ in range(repeats)]),
        )


def rules(repeats: int, m: int = 12) -> None:
    """Every rule against the same matrix-vector product."""
    tensors = tensors_up_to(D // 8)
    d = sum(size for _, size in tensors)
    G, p = torch.randn(m, d), torch.full((m,), 1 / m)
    table("rule", f"rule / mean (p @ G), m = {m}, d = {d}")
    for name in sorted(set(RULES) - {"measured"}):  # which asks clients
        ratios = []
        for _ in range(min(5, repeats)):
            base = seconds(torch.mv, G.T, p)
            ratios.append(seconds(aggregate, G, [1.0] * m, name, tensors=tensors) / base)
        row(name, spread(ratios, 1))


def fit(repeats: int) -> None:
    """Constants of the cost model in docs/scaling.md: seconds = d (a + b m + c m^2) + e m^3."""
    tensors = tensors_up_to(D // 16)
    d = sum(size for _, size in tensors)
    clients = [2, 5, 12, 25, 50, 100, 200]
    found = []
    for m in clients:
        G = torch.randn(m, d)
        aggregate(G, [1.0] * m, tensors=tensors)
        times = [seconds(aggregate, G, [1.0] * m, tensors=tensors) for _ in range(min(5, repeats))]
        found.append(1e9 * median(times) / d)
    terms = np.array([[1.0, m, m * m] for m in clients]) / np.array(found)[:, None]
    (a, b, c), _ = nnls(terms, np.ones(len(clients)))
    table("m", f"measured, ns per parameter (d = {d})", "model")
    for m, value in zip(clients, found, strict=True):
        row(m, f"{value:.2f}", f"{a + b * m + c * m * m:.2f}")
    sizes = [250, 500, 1000]
    cubes = [
        median([seconds(np.linalg.eigh, np.cov(np.random.randn(m, m))) for _ in range(3)]) / m**3
        for m in sizes
    ]
    print(f"\na = {a:.3f} ns, b = {b:.4f} ns, c = {c:.5f} ns, e = {1e9 * median(cubes):.2f} ns (m = {sizes})")


def peak() -> float:
    """Largest resident size of this process so far in MiB (getrusage would hand on the parent's)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def memory_child(m: int) -> None:
    """Runs alone in a process: peak resident memory before and after."""
    G = torch.randn(m, D)
    aggregate(G[:, :64], [1.0] * m)  # BLAS has allocated what it keeps
    before = peak()
    aggregate(G, [1.0] * m, tensors=TENSORS)
    row(m, f"{before:.0f} MiB", f"{peak() - before:.0f} MiB")


def memory(clients: list[int]) -> None:
    table("m", "updates and program", "extra at the peak, the aggregate included")
    for m in clients:
        subprocess.run([sys.executable, __file__, "--child", "memory", str(m)], check=True)


def files_child(folder: str, m: int) -> None:
    """Runs alone in a process, which never holds the updates."""
    paths = [path for _ in range(m) for path in sorted(Path(folder).iterdir())][:m]
    before = peak()
    taken = seconds(aggregate, paths, [1.0] * m)
    row(m, f"{m * D * 4 / 2**30:.1f} GiB", f"{before:.0f} MiB", f"{peak():.0f} MiB", f"{taken:.1f}")


def files(m: int = 100, distinct: int = 10) -> None:
    """From safetensors files: ten different ones, each used ten times, to spare the disk."""
    table("m", "updates", "program", "peak resident", "seconds (elapsed)")
    with tempfile.TemporaryDirectory() as folder:
        for i in range(distinct):
            state = {name: torch.randn(shape) for name, shape in resnet50()}
            save_file(state, Path(folder) / f"{i}.safetensors")
        subprocess.run([sys.executable, __file__, "--child", "files", folder, str(m)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 12, 50, 500])
    parser.add_argument("--busy", action="store_true", help="also beside one busy process")
    parts = ["speed", "naive", "linear", "rules", "fit", "memory", "files"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--cpu", action="store_true", help="one thread in CPU seconds, for a busy machine")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu else options.threads)
    if options.cpu:
        globals()["clock"] = time.process_time
    if options.child:
        name, *rest = options.child
        return memory_child(int(rest[0])) if name == "memory" else files_child(rest[0], int(rest[1]))
    unit = "CPU seconds of one thread" if options.cpu else "seconds"
    print(describe())
    print(f"d = {D:,} in {len(TENSORS)} tensors, float32, {unit}, medians (smallest - largest)")
    runs = {
        "speed": lambda: speed(options.clients, options.repeats, options.busy),
        "naive": lambda: naive([m for m in options.clients if m <= 100], options.repeats),
        "linear": lambda: linear(options.repeats),
        "rules": lambda: rules(options.repeats),
        "fit": lambda: fit(options.repeats),
        "memory": lambda: memory([m for m in options.clients if m <= 100]),
        "files": files,
    }
    for part in options.parts:
        runs[part]()
    return None


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
