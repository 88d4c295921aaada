"""What happens to an update between a client's training and the server's step."""

from typing import Any

from fedld.errors import FedLDError, nearest
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

TRANSFORMS: dict[str, type[UpdateTransform]] = {"clip": Clip, "quantise": Quantise, "topk": TopK}
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
    if name not in TRANSFORMS:
        raise FedLDError(f"unknown transform '{name}': {nearest(name, list(TRANSFORMS))}")
    try:
        return TRANSFORMS[name](*([NUMBERS[name](number)] if colon else []))
    except (TypeError, ValueError):
        what = f"not '{number}'" if colon else f"for example {name}:1"
        raise FedLDError(f"transform {name} takes a number after the colon, {what}") from None


def as_transform(value: Any) -> UpdateTransform:
    """Take a user's own transform: a value or a class without required options.

    Raises:
        FedLDError: It is none.
    """
    value = value() if isinstance(value, type) and issubclass(value, UpdateTransform) else value
    if not isinstance(value, UpdateTransform):
        raise FedLDError(
            f"transform is a name or an UpdateTransform, not {type(value).__name__} {value!r:.80}"
        )
    return value


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
    "as_transform",
    "make_transform",
]
