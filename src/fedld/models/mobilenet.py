"""MobileNetV2 (Sandler et al. 2018, table 2) with torchvision's parameter names."""

from torch import Tensor, nn

from fedld.models.base import Block, Model, NormLayer, head_layers

STAGES = (  # expansion, channels, blocks, stride of the first block
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
FEATURES = 1280


def _conv_norm(
    inputs: int, outputs: int, size: int, norm: NormLayer, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, norm(outputs), nn.ReLU6())


class InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise, 1x1 linear projection; a shortcut where shapes allow one."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, norm: NormLayer) -> None:
        super().__init__()
        hidden = inputs * expansion
        expand = [_conv_norm(inputs, hidden, 1, norm)] if expansion > 1 else []
        self.conv = nn.Sequential(
            *expand,
            _conv_norm(hidden, hidden, 3, norm, stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            norm(outputs),
        )
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Residual map."""
        out: Tensor = self.conv(x)
        return x + out if self.shortcut else out


class GlobalMean(nn.Module):
    """Mean over the pixels of every map."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C)."""
        return x.mean((2, 3))


class MobileNetV2(Model):
    """Width multiplier 1; the trunk is `features`, the head `classifier`."""

    def __init__(self, *, classes: int, channels: int, norm: NormLayer, hidden: int = 0) -> None:
        super().__init__()
        width = 32
        blocks: list[nn.Module] = [_conv_norm(channels, width, 3, norm, stride=2)]
        for expansion, outputs, count, stride in STAGES:
            for index in range(count):
                blocks.append(InvertedResidual(width, outputs, stride if index == 0 else 1, expansion, norm))
                width = outputs
        self.features = nn.Sequential(*blocks, _conv_norm(width, FEATURES, 1, norm))
        self.pool = GlobalMean()
        # torchvision has Dropout(0.2) in place of Identity; it would draw from the global generator and
        # make results depend on the number of workers.
        self.classifier = nn.Sequential(nn.Identity(), *head_layers(FEATURES, hidden, classes))
        names = [f"features.{i}" for i in range(len(self.features))]
        self.blocks = (
            *(Block(name, (name,)) for name in names[:-1]),
            Block(names[-1], (names[-1], "pool")),
            Block("classifier", tuple(f"classifier.{i}" for i in range(1, len(self.classifier)))),
        )
