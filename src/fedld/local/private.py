"""Steps with record-level differential privacy: Poisson batches, clipped gradients of single samples, noise.

A step takes every sample with probability `rate`, scales the gradient of each to a length of at most `clip`,
adds noise of deviation `noise * clip` to their sum and divides by the expected batch size (Abadi et al.
2016). All that a step does afterwards (weight decay, corrections, momentum) depends on the samples through
this gradient alone. What steps cost is computed by `fedld.privacy.accounting`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedld.layout import FlatModel
from fedld.local.samples import Batch, Samples

SampleLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Loss of logits, images and labels of a batch."""


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

    def batches(self, samples: Samples, generator: torch.Generator) -> Iterator[Batch]:
        """One Poisson batch for each step; a batch may be empty."""
        for _ in range(self.steps):
            taken = torch.rand(len(samples), generator=generator, dtype=torch.float64) < self.rate
            yield samples.batch(taken.nonzero().flatten())

    def gradient(
        self, flat: FlatModel, loss: SampleLoss, batch: Batch, samples: int, generator: torch.Generator
    ) -> None:
        """Leave the noisy mean of clipped gradients in the flat model.

        Args:
            flat: the network at its weights.
            loss: of logits, images and labels.
            batch: images and labels, possibly none.
            samples: how many samples the client has.
            generator: of the noise; on a site it must be seeded with a secret.
        """
        total = flat.gradient.zero_()
        images, labels = batch
        for start in range(0, len(labels), CHUNK):
            part = slice(start, start + CHUNK)
            self._add_clipped(total, flat, loss, images[part], labels[part])
        noise = torch.randn(total.shape, generator=generator, dtype=total.dtype).to(total.device)
        total.add_(noise, alpha=self.noise * self.clip).div_(self.rate * samples)

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
        lengths = torch.stack(squares).sum(0).sqrt()
        # A gradient that is not finite has no length to scale by: its sample counts with 0.
        scales = torch.where(lengths.isfinite(), (self.clip / lengths).clamp(max=1.0), 0.0)
        for entry in flat.layout.entries:
            if entry.name in gradients:
                each = gradients[entry.name].nan_to_num(0.0, 0.0, 0.0)
                entry.view(total).add_(torch.tensordot(scales.to(each.dtype), each, dims=1))


CHUNK = 64
"""Samples whose gradients are in memory at once."""
