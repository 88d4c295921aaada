"""Devices: which one a run computes on, and how worker processes share GPUs."""

import re

import torch

from fedld.config.experiment import DEVICE
from fedld.errors import FedLDError


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
        raise FedLDError(f"device is auto, cpu, cuda, cuda:NUMBER or mps, not '{asked[:80]}'")
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
