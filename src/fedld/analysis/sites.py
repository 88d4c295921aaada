"""A model at one site: what the site's test pictures say of it, and how surely."""

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
