"""A saved model for programs without fedld: ONNX or TorchScript, from pixels to probabilities.

The file takes float32 pixels from 0 to 255, (pictures, channels, height, width), and gives the probability of
every class; normalisation and softmax are inside. Its metadata (`fedld`) are those of the model file. It is
compared with the model on random pictures before it is written.
"""

import io
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedld.engine.network import KEY, SavedModel
from fedld.errors import FedLDError, unknown_name
from fedld.records.writer import write_atomically

TOLERANCE = 1e-4
"""Largest difference of a probability between the exported model and the saved one."""
SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt"}
Predict = Callable[[NDArray[np.float32]], NDArray[Any]]


class Portable(nn.Module):
    """Normalisation, network and softmax as one module."""

    mean: Tensor
    scale: Tensor

    def __init__(self, saved: SavedModel) -> None:
        super().__init__()
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (saved.facts.mean, saved.facts.std))
        self.register_buffer("mean", mean * 255)
        self.register_buffer("scale", 1 / (std * 255))
        self.network = saved.network

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute the probabilities of every class."""
        logits: Tensor = self.network((pixels - self.mean) * self.scale)
        return torch.softmax(logits, 1)


def export_model(saved: SavedModel, file: Path, format: str) -> float:
    """Write a model as ONNX or TorchScript, if it gives what the saved model gives.

    Args:
        saved: the model, as `load_model` reads it.
        file: where to write it.
        format: onnx or torchscript.

    Returns:
        The largest difference of a probability on 16 random pictures.

    Raises:
        FedLDError: the format is unknown, its libraries are missing, the network cannot be exported, or the
            exported model gives other probabilities.
    """
    if format not in SUFFIXES:
        raise unknown_name("model format", format, SUFFIXES)
    if saved.facts.task != "classification" or not saved.facts.pictures:
        raise FedLDError(
            f"models of pictures' classes are exported, not those of {saved.facts.task} or tables"
        )
    channels, height, width = saved.facts.input_shape
    pictures = np.random.default_rng(0).integers(0, 256, (16, height, width, channels), np.uint8)
    pixels = np.ascontiguousarray(pictures.transpose(0, 3, 1, 2)).astype(np.float32)
    make = _onnx if format == "onnx" else _torchscript
    facts = json.dumps(asdict(saved.facts))
    content, predict = make(Portable(saved).eval(), torch.from_numpy(pixels[:2]), facts)
    predicted = np.concatenate([predict(pixels[:1]), predict(pixels[1:])])  # any number of pictures
    difference = float(np.abs(predicted - saved.probabilities(pictures)).max())
    if not difference <= TOLERANCE:
        raise FedLDError(f"the exported model's probabilities differ by {difference:.2g}: nothing is written")
    write_atomically(file, content)
    return difference


def _onnx(module: nn.Module, example: Tensor, facts: str) -> tuple[bytes, Predict]:
    try:
        onnx, onnxruntime, _ = (import_module(name) for name in ("onnx", "onnxruntime", "onnxscript"))
    except ImportError:
        raise FedLDError("ONNX needs onnx, onnxscript and onnxruntime: pip install 'fedld[export]'") from None
    shapes = {"pixels": {0: torch.export.Dim("pictures")}}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                (example,),
                input_names=["pixels"],
                output_names=["probabilities"],
                dynamic_shapes=shapes,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # the exporter raises almost anything for networks of people's own
        raise FedLDError(
            f"this network cannot be exported to ONNX: {' '.join(str(error).split())[:200]}"
        ) from None
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, {KEY: facts})
    content: bytes = proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return content, lambda pixels: np.asarray(session.run(None, {"pixels": pixels})[0])


def _torchscript(module: nn.Module, example: Tensor, facts: str) -> tuple[bytes, Predict]:
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            script: Any = torch.jit  # which has no types
            traced = script.trace(module, example)
            buffer = io.BytesIO()
            script.save(traced, buffer, _extra_files={f"{KEY}.json": facts})
            content = buffer.getvalue()
            again = script.load(io.BytesIO(content))
    except Exception as error:  # as above
        raise _refusal("TorchScript", error) from None

    def predict(pixels: NDArray[np.float32]) -> NDArray[Any]:
        with torch.no_grad():
            return np.asarray(again(torch.from_numpy(pixels)))

    return content, predict


def _refusal(format: str, error: Exception) -> FedLDError:
    reason = " ".join(str(error).split())[:200]
    return FedLDError(f"this network cannot be exported to {format}: {reason}")
