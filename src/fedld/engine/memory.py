"""How much memory a run will need, said before it starts rather than by the kernel at round 180."""

from pathlib import Path

import torch
from torch import Tensor

from fedld.engine.work import Setup, initial_model
from fedld.errors import FedLDError

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
    """Bytes: a row a sampled client; in each worker the model, its gradient, momentum and activations."""
    size = 4 * setup.layout.size
    shared = size * (rows + 2) + 4 * len(setup.federation.test) * len(setup.federation.classes)
    batch = min(setup.experiment.batch_size, max(setup.sizes))
    each = PROCESS + 5 * size + batch * activation_bytes(setup)
    return shared + max(workers, 1) * each


def activation_bytes(setup: Setup) -> int:
    """What autograd keeps for the backward pass of one image, counted in a small trial."""
    model = initial_model(setup.experiment, setup.method, setup.federation)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    _, height, width, channels = setup.federation.images.shape
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(PROBE, channels, height, width))
    return sum(kept.values()) // PROBE


def free_memory() -> int | None:
    """Memory that can be had without swapping, as the kernel says; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    facts = dict(line.split(":", 1) for line in lines)
    return int(facts["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in facts else None
