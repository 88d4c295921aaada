"""Plain stacks of convolutions and linear layers without normalisation: the family that FedMA can match."""

from itertools import pairwise

from torch import nn

from fedld.models.base import Block, Model, head_layers

Widths = tuple[int | str, ...]  # channels of a 3x3 convolution, or "M" for a 2x2 max pooling

CNN: Widths = (16, "M", 32, "M", 64, "M")
VGG9: Widths = (32, 64, "M", 128, 128, "M", 256, 256, "M")


class PlainCNN(Model):
    """Convolutions, pooling to a `grid` x `grid` map, linear layers; parameter names as torchvision's VGG.

    The map is flattened channel by channel: input c * grid**2 + k of the first linear layer is cell k of
    channel c. Every layer with weights is a block, with the activation and pooling that follow it.
    """

    def __init__(
        self,
        convolutions: Widths,
        layers: tuple[int, ...],
        *,
        classes: int,
        channels: int,
        image_size: int,
        hidden: int = 0,
    ) -> None:
        super().__init__()
        self.features, width = _trunk(convolutions, channels)
        # Cells beyond the trunk's own resolution would be copies of each other, hence the minimum.
        self.grid = min(4, image_size >> convolutions.count("M"))
        self.avgpool, self.flatten = nn.AdaptiveAvgPool2d(self.grid), nn.Flatten()
        sizes = (width * self.grid**2, *layers)
        body = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
        self.classifier = nn.Sequential(*body, *head_layers(sizes[-1], hidden, classes))
        trunk = [*_names(self.features, "features"), "avgpool", "flatten"]
        names = _names(self.classifier, "classifier")
        head = Block(names[len(body)], tuple(names[len(body) :]))
        self.blocks = (*self._grouped([*trunk, *names[: len(body)]]), head)

    def _grouped(self, names: list[str]) -> list[Block]:
        """A new block at every layer with weights."""
        groups: list[list[str]] = []
        for name in names:
            if next(self.get_submodule(name).parameters(), None) is not None:
                groups.append([])
            groups[-1].append(name)
        return [Block(group[0], tuple(group)) for group in groups]

    def layers(self) -> list[tuple[str, nn.Conv2d | nn.Linear]]:
        """Weighted layers in order of computation, with their names."""
        return [(name, m) for name, m in self.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]


def _names(stack: nn.Sequential, prefix: str) -> list[str]:
    return [f"{prefix}.{i}" for i in range(len(stack))]


def _trunk(widths: Widths, channels: int) -> tuple[nn.Sequential, int]:
    layers: list[nn.Module] = []
    for width in widths:
        if isinstance(width, int):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers), channels
