"""Transforms that bound an update or make it small."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedld.errors import FedLDError
from fedld.layout import Layout, Tree
from fedld.transforms.base import PARAMETERS, Sender, UpdateTransform

RESIDUAL = "residual"


@dataclass(frozen=True)
class Clip(UpdateTransform):
    """Shorten an update's parameters to the length `bound` where they are longer; buffers are not touched."""

    bound: float

    name: ClassVar[str] = "clip"

    def __post_init__(self) -> None:
        if not 0 < self.bound < math.inf:
            raise FedLDError(f"transform clip: the bound must be a positive number, not {self.bound:g}")

    def encode(self, message: Tree, sender: Sender) -> tuple[Tree, Tree]:
        """Scale the parameters by min(1, bound / length)."""
        parameters = message[PARAMETERS]
        length = float(torch.linalg.vector_norm(parameters, dtype=torch.float64))
        if not length > self.bound:
            return message, {}
        return {**message, PARAMETERS: parameters * (self.bound / length)}, {}


@dataclass(frozen=True)
class Quantise(UpdateTransform):
    """Round every number of a tensor to one of 2^bits levels between its smallest and largest value.

    Rounding is stochastic, so that the expected value is the number itself; what it changed is added to the
    client's next update (error feedback).
    """

    bits: int = 8

    name: ClassVar[str] = "quantise"

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):  # with one bit the error feedback would grow from round to round
            raise FedLDError(f"transform quantise: bits must be 2, 4 or 8, not {self.bits:g}")

    def encode(self, message: Tree, sender: Sender) -> tuple[Tree, Tree]:
        """Code the parameters in `bits` bits each, with two numbers per tensor."""
        rest = dict(message)
        wanted = _with_residual(rest.pop(PARAMETERS), sender)
        low, step = self._ranges(wanted, sender.layout)
        lengths = _lengths(sender.layout)
        places = (wanted - low.repeat_interleave(lengths)) / step.repeat_interleave(lengths)
        noise = torch.rand(len(places), generator=sender.generator(self.name))
        codes = (places + noise).floor().nan_to_num().clamp(0, 2**self.bits - 1).to(torch.uint8)
        coded = {"codes": _packed(codes, self.bits), "low": low, "step": step}
        return {**rest, **coded}, {RESIDUAL: wanted - self._values(coded, sender.layout)}

    def decode(self, message: Tree, layout: Layout) -> Tree:
        """Give back the levels that the codes stand for."""
        rest = {key: value for key, value in message.items() if key not in ("codes", "low", "step")}
        return {**rest, PARAMETERS: self._values(message, layout)}

    def _ranges(self, values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Give smallest value and distance of levels of every tensor."""
        parts = torch.split(values, [length for _, length in layout.tensors])
        low = torch.stack([part.min() for part in parts]) if parts else values.new_zeros(0)
        high = torch.stack([part.max() for part in parts]) if parts else values.new_zeros(0)
        step = (high - low) / (2**self.bits - 1)
        return low, torch.where(step > 0, step, torch.ones_like(step))

    def _values(self, coded: Tree, layout: Layout) -> Tensor:
        codes = _unpacked(coded["codes"], self.bits)[: layout.shared].float()
        lengths = _lengths(layout)
        return codes * coded["step"].repeat_interleave(lengths) + coded["low"].repeat_interleave(lengths)


@dataclass(frozen=True)
class TopK(UpdateTransform):
    """Send the largest numbers of an update, a `share` of them; the rest is added to the next update."""

    share: float = 0.01

    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise FedLDError(f"transform topk: the share must be above 0 and at most 1, not {self.share:g}")

    def encode(self, message: Tree, sender: Sender) -> tuple[Tree, Tree]:
        """Keep the largest parameters by size, with their places."""
        rest = dict(message)
        wanted = _with_residual(rest.pop(PARAMETERS), sender)
        count = min(len(wanted), math.ceil(self.share * len(wanted)))
        places = wanted.abs().topk(count).indices.sort().values
        residual = wanted.clone()
        residual[places] = 0.0
        return {**rest, "places": places.to(torch.int32), "values": wanted[places]}, {RESIDUAL: residual}

    def decode(self, message: Tree, layout: Layout) -> Tree:
        """Put the numbers back at their places; all others are zero."""
        rest = {key: value for key, value in message.items() if key not in ("places", "values")}
        places = message["places"].long()
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < layout.shared:
            raise FedLDError("its update names places that the model does not have")
        parameters = torch.zeros(layout.shared, dtype=message["values"].dtype)
        parameters[places] = message["values"]
        return {**rest, PARAMETERS: parameters}


def _with_residual(parameters: Tensor, sender: Sender) -> Tensor:
    """Give the update and what was left of the client's last one."""
    return parameters + sender.state[RESIDUAL] if RESIDUAL in sender.state else parameters


def _lengths(layout: Layout) -> Tensor:
    return torch.tensor([length for _, length in layout.tensors])


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of a few bits, several to a byte."""
    each = 8 // bits
    padded = torch.cat([codes, codes.new_zeros(-len(codes) % each)]).view(-1, each)
    return sum((padded[:, k] << (k * bits) for k in range(each)), start=torch.zeros_like(padded[:, 0]))


def _unpacked(content: Tensor, bits: int) -> Tensor:
    each = 8 // bits
    parts = [(content >> (k * bits)) & (2**bits - 1) for k in range(each)]
    return torch.stack(parts, 1).flatten()
