"""The final models at each site: from predictions.csv, and as the sites measured them."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedld.analysis.intervals import Estimate
from fedld.analysis.sites import CaseResult, SiteResult, site_result
from fedld.errors import FedLDError, unknown_name
from fedld.records.schema import Summary, Which
from fedld.records.tables import PredictionTable

APART = 0.1
"""AUROC over all sites minus the best inside a site, from which the model may be telling sites apart."""
MEASURED = ("accuracy", "auroc", "sensitivity")


def site_results(
    table: PredictionTable, positive: str | None = None, specificity: float = 0.9
) -> tuple[SiteResult, dict[str, SiteResult]]:
    """Measure all test pictures together, and those of each site where the sites are known."""
    name = table.classes[-1] if positive is None else positive
    if name not in table.classes:
        raise unknown_name("class", name, table.classes)
    sites = np.array(table.columns.get("site", []), str)
    overall = np.ones(len(table.probabilities), bool)
    rows = {str(site): sites == site for site in np.unique(sites) if site}
    sick = table.classes.index(name)
    parts = {site: _result(table, where, sick, specificity) for site, where in rows.items()}
    return _result(table, overall, sick, specificity), parts


def sites_apart(overall: SiteResult, sites: Mapping[str, SiteResult]) -> str | None:
    """Warn of an AUROC over all sites that is far above those inside the sites; None if it is not.

    Only sites with pictures of more than one class have an AUROC of their own. A model that recognises the
    site ranks the pictures of a site with much disease above the others, whatever is in them.
    """
    pooled = overall.auroc.value
    inside = {name: site.auroc.value for name, site in sites.items() if site.auroc.value is not None}
    if pooled is None or not inside or pooled - max(inside.values()) < APART:
        return None
    named = ", ".join(f"{name} {value:.3f}" for name, value in list(inside.items())[:5])
    return (
        f"One AUROC over all sites is {pooled:.3f}, but inside the sites with more than one class it is "
        f"lower ({named}): the model may tell sites apart, and not the classes."
    )


def _result(table: PredictionTable, rows: NDArray[np.bool_], sick: int, specificity: float) -> SiteResult:
    label, predicted = (np.array(table.columns[key], str)[rows] for key in ("label", "predicted"))
    try:
        labels = np.array([table.classes.index(name) for name in label], np.int64)
    except ValueError as error:
        raise FedLDError(f"predictions.csv has a label that is none of its classes: {error}") from None
    groups = np.array(table.columns["patient"], str)[rows] if "patient" in table.columns else None
    return site_result(
        table.probabilities[rows],
        label == predicted,
        labels=labels,
        positive=sick,
        specificity=specificity,
        groups=groups,
    )


def measured_at_sites(summary: Summary) -> dict[str, dict[Which, SiteResult]]:
    """Read what the clients measured on their own test pictures when the run ended, by client and model."""
    try:
        return {
            name: {
                which: SiteResult(
                    pictures=result["pictures"],
                    patients=result["patients"],
                    **{key: Estimate(**result[key]) for key in MEASURED},  # type: ignore[literal-required]
                )
                for which, result in models.items()
            }
            for name, models in summary.get("sites", {}).items()
        }
    except (AttributeError, KeyError, TypeError):
        raise FedLDError("what summary.json says of the sites is damaged") from None


def case_means(summary: Summary | None) -> dict[str, dict[Which, CaseResult]]:
    """Read the means over every client's own test cases, by client and model.

    Raises:
        FedLDError: the summary has them in another form.
    """
    if summary is None:
        return {}
    try:
        return {
            name: {
                which: CaseResult(
                    pictures=result["pictures"],
                    patients=result["patients"],
                    measures={key: Estimate(**value) for key, value in result["measures"].items()},
                )
                for which, result in models.items()
            }
            for name, models in summary.get("cases", {}).items()
        }
    except (AttributeError, KeyError, TypeError):
        raise FedLDError("what summary.json says of the cases of sites is damaged") from None
