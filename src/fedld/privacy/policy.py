"""A site's policy: what it takes part in, and what may leave it. The site owns it; no message changes it.

methods = ["fedavg", "fedld-drift"]   # allowed methods; without the line all
rules = ["mean", "measured"]          # allowed aggregation rules
tasks = ["classification"]            # allowed tasks
min_sites = 3                         # least number of sites in a run, by the server's word
updates = "visible"                   # or "summed": updates and losses leave in secure sums only; or "gram":
                                      # the same, and lengths and angles of updates are opened
models_to_sites = true                # whether other sites may get this site's models (decompose)
smallest_count = 50                   # smallest number of images of which anything is told
max_rounds = 100                      # most rounds of a run
epsilon = 4.0                         # privacy budget of all runs: train with differential privacy only
delta = 1e-5                          # at which the budget is counted
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from fedld.errors import FedLDError, nearest
from fedld.paths import require_regular
from fedld.registry import first_problem

POLICY = "policy.toml"
"""The site's copy of its policy, in its own folder of states."""
LARGEST_FILE = 1 << 16
Names = tuple[Annotated[str, Field(max_length=100)], ...]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a run asks of a site, as far as a policy decides on it.

    Attributes:
        method, rule, task: their names.
        sites: how many sites the run has, by the server's word.
        rounds: how many rounds it has.
        trains: whether a result of a round is asked for.
        decomposes: whether the site's models go to other sites.
        measures: whether training images are measured, beside training.
        tells: whether a measurement of this site alone is asked for.
        secure: in which secure computation the result leaves; None for the result itself.
        private: whether training is differentially private.
    """

    method: str
    rule: str
    task: str
    sites: int
    rounds: int
    trains: bool
    decomposes: bool
    measures: bool = False
    tells: bool = False
    secure: Literal["sum", "gram"] | None = None
    private: bool = False


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Bounds of a site's own; None allows every name."""

    methods: Names | None = None
    rules: Names | None = None
    tasks: Names | None = None
    min_sites: Annotated[int, Field(ge=1)] = 1
    updates: Literal["visible", "gram", "summed"] = "visible"
    models_to_sites: bool = True
    smallest_count: Annotated[int, Field(ge=2)] = 50
    max_rounds: Annotated[int, Field(ge=1)] = 1000
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5

    def check(self, asked: Request) -> None:
        """Refuse what the policy does not allow.

        Raises:
            FedLDError: with the first reason, as the server's operator will read it.
        """
        if reason := next(self._reasons(asked), None):
            raise FedLDError(f"its policy refuses this: {reason}")

    def _reasons(self, asked: Request) -> Iterator[str]:
        kinds = (("method", self.methods), ("rule", self.rules), ("task", self.tasks))
        for kind, names in kinds:
            name = getattr(asked, kind)
            if names is not None and name not in names:
                yield f"the {kind} '{name}' is not one of {', '.join(names) or 'none'}"
        if asked.sites < self.min_sites:
            yield f"a run has at least {self.min_sites} sites, not {asked.sites}"
        if asked.rounds > self.max_rounds:
            yield f"a run has at most {self.max_rounds} rounds, not {asked.rounds}"
        if asked.decomposes and not self.models_to_sites:
            yield "its models do not go to other sites, so the loss is not decomposed"
        if asked.trains and self.updates != "visible" and asked.secure is None:
            yield "its updates leave in secure sums only"
        if asked.tells and self.updates != "visible":
            yield "what it measures leaves in secure sums only"
        if self.updates == "summed" and asked.secure == "gram":
            yield "inner products of its updates do not leave (updates = 'gram' would allow it)"
        if (asked.trains or asked.measures) and self.epsilon is not None and not asked.private:
            yield f"it trains with differential privacy only (epsilon at most {self.epsilon:g})"

    def lines(self) -> Iterator[str]:
        """The policy and what leaves under it, for a reader."""
        yield "policy:"
        for field in fields(self):
            value = getattr(self, field.name)
            shown = ", ".join(value) if isinstance(value, tuple) else value
            yield f"  {field.name}: {'any' if shown is None and field.name != 'epsilon' else shown}"
        updates = "the update of its model, which the server sees"
        if self.updates == "summed":
            updates = "no update but in a secure sum"
        if self.updates == "gram":
            updates = "no update but in a secure sum; inner products of its sketch with other sites' sketches"
        if self.epsilon is not None:
            updates += (
                f"; nothing is trained without differential privacy, at most epsilon {self.epsilon:g} "
                f"(delta {self.delta:g}) over all runs"
            )
        yield "under this policy leave:"
        yield f"  {updates}"
        if self.updates == "visible":
            yield f"  numbers, losses and features of at least {self.smallest_count} images of a class"
        else:
            yield f"  numbers of at least {self.smallest_count} images of a class; losses in secure sums only"
        where = "its models to other sites, where a run decomposes the loss"
        yield f"  {where if self.models_to_sites else 'no model to other sites'}"


def read_policy(file: Path) -> Policy:
    """Read a policy.

    Args:
        file: a TOML file of the settings above.

    Raises:
        FedLDError: the file cannot be read or has something else in it; then everything is refused.
    """
    try:
        require_regular(file)
        if file.stat().st_size > LARGEST_FILE:
            raise FedLDError(f"the policy '{file.name}' is very large, so everything is refused")
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise FedLDError(f"the policy '{file.name}' cannot be read, so everything is refused") from None
    names = [field.name for field in fields(Policy)]
    for key in given:
        if key not in names:
            raise FedLDError(f"the policy has no setting '{key}': {nearest(key, names)}")
    try:
        return TypeAdapter(Policy).validate_python(given)
    except ValidationError as error:
        raise FedLDError(
            f"the policy is not valid, so everything is refused: {first_problem(error)}"
        ) from None
