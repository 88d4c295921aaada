"""Steps with record-level differential privacy: Poisson batches, clipped gradients of single samples, noise.

A step takes every sample with probability `rate`, scales the gradient of each to a length of at most `clip`,
adds noise of deviation `noise * clip` to their sum and divides by the expected batch size (Abadi et al.
2016). All that a step does afterwards (weight decay, corrections, momentum) depends on the samples through
this gradient alone. What steps cost is computed by `fedld.privacy.accounting`.

Sum and noise are multiples of one grid, so that the lowest bits of a result tell nothing of the sum that they
came from (Mironov 2012). The sum is made in float64, so that a sample moves it by no more than `clip`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedld.layout import FlatModel
from fedld.local.noise import KeyedRandom
from fedld.local.samples import Batch, Samples
from fedld.models.standardise import StandardisedLinear

SampleLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Loss of logits, images and labels of a batch: the mean over its samples."""


@dataclass(frozen=True, kw_only=True)
class PrivateSteps:
    """How one client takes noisy steps.

    Args:
        noise: standard deviation of the noise over `clip`.
        clip: largest length of a sample's gradient.
        rate: probability with which a step takes a sample.
        steps: steps in a round.
    """

    noise: float
    clip: float
    rate: float
    steps: int

    @property
    def grid(self) -> float:
        """Of what the noisy sum is a multiple: a power of two, about 2^-40 of `clip`."""
        return 2.0 ** (math.floor(math.log2(self.clip)) - 40)

    def batches(self, samples: Samples, random: KeyedRandom) -> Iterator[Batch]:
        """Draw one Poisson batch for each step; a batch may be empty."""
        for _ in range(self.steps):
            taken = random.uniform(len(samples)) < self.rate
            yield samples.batch(taken.nonzero().flatten())

    def gradient(
        self, flat: FlatModel, loss: SampleLoss, batch: Batch, samples: int, random: KeyedRandom
    ) -> None:
        """Leave the noisy mean of clipped gradients in the flat model.

        Args:
            flat: the network at its weights.
            loss: of logits, images and labels.
            batch: images and labels, possibly none.
            samples: how many samples the client has.
            random: of the noise; on a site its key must be a secret.
        """
        # Apple's devices have no float64.
        exact = torch.float32 if flat.gradient.device.type == "mps" else torch.float64
        total = torch.zeros_like(flat.gradient, dtype=exact)
        images, labels = batch
        layers = _linear_layers(flat.model)
        if (
            not len(labels)
            or layers is None
            or not self._add_of_layers(total, flat, loss=loss, batch=batch, layers=layers)
        ):
            for start in range(0, len(labels), CHUNK):
                part = slice(start, start + CHUNK)
                self._add_clipped(total, flat, loss=loss, images=images[part], labels=labels[part])
        flat.gradient.copy_(self.noisy(total, random).div_(self.rate * samples))

    def noisy(self, total: Tensor, random: KeyedRandom) -> Tensor:
        """Give a sum with noise in float64: a multiple of the grid, whatever the sum is."""
        multiples = total.cpu().double().div_(self.grid).round_()
        noise = random.normal(len(multiples)).mul_(self.noise * self.clip / self.grid).round_()
        return multiples.add_(noise).mul_(self.grid)

    def _add_of_layers(
        self, total: Tensor, flat: FlatModel, loss: SampleLoss, batch: Batch, layers: dict[str, nn.Linear]
    ) -> bool:
        """Add the clipped gradients of a network with all parameters in linear layers.

        A sample's gradient is (output's gradient) x (layer's input), so its length is the product of theirs.
        Gives False, and adds nothing, where a layer is not called exactly once with one row per sample.
        """
        images, labels = batch
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}
        with _watched(layers, inputs, outputs) as calls:
            value = loss(flat.model(images), images, labels) * len(labels)
        rows = (len(labels),)
        if any(calls[name] != 1 or inputs[name].shape[:-1] != rows for name in layers):
            return False
        gradients = dict(zip(outputs, torch.autograd.grad(value, list(outputs.values())), strict=True))
        squares = torch.zeros(rows, dtype=torch.float64, device=total.device)
        for name, layer in layers.items():
            length = torch.linalg.vector_norm(inputs[name], dim=1).double().square()
            length = length * layer.weight.requires_grad
            if layer.bias is not None and layer.bias.requires_grad:
                length = length + 1
            squares += torch.linalg.vector_norm(gradients[name], dim=1).double().square() * length
        scales = self._scales(squares.sqrt())
        defined = bool(scales.all())
        entries = {entry.name: entry for entry in flat.layout.entries}
        for name, layer in layers.items():
            prefix = f"{name}." if name else ""
            scaled = gradients[name].to(total.dtype) * scales[:, None].to(total.dtype)
            used = inputs[name].to(total.dtype)
            if not defined:  # 0 times infinity is no number
                scaled, used = (tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in (scaled, used))
            if layer.weight.requires_grad:
                entries[prefix + "weight"].view(total).addmm_(scaled.T, used)
            if layer.bias is not None and layer.bias.requires_grad:
                entries[prefix + "bias"].view(total).add_(scaled.sum(0))
        return True

    def _scales(self, lengths: Tensor) -> Tensor:
        """Compute what clips gradients of these lengths; one that is not finite counts with 0.

        Lengths and sums are rounded, so the bound is kept with a hundred-thousandth to spare.
        """
        return torch.where(lengths.isfinite(), (self.clip * (1 - 1e-5) / lengths).clamp(max=1.0), 0.0)

    def _add_clipped(
        self, total: Tensor, flat: FlatModel, loss: SampleLoss, images: Tensor, labels: Tensor
    ) -> None:
        """Add the clipped gradients of some samples."""
        named = dict(flat.model.named_parameters())
        params = {name: value.detach() for name, value in named.items() if value.requires_grad}
        rest = {name: value.detach() for name, value in named.items() if not value.requires_grad}

        def of_sample(moved: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(flat.model, {**rest, **moved}, (image[None],))
            return loss(logits, image[None], label[None])

        each_gradient = vmap(grad(of_sample), in_dims=(None, 0, 0), randomness="different")
        gradients = each_gradient(params, images, labels)
        squares = [g.flatten(1).square().sum(1, dtype=torch.float64) for g in gradients.values()]
        scales = self._scales(torch.stack(squares).sum(0).sqrt())
        for entry in flat.layout.entries:
            if entry.name in gradients:
                each = gradients[entry.name].to(total.dtype).nan_to_num(0.0, 0.0, 0.0)
                entry.view(total).add_(torch.tensordot(scales.to(each.dtype), each, dims=1))


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear] | None:
    """Give the layers with parameters that move, if they are all linear."""
    layers = {}
    for name, module in model.named_modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            if not isinstance(module, nn.Linear):
                return None
            layers[name] = module
    return layers


@contextmanager
def _watched(
    layers: dict[str, nn.Linear], inputs: dict[str, Tensor], outputs: dict[str, Tensor]
) -> Iterator[dict[str, int]]:
    """Note what goes into layers and comes out of them, and how often they are called."""
    calls = dict.fromkeys(layers, 0)

    def note(name: str, layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        used = layer.inputs(given[0]) if isinstance(layer, StandardisedLinear) else given[0]
        inputs[name], outputs[name] = used.detach(), output
        calls[name] += 1

    hooks = [layer.register_forward_hook(partial(note, name)) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


CHUNK = 64
"""Samples with gradients in memory at once."""
