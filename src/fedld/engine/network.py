"""The network of an experiment: built, filled with public weights, cut into a trunk and what is trained."""

from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from fedld.config.experiment import Experiment
from fedld.data import Federation
from fedld.engine.saved import facts_of, to_metadata
from fedld.errors import FedLDError
from fedld.layout import Layout, Tree
from fedld.methods import Method
from fedld.models import MODELS, Model, Trunk, batchnorm_names, build, cut, load_weights, own_network
from fedld.models.build import VECTOR, build_vector
from fedld.models.files import model_bytes
from fedld.models.standardise import standardise_head
from fedld.models.unet import UNet, build_unet, is_unet

IMAGENET: tuple[tuple[float, ...], ...] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation, per channel, that public ImageNet weights were trained with."""


def whole_network(experiment: Experiment, federation: Federation) -> nn.Module:
    """The network at round 0, the same for every method of a seed: built, the user's own, or from a file."""
    classes, shape, seed = federation.outputs, federation.input_shape, experiment.seed
    own = experiment.own.get("model") or MODELS.get(experiment.model)
    dense = len(federation.output_shape) == 3
    model: nn.Module
    if own is not None:
        model = own_network(own, classes=classes, input_shape=shape, seed=seed, dense=dense)
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
        model = deepcopy(_built(experiment.model, classes, shape, seed, experiment.head, _file(experiment)))
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
    """A network of ours as every part of a run starts from it; a file of weights goes with its time."""
    model = build(name, classes=classes, channels=shape[0], image_size=min(shape[1:]), seed=seed, head=head)
    if file is not None:
        load_weights(model, file[0])
    return model


def _file(experiment: Experiment) -> tuple[Path, int] | None:
    path = experiment.weights
    return None if path is None else (path, path.stat().st_mtime_ns if path.exists() else 0)


def divided(experiment: Experiment, method: Method, federation: Federation) -> tuple[Trunk | None, nn.Module]:
    """The frozen trunk, if there is one, and the trained part with what the method adds to it."""
    trunk, model = cut(whole_network(experiment, federation), experiment.train)
    method.check(model)
    return trunk, method.adapt(model)


def make_layout(experiment: Experiment, method: Method, model: nn.Module) -> Layout:
    """What is shared and what stays with a client."""
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
    """The whole network as a safetensors file: the trunk as it came, the rest as it was trained.

    Its metadata say how to use it (`fedld.engine.saved`) and where it comes from.
    """
    tensors = {**whole_network(experiment, federation).state_dict(), **layout.export(weights)}
    return model_bytes(tensors, to_metadata(facts_of(experiment, federation)) | provenance)


def loaded(experiment: Experiment, method: Method, federation: Federation, state: Tree) -> nn.Module:
    """The network with the weights of a state dict, whole: a frozen trunk sees the images first."""
    trunk, model = divided(experiment, method, federation)
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    if trunk is not None and isinstance(model, Model):
        model.behind(trunk)
    return model.eval()


def parameters(experiment: Experiment, federation: Federation, layout: Layout) -> int:
    """Trainable numbers of the whole network, the frozen ones included."""
    trained = {entry.name for entry in layout.entries}
    own = whole_network(experiment, federation).named_parameters()
    return layout.trainable + sum(p.numel() for name, p in own if name not in trained)


def normalised(experiment: Experiment, federation: Federation) -> Federation:
    """The federation with the mean and deviation of pixels that the network expects."""
    wanted = experiment.normalisation
    if wanted == "data" or (wanted == "auto" and experiment.weights is None):
        return federation
    mean, std = IMAGENET
    if len(federation.mean) != len(mean):  # grey images
        mean, std = ((float(np.mean(part)),) * len(federation.mean) for part in IMAGENET)
    return replace(federation, mean=mean, std=std)
