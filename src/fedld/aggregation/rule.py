"""What an aggregation rule is, and the table of all rules by name.

The aggregate of most rules lies in the span of the clients' updates, u = G c, and its coefficients c follow
from the Gram matrix K = G'G and the weights p alone: those are `GramRule`s. Rules that look at single
coordinates cannot be written so and say it by their type, `CoordinateRule`. `Spectrum` has the principal axes
of the updates, seen from K (Eq. 4-6).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedld.errors import FedLDError, nearest
from fedld.registry import Registry, require_instance, require_subclass

if TYPE_CHECKING:
    from fedld.aggregation.measured import Candidates, Trial, Vote


Array = NDArray[np.float64]


@dataclass(frozen=True)
class Extras:
    """What a rule may know beside K and p.

    group      name of the model, layer or tensor it is asked about
    precision  how exact K is (relative)
    reference  inner products <g_i, h> with a direction h that the server remembers
    names      the clients', for rules that depend on an order
    """

    group: str = "model"
    precision: float = 1e-10
    reference: Array | None = None
    names: tuple[str, ...] = ()


NO_EXTRAS = Extras()


@dataclass(frozen=True)
class Rule:
    """Base of all aggregation rules: a frozen value with a name and options.

    Rules that follow from inner products of updates are `GramRule`s; others are `CoordinateRule`s.

    Attributes:
        robust: whether the rule withstands a minority of wrong clients.
        max_weight: largest share of the weights for one client, unless `aggregate` is given another.
    """

    name: ClassVar[str]
    robust: ClassVar[bool] = False
    max_weight: ClassVar[float] = 1.0
    """Largest share of the weights that one client may have, unless `aggregate` gets another."""

    @property
    def sums_suffice(self) -> bool:
        """Whether the mean of the updates and sums over clients are all that it needs."""
        return False

    def bases(self) -> list["GramRule"]:
        """Name the rules that give the directions of candidate steps, for rules that clients measure.

        Returns:
            One rule for each direction; none unless the rule measures.
        """
        return []

    def pairs(self) -> list[tuple[int, float]]:
        """List direction and length of every candidate step.

        Returns:
            (index of a direction, length) of each candidate.
        """
        return []

    def propose(self, basis: torch.Tensor) -> "Candidates":
        """Make candidate steps of some directions, for rules with `bases`.

        Args:
            basis: (directions, d) vectors, one for each rule of `bases`.

        Returns:
            The candidates that clients measure.
        """
        raise NotImplementedError

    def choose(self, answers: "Mapping[str, Vote | str]", weights: Mapping[str, float]) -> "Trial":
        """Choose a candidate by what clients measured, for rules with `bases`.

        Args:
            answers: by client its losses on the candidates, or why it has none.
            weights: by client its share.

        Returns:
            The losses of all candidates and the chosen one.
        """
        raise NotImplementedError

    def held_out(self, images: int) -> float:
        """Say which share of a client's images a round's training leaves out, to measure candidates on them.

        Args:
            images: number of the client's images.

        Returns:
            A share between 0 and 1; 0 unless the rule measures.
        """
        return 0.0

    def kept(self, axes: "Spectrum") -> int:
        """Count the leading principal axes that the rule uses.

        Args:
            axes: eigenvalues and eigenvectors of the Gram matrix.

        Returns:
            All of them, unless the rule chooses.
        """
        return axes.rank


class Robust:
    """Mixed into rules that are to stand a minority of wrong clients, whatever sizes these claim.

    Every estimate of location breaks down where one client holds half of the weight; at 0.4 the others
    outweigh it. Statistics beside the parameters (BatchNorm buffers) are combined by a median, since a client
    may send a harmless update with harmful statistics.
    """

    robust: ClassVar[bool] = True
    max_weight: ClassVar[float] = 0.4


@dataclass(frozen=True)
class GramRule(Rule):
    """Base of rules that compute coefficients c from the Gram matrix K = G'G; the aggregate is G c.

    A rule that weights clients by the inverse length of their updates:

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class InverseLength(GramRule):
    ...     def __call__(self, K, p, extras=NO_EXTRAS):
    ...         c = p / np.sqrt(np.diag(K))
    ...         return c / c.sum()
    >>> InverseLength()(np.diag([1.0, 4.0]), np.array([0.5, 0.5])).round(3).tolist()
    [0.667, 0.333]
    """

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Compute the coefficients of the aggregate.

        Args:
            K: (m, m) inner products of the updates.
            p: (m,) weights of the clients, summing to 1.
            extras: what a rule may know beside them.

        Returns:
            (m,) coefficients c.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class CoordinateRule(Rule):
    """A rule of single coordinates: ((m, b) block of all clients, p) -> (b,) block of the aggregate."""

    def __call__(self, block: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Aggregate one block of parameters.

        Args:
            block: (m, b) numbers of all clients.
            p: (m,) weights.

        Returns:
            (b,) numbers.
        """
        raise NotImplementedError


RULES: Registry[type[Rule]] = Registry(
    "rule",
    {},
    accept=require_instance("rule", Rule, "or a Rule"),
    accept_entry=require_subclass("rule", Rule),
)

R = TypeVar("R", bound=type[Rule])


def register(name: str) -> Callable[[R], R]:
    """Enter a rule in the table under the name users write."""

    def enter(rule: R) -> R:
        rule.name = name
        RULES.register(name, rule)
        return rule

    return enter


def make_rule(name: str, **options: Any) -> Rule:
    """Give the rule of that name; an unknown name, option or value is an error that says what would be right.

    >>> make_rule("principal", weighting="l1").weighting
    'l1'
    >>> make_rule("principle")
    Traceback (most recent call last):
    fedld.errors.FedLDError: unknown rule 'principle': did you mean 'principal'?
    """
    rule = RULES.find(name)
    valid = [field.name for field in fields(rule)]
    for option in options:
        if option not in valid:
            hint = nearest(option, valid) if valid else "it has no options"
            raise FedLDError(f"unknown option '{option}' of rule '{name}': {hint}")
    return rule(**options)


def check_choice(rule: Rule, option: str, valid: tuple[str, ...]) -> None:
    """Raise an error unless the option's value is one of the valid words."""
    value = getattr(rule, option)
    if value not in valid:
        raise FedLDError(
            f"{rule.name}: {option} = {value!r} is not valid: {nearest(str(value), list(valid))}"
        )


def check_number(
    rule: Rule, option: str, low: float, high: float = np.inf, *, open_low: bool = False, whole: bool = False
) -> None:
    """Raise an error unless the option is a number between low and high (low itself excluded if open)."""
    value = getattr(rule, option)
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not number or not (low < value if open_low else low <= value) or not value <= high:
        kind = "a whole number" if whole else "a number"
        bounds = f"{'above' if open_low else 'of at least'} {low:g}"
        bounds += f" and at most {high:g}" if np.isfinite(high) else ""
        raise FedLDError(f"{rule.name}: {option} = {value!r} is not {kind} {bounds}")


NO_VOTE = 1e-6  # |<g_i, u_l>| up to this fraction of |g_i| is rounding, not an opinion


@dataclass(frozen=True)
class Spectrum:
    """Axes u_l = G e_l / sqrt(lambda_l), largest eigenvalue first; null axes are left out.

    `values` holds all m eigenvalues (clipped at 0), `vectors` only the e_l of the `rank` axes that exist.
    """

    values: Array
    vectors: Array
    norms: Array
    rank: int

    def projections(self, axes: int) -> Array:
        """Compute (m, axes) inner products <g_i, u_l> = sqrt(lambda_l) e_l[i]."""
        return np.asarray(self.vectors[:, :axes] * np.sqrt(self.values[:axes]))

    def votes(self, axes: int) -> Array:
        """Compute (m, axes) signs of the inner products, 0 where a client has no opinion on an axis."""
        dots = self.projections(axes)
        return np.sign(dots) * (np.abs(dots) > NO_VOTE * self.norms[:, None])

    def orientation(self, axes: int) -> Array:
        """Give signs that turn each axis towards the mean update (Eq.

        6): <u_l, mean g> has that of sum e_l.
        """
        sums = self.vectors[:, :axes].sum(axis=0)
        return np.where(np.abs(sums) > NO_VOTE, np.sign(sums), 0.0)


def spectrum(K: Array, precision: float = 1e-10) -> Spectrum:
    """Decompose K; axes with lambda_l <= precision * lambda_1 do not exist (covers m > d)."""
    values, vectors = np.linalg.eigh(K)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    rank = int(np.sum(values > precision * values[0])) if values[0] > 0 else 0
    return Spectrum(values, vectors[:, :rank], np.sqrt(np.diagonal(K)), rank)
