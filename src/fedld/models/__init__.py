"""CNN, VGG-9, ResNet-8/18/50, MobileNetV2; parameter names as in torchvision, so public weights load."""

from fedld.models.base import Model, Norm, as_model, batchnorm_names, head_names
from fedld.models.build import NAMES, build, hidden_units
from fedld.models.cut import Trunk, cut
from fedld.models.files import LoadReport, load_weights
from fedld.models.networks import PlainCNN
from fedld.models.own import MODELS, own_network

__all__ = [
    "MODELS",
    "NAMES",
    "LoadReport",
    "Model",
    "Norm",
    "PlainCNN",
    "Trunk",
    "as_model",
    "batchnorm_names",
    "build",
    "cut",
    "head_names",
    "hidden_units",
    "load_weights",
    "own_network",
]
