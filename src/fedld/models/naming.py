"""Names of tensors in public weight files, brought to torchvision's, which our networks have.

timm's ResNets are named as torchvision's; its MobileNetV2 (`mobilenetv2_100`) is not.
"""

import re

from torch import Tensor

from fedld.models.mobilenet import STAGES

KNOWN = {
    "resnet18": "torchvision resnet18, timm resnet18",
    "resnet50": "torchvision resnet50, timm resnet50",
    "mobilenet_v2": "torchvision mobilenet_v2, timm mobilenetv2_100",
}
"""Public networks whose files fit, by our name."""

_FIRST = {"conv_dw": "conv.0.0", "bn1": "conv.0.1", "conv_pw": "conv.1", "bn2": "conv.2"}
_OTHERS = {
    "conv_pw": "conv.0.0",
    "bn1": "conv.0.1",
    "conv_dw": "conv.1.0",
    "bn2": "conv.1.1",
    "conv_pwl": "conv.2",
    "bn3": "conv.3",
}
_OUTSIDE = {
    "conv_stem": "features.0.0",
    "bn1": "features.0.1",
    "conv_head": "features.18.0",
    "bn2": "features.18.1",
    "classifier": "classifier.1",
}


def torchvision_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under torchvision's names; what data-parallel training puts before a name is dropped.

    >>> list(torchvision_names({"conv_stem.weight": None, "blocks.1.0.conv_dw.weight": None}))
    ['features.0.0.weight', 'features.2.conv.1.0.weight']
    """
    if state and all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): value for name, value in state.items()}
    if "conv_stem.weight" not in state:
        return state
    return {_from_timm(name): value for name, value in state.items()}


def _from_timm(name: str) -> str:
    if found := re.fullmatch(r"blocks\.(\d+)\.(\d+)\.(\w+)\.(\w+)", name):
        stage, index, module, leaf = found.groups()
        place = 1 + sum(count for _, _, count, _ in STAGES[: int(stage)]) + int(index)
        names = _FIRST if place == 1 else _OTHERS
        return f"features.{place}.{names[module]}.{leaf}" if module in names else name
    module, _, leaf = name.rpartition(".")
    return f"{_OUTSIDE[module]}.{leaf}" if module in _OUTSIDE else name
