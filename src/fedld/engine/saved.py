"""A model file that says how to use it: which network, which classes, which images it wants.

The facts are one JSON text in the safetensors metadata (`fedld`), so that the file alone is enough to predict
with. They name things that fedld knows; nothing that a file says is imported or run.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedld import __version__
from fedld.config.experiment import Experiment
from fedld.config.resolve import fit_task, make_task
from fedld.data import Federation
from fedld.errors import FedLDError
from fedld.local.samples import RowSamples, Samples
from fedld.methods import METHODS
from fedld.methods.closed import ClosedForm
from fedld.models import MODELS, Model, build, own_network
from fedld.models.build import NAMES, VECTOR, build_vector
from fedld.models.files import read_model
from fedld.models.standardise import standardise_head
from fedld.models.unet import build_unet, is_unet
from fedld.tasks import TASKS, Classification, Task

KEY = "fedld"
BATCH = 64


@dataclass(frozen=True)
class Facts:
    """What a model file says of itself. Network and method are None where they are the user's own."""

    version: str
    model: str | None
    head: str
    train: str
    method: str | None
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    pictures: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    task: str = "classification"
    columns: tuple[str, ...] = ()  # features of a table, by name
    scale: tuple[float, ...] = (0.0, 1.0)  # constants of the task; of a regression mean and deviation
    features: str = "linear"  # what a method in closed form made of the trunk's outputs


def facts_of(experiment: Experiment, federation: Federation) -> Facts:
    """What is to be saved with the model of an experiment."""
    own, method = experiment.own, str(experiment.method["name"])
    return Facts(
        version=__version__,
        model=None if "model" in own else experiment.model,
        head=experiment.head,
        train=experiment.train,
        method=None if "method" in own else method,
        classes=federation.classes,
        input_shape=federation.input_shape,
        pictures=federation.images.dtype == np.uint8,
        mean=federation.mean,
        std=federation.std,
        task=make_task(experiment).name,
        columns=federation.features,
        scale=fit_task(make_task(experiment), federation).constants,
        features=str(experiment.method.get("features", "linear")),
    )


def to_metadata(facts: Facts) -> dict[str, str]:
    """The facts as safetensors keeps them."""
    return {KEY: json.dumps(asdict(facts))}


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A network with its weights, and what it was trained to look at.

    note: what a user must know of the file: that it has no checksum.
    """

    facts: Facts
    network: nn.Module
    note: str | None = None

    @property
    def task(self) -> Task:
        """What the model was trained for."""
        return TASKS[self.facts.task].with_constants(self.facts.scale)

    @torch.no_grad()
    def outputs(self, samples: NDArray[Any]) -> Tensor:
        """Outputs (N, outputs), in float64, of pictures (N, H, W, C) or of rows (N, features)."""
        rows, facts = np.arange(len(samples)), self.facts
        kind = Samples if facts.pictures else RowSamples
        read = kind(samples, np.zeros(len(samples), np.int64), rows, facts.mean, facts.std)
        return torch.cat([self.network(batch).double() for batch, _ in read.in_order(BATCH)])

    @torch.no_grad()
    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Softmax of the logits, (N, classes), of uint8 pictures (N, H, W, C) of the model's own shape."""
        return torch.softmax(self.outputs(images), 1).numpy()


def load_model(path: Path) -> SavedModel:
    """The model of a run directory or of a model.safetensors file."""
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        if path.is_dir() and (path / "config.toml").exists():
            why = "the run is unfinished, or every client keeps its own"
            raise FedLDError(f"'{path}' has no global model: {why}")
        raise FedLDError(f"there is no model '{file}'")
    content = read_model(file)
    facts = _facts(content.metadata.get(KEY), file)
    network = _network(facts, file)
    try:
        network.load_state_dict(content.tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise FedLDError(f"'{file}' does not hold the network it names: {reason}") from None
    return SavedModel(facts, network.eval(), content.note)


def _facts(text: str | None, file: Path) -> Facts:
    """The facts, every one of the kind that it must be."""
    if text is None:
        raise FedLDError(f"'{file}' does not say which network and classes it has: it is of no fedld run")
    try:
        raw = {key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(text).items()}
        facts = Facts(**cast(dict[str, Any], raw))
        sound = (
            all(
                isinstance(name, str)
                for name in (facts.version, facts.head, facts.train, facts.features, *facts.classes)
            )
            and all(name is None or isinstance(name, str) for name in (facts.model, facts.method))
            and all(type(side) is int and 0 < side <= 4096 for side in facts.input_shape)
            and all(np.isfinite(float(value)) for value in facts.mean)
            and all(float(value) > 0 for value in facts.std)
            and len(facts.mean)
            == len(facts.std)
            == (facts.input_shape[0] if facts.pictures or facts.columns else len(facts.std))
            and all(isinstance(name, str) for name in facts.columns)
            and facts.task in TASKS
            and (facts.task != Classification.name or len(facts.classes) > 1)
            and len(facts.scale) == 2
            and all(np.isfinite(float(value)) for value in facts.scale)
            and 1 <= len(facts.classes) <= 10_000
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise FedLDError(f"what '{file}' says of itself cannot be understood")
    return facts


def _network(facts: Facts, file: Path) -> nn.Module:
    shape, classes = facts.input_shape, len(facts.classes)
    if not (facts.pictures and len(shape) == 3) and not (facts.columns and len(shape) == 1):
        raise FedLDError(f"'{file}' was not trained on pictures or a table: load its tensors in Python")
    if facts.method is not None and facts.method not in METHODS:
        raise FedLDError(
            f"'{file}' was trained with the method '{facts.method}', which is not installed here"
        )
    if facts.model == VECTOR:
        network: nn.Module = build_vector(outputs=classes, input_shape=shape, seed=0, head=facts.head)
    elif is_unet(str(facts.model)) and facts.pictures:
        network = build_unet(str(facts.model), classes=classes, input_shape=shape, seed=0)
    elif facts.model in NAMES and facts.pictures:
        size, name = min(shape[1:]), str(facts.model)
        network = build(name, classes=classes, channels=shape[0], image_size=size, seed=0, head=facts.head)
    elif facts.model is not None and facts.model in MODELS:
        network = own_network(MODELS[facts.model], classes=classes, input_shape=shape, seed=0)
    else:
        raise FedLDError(f"'{file}' is of somebody's own network, which cannot be made from its name")
    if facts.train == "head" and isinstance(network, Model):
        network = standardise_head(network)
    if facts.method is None:
        return network
    method = METHODS[facts.method]
    if isinstance(method, ClosedForm):
        method = replace(method, features=facts.features)
    return method.adapt(network)
