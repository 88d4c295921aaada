"""EfficientNet-Lite0 (Tan and Le 2019, no squeeze and excitation) with EfficientNet-PyTorch's names."""

import torch.nn.functional as F
from torch import Tensor, nn

from fedld.models.base import Block, Model, NormLayer, head_layers
from fedld.models.mobilenet import GlobalMean

STAGES = (  # kernel, stride of the first block, expansion, channels, blocks
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
FEATURES = 1280
EPSILON = 1e-3
"""What the published weights' BatchNorm adds to variances."""


class SameConv2d(nn.Conv2d):
    """A convolution padded as TensorFlow does: at stride 2 more at the lower right than at the upper left."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, size, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The convolution of the padded maps."""
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
        """Residual map."""
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
        for size, stride, expansion, outputs, count in STAGES:
            for index in range(count):
                blocks.append(LiteBlock(width, outputs, size, stride if index == 0 else 1, expansion, norm))
                width = outputs
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1, self._relu1 = SameConv2d(width, FEATURES, 1), norm(FEATURES), nn.ReLU6()
        self.pool = GlobalMean()
        layers = head_layers(FEATURES, hidden, classes)
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
