"""Model files, and public weights: read a file without running anything in it, copy what fits, name the rest.

Model files are safetensors with a SHA-256 checksum of names, shapes, numbers and metadata in the metadata.
The same model and metadata give the same bytes, in whatever order they are given: safetensors itself writes
metadata in an order that changes from process to process. Files without a checksum, written by older versions
or other tools, are read as well; `ModelFile.note` says so.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedld.errors import FedLDError
from fedld.models.base import Model
from fedld.models.networks import MOBILENET_STAGES
from fedld.paths import require_regular

DIGEST = "sha256"
METADATA = "__metadata__"


@dataclass(frozen=True, eq=False)
class ModelFile:
    """A model file as read: metadata, tensors, and whether a checksum confirmed them."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, Tensor]
    checked: bool

    @property
    def note(self) -> str | None:
        """What to tell a user of a file without a checksum; None if it has one."""
        if self.checked:
            return None
        return f"'{self.path}' has no checksum (an older version wrote it): damage would not be noticed"


def model_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Encode tensors and metadata as a safetensors file with its checksum.

    Args:
        tensors: the state dict.
        metadata: further text by name; `sha256` is replaced by the checksum.

    Returns:
        The file's bytes, which depend on the contents alone.
    """
    header, data = _split(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    texts = {name: text for name, text in metadata.items() if name != DIGEST}
    texts[DIGEST] = _digest(header, texts, data)
    ordered = {METADATA: dict(sorted(texts.items())), **dict(sorted(header.items()))}
    text = json.dumps(ordered, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns the numbers to 8 bytes
    return len(text).to_bytes(8, "little") + text + data


def read_model(file: Path) -> ModelFile:
    """Read a model file and check it.

    Raises:
        FedLDError: the file is no safetensors file, or it is not as it was written.
    """
    try:
        require_regular(file)
        content = file.read_bytes()
        tensors = load(content)
        header, data = _split(content)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FedLDError(f"'{file}' is no readable safetensors file: {error}") from None
    metadata: dict[str, str] = header.pop(METADATA, None) or {}
    checksum = metadata.get(DIGEST)
    texts = {name: text for name, text in metadata.items() if name != DIGEST}
    if checksum is not None and checksum != _digest(header, texts, data):
        raise FedLDError(f"'{file}' is damaged: its contents are not those of its checksum")
    return ModelFile(file, metadata, tensors, checksum is not None)


def _split(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """Separate header and numbers of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), memoryview(content)[end:]


def _digest(header: Mapping[str, Any], metadata: Mapping[str, str], data: memoryview) -> str:
    """Compute a checksum over metadata and tensors by name, independent of their order in the file."""
    digest = sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(header):
        entry = header[name]
        start, end = entry["data_offsets"]
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        digest.update(data[start:end])
    return digest.hexdigest()


KNOWN = {
    "resnet18": "torchvision resnet18, timm resnet18",
    "resnet50": "torchvision resnet50, timm resnet50",
    "mobilenet_v2": "torchvision mobilenet_v2, timm mobilenetv2_100",
}
"""Public networks with files that fit, by our name."""

_FIRST = {"conv_dw": "conv.0.0", "bn1": "conv.0.1", "conv_pw": "conv.1", "bn2": "conv.2"}
_OTHERS = {
    "conv_pw": "conv.0.0",
    "bn1": "conv.0.1",
    "conv_dw": "conv.1.0",
    "bn2": "conv.1.1",
    "conv_pwl": "conv.2",
    "bn3": "conv.3",
}
_OUTSIDE = {
    "conv_stem": "features.0.0",
    "bn1": "features.0.1",
    "conv_head": "features.18.0",
    "bn2": "features.18.1",
    "classifier": "classifier.1",
}


def torchvision_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors as torchvision does; the prefix of data-parallel training is dropped.

    >>> list(torchvision_names({"conv_stem.weight": None, "blocks.1.0.conv_dw.weight": None}))
    ['features.0.0.weight', 'features.2.conv.1.0.weight']
    """
    if state and all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): value for name, value in state.items()}
    if "conv_stem.weight" not in state:
        return state
    return {_from_timm(name): value for name, value in state.items()}


def _from_timm(name: str) -> str:
    if match := re.fullmatch(r"blocks\.(\d+)\.(\d+)\.(\w+)\.(\w+)", name):
        stage, index, module, leaf = match.groups()
        place = 1 + sum(count for _, _, count, _ in MOBILENET_STAGES[: int(stage)]) + int(index)
        names = _FIRST if place == 1 else _OTHERS
        return f"features.{place}.{names[module]}.{leaf}" if module in names else name
    module, _, leaf = name.rpartition(".")
    return f"{_OUTSIDE[module]}.{leaf}" if module in _OUTSIDE else name


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
    """Copy what fits of a .safetensors or weights-only .pth file into the model's own storage.

    Of a network that names its blocks everything but the head must be there and fit; the head has as many
    outputs as there are classes, so it often cannot, and stays as the seed made it.
    """
    fits, report = match_weights(model, read_weights(path), path)
    for name, value in fits.items():
        if not bool(torch.isfinite(value).all()):
            raise FedLDError(f"tensor '{name}' in weights file '{path}' is not finite")
    model.load_state_dict(fits, strict=False)
    return report


def match_weights(
    model: nn.Module, state: dict[str, Tensor], path: str | Path
) -> tuple[dict[str, Tensor], LoadReport]:
    """Match a file's tensors with a model, which may be without storage."""
    expected = model.state_dict()
    state = {name: _for_grey(value, expected.get(name)) for name, value in state.items()}
    fits = {name: value for name, value in state.items() if name in expected and _fits(value, expected[name])}
    if not fits:
        raise FedLDError(f"no tensor in weights file '{path}' fits the model")
    report = LoadReport(
        loaded=tuple(fits),
        missing=tuple(name for name in expected if name not in state),
        unexpected=tuple(name for name in state if name not in expected),
        mismatched=tuple(name for name in state if name in expected and name not in fits),
    )
    if isinstance(model, Model):
        _check_trunk(model, state, report, path)
    return fits, report


def _check_trunk(model: Model, state: dict[str, Tensor], report: LoadReport, path: str | Path) -> None:
    expected, head = model.state_dict(), model.blocks[-1].modules

    def outside(names: Iterable[str]) -> list[str]:
        return [name for name in names if name.rpartition(".")[0] not in head]

    for name in outside(report.mismatched):
        actual, wanted = (_by(tensor.shape) for tensor in (state[name], expected[name]))
        raise FedLDError(
            f"weights file '{path}' is of another network: '{name}' is {actual} there and {wanted} here"
        )
    lacking = [name for name in outside(report.missing) if not name.endswith("num_batches_tracked")]
    if lacking:
        raise FedLDError(
            f"weights file '{path}' lacks {len(lacking)} tensors of the network, such as '{lacking[0]}'"
        )


def _by(shape: torch.Size) -> str:
    return " x ".join(map(str, shape)) or "a number"


def _for_grey(value: Tensor, expected: Tensor | None) -> Tensor:
    """Sum the colours of a first convolution for grey images, where all colours are equal."""
    if (
        expected is None
        or value.ndim != 4
        or expected.ndim != 4
        or (value.shape[1], expected.shape[1]) != (3, 1)
    ):
        return value
    return value.sum(1, keepdim=True)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read tensors by name from a file; never unpickles an object."""
    path = Path(path)
    if not path.is_file():
        raise FedLDError(f"weights file '{path}' does not exist")
    if path.suffix not in (".safetensors", ".pth", ".pt"):
        raise FedLDError(f"weights file '{path}' must end in .safetensors, .pth or .pt")
    try:
        if path.suffix == ".safetensors":
            state: Any = read_model(path).tensors
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FedLDError as error:
        raise FedLDError(f"weights file '{path}' cannot be read: {error}") from None
    except Exception as error:  # a damaged archive makes the readers raise almost anything
        reason = "it is corrupt or holds pickled objects, which are never loaded"
        raise FedLDError(f"weights file '{path}' cannot be read: {reason}") from error
    for key in ("state_dict", "model"):  # as training scripts keep it, beside other things
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise FedLDError(f"weights file '{path}' does not hold a mapping from names to tensors")
    for name, value in state.items():
        if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise FedLDError(f"tensor '{name}' in weights file '{path}' is not a plain, dense one")
    return torchvision_names(state)


def _fits(value: Tensor, expected: Tensor) -> bool:
    return value.shape == expected.shape and value.is_floating_point() == expected.is_floating_point()
