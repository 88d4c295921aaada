"""What happens to an update between a client's training and the server's step."""

from fedld.errors import FedLDError
from fedld.registry import Registry, is_import_path, require_instance, require_subclass
from fedld.transforms.base import (
    BUFFERS,
    PARAMETERS,
    STATE,
    UPDATE_ENTRIES,
    Chain,
    Combination,
    CombinedTotal,
    Sender,
    SummedEntry,
    Total,
    UpdateTransform,
)
from fedld.transforms.compression import Clip, Quantise, TopK

TRANSFORMS: Registry[type[UpdateTransform]] = Registry(
    "transform",
    {"clip": Clip, "quantise": Quantise, "topk": TopK},
    accept=require_instance("transform", UpdateTransform, "or an UpdateTransform"),
    accept_entry=require_subclass("transform", UpdateTransform),
    with_argument=("clip", "quantise", "topk"),
)
TRANSFORMS.load_plugins()
NUMBERS = {"clip": float, "quantise": int, "topk": float}


def make_transform(text: str) -> UpdateTransform:
    """Make a transform from NAME or NAME:NUMBER.

    >>> make_transform("quantise:4").bits
    4
    >>> make_transform("quantize:4")
    Traceback (most recent call last):
    fedld.errors.FedLDError: unknown transform 'quantize': did you mean 'quantise'?
    """
    name, colon, number = text.partition(":")
    if is_import_path(text):
        TRANSFORMS.check(text)
    kind = TRANSFORMS.find(name)
    try:
        return kind(*([NUMBERS[name](number)] if colon else []))
    except (TypeError, ValueError):
        what = f"not '{number}'" if colon else f"for example {name}:1"
        raise FedLDError(f"transform {name} takes a number after the colon, {what}") from None


__all__ = [
    "BUFFERS",
    "PARAMETERS",
    "STATE",
    "TRANSFORMS",
    "UPDATE_ENTRIES",
    "Chain",
    "Clip",
    "Combination",
    "CombinedTotal",
    "Quantise",
    "Sender",
    "SummedEntry",
    "TopK",
    "Total",
    "UpdateTransform",
    "make_transform",
]
