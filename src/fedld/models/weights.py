"""Public weights: read a file without running anything in it, copy what fits, say what did not."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedld.errors import FedLDError


@dataclass(frozen=True)
class LoadReport:
    """Names of tensors copied, absent from the file, absent from the model, and of another shape or kind."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded"]
        for word in ("missing", "unexpected", "mismatched"):
            names = getattr(self, word)
            if names:
                parts.append(
                    f"{len(names)} {word} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
                )
        return ", ".join(parts)


def load_weights(model: nn.Module, path: str | Path) -> LoadReport:
    """Copy what fits of a .safetensors or weights-only .pth file into the model's own storage."""
    state, own = read_weights(path), model.state_dict()
    fits = {name: value for name, value in state.items() if name in own and _fits(value, own[name])}
    if not fits:
        raise FedLDError(f"no tensor in weights file '{path}' fits the model")
    for name, value in fits.items():
        if not bool(torch.isfinite(value).all()):
            raise FedLDError(f"tensor '{name}' in weights file '{path}' is not finite")
    model.load_state_dict(fits, strict=False)
    return LoadReport(
        loaded=tuple(fits),
        missing=tuple(name for name in own if name not in state),
        unexpected=tuple(name for name in state if name not in own),
        mismatched=tuple(name for name in state if name in own and name not in fits),
    )


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Tensors by name from a file; never unpickles an object."""
    path = Path(path)
    if not path.is_file():
        raise FedLDError(f"weights file '{path}' does not exist")
    if path.suffix not in (".safetensors", ".pth", ".pt"):
        raise FedLDError(f"weights file '{path}' must end in .safetensors, .pth or .pt")
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive makes the readers raise almost anything
        reason = "it is corrupt or holds pickled objects, which are never loaded"
        raise FedLDError(f"weights file '{path}' cannot be read: {reason}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise FedLDError(f"weights file '{path}' does not hold a mapping from names to tensors")
    return state


def _fits(value: Tensor, own: Tensor) -> bool:
    return value.shape == own.shape and value.is_floating_point() == own.is_floating_point()
