"""The networks: plain CNNs, ResNets, MobileNetV2 and EfficientNet-Lite0, named as in public weights.

- `PlainCNN`: convolutions and linear layers without normalisation, the family that FedMA can match.
- `ResNet`: ResNet-8, -18 and -50 (He et al. 2016), with torchvision's names.
- `MobileNetV2` (Sandler et al. 2018, table 2), with torchvision's names.
- `EfficientNetLite0` (Tan and Le 2019, no squeeze and excitation), with EfficientNet-PyTorch's names.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from fedld.models.base import Block, Model, NormLayer, head_layers

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
        self.features, width = _plain_trunk(convolutions, channels)
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
        """Start a new block at every layer with weights."""
        groups: list[list[str]] = []
        for name in names:
            if next(self.get_submodule(name).parameters(), None) is not None:
                groups.append([])
            groups[-1].append(name)
        return [Block(group[0], tuple(group)) for group in groups]

    def layers(self) -> list[tuple[str, nn.Conv2d | nn.Linear]]:
        """List weighted layers in order of computation, with their names."""
        return [(name, m) for name, m in self.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]


def _names(stack: nn.Sequential, prefix: str) -> list[str]:
    return [f"{prefix}.{i}" for i in range(len(stack))]


def _plain_trunk(widths: Widths, channels: int) -> tuple[nn.Sequential, int]:
    layers: list[nn.Module] = []
    for width in widths:
        if isinstance(width, int):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers), channels


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
        """Compute the residual map."""
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
        """Compute the residual map."""
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


MOBILENET_STAGES = (  # expansion, channels, blocks, stride of the first block
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
MOBILENET_FEATURES = 1280


class DepthwiseConv2d(nn.Conv2d):
    """A 3x3 filter for every channel.

    Maps that become 2x2 or smaller are padded beforehand: where the convolution pads them itself, oneDNN has
    no depthwise kernel for the filters' gradient, and takes twenty times as long.
    """

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__(channels, channels, 3, stride, padding=1, groups=channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve every map with its own filter."""
        if max(x.shape[-2:]) > 2 * self.stride[0]:
            return super().forward(x)
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, stride=self.stride, groups=self.groups)


def _conv_norm(conv: nn.Conv2d, norm: NormLayer) -> nn.Sequential:
    return nn.Sequential(conv, norm(conv.out_channels), nn.ReLU6())


class InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise, 1x1 linear projection; a shortcut where shapes allow one."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, norm: NormLayer) -> None:
        super().__init__()
        hidden = inputs * expansion
        expand = [_conv_norm(_conv(inputs, hidden, 1), norm)] if expansion > 1 else []
        self.conv = nn.Sequential(
            *expand,
            _conv_norm(DepthwiseConv2d(hidden, stride), norm),
            _conv(hidden, outputs, 1),
            norm(outputs),
        )
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Compute the residual map."""
        out: Tensor = self.conv(x)
        return x + out if self.shortcut else out


class GlobalMean(nn.Module):
    """Mean over the pixels of every map.

    It is a sum, divided afterwards: the gradient of `mean` is a copy for every pixel, and not channels-last,
    which slows down the backward pass of the layers before it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Average (N, C, H, W) to (N, C)."""
        return x.sum((2, 3)) / (x.shape[2] * x.shape[3])


class MobileNetV2(Model):
    """Width multiplier 1; the trunk is `features`, the head `classifier`."""

    def __init__(self, *, classes: int, channels: int, norm: NormLayer, hidden: int = 0) -> None:
        super().__init__()
        width = 32
        blocks: list[nn.Module] = [_conv_norm(_conv(channels, width, 3, 2), norm)]
        for expansion, outputs, count, stride in MOBILENET_STAGES:
            for index in range(count):
                blocks.append(
                    InvertedResidual(width, outputs, stride if index == 0 else 1, expansion, norm=norm)
                )
                width = outputs
        self.features = nn.Sequential(*blocks, _conv_norm(_conv(width, MOBILENET_FEATURES, 1), norm))
        self.pool = GlobalMean()
        # torchvision has Dropout(0.2) in place of Identity; it would draw from the global generator and
        # make results depend on the number of workers.
        self.classifier = nn.Sequential(nn.Identity(), *head_layers(MOBILENET_FEATURES, hidden, classes))
        names = [f"features.{i}" for i in range(len(self.features))]
        self.blocks = (
            *(Block(name, (name,)) for name in names[:-1]),
            Block(names[-1], (names[-1], "pool")),
            Block("classifier", tuple(f"classifier.{i}" for i in range(1, len(self.classifier)))),
        )


LITE_STAGES = (  # kernel, stride of the first block, expansion, channels, blocks
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
LITE_FEATURES = 1280
EPSILON = 1e-3
"""What the published weights' BatchNorm adds to variances."""


class SameConv2d(nn.Conv2d):
    """A convolution padded as TensorFlow does: at stride 2 more at the lower right than at the upper left."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, size, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve the padded maps."""
        size, stride = self.kernel_size[0], self.stride[0]
        height, width = (max((-(-n // stride) - 1) * stride + size - n, 0) for n in x.shape[-2:])
        return super().forward(F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2)))


class LiteBlock(nn.Module):
    """1x1 expansion, depthwise convolution, 1x1 linear projection; a shortcut where shapes allow one."""

    def __init__(
        self, inputs: int, outputs: int, size: int, stride: int, expansion: int, norm: NormLayer
    ) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.expands, self.shortcut = expansion > 1, stride == 1 and inputs == outputs
        if self.expands:
            self._expand_conv, self._bn0 = SameConv2d(inputs, hidden, 1), norm(hidden)
        self._depthwise_conv = SameConv2d(hidden, hidden, size, stride, groups=hidden)
        self._bn1 = norm(hidden)
        self._project_conv, self._bn2 = SameConv2d(hidden, outputs, 1), norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the residual map."""
        hidden = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        hidden = F.relu6(self._bn1(self._depthwise_conv(hidden)))
        out: Tensor = self._bn2(self._project_conv(hidden))
        return x + out if self.shortcut else out


class EfficientNetLite0(Model):
    """The trunk is `_conv_stem`, `_blocks` and `_conv_head`, the head `_fc`."""

    def __init__(self, *, classes: int, channels: int, norm: NormLayer, hidden: int = 0) -> None:
        super().__init__()
        width = 32
        self._conv_stem, self._bn0, self._relu0 = SameConv2d(channels, width, 3, 2), norm(width), nn.ReLU6()
        blocks = []
        for size, stride, expansion, outputs, count in LITE_STAGES:
            for index in range(count):
                blocks.append(
                    LiteBlock(
                        width, outputs, size, stride if index == 0 else 1, expansion=expansion, norm=norm
                    )
                )
                width = outputs
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1, self._relu1 = (
            SameConv2d(width, LITE_FEATURES, 1),
            norm(LITE_FEATURES),
            nn.ReLU6(),
        )
        self.pool = GlobalMean()
        layers = head_layers(LITE_FEATURES, hidden, classes)
        self._fc = nn.Sequential(*layers) if hidden else layers[0]
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = EPSILON
        names = [f"_blocks.{i}" for i in range(len(blocks))]
        self.blocks = (
            Block("_conv_stem", ("_conv_stem", "_bn0", "_relu0")),
            *(Block(name, (name,)) for name in names),
            Block("_conv_head", ("_conv_head", "_bn1", "_relu1", "pool")),
            Block("_fc", tuple(f"_fc.{i}" for i in range(len(layers))) if hidden else ("_fc",)),
        )
