"""A model as one vector: where every parameter and buffer lies.

A federated method adds, scales and projects whole models, so the models live as views of one flat vector:

    [ shared parameters | private parameters | shared buffers | private buffers ]
      0 .. d              d .. trainable       (BatchNorm statistics and counters)

*Shared* entries travel between client and server, *private* ones stay with the client (FedBN's BatchNorm).
Convolution weights are stored channels-last, the order CPU kernels like; within a run the order of the
numbers is the same everywhere, and `export` gives back ordinary tensors.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

Tree = dict[str, Tensor]
"""Server state, client state and every message: names and tensors, nothing else."""


def tree_bytes(tree: Tree) -> int:
    """Count the bytes of all tensors of a message."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tree.values())


Kind = Literal["parameter", "buffer", "counter"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of the model and its place in the vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    kind: Kind
    private: bool

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def view(self, vector: Tensor) -> Tensor:
        """View the entry as a tensor of its own shape that shares memory with `vector`."""
        flat = vector[self.start : self.start + self.size]
        if len(self.shape) == 4:
            out, inner, height, width = self.shape
            return flat.view(out, height, width, inner).permute(0, 3, 1, 2)
        return flat.view(self.shape)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names, shapes and places of everything in a model's vector."""

    entries: tuple[Entry, ...]
    shared: int
    trainable: int
    shared_end: int
    size: int

    @classmethod
    def of(cls, model: nn.Module, private: Iterable[str] = ()) -> "Layout":
        """Make the layout of a model; `private` names the parameters and buffers that stay with a client."""
        mine = set(private)
        tensors: list[tuple[str, Tensor, Kind]] = [(n, p, "parameter") for n, p in model.named_parameters()]
        for name, buffer in model.named_buffers():
            tensors.append((name, buffer, "buffer" if buffer.is_floating_point() else "counter"))
        tensors.sort(key=lambda item: (item[2] != "parameter", item[0] in mine))
        entries, start, ends = [], 0, {}
        for name, tensor, kind in tensors:
            entries.append(
                Entry(name=name, shape=tuple(tensor.shape), start=start, kind=kind, private=name in mine)
            )
            start += tensor.numel()
            ends[kind == "parameter", name in mine] = start
        shared = ends.get((True, False), 0)
        trainable = ends.get((True, True), shared)
        shared_end = ends.get((False, False), trainable)
        return cls(
            entries=tuple(entries), shared=shared, trainable=trainable, shared_end=shared_end, size=start
        )

    @cached_property
    def shared_size(self) -> int:
        """How many numbers travel: shared parameters and shared buffers."""
        return self.shared + self.shared_end - self.trainable

    @cached_property
    def private_size(self) -> int:
        """How many numbers stay with a client."""
        return self.size - self.shared_size

    @cached_property
    def tensors(self) -> tuple[tuple[str, int], ...]:
        """Name and length of every shared parameter, in order: what an aggregation rule sees."""
        return tuple((e.name, e.size) for e in self.entries if e.kind == "parameter" and not e.private)

    def views(self, vector: Tensor) -> Tree:
        """View every entry by name, sharing memory with `vector`."""
        return {entry.name: entry.view(vector) for entry in self.entries}

    def flatten(self, model: nn.Module) -> Tensor:
        """Copy the model's parameters and buffers into a new vector."""
        dtype = next(model.parameters()).dtype
        vector = torch.zeros(self.size, dtype=dtype)
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, view in self.views(vector).items():
            view.copy_(tensors[name].detach())
        return vector

    def export(self, vector: Tensor) -> Tree:
        """Copy entries to ordinary contiguous tensors by name, as in a state dict; counters are integers."""
        return {
            e.name: (e.view(vector).round().long() if e.kind == "counter" else e.view(vector)).contiguous()
            for e in self.entries
        }

    def update(self, after: Tensor, before: Tensor) -> Tensor:
        """Compute the update: differences of the parameters, and the new values of the buffers."""
        update = after - before
        update[self.trainable :] = after[self.trainable :]
        return update

    def apply(self, vector: Tensor, update: Tensor) -> None:
        """Move the shared parameters of `vector` by an update and take over its shared buffers."""
        self.shared_parameters(vector).add_(self.shared_parameters(update))
        self.shared_buffers(vector).copy_(self.shared_buffers(update))

    def shared_part(self, vector: Tensor) -> Tensor:
        """Copy the shared numbers of `vector`: the shared parameters, then the shared buffers."""
        return torch.cat([self.shared_parameters(vector), self.shared_buffers(vector)])

    def set_shared(self, vector: Tensor, part: Tensor) -> None:
        """Write what `shared_part` gave back into `vector`."""
        self.shared_parameters(vector).copy_(part[: self.shared])
        self.shared_buffers(vector).copy_(part[self.shared :])

    def shared_parameters(self, vectors: Tensor) -> Tensor:
        """View the shared parameters in a vector, or in every row of a matrix."""
        return vectors[..., : self.shared]

    def shared_buffers(self, vectors: Tensor) -> Tensor:
        """View the shared buffers in a vector, or in every row of a matrix."""
        return vectors[..., self.trainable : self.shared_end]

    def private_parameters(self, vector: Tensor) -> Tensor:
        """View the private parameters in `vector`."""
        return vector[self.shared : self.trainable]

    def private_part(self, vector: Tensor) -> Tensor:
        """Copy the private numbers of `vector`."""
        return torch.cat([self.private_parameters(vector), self.private_buffers(vector)])

    def set_private(self, vector: Tensor, part: Tensor) -> None:
        """Write what `private_part` gave back into `vector`."""
        cut = self.trainable - self.shared
        self.private_parameters(vector).copy_(part[:cut])
        self.private_buffers(vector).copy_(part[cut:])

    def private_buffers(self, vector: Tensor) -> Tensor:
        """View the private buffers in `vector`."""
        return vector[self.shared_end :]

    def count_batches(self, mean: Tensor, values: Tensor, *, private: bool = False) -> Tensor:
        """Average the clients' shared (or private) buffers (m, b), with counters at their maximum.

        A truncated mean of `num_batches_tracked` is meaningless, and wrong BatchNorm statistics are the
        field's most reported bug, so the rule is explicit.
        """
        first = self.shared_end if private else self.trainable
        for e in self.entries:
            if e.kind == "counter" and e.private == private:
                at = slice(e.start - first, e.start - first + e.size)
                mean[at] = values[:, at].amax(0)
        return mean


class FlatModel:
    """A model with parameters, buffers and gradients that are views of flat vectors."""

    def __init__(self, model: nn.Module, layout: Layout, device: str = "cpu") -> None:
        self.model = model.to(device)
        self.layout = layout
        self.vector = layout.flatten(model).to(device)
        self.weights = self.vector[: layout.trainable]  # all trainable parameters, the shared ones first
        self.gradient = torch.zeros(layout.trainable, dtype=self.vector.dtype, device=device)
        modules = dict(model.named_modules())
        for entry in layout.entries:
            owner, _, leaf = entry.name.rpartition(".")
            if entry.kind == "parameter":
                parameter = modules[owner]._parameters[leaf]
                assert parameter is not None
                parameter.data = entry.view(self.vector)
                parameter.grad = entry.view(self.gradient)
            else:
                # `.data` has a version counter of its own: with a shared one, autograd takes a running update
                # of one BatchNorm for a change to what another saved for its backward pass.
                modules[owner]._buffers[leaf] = entry.view(self.vector.data)

    def load(self, vector: Tensor) -> None:
        """Set parameters and buffers."""
        self.vector.copy_(vector)

    @contextmanager
    def holding(self, vector: Tensor) -> Iterator[None]:
        """Use other numbers in the network for a moment; a pass already made can still be differentiated.

        Other tensors take the parameters' places, as autocast would otherwise use its copies of the old ones.
        """
        modules, replaced = dict(self.model.named_modules()), []
        for entry in self.layout.entries:
            owner, _, leaf = entry.name.rpartition(".")
            module = modules[owner]
            table = module._parameters if entry.kind == "parameter" else module._buffers
            replaced.append((table, leaf, table[leaf]))
            table[leaf] = entry.view(vector)
        try:
            yield
        finally:
            for table, leaf, tensor in replaced:
                table[leaf] = tensor
