"""ResNet-8, -18 and -50 (He et al. 2016) with torchvision's parameter names."""

from collections.abc import Sequence

from torch import Tensor, nn

from fedld.models.base import Block, Model, NormLayer, head_layers


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def _downsample(inputs: int, outputs: int, stride: int, norm: NormLayer) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), norm(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: NormLayer) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), norm(width)
        self.conv2, self.bn2 = _conv(width, width, 3), norm(width)
        self.relu = nn.ReLU()
        self.downsample = _downsample(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Residual map."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + shortcut)  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride, as torchvision's V1.5), 1x1 and the shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: NormLayer) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = _conv(inputs, width, 1), norm(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), norm(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1), norm(outputs)
        self.relu = nn.ReLU()
        self.downsample = _downsample(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Residual map."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + shortcut)  # type: ignore[no-any-return]


class ResNet(Model):
    """Stem, stages `layer1`.. of residual blocks (width doubles, resolution halves), mean pooling, `fc`."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        *,
        width: int,
        small_stem: bool,
        classes: int,
        channels: int,
        norm: NormLayer,
        hidden: int = 0,
    ) -> None:
        super().__init__()
        self.conv1 = _conv(channels, width, 3) if small_stem else _conv(channels, width, 7, 2)
        self.bn1 = norm(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small_stem else nn.MaxPool2d(3, 2, padding=1)
        chain = [Block("conv1", ("conv1", "bn1", "relu", "maxpool"))]
        inputs = width
        for stage, depth in enumerate(depths):
            blocks = []
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(inputs, width << stage, stride, norm))
                inputs = (width << stage) * block.expansion
                name = f"layer{stage + 1}.{index}"
                chain.append(Block(name, (name,)))
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        chain[-1] = Block(chain[-1].name, (chain[-1].name, "avgpool", "flatten"))
        layers = head_layers(inputs, hidden, classes)
        self.fc = nn.Sequential(*layers) if hidden else layers[0]
        head = tuple(f"fc.{i}" for i in range(len(layers))) if hidden else ("fc",)
        self.blocks = (*chain, Block("fc", head))
