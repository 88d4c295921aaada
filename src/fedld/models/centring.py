"""Trained layers with inputs centred and outputs scaled, as a way to take steps: the network stays as it is.

A frozen BatchNorm is an affine map y = s (W a - m) + beta, so a trained layer before it never sees inputs of
mean zero. The mean input then dominates the curvature: every step of W moves the outputs of all images at
once, in proportion to |mean a|^2 s^2. Sites of one class pull hardest along this direction. Written with
centred inputs and scaled weights V = s W,

    y = V (a - c) + b,    c = the mean input over all clients' images, measured once before the first round,

the function is the same and the direction is gone. A step of rate lr along the gradients in V and b is, in W
and beta, one along P g, where P is symmetric and positive definite:

    step of W:     (g_W - s g_beta c') / s^2
    step of beta:  g_beta - s (step of W) c
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedld.layout import Layout
from fedld.models.networks import DepthwiseConv2d

CENTRE = "centre"
"""Name of the buffer with a layer's mean input; it travels with the model's buffers and is not saved."""
CENTRED = (nn.Conv2d, DepthwiseConv2d, nn.Linear)
"""Layers that multiply what enters them with their weights and do nothing else; subclasses may do more."""
SMALLEST_GAIN = 1e-3
"""Outputs that a BatchNorm all but removes get no larger steps than those of this gain."""


@dataclass(frozen=True)
class CentredLayer:
    """A layer of which the steps are centred: its name, and that of the layer with the bias and the gain."""

    name: str
    bias: str
    norm: str | None


def centred_layers(model: nn.Module) -> list[CentredLayer]:
    """Find convolutions before a BatchNorm, and convolutions and linear layers with a bias of their own."""
    modules = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    layers = []
    for (name, module), (after, norm) in zip(modules, [*modules[1:], ("", None)], strict=True):
        if type(module) not in CENTRED or isinstance(getattr(module, "padding", 0), str):
            continue
        assert isinstance(module.weight, Tensor)
        if module.bias is not None:
            layers.append(CentredLayer(name, name, None))
        elif isinstance(norm, nn.BatchNorm2d) and norm.affine and norm.num_features == len(module.weight):
            layers.append(CentredLayer(name, after, after))
    return layers


def add_centres(model: nn.Module) -> nn.Module:
    """Give every such layer its buffer, zero until the mean inputs are known."""
    for layer in centred_layers(model):
        module = model.get_submodule(layer.name)
        module.register_buffer(CENTRE, torch.zeros(_centre_shape(module)), persistent=False)
    return model


def _centre_shape(layer: nn.Module) -> torch.Size:
    """Shape of one filter's inputs; of all filters' where groups of them have inputs of their own."""
    assert isinstance(layer.weight, Tensor)
    return layer.weight.shape if getattr(layer, "groups", 1) > 1 else layer.weight.shape[1:]


def is_centre(name: str) -> bool:
    """Tell whether an entry of a model's vector is such a buffer."""
    return name.rpartition(".")[2] == CENTRE


def input_sums(model: nn.Module, passes: Callable[[], object]) -> Tensor:
    """Add up what the weights of all centred layers are multiplied with.

    Args:
        model: a network with centres.
        passes: lets the images pass through it.

    Returns:
        The layers' sums over images (float64), one after the other; of a convolution the mean over positions.
    """
    modules = [model.get_submodule(layer.name) for layer in centred_layers(model)]
    sums = [torch.zeros(_centre_shape(module), dtype=torch.float64) for module in modules]

    def adder(total: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            total.add_(_mean_inputs(module, inputs[0].detach()).double().sum(0).view(total.shape).cpu())

        return add

    handles = [m.register_forward_pre_hook(adder(t)) for m, t in zip(modules, sums, strict=True)]
    try:
        passes()
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([total.flatten() for total in sums])


def _mean_inputs(layer: nn.Module, inputs: Tensor) -> Tensor:
    """What a layer's weights are multiplied with, by image (N, numbers of a centre)."""
    if not isinstance(layer, nn.Conv2d):
        return inputs.flatten(1, -2).mean(1) if inputs.ndim > 2 else inputs
    assert not isinstance(layer.padding, str)
    windows = F.unfold(inputs.float(), layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    patches = windows.mean(-1)
    if layer.groups == 1:
        return patches
    filters = layer.out_channels // layer.groups
    return patches.view(len(inputs), layer.groups, 1, -1).expand(-1, -1, filters, -1).flatten(1)


def set_centres(weights: Tensor, layout: Layout, sums: Tensor, count: float) -> Tensor:
    """Write the mean inputs into a model's vector.

    Args:
        weights: the vector.
        layout: of the model, with centres.
        sums: over all clients' images.
        count: number of these images.

    Returns:
        A new vector.
    """
    weights = weights.clone()
    views = [view for name, view in layout.views(weights).items() if is_centre(name)]
    means = torch.split((sums / count).to(weights), [view.numel() for view in views])
    for view, mean in zip(views, means, strict=True):
        view.copy_(mean.view(view.shape))
    return weights


class CentredSteps:
    """Turns a gradient into the direction of the centred step at some weights; linear in the gradient.

    Args:
        model: gives the layers.
        layout: where parameters and buffers lie.
        vector: the model's, at the weights from which a round starts; all clients have the same ones.
    """

    def __init__(self, model: nn.Module, layout: Layout, vector: Tensor) -> None:
        self.entries = {entry.name: entry for entry in layout.entries}
        now = layout.views(vector)
        self.parts = []
        for layer in centred_layers(model):
            module = model.get_submodule(layer.name)
            bias = now[f"{layer.bias}.bias"]
            gain = torch.ones_like(bias)
            if layer.norm is not None:
                norm = model.get_submodule(layer.norm)
                assert isinstance(norm, nn.BatchNorm2d)
                gain = now[f"{layer.norm}.weight"] / (now[f"{layer.norm}.running_var"] + norm.eps).sqrt()
            gain = gain.reshape(-1, *[1] * (module.weight.ndim - 1)).clone()  # type: ignore[operator]
            centre = now[f"{layer.name}.{CENTRE}"].clone()
            self.parts.append((f"{layer.name}.weight", f"{layer.bias}.bias", gain, centre))

    def apply(self, gradient: Tensor) -> None:
        """Replace a flat gradient by P times it."""
        for weight_name, bias_name, gain, centre in self.parts:
            weight = self.entries[weight_name].view(gradient)
            bias = self.entries[bias_name].view(gradient)
            step = weight - gain * bias.view(gain.shape) * centre
            step /= gain.abs().clamp_min(SMALLEST_GAIN).square()
            bias -= gain.flatten() * (step * centre).flatten(1).sum(1)
            weight.copy_(step)
