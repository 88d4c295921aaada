"""`measured`: of several candidate steps the server takes the one that the clients measure as best.

Of the three terms of Eq. 2 the server controls only the aggregation loss, L(w_next) - p'Mp: the other two are
fixed once the clients have trained. So the best of some candidates is the one with the smallest
L(w_next) = sum_j p_j L_j(w_next), and that the clients can measure by forward passes. The plain average is
always among the candidates, so the measured loss is never above that of FedAvg's step from the same point.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from fedld.aggregation.rule import (
    Array,
    GramRule,
    Rule,
    check_choice,
    check_number,
    make_rule,
    register,
)
from fedld.errors import FedLDError

LARGEST_LOSS = 20.0
"""Cross-entropy of a probability of 2e-9. No image counts for more, so no image and no liar decides alone."""


@dataclass(frozen=True)
class Candidates:
    """Steps `w + sum_r coefficients[k][r] basis[r]`, measured on at most `samples` images per client."""

    basis: torch.Tensor
    coefficients: tuple[tuple[float, ...], ...]
    samples: int


@dataclass(frozen=True)
class Vote:
    """One client's measurement: per candidate the mean loss, and the mean squared difference to the first.

    The differences are taken image by image, so that their spread is that of the *comparison*.
    """

    count: int
    losses: tuple[float, ...]
    squares: tuple[float, ...]

    def problem(self, candidates: int) -> str | None:
        """Say why this vote cannot count; None if it can."""
        if self.count < 1 or len(self.losses) != candidates or len(self.squares) != candidates:
            return "its measurement is incomplete"
        values = np.array([*self.losses, *self.squares])
        if not np.isfinite(values).all() or (values < 0).any() or max(self.losses) > LARGEST_LOSS:
            return f"its measurement is not between 0 and {LARGEST_LOSS:g}"
        return None

    @property
    def variances(self) -> Array:
        """Variance of the mean difference to the first candidate, per candidate."""
        losses, squares = np.array(self.losses), np.array(self.squares)
        spread = np.maximum(squares - (losses - losses[:1]) ** 2, 0.0)
        return np.asarray(spread / max(self.count - 1, 1))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What was measured in a round and what was taken; of the candidates the first is the average."""

    rules: list[str]
    lengths: list[float]
    losses: list[float]  # sum_j p_j L_j over the clients that voted
    errors: list[float]  # standard error of the difference to the average
    chosen: int
    gain: float  # measured loss of the average minus that of the choice
    votes: dict[str, int]  # candidate that each client by itself would have taken
    left_out: dict[str, str]  # client: why its vote does not count
    fallback: str | None = None  # why the average was taken without a vote

    def to_json(self) -> dict[str, Any]:
        """Give the same as a plain dictionary."""
        return asdict(self)


@register("measured")
@dataclass(frozen=True, kw_only=True)
class Measured(Rule):
    """Candidates are pairs of a rule and a length; the clients measure them, the best is taken.

    rules    directions: rules of the Gram matrix, by name
    lengths  factors on each direction; the average at length 1 is always a candidate
    samples  images per client, drawn anew in every round
    unseen   largest share of a client's images that sits a round's training out. Half of those it measures
             did: there a step looks worse than it is (the model learned them before, any step forgets), on
             the others better (it was trained on them). With 0 all are images of its training
    margin   stay with the average unless the gain exceeds so many standard errors of the paired difference
    vote     `mean`: smallest sum of p_j L_j; `median`: smallest median over clients of L_j - L_j(average),
             which no minority of clients can move far
    quorum   share of the clients' weight that must have voted; below it the average is taken
    """

    rules: str = "consensus"
    lengths: str = "0.5,1,2,4"
    samples: int = 64
    unseen: float = 0.2
    margin: float = 0.0
    vote: str = "mean"
    quorum: float = 0.5

    def __post_init__(self) -> None:
        check_number(self, "samples", 1, whole=True)
        check_number(self, "unseen", 0, 0.5)
        check_number(self, "margin", 0)
        check_number(self, "quorum", 0, 1)
        check_choice(self, "vote", ("mean", "median"))
        self.pairs()

    def held_out(self, images: int) -> float:
        """Give the share of so many images that sits a round out: half of those that are measured.

        >>> Measured().held_out(640), Measured().held_out(50)
        (0.05, 0.2)
        """
        return min(self.unseen, self.samples / 2 / images)

    def bases(self) -> list[GramRule]:
        """Give the directions' rules; the average is the first."""
        names = [name.strip() for name in self.rules.split(",") if name.strip()]
        made = [make_rule(name) for name in dict.fromkeys(["mean", *names])]
        for rule in made:
            if not isinstance(rule, GramRule):
                raise FedLDError(f"measured: '{rule.name}' is no rule of the Gram matrix")
        return [rule for rule in made if isinstance(rule, GramRule)]

    def pairs(self) -> list[tuple[int, float]]:
        """Compute (direction, length) of every candidate, the average at length 1 first."""
        wanted = [name.strip() for name in self.rules.split(",") if name.strip()]
        candidates = [(0, 1.0)]
        for index, rule in enumerate(self.bases()):
            candidates += [(index, length) for length in self._lengths() if rule.name in wanted]
        pairs = list(dict.fromkeys(candidates))
        if len(pairs) < 2:
            raise FedLDError("measured: there is no candidate beside the average: name rules and lengths")
        return pairs

    def _lengths(self) -> list[float]:
        try:
            lengths = [float(text) for text in self.lengths.split(",") if text.strip()]
        except ValueError:
            raise FedLDError(f"measured: lengths = {self.lengths!r} is not a list of numbers") from None
        for length in lengths:
            if not 0 < length < np.inf:
                raise FedLDError(f"measured: a length of {length:g} is not a positive number")
        return lengths

    def propose(self, basis: torch.Tensor) -> Candidates:
        """Make the candidate steps; row r of `basis` is the direction of rule r of `bases`."""
        rows = [
            tuple(length if k == index else 0.0 for k in range(len(basis))) for index, length in self.pairs()
        ]
        return Candidates(basis, tuple(rows), self.samples)

    def choose(self, answers: Mapping[str, Vote | str], weights: Mapping[str, float]) -> Trial:
        """Count the clients' votes.

        Args:
            answers: What each client measured, by name, or why it did not.
            weights: p by client.

        Returns:
            What was measured and which candidate is taken.
        """
        pairs = self.pairs()
        votes: dict[str, Vote] = {}
        left_out: dict[str, str] = {}
        for name in weights:
            vote = answers.get(name, "it was not asked")
            problem = vote if isinstance(vote, str) else vote.problem(len(pairs))
            if isinstance(vote, Vote) and problem is None:
                votes[name] = vote
            else:
                left_out[name] = str(problem)
        return self._count(votes, weights, left_out)

    def _count(
        self,
        votes: Mapping[str, Vote],
        weights: Mapping[str, float],
        left_out: dict[str, str],
    ) -> Trial:
        heard = sum(weights[name] for name in votes)
        if not votes or heard < self.quorum:
            return self._not_heard(heard, left_out)
        p = np.array([weights[name] for name in votes]) / heard
        losses = np.array([vote.losses for vote in votes.values()])
        errors = _paired_errors(list(votes.values()), p)
        mean = p @ losses
        rank = mean if self.vote == "mean" else np.median(losses - losses[:, :1], axis=0)
        choices = {name: int(np.argmin(row)) for name, row in zip(votes, losses, strict=True)}
        return self._take(rank, mean, errors=errors, votes=choices, left_out=left_out)

    def _not_heard(self, heard: float, left_out: Mapping[str, str]) -> Trial:
        """Give the average, because too few clients were heard."""
        pairs, bases = self.pairs(), self.bases()
        unknown = [float("nan")] * len(pairs)
        return Trial(
            rules=[bases[index].name for index, _ in pairs],
            lengths=[length for _, length in pairs],
            losses=unknown,
            errors=unknown,
            chosen=0,
            gain=0.0,
            votes={},
            left_out=dict(left_out),
            fallback=f"only {heard:.0%} of the clients' weight was heard, {self.quorum:.0%} are needed",
        )

    def _take(
        self, rank: Array, losses: Array, *, errors: Array, votes: dict[str, int], left_out: Mapping[str, str]
    ) -> Trial:
        """Give the candidate of least rank, unless its gain over the average is within the margin."""
        pairs, bases = self.pairs(), self.bases()
        best = int(np.argmin(rank))  # of equals the first: the average
        if rank[0] - rank[best] <= self.margin * errors[best]:
            best = 0
        return Trial(
            rules=[bases[index].name for index, _ in pairs],
            lengths=[length for _, length in pairs],
            losses=losses.tolist(),
            errors=errors.tolist(),
            chosen=best,
            gain=float(losses[0] - losses[best]),
            votes=votes,
            left_out=dict(left_out),
        )

    @property
    def sums_suffice(self) -> bool:
        """Whether it needs no single update and no single vote: candidates along the mean, by mean losses."""
        return len(self.bases()) == 1 and self.vote == "mean"

    def choose_by_sums(
        self, losses: Array, variances: Array, heard: float, left_out: Mapping[str, str]
    ) -> Trial:
        """Choose where only sums over the clients' votes are known.

        Args:
            losses: Per candidate the sum of p_j L_j over the clients that voted, their p summing to one.
            variances: Per candidate the sum of p_j^2 times `Vote.variances`.
            heard: Share of the weight of the round's clients that voted.
            left_out: Clients that are not in the sums, and why.

        Returns:
            What was measured and which candidate is taken; votes of single clients are not known.
        """
        if heard < self.quorum:
            return self._not_heard(heard, left_out)
        errors = np.sqrt(np.maximum(variances, 0.0))
        return self._take(losses, losses, errors=errors, votes={}, left_out=left_out)


def _paired_errors(votes: list[Vote], p: Array) -> Array:
    """Compute the standard error of sum_j p_j (L_j - L_j(average)), where images are drawn at random."""
    spread = np.array([vote.variances for vote in votes])
    return np.asarray(np.sqrt((p[:, None] ** 2 * spread).sum(axis=0)))
