"""The machine that a run is computed on: its devices, its libraries, and how much memory a run will need.

Bits agree on one kind of processor, and may differ between two. Memory is estimated before a run starts, so
that the kernel does not end it at round 180.
"""

import math
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedld.config.experiment import DEVICE, Experiment
from fedld.engine.jobs import Setup
from fedld.engine.network import divided
from fedld.errors import FedLDError, printable
from fedld.local.samples import BATCH
from fedld.models.build import VECTOR, VectorModel, hidden_units, outline
from fedld.models.cut import CHUNK
from fedld.models.unet import is_unet, outline_unet
from fedld.records.schema import Environment


def find_device(asked: str) -> str:
    """Give the device to compute on.

    Args:
        asked: auto, cpu, cuda, cuda:NUMBER or mps. `auto` takes a GPU where there is one.

    Returns:
        A device that torch has here: cpu, cuda, cuda:NUMBER or mps.

    Raises:
        FedLDError: torch sees no such device.

    >>> find_device("cpu")
    'cpu'
    """
    if not re.fullmatch(DEVICE, asked):
        raise FedLDError(f"device is auto, cpu, cuda, cuda:NUMBER or mps, not '{printable(asked, 80)}'")
    if asked == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if asked == "mps" and not torch.backends.mps.is_available():
        raise FedLDError("device 'mps' asked for, but torch sees no Apple GPU here")
    if asked.startswith("cuda"):
        if not torch.cuda.is_available():
            raise FedLDError(f"device '{asked}' asked for, but torch sees no GPU here")
        if asked != "cuda" and int(asked.removeprefix("cuda:")) >= torch.cuda.device_count():
            raise FedLDError(
                f"device '{asked}' asked for; there are {torch.cuda.device_count()}, from cuda:0"
            )
    return asked


def default_workers(device: str, cores: int) -> int:
    """Give the number of worker processes where none is asked for: one per core, or one per GPU in use."""
    if device == "cpu":
        return cores
    return torch.cuda.device_count() if device == "cuda" else 1


def worker_device(device: str, rank: int) -> str:
    """Give the device of a worker process: those of `cuda` take turns, so several may share a GPU.

    Args:
        device: what `find_device` gave.
        rank: number of the worker, from 0.

    Returns:
        A device for this worker alone or shared with others.
    """
    return f"cuda:{rank % torch.cuda.device_count()}" if device == "cuda" else device


Key = Literal["processor", "instructions", "torch", "blas"]


def environment() -> Environment:
    """Give the machine and the libraries of this process."""
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
    """Give a sentence if a run is continued where its bits may come out differently; None if they agree."""
    keys: tuple[Key, ...] = ("processor", "instructions", "torch", "blas")
    parts = [f"{key} {before.get(key)} before, {now[key]} now" for key in keys if before.get(key) != now[key]]
    if not parts:
        return None
    return f"this run was begun elsewhere ({'; '.join(parts)}): bits may differ from a run made in one place"


def _processor() -> str:
    """Give the processor's name: from the kernel where it tells, else from Python."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


PROCESS = 350 << 20  # a Python process with torch loaded
PROBE = 2  # images of the trial forward pass


def check_memory(setup: Setup, rows: int, workers: int) -> None:
    """Refuse a run that needs more memory than is free, and say what to lower."""
    needed, free = estimate(setup, rows, workers), free_memory()
    if free is not None and needed > free:
        raise FedLDError(
            f"the run needs about {needed / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are free: "
            "lower batch_size, workers, image_size or sample_rate"
        )


def estimate(setup: Setup, rows: int, workers: int) -> int:
    """Estimate the bytes: one row per sampled client.

    In each worker the model, its gradient, momentum and activations.
    """
    size = 4 * setup.layout.size
    shared = size * (rows + 2) + 4 * len(setup.federation.test) * math.prod(setup.federation.output_shape)
    batch = min(setup.experiment.batch_size, max(setup.sizes.values()))
    each = PROCESS + 5 * size + batch * activation_bytes(setup)
    return shared + max(workers, 1) * each


def estimate_unbuilt(experiment: Experiment, input_shape: tuple[int, ...], classes: int, images: int) -> int:
    """Estimate the bytes that one worker needs to train and evaluate, without making network or images.

    Args:
        experiment: the settings, with a model of ours.
        input_shape: channels, height and width of an image.
        classes: number of classes.
        images: number of training images.

    Returns:
        The model eight times (weights, gradient, momentum, what arrives and leaves) and what a batch keeps.
    """
    channels, height, width = input_shape
    hidden = hidden_units(experiment.head)
    model: nn.Module
    if is_unet(experiment.model):
        model = outline_unet(experiment.model, classes, channels)
    elif experiment.model == VECTOR:
        with torch.device("meta"):
            model = VectorModel(math.prod(input_shape), classes, hidden)
    else:
        model = outline(experiment.model, classes, min(height, width), channels, hidden=hidden)
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(PROBE, *input_shape, device="meta"))
    sizes = [storage.nbytes() // PROBE for storage in kept.values()]
    training = min(experiment.batch_size, images) * sum(sizes) if experiment.train == "all" else 0
    at_once = BATCH if experiment.train == "all" else CHUNK  # a frozen trunk's outputs are kept
    evaluation = 2 * min(at_once, images) * max(sizes, default=0)  # a layer's input and output
    return PROCESS + 8 * 4 * sum(p.numel() for p in model.parameters()) + max(training, evaluation)


def activation_bytes(setup: Setup) -> int:
    """Give what autograd keeps for the backward pass of one image, counted in a small trial."""
    trunk, model = divided(setup.experiment, setup.method, setup.federation)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = torch.zeros(PROBE, *setup.federation.input_shape)
    if trunk is not None:
        with torch.no_grad():
            inputs = trunk.stack(inputs)  # not in whole chunks: only the shape matters
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs)
    return sum(kept.values()) // PROBE


def free_memory(root: Path = Path("/")) -> int | None:
    """Measure the memory that can be had without swapping, by the kernel and the container's limits.

    None if unknown.
    """
    limits = [free for free in (_machine(root), *_control_groups(root)) if free is not None]
    return min(limits, default=None)


def peak_memory() -> int:
    """Give the most memory that this process held at any time, in bytes."""
    facts = _facts(Path("/proc/self/status"))
    if "VmHWM:" in facts:  # getrusage() would also count what started this program held
        return facts["VmHWM:"] * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _machine(root: Path) -> int | None:
    facts = _facts(root / "proc/meminfo")
    return facts["MemAvailable:"] * 1024 if "MemAvailable:" in facts else None


def _control_groups(root: Path) -> Iterator[int]:
    """Give what each control group above this process leaves: limit less use, file cache not counted."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield from _left(folder)


def _left(group: Path) -> Iterator[int]:
    """Read what is left: version 2 calls it memory.max, version 1 memory.limit_in_bytes.

    No limit, no answer.
    """
    for limit, use, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            allowed, used = ((group / name).read_text().strip() for name in (limit, use))
        except OSError:
            continue
        if allowed.isdigit() and used.isdigit():
            yield max(0, int(allowed) - int(used) + _facts(group / "memory.stat").get(cache, 0))


def _facts(path: Path) -> dict[str, int]:
    """Give names and numbers of a file of the kernel's."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
