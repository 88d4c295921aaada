"""Table of the candidates of a search, one run each, judged on held-out training images.

    python results/candidates.py RUNS results/covid-last4-search

RUNS holds run directories, each under its candidate's name. A run that was stopped has the rounds it reached.
The table has the accuracy on held-out images at the last evaluated round, the best one and the terms of the
loss where the run decomposed it; the page shows it like any other table (`results/tables.py`).
"""

import json
import sys
from pathlib import Path
from typing import Any


def candidate(run: Path) -> dict[str, Any] | None:
    """One row; None for a run without an evaluation."""
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    tests = [(line["round"], line["test"]) for line in rounds if line.get("test")]
    if not tests:
        return None
    accuracies = [100 * test["accuracy"] for _, test in tests]
    return {
        "label": run.name,
        "seeds": [0],
        "difference": None,
        "rounds": len(rounds),
        "final": [accuracies[-1]],
        "best": [max(accuracies)],
        "last5": [sum(accuracies[-3:]) / len(accuracies[-3:])],
        "auroc": [tests[-1][1]["auroc"]],
        "loss": [tests[-1][1]["loss"]],
        "curve": {str(number): round(100 * test["accuracy"], 2) for number, test in tests},
    }


def main(runs: str, to: str) -> None:
    """Write the table."""
    rows = [row for run in sorted(Path(runs).iterdir()) if (row := candidate(run))]
    rows.sort(key=lambda row: -row["best"][0])
    content = {"title": "candidates", "baseline": "", "command": "", "rows": rows, "causes": []}
    Path(to).mkdir(parents=True, exist_ok=True)
    (Path(to) / "table.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
