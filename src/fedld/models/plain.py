"""Plain stacks of convolutions and linear layers without normalisation: the family that FedMA can match."""

from itertools import pairwise

from torch import Tensor, nn

from fedld.models.base import Model

Widths = tuple[int | str, ...]  # channels of a 3x3 convolution, or "M" for a 2x2 max pooling

CNN: Widths = (16, "M", 32, "M", 64, "M")
VGG9: Widths = (32, 64, "M", 128, 128, "M", 256, 256, "M")


class PlainCNN(Model):
    """Convolutions, pooling to a `grid` x `grid` map, linear layers; parameter names as torchvision's VGG.

    The map is flattened channel by channel: input c * grid**2 + k of the first linear layer is cell k of
    channel c.
    """

    def __init__(
        self, convolutions: Widths, hidden: tuple[int, ...], *, classes: int, channels: int, image_size: int
    ) -> None:
        super().__init__()
        self.features, width = _trunk(convolutions, channels)
        # Cells beyond the trunk's own resolution would be copies of each other, hence the minimum.
        self.grid = min(4, image_size >> convolutions.count("M"))
        self.avgpool = nn.AdaptiveAvgPool2d(self.grid)
        sizes = (width * self.grid**2, *hidden)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.classifier = nn.Sequential(*layers, nn.Linear(sizes[-1], classes))

    def embed(self, x: Tensor) -> Tensor:
        """Activations of the last hidden linear layer."""
        x = self.avgpool(self.features(x)).flatten(1)
        return self.classifier[:-1](x)  # type: ignore[no-any-return]

    @property
    def head(self) -> nn.Linear:
        """The last linear layer."""
        head = self.classifier[-1]
        assert isinstance(head, nn.Linear)
        return head

    def layers(self) -> list[tuple[str, nn.Conv2d | nn.Linear]]:
        """Weighted layers in order of computation, with their names."""
        return [(name, m) for name, m in self.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]


def _trunk(widths: Widths, channels: int) -> tuple[nn.Sequential, int]:
    layers: list[nn.Module] = []
    for width in widths:
        if isinstance(width, int):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers), channels
