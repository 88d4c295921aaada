"""What the paper reports (Tables 1-3): final test accuracy in percent."""

from collections.abc import Sequence

from fedld.records.reader import Run
from fedld.study.report.tables import PageTable, TableCell

RETINA = ("retina-split1", "retina-split2", "retina-split3")

_COLUMNS = (*RETINA, "covid-fl")
_TABLE1 = {
    "fedavg": (83.63, 82.26, 81.13, 79.86),
    "fedprox": (84.17, 83.53, 81.20, 81.88),
    "fedbn": (83.91, 75.91, 65.25, 56.34),
    "fedpac": (78.01, 71.64, 52.81, 81.63),
    "fedgh": (83.90, 83.33, 81.56, 82.26),
    "fedld": (85.20, 83.83, 82.30, 83.87),
}
_TABLE2 = {
    "none": (83.63, 82.26, 81.13),
    "principal": (84.76, 82.67, 81.66),
    "margin": (84.63, 83.50, 81.96),
    "both": (85.20, 83.83, 82.30),
}
_TABLE3 = {
    "fedavg": 67.43,
    "fedprox": 69.87,
    "fedbn": 68.40,
    "fedpac": 66.59,
    "fedgh": 70.33,
    "fedld": 71.30,
}

PAPER: dict[str, dict[str, dict[str, float]]] = {
    "table1": {label: dict(zip(_COLUMNS, row, strict=True)) for label, row in _TABLE1.items()},
    "table2": {label: dict(zip(RETINA, row, strict=True)) for label, row in _TABLE2.items()},
    "table3": {label: {"retina-50-clients": value} for label, value in _TABLE3.items()},
}
"""table -> method -> preset -> percent."""

_TITLES = ("Retina split 1", "Retina split 2", "Retina split 3", "COVID-FL")


def paper_table(runs: Sequence[Run]) -> PageTable:
    """Make the report's table of the paper's numbers for the methods of some runs."""
    names = {run.method: run.label for run in runs}
    rows = [
        [TableCell(names[method], names[method]), *(TableCell(f"{value:.2f}", value) for value in values)]
        for method, values in _TABLE1.items()
        if method in names
    ]
    note = (
        "Final accuracy (%) as published: Retina and COVID-FL, pretrained ResNet-50, 200 rounds, one seed. "
        "Other data and another model than here: compare order and distance, not level."
    )
    if runs[0].config.get("dataset") in ("retina", "covid-fl"):
        note = "Final accuracy (%) as published: pretrained ResNet-50, 200 rounds, one seed, no interval."
    return PageTable("paper", "The paper's numbers (Table 1)", note, ["method", *_TITLES], rows)
