"""CNN, VGG-9, ResNet-8/18/50, MobileNetV2; parameter names as in torchvision, so public weights load."""

from fedld.models.base import Model, Norm, batchnorm_names, head_names
from fedld.models.build import NAMES, build
from fedld.models.plain import PlainCNN
from fedld.models.weights import LoadReport, load_weights

__all__ = [
    "NAMES",
    "LoadReport",
    "Model",
    "Norm",
    "PlainCNN",
    "batchnorm_names",
    "build",
    "head_names",
    "load_weights",
]
