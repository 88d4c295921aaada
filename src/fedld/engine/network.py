"""The network of an experiment, and of a model file that says how to use it.

The network is built, filled with public weights, and cut into a trunk and what is trained. In a model file
the facts on network, classes and images are one JSON text in the safetensors metadata (`fedld`), so that
the file alone is enough to predict with. They name things that fedld knows; nothing that a file says is
imported or run.
"""

import json
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
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
from fedld.layout import Layout, Tree
from fedld.local.samples import RowSamples, Samples
from fedld.methods import METHODS, Method
from fedld.methods.closed import ClosedForm
from fedld.models import MODELS, Model, Trunk, batchnorm_names, build, cut, load_weights, own_network
from fedld.models.build import NAMES, VECTOR, build_vector
from fedld.models.centring import add_centres, is_centre
from fedld.models.files import model_bytes, read_model
from fedld.models.standardise import standardise_head
from fedld.models.unet import UNet, build_unet, is_unet
from fedld.tasks import TASKS, Classification, Task

IMAGENET: tuple[tuple[float, ...], ...] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation, per channel, that public ImageNet weights were trained with."""


def whole_network(experiment: Experiment, federation: Federation) -> nn.Module:
    """Make the network at round 0, the same for every method of a seed: built, the user's, or from a file."""
    classes, shape, seed = federation.outputs, federation.input_shape, experiment.seed
    given = experiment.own.get("model") or MODELS.get(experiment.model)
    dense = len(federation.output_shape) == 3
    model: nn.Module
    if given is not None:
        model = own_network(given, classes=classes, input_shape=shape, seed=seed, dense=dense)
        if experiment.weights is not None:
            load_weights(model, experiment.weights)
    elif experiment.model == VECTOR:
        model = build_vector(outputs=classes, input_shape=shape, seed=seed, head=experiment.head)
        if experiment.weights is not None:
            load_weights(model, experiment.weights)
    elif len(shape) != 3:
        raise FedLDError(
            f"model '{experiment.model}' is for pictures, but a sample has shape {shape}: take --model "
            "linear, with --head mlp:64 for a hidden layer"
        )
    elif is_unet(experiment.model):
        model = build_unet(experiment.model, classes=classes, input_shape=shape, seed=seed)
        if experiment.weights is not None:
            load_weights(model, experiment.weights)
    else:
        model = deepcopy(
            _built(
                experiment.model,
                classes,
                shape=shape,
                seed=seed,
                head=experiment.head,
                file=_file(experiment),
            )
        )
    _check_outputs(experiment.model, model, dense=dense)
    if experiment.train == "head" and isinstance(model, Model):
        return standardise_head(model)
    return model


def _check_outputs(name: str, model: nn.Module, *, dense: bool) -> None:
    """Refuse a classifier for masks, and a U-Net for classes."""
    if dense and isinstance(model, Model):
        raise FedLDError(f"model '{name}' gives one answer for a picture, not one for a pixel: take unet")
    if isinstance(model, UNet) and not dense:
        raise FedLDError(f"model '{name}' gives an answer for every pixel: it needs --task segmentation")


@lru_cache(maxsize=1)
def _built(
    name: str, classes: int, shape: tuple[int, ...], seed: int, head: str, file: tuple[Path, int] | None
) -> Model:
    """Give a network of ours as every part of a run starts from it; a file of weights goes with its time."""
    model = build(name, classes=classes, channels=shape[0], image_size=min(shape[1:]), seed=seed, head=head)
    if file is not None:
        load_weights(model, file[0])
    return model


def _file(experiment: Experiment) -> tuple[Path, int] | None:
    path = experiment.weights
    return None if path is None else (path, path.stat().st_mtime_ns if path.exists() else 0)


def divided(experiment: Experiment, method: Method, federation: Federation) -> tuple[Trunk | None, nn.Module]:
    """Give the frozen trunk, if there is one, and the trained part with what the method adds to it."""
    trunk, model = cut(whole_network(experiment, federation), experiment.train)
    method.check(model)
    adapted = method.adapt(model)
    return trunk, add_centres(adapted) if experiment.steps == "centred" else adapted


def make_layout(experiment: Experiment, method: Method, model: nn.Module) -> Layout:
    """Give what is shared and what stays with a client."""
    private = set(method.private(model))
    if experiment.buffers == "local":
        private |= batchnorm_names(model) - {name for name, _ in model.named_parameters()}
    return Layout.of(model, private)


def exported(
    experiment: Experiment,
    federation: Federation,
    layout: Layout,
    weights: Tensor,
    provenance: dict[str, str],
) -> bytes:
    """Give the whole network as a safetensors file: the trunk as it came, the rest as it was trained.

    Its metadata say how to use it (`fedld.engine.network`) and where it comes from.
    """
    trained = {name: value for name, value in layout.export(weights).items() if not is_centre(name)}
    tensors = {**whole_network(experiment, federation).state_dict(), **trained}
    return model_bytes(tensors, to_metadata(facts_of(experiment, federation)) | provenance)


def loaded(experiment: Experiment, method: Method, federation: Federation, state: Tree) -> nn.Module:
    """Give the network with the weights of a state dict, whole: a frozen trunk sees the images first."""
    trunk, model = divided(experiment, method, federation)
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    if trunk is not None and isinstance(model, Model):
        model.behind(trunk)
    return model.eval()


def parameters(experiment: Experiment, federation: Federation, layout: Layout) -> int:
    """Count the trainable numbers of the whole network, the frozen ones included."""
    trained = {entry.name for entry in layout.entries}
    named = whole_network(experiment, federation).named_parameters()
    return layout.trainable + sum(p.numel() for name, p in named if name not in trained)


def normalised(experiment: Experiment, federation: Federation) -> Federation:
    """Give the federation with the mean and deviation of pixels that the network expects."""
    wanted = experiment.normalisation
    if wanted == "data" or (wanted == "auto" and experiment.weights is None):
        return federation
    mean, std = IMAGENET
    if len(federation.mean) != len(mean):  # grey images
        mean, std = ((float(np.mean(part)),) * len(federation.mean) for part in IMAGENET)
    return replace(federation, mean=mean, std=std)


KEY = "fedld"
BATCH = 64


@dataclass(frozen=True, kw_only=True)
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
    """Give what is to be saved with the model of an experiment."""
    values, method = experiment.own, str(experiment.method["name"])
    return Facts(
        version=__version__,
        model=None if "model" in values else experiment.model,
        head=experiment.head,
        train=experiment.train,
        method=None if "method" in values else method,
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
    """Give the facts as safetensors keeps them."""
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
        """Compute the outputs (N, outputs), in float64, of pictures (N, H, W, C) or of rows (N, features)."""
        rows, facts = np.arange(len(samples)), self.facts
        kind = Samples if facts.pictures else RowSamples
        labels = np.zeros(len(samples), np.int64)
        read = kind(samples, labels, positions=rows, mean=facts.mean, std=facts.std)
        return torch.cat([self.network(batch).double() for batch, _ in read.in_order(BATCH)])

    @torch.no_grad()
    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Compute probabilities (N, classes) of uint8 pictures (N, H, W, C) of the model's own shape."""
        return torch.softmax(self.outputs(images), 1).numpy()


def load_model(path: Path) -> SavedModel:
    """Give the model of a run directory or of a model.safetensors file."""
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
    """Give the facts, every one of the kind that it must be."""
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
