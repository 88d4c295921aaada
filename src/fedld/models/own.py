"""A user's own network: a module with its weights, or a function that makes one."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from fedld.errors import FedLDError
from fedld.models.build import NAMES, VECTOR
from fedld.models.unet import NAME as UNET
from fedld.registry import Registry, call_with, name_of, require_callable
from fedld.seeds import derive

Factory = Callable[..., nn.Module]
"""Makes a network; asks by name for any of classes, channels, image_size and input_shape."""

MODELS: Registry[nn.Module | Factory] = Registry(
    "model",
    {},
    accept=require_callable("model", "a torch module, or a function that makes one"),
    reserved=(*NAMES, VECTOR, UNET),
    with_argument=(UNET,),
)
"""Networks beside those that `build`, `build_vector` and `build_unet` make."""
MODELS.load_plugins()


def own_network(
    own_model: nn.Module | Factory,
    *,
    classes: int,
    input_shape: tuple[int, ...],
    seed: int,
    dense: bool = False,
) -> nn.Module:
    """Copy the module with its weights, whatever the seed; or call the function with this seed.

    >>> net = own_network(lambda classes: nn.Linear(4, classes), classes=3, input_shape=(4,), seed=0)
    >>> net.weight.shape
    torch.Size([3, 4])
    """
    network: Any = deepcopy(own_model)
    if not isinstance(own_model, nn.Module):
        arguments: dict[str, Any] = {"classes": classes, "input_shape": input_shape}
        if len(input_shape) == 3:
            arguments |= {"channels": input_shape[0], "image_size": min(input_shape[1:])}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "init"))
            network = call_with(own_model, "model", **arguments)
    if not isinstance(network, nn.Module):
        raise FedLDError(f"model '{name_of(own_model)}' made a {type(network).__name__}, not a torch module")
    if not any(True for _ in network.parameters()):
        raise FedLDError(f"model '{name_of(own_model)}' has no parameters to train")
    made: nn.Module = network.cpu().float()
    wanted = (classes, *input_shape[1:]) if dense else (classes,)
    _check(made, name_of(own_model), wanted, input_shape)
    return made


@torch.no_grad()
def _check(network: nn.Module, name: str, wanted: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Refuse a network that cannot take the samples, or gives outputs that do not fit the labels."""
    training = network.training
    try:
        output: Any = network.eval()(torch.zeros(2, *shape))
    except Exception as error:  # whatever the user's module raises
        raise FedLDError(f"model '{name}' cannot take samples of shape {shape}: {error}") from error
    network.train(training)
    shape_given = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if shape_given != (2, *wanted):
        raise FedLDError(
            f"model '{name}' gives {shape_given} for two samples, but {wanted[0]} classes need {(2, *wanted)}"
        )
