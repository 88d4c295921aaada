"""Trunk and tail: the frozen first blocks of a network, and the trained ones from there to the head."""

from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedld.errors import FedLDError, nearest
from fedld.models.base import Model

CHUNK = 32
"""Images that the trunk takes at a time; fewer are filled up with zeros.

Kernels for few images add up in another order than those for many; an image's place and neighbours do not
matter. So with one size throughout, an image has the same features whenever they are computed.
"""


class Trunk(nn.Module):
    """The frozen blocks, in eval mode: images in, what the first trained block takes out."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stack = nn.Sequential(*modules).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
        self.requires_grad_(False)

    @property
    def digest(self) -> str:
        """What the features depend on: every weight and its place."""
        digest = sha256()
        for name, value in self.stack.state_dict().items():
            digest.update(f"{name} {tuple(value.shape)} {value.dtype};".encode())
            digest.update(value.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def train(self, mode: bool = True) -> "Trunk":
        """Do nothing: frozen BatchNorm uses the statistics that it came with."""
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Compute features of any number of images, in float32 also where the tail computes in bfloat16."""
        with torch.autocast(images.device.type, enabled=False):
            parts = [self.stack(_filled(chunk))[: len(chunk)] for chunk in torch.split(images, CHUNK)]
        return torch.cat(parts)


def _filled(images: Tensor) -> Tensor:
    missing = CHUNK - len(images)
    images = functional.pad(images, (0, 0) * 3 + (0, missing)) if missing else images
    return images.contiguous(memory_format=torch.channels_last)


def cut(network: nn.Module, train: str) -> tuple[Trunk | None, nn.Module]:
    """Divide a network into trunk and tail as `train` says; the tail is the network itself without the trunk.

    "all" trains everything, "head" the head, "last:N" the last N blocks (the head is one), and the name of a
    module everything from it to the head. What remains in the tail keeps its full names.

    >>> from fedld.models import build
    >>> trunk, tail = cut(build("resnet8", classes=2, image_size=32, seed=0), "last:2")
    >>> [block.name for block in tail.blocks], sum(p.numel() for p in tail.parameters())
    (['layer3.0', 'fc'], 57858)
    """
    if train == "all":
        return None, network
    if not isinstance(network, Model):
        raise FedLDError(f"{type(network).__name__} does not name its blocks, so train must be 'all'")
    start = first_trained(network, train)
    if start == 0:
        return None, network
    names = [name for block in network.blocks[:start] for name in block.modules]
    trunk = Trunk([network.get_submodule(name) for name in names])
    for name in names:
        owner, _, leaf = name.rpartition(".")
        del network.get_submodule(owner)._modules[leaf]
    network.blocks = network.blocks[start:]
    return trunk, network


def first_trained(network: Model, train: str) -> int:
    """Place of the first block that is trained."""
    names, total = [block.name for block in network.blocks], len(network.blocks)
    if train == "head":
        return total - 1
    if train.startswith("last:"):
        count = train.removeprefix("last:")
        if not count.isdecimal() or not 1 <= int(count) <= total:
            raise FedLDError(
                f"train = '{train}' cannot be: this network has {total} blocks, so last:1 to last:{total}"
            )
        return total - int(count)
    positions = [k for k, name in enumerate(names) if name == train or name.startswith(f"{train}.")]
    if not positions:
        names_of_blocks = [
            "all",
            "head",
            "last:N",
            *dict.fromkeys([*(n.split(".")[0] for n in names), *names]),
        ]
        raise FedLDError(
            f"train = '{train}' names no block of this network: {nearest(train, names_of_blocks)}"
        )
    return positions[0]
