"""The job of every framework: 10 clients x 1,000 images, small CNN, 5 rounds, evaluation after each."""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
from fedld.models import build

CLIENTS, ROUNDS, BATCH, LR, MOMENTUM = 10, 5, 50, 0.01, 0.9


def network():
    return build("cnn", classes=10, image_size=28, seed=0)


def load(path):
    """Training shards of the clients and the test set, as float tensors in memory."""
    data = np.load(path)
    pixels = torch.from_numpy(data["images"]).permute(0, 3, 1, 2).float().contiguous() / 255
    labels, train = torch.from_numpy(data["labels"]), torch.from_numpy(data["split"] == "train")
    shards = torch.nonzero(train).flatten().chunk(CLIENTS)
    return [(pixels[i], labels[i]) for i in shards], (pixels[~train], labels[~train])
