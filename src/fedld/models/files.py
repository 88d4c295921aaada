"""Model files: safetensors with a SHA-256 checksum of names, shapes, numbers and metadata in the metadata.

The same model and metadata give the same bytes, in whatever order they are given: safetensors itself writes
metadata in an order that changes from process to process. Files without a checksum, written by older versions
or other tools, are read as well; `ModelFile.note` says so.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedld.errors import FedLDError
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
    """Header and numbers of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), memoryview(content)[end:]


def _digest(header: Mapping[str, Any], metadata: Mapping[str, str], data: memoryview) -> str:
    """Checksum over metadata and tensors by name: the order in the file does not count."""
    digest = sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(header):
        entry = header[name]
        start, end = entry["data_offsets"]
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        digest.update(data[start:end])
    return digest.hexdigest()
