"""What travels between the server and a site, as Flower records.

Numbers and words travel as one JSON text that is checked on arrival, tensors as arrays. Nothing is unpickled.
"""

import json
import re
from typing import Annotated, Literal, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedld.engine.work import Sums
from fedld.errors import FedLDError
from fedld.layout import Layout, Tree
from fedld.registry import first_problem

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""A site's name is part of file names, so it is made of few kinds of characters."""

Count = Annotated[int, Field(ge=0, lt=2**53)]
Index = Annotated[int, Field(ge=0, lt=100_000)]


class Part(BaseModel):
    """A part of a message: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Question(Part):
    """First message to a site: who are you, and does your data fit?"""

    version: str
    classes: list[str]
    image_size: int | None


class Description(Part):
    """A site's answer: all that the server ever learns of its data, beside updates and losses."""

    site: Annotated[str, Field(pattern=NAME)]
    version: str
    shape: tuple[Count, Count, Count]
    train: Annotated[int, Field(ge=1, lt=2**53)]
    test: Count
    label_counts: list[Count]
    pixel_sums: tuple[list[Count], list[int]]


class Task(Part):
    """One job for a site. `model` and `message` are numbers of the order's arrays."""

    kind: Literal["train", "loss", "personal"]
    round: Count = 0
    state_round: Count = 0
    model: int | None = None
    message: int | None = None


class Order(Part):
    """What the server asks of a site; `kept` are the rounds of states that a checkpoint may still need."""

    version: str
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    site: Index
    settings: str
    classes: list[str]
    mean: list[float]
    std: list[float]
    kept: list[Count]
    tasks: list[Task]


class Outcome(Part):
    """Result of one task; a training's update and message travel as arrays."""

    metrics: dict[str, float | None] = {}
    before: Sums | None = None
    after: Sums | None = None
    kept: bool = False
    seconds: float = 0.0
    own_accuracy: float | None = None


class Answer(Part):
    """A site's answer to an order: one outcome a task, or the reason why there are none."""

    outcomes: list[Outcome] = []
    error: str | None = None


P = TypeVar("P", bound=Part)


def site_name(name: str) -> str:
    """A site's name, checked."""
    if not re.match(NAME, name):
        raise FedLDError(f"a site's name has letters, digits, '.', '_' and '-' only, unlike '{name}'")
    return name


def pack(part: Part, **trees: Tree) -> RecordDict:
    """A part and named trees of tensors as records."""
    # JSON as Python writes it keeps every bit of a float, NaN and infinity included.
    content = RecordDict({"part": ConfigRecord({"json": json.dumps(part.model_dump())})})
    for name, tree in trees.items():
        content[f"tree.{name}"] = ArrayRecord({key: Array(value) for key, value in tree.items()})
    return content


def unpack(kind: type[P], content: RecordDict) -> P:
    """The part of a message, checked."""
    try:
        return kind.model_validate(json.loads(str(content.config_records["part"]["json"])))
    except (KeyError, ValueError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else repr(error)
        raise FedLDError(f"the {kind.__name__.lower()} is malformed: {problem}") from None


def tree(content: RecordDict, name: str) -> Tree:
    """A tree of a message; one that was not sent is empty."""
    record = content.array_records.get(f"tree.{name}", ArrayRecord())
    return {key: torch.from_numpy(np.array(array.numpy())) for key, array in record.items()}


def size(content: RecordDict) -> int:
    """Bytes of a message's arrays."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def shared_part(layout: Layout, update: Tensor) -> Tensor:
    """What a client gives away of its update: the shared parameters and the shared buffers."""
    return torch.cat([update[: layout.shared], update[layout.buffers]])


def set_shared(layout: Layout, row: Tensor, part: Tensor) -> None:
    """Write what `shared_part` gave into a row of updates."""
    row[: layout.shared] = part[: layout.shared]
    row[layout.buffers] = part[layout.shared :]
