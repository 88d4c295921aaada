"""A model at one site: what the site's test pictures say of it, and how surely."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedld.analysis.intervals import (
    Estimate,
    Groups,
    accuracy_interval,
    auroc_interval,
    log_odds,
    mean_interval,
    sensitivity_interval,
)


@dataclass(frozen=True)
class SiteResult:
    """Measures with 95 % intervals on the test pictures of one site."""

    pictures: int
    patients: int | None
    accuracy: Estimate
    auroc: Estimate
    sensitivity: Estimate

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @property
    def estimates(self) -> tuple[Estimate, Estimate, Estimate]:
        """Accuracy, AUROC and sensitivity."""
        return self.accuracy, self.auroc, self.sensitivity


def site_result(
    probabilities: ArrayLike,
    right: NDArray[np.bool_],
    labels: NDArray[np.int64],
    positive: int,
    specificity: float = 0.9,
    groups: Groups = None,
) -> SiteResult:
    """Wilson's interval of the accuracy, DeLong's of the AUROC, a bootstrap of the sensitivity.

    `right` says which pictures are classified rightly, `positive` is the class whose sensitivity is told, at
    a threshold of this `specificity`.
    """
    p = np.asarray(probabilities, np.float64)
    odds = log_odds(p) if np.isfinite(p).all() else p
    return SiteResult(
        pictures=len(labels),
        patients=None if groups is None else len(np.unique(np.asarray(groups))),
        accuracy=accuracy_interval(right, groups),
        auroc=auroc_interval(odds, labels, groups),
        sensitivity=sensitivity_interval(odds[:, positive], labels == positive, specificity, groups),
    )


@dataclass(frozen=True)
class CaseResult:
    """Means over the test cases of one site with 95 % intervals, by measure."""

    pictures: int
    patients: int | None
    measures: dict[str, Estimate]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def case_result(
    values: Mapping[str, NDArray[np.float64]], bounds: Mapping[str, float], groups: Groups = None
) -> CaseResult:
    """Average measures over cases.

    Args:
        values: one number for every case, by measure.
        bounds: the largest value that a measure can have, if there is one; intervals end there and at 0.
        groups: patient of each case.

    >>> case_result({"dice": np.array([0.9, 1.0])}, {"dice": 1.0}).measures["dice"].high
    1.0
    """
    found = {}
    for name, column in values.items():
        estimate = mean_interval(column, groups)
        if estimate.low is not None and estimate.high is not None:
            low = max(estimate.low, 0.0)
            estimate = Estimate(estimate.value, low, min(estimate.high, bounds.get(name, np.inf)))
        found[name] = estimate
    return CaseResult(
        pictures=len(next(iter(values.values()))),
        patients=None if groups is None else len(np.unique(np.asarray(groups))),
        measures=found,
    )
