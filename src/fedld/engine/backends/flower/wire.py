"""What travels between the server and a site, as Flower records.

Numbers and words travel as one JSON text that is checked on arrival, tensors as arrays. Nothing is unpickled.
"""

import json
import re
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fedld.data.columns import SheetColumn
from fedld.data.sheet import CATEGORIES
from fedld.engine.jobs import ClientJob, ClientResult, Count, Seconds
from fedld.errors import FedLDError, printable
from fedld.layout import Tree
from fedld.privacy.context import MOST_SITES
from fedld.privacy.gram import MOST_EXPONENT
from fedld.registry import first_problem

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""A site's name is part of file names, so it is made of few kinds of characters."""

JOBS = 1024
"""Jobs of one order: a loss for every site's model, and room."""

IMAGES = 10_000_000
"""Most images of a site."""

Side = Annotated[int, Field(ge=1, le=1 << 15)]
Text = Annotated[str, Field(max_length=100)]
Classes = Annotated[list[Text], Field(max_length=10_000)]
Pixels = Annotated[int, Field(ge=0, lt=2**80)]
Name = Annotated[str, Field(max_length=200)]
Features = Annotated[list[Annotated[str, Field(max_length=404)]], Field(max_length=10_000)]
Number = Annotated[float, Field(allow_inf_nan=False)]
RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
P = TypeVar("P", bound="Part")
R = TypeVar("R", bound=ClientResult)


class Part(BaseModel):
    """A part of a message: unknown fields are refused. Tensors travel as arrays, so none stands in it."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class TableColumn(Part):
    """A column of a table, as `fedld.data.columns.SheetColumn`; what is None stays at the site."""

    name: Name
    kind: Literal["number", "text", "empty"]
    missing: bool = False
    levels: Annotated[dict[Name, Count | None], Field(max_length=CATEGORIES)] = {}
    sums: tuple[Number, Number, Number] | None = None

    @classmethod
    def of(cls, column: SheetColumn) -> "TableColumn":
        """As it travels."""
        return cls(**vars(column))

    def column(self) -> SheetColumn:
        """As it is used."""
        return SheetColumn(**self.model_dump())

    def adds_up(self, rows: int) -> bool:
        """Whether so many training rows can have these sums."""
        known, total, squares = self.sums or (0.0, 0.0, 0.0)
        levels = sum(count or 0 for count in self.levels.values())
        return 0 <= known <= rows and total**2 <= known * squares * 1.001 and levels <= rows


class Question(Part):
    """First message to a site: who are you, and does your data fit?

    `columns` are those of the server's table; none where it has pictures.
    """

    version: Text
    classes: Classes
    image_size: Side | None
    task: Text = "classification"
    columns: Annotated[list[TableColumn], Field(max_length=10_000)] = []


class Description(Part):
    """A site's answer: all that the server ever learns of its data, beside updates and losses.

    Of a class with few images the number is not told: None. A table has `columns` and no shape. What a task
    needs of the targets of all sites is in `target_sums`. `identity` is the site's public key for secure
    rounds, where it has pinned its peers'.
    """

    site: Annotated[str, Field(pattern=NAME)]
    version: Text
    shape: tuple[Side, Side, Annotated[int, Field(ge=1, le=16)]] | tuple[()]
    train: Annotated[int, Field(ge=1, le=IMAGES)]
    test: Annotated[int, Field(ge=0, le=IMAGES)]
    label_counts: Annotated[list[Count | None], Field(max_length=10_000)]
    pixel_sums: tuple[list[Pixels], list[Pixels]] | tuple[()]
    columns: Annotated[list[TableColumn], Field(max_length=10_000)] = []
    target_sums: Annotated[dict[Text, Number], Field(max_length=100)] = {}
    identity: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None

    def problem(self, classes: int) -> str | None:
        """What does not add up, if anything."""
        told = [count for count in self.label_counts if count is not None]
        untold = len(self.label_counts) - len(told)
        if len(self.label_counts) != classes or not untold <= self.train - sum(told) <= untold * self.train:
            return "its label counts do not add up"
        if not all(column.adds_up(self.train) for column in self.columns):
            return "its sums of columns do not fit its rows"
        if not self.shape or not self.pixel_sums:
            return None if self.columns else "it has neither pictures nor a table"
        height, width, channels = self.shape
        brightest = self.train * height * width * 255
        for sums, largest in zip(self.pixel_sums, (brightest, brightest * 255), strict=True):
            if len(sums) != channels or max(sums) > largest:
                return "its sums of pixels do not fit its images"
        return None


class PublishedCoefficients(Part):
    """The coefficients c of a rule and the weights p that it was given, by participant in sorted order."""

    coefficients: Annotated[list[Number], Field(max_length=MOST_SITES)]
    weights: Annotated[list[Count], Field(max_length=MOST_SITES)]


class SecureRequest(Part):
    """What the server says of a secure computation over a result that a site keeps.

    `largest` is the number of images of the largest site, for the bounds; `attempt` tells repetitions apart.
    `bound` is that of the sketches of a Gram matrix, known when all sites have announced their lengths. A sum
    after a Gram matrix has the `published` coefficients, and what opens the matrix travels beside.
    """

    computation: Literal["sum", "gram"] = "sum"
    participants: Annotated[list[Annotated[str, Field(pattern=NAME)]], Field(max_length=MOST_SITES)]
    largest: Annotated[int, Field(ge=1, le=IMAGES)]
    attempt: Count
    bound: Annotated[float, Field(gt=0, lt=1e30)] | None = None
    published: PublishedCoefficients | None = None


class SecureStep(Part):
    """The server's part of message `number` of a secure computation; its bytes travel as the tree `secure`.

    Message 1 of a further attempt comes with a `request`. `context` is the computation's digest otherwise.
    """

    version: str
    run: RunId
    number: Annotated[int, Field(ge=1, le=9)]
    context: Annotated[str, Field(max_length=64)] = ""
    request: SecureRequest | None = None


class Held(Part):
    """The form of a result that stays at a site until it is summed: shapes and types of its entries.

    `exponent`: before a Gram matrix, the power of two that bounds the length of the update.
    """

    entries: Annotated[
        dict[Text, tuple[Annotated[list[Count], Field(max_length=4)], Literal["float32", "float64"]]],
        Field(max_length=32),
    ]
    exponent: Annotated[int, Field(ge=-MOST_EXPONENT, le=MOST_EXPONENT)] | None = None

    def form(self) -> Tree:
        """Tensors of these shapes without content."""
        return {
            key: torch.empty(shape, dtype=getattr(torch, kind), device="meta")
            for key, (shape, kind) in self.entries.items()
        }


class Order(Part):
    """What the server asks of a site; `kept` are the rounds of states that a checkpoint may still need.

    The message to the client of job k travels as the tree `message.k`, the model of row `slot` of a loss job
    as `models`. A `dry_run` is two steps on a few images, of which time and memory are reported,
    and nothing is kept. `trunk` is the digest of the frozen part, which a site has in a file of its own.
    `sites` is the number of sites in the run. `features` are those of all sites' tables together, and
    `target_sums` are over all sites' targets, where a task needs some. With `secure` the result of a round's
    job stays at the site, which answers with its form and message 1 of the secure computation.
    """

    version: str
    run: RunId
    settings: str
    trunk: str = ""
    classes: Classes
    mean: Annotated[list[float], Field(max_length=10_000)]
    std: Annotated[list[float], Field(max_length=10_000)]
    features: Features = []
    target_sums: Annotated[dict[Text, Number], Field(max_length=100)] = {}
    kept: Annotated[list[Count], Field(max_length=100_000)]
    jobs: list[Annotated[ClientJob, Field(discriminator="kind")]]
    dry_run: bool = False
    sites: Annotated[int, Field(ge=1)] = 1
    secure: SecureRequest | None = None


class DryRun(Part):
    """What a dry run took."""

    seconds: Seconds
    memory: Count


class Answer(Part):
    """A site's answer to an order: one result per job, or the reason why there are none.

    A training's update and what a client says to its method travel as the trees `update` and `message`. Where
    the result is `held`, the tree `secure` has message 1 of its sum instead; before a Gram matrix there is no
    such tree.
    """

    results: Annotated[list[dict[str, Any]], Field(max_length=JOBS)] = []
    dry_run: DryRun | None = None
    held: Held | None = None
    error: str | None = None

    def read(self, k: int, kind: type[R]) -> R:
        """The result of job k, checked."""
        checks: TypeAdapter[list[R]] = TypeAdapter(list[kind], config=self.model_config)  # type: ignore[valid-type]
        try:
            return checks.validate_python([self.results[k]])[0]
        except ValidationError as error:
            raise FedLDError(printable(f"the answer is malformed: {first_problem(error)}")) from None


def site_name(name: str) -> str:
    """A site's name, checked."""
    if not re.fullmatch(NAME, name):  # re.match would take a newline at the end
        unlike = printable(name, 80)
        raise FedLDError(f"a site's name has letters, digits, '.', '_' and '-' only, unlike '{unlike}'")
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
    except Exception as error:  # whatever a peer may send: nesting too deep, surrogates, no such record
        problem = first_problem(error) if isinstance(error, ValidationError) else repr(error)
        raise FedLDError(printable(f"the {kind.__name__.lower()} is malformed: {problem}")) from None


def tree(content: RecordDict, name: str) -> Tree:
    """A tree of a message; one that was not sent is empty."""
    record = content.array_records.get(f"tree.{name}", ArrayRecord())
    return {key: torch.from_numpy(np.array(array.numpy())) for key, array in record.items()}


def tree_names(content: RecordDict) -> list[str]:
    """The trees that a message has."""
    return [name.removeprefix("tree.") for name in content.array_records if name.startswith("tree.")]


def carried(content: bytes) -> Tree:
    """Bytes of a secure computation as a tree."""
    return {"message": torch.from_numpy(np.frombuffer(content, np.uint8).copy())}


def carried_bytes(content: RecordDict) -> bytes:
    """The bytes of a secure computation that came with a message."""
    found = tree(content, "secure").get("message")
    if found is None or found.dtype != torch.uint8 or found.dim() != 1:
        raise FedLDError("it came without the bytes of its secure computation")
    return found.numpy().tobytes()


def listed(content: RecordDict) -> dict[str, list[Any]]:
    """A message's arrays as a ledger tells of them: name, shape and bytes."""
    return {
        f"{name.removeprefix('tree.')}.{key}": [list(array.shape), len(array.data)]
        for name, record in content.array_records.items()
        for key, array in record.items()
    }


def size(content: RecordDict) -> int:
    """Bytes of a message's arrays."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())
