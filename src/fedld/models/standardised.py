"""Weight standardisation (Qiao et al. 2019): every filter has mean 0 and variance 1 where it is applied.

With GroupNorm it trains small batches as BatchNorm trains large ones, and there are no statistics to average.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class StandardisedConv2d(nn.Conv2d):
    """A convolution by (w - mean) / deviation of each filter, with an ordinary convolution's parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """The convolution with standardised filters."""
        w = self.weight
        mean, variance = w.mean((1, 2, 3), keepdim=True), w.var((1, 2, 3), keepdim=True)
        filters = (w - mean) / (variance + 1e-10).sqrt()
        return F.conv2d(x, filters, self.bias, self.stride, self.padding, self.dilation, self.groups)


def standardise(network: nn.Module) -> None:
    """Put a standardised convolution in the place of every convolution; names and shapes stay."""
    for name, child in network.named_children():
        if type(child) is nn.Conv2d:
            layer = StandardisedConv2d(
                child.in_channels,
                child.out_channels,
                child.kernel_size,  # type: ignore[arg-type]
                child.stride,  # type: ignore[arg-type]
                child.padding,  # type: ignore[arg-type]
                groups=child.groups,
                bias=child.bias is not None,
            )
            setattr(network, name, layer)
        else:
            standardise(child)
