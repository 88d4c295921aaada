"""Put new runs of some methods into tables whose other rows stay: after a method was mended.

    python results/replace.py OUT METHOD...

Every study of OUT that has a folder in results/ is taken. A method that is in both and not named must have
the same accuracies in both, seed by seed (to 0.2 points): then the new rows were made as the old ones.
Differences, p values (Holm over all rows), verdict and warnings are computed again; the loss terms that
explain the verdict stay, and so do the seconds (the new runs may have shared their machine).
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedld.study.accounts import Account
from fedld.study.comparison import Comparison, Standing, _tested
from fedld.tasks.scores import MEASURES

RESULTS = Path(__file__).parent
Table = dict[str, Any]


def standing(row: dict[str, Any], account: dict[str, Any]) -> Standing:
    """A row of a table as the comparison had it."""
    keys = {"accuracy": "final", **{one.name: one.name for one in MEASURES if one.name != "accuracy"}}
    values = {name: by_seed(row, key) for name, key in keys.items() if row.get(key)}
    return Standing(
        row["label"],
        row["seeds"],
        values,
        by_seed(row, "last5"),
        by_seed(row, "best"),
        by_seed(row, "personal"),
        Account(**account),
        row["never_predicted"],
        row["megabytes"],
        row["seconds"],
        measures=tuple(one.name for one in MEASURES),
        reference=row["reference"],
    )


def by_seed(row: dict[str, Any], key: str) -> dict[int, float]:
    """One measure of a row; all seeds have it or none."""
    values = row[key] or []
    assert not values or len(values) == len(row["seeds"]), (row["label"], key)
    return dict(zip(row["seeds"], values, strict=False))


def replaced(old: Table, new: Table, methods: list[str]) -> Comparison:
    """The comparison with the rows of some methods from another table."""
    rows = {row["label"]: (row, account) for row, account in pairs(old)}
    for row, account in pairs(new):
        if row["label"] in methods:
            rows[row["label"]] = row | {"seconds": rows[row["label"]][0]["seconds"]}, account
        elif not alike(row["final"], rows[row["label"]][0]["final"]):
            raise SystemExit(f"{row['label']} is not what it was: the tables do not belong together")
    same = {line.partition(" is FedAvg here")[0] for line in old["warnings"]}
    standings = [replace(standing(*pair), same_as_fedavg=label in same) for label, pair in rows.items()]
    return Comparison(
        old["title"],
        old["baseline"],
        old["primary"],
        old["round"],
        {one.name: one for one in MEASURES},
        _tested(standings, old["baseline"], old["primary"]),
    )


def alike(ours: list[float], theirs: list[float]) -> bool:
    """Whether accuracies of the same seeds are the same, up to an image of 700 (another processor)."""
    return len(ours) == len(theirs) and all(abs(a - b) < 0.2 for a, b in zip(ours, theirs, strict=True))


def _known(row: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """The fields that the table had; those of later versions are left out."""
    return {key: value for key, value in row.items() if key in old}


def pairs(table: Table) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows with their accounts."""
    return list(zip(table["rows"], table["causes"], strict=True))


def main(out: Path, methods: list[str]) -> None:
    """Replace the rows of all studies of a folder."""
    for file in sorted(out.glob("*/table.json")):
        target = RESULTS / file.parent.name
        if not (target / "table.json").exists():
            continue
        old, new = (json.loads(path.read_text()) for path in (target / "table.json", file))
        comparison = replaced(old, new, methods)
        command = old["command"]
        for method in methods:
            if rate := re.search(rf"--set {method}\.lr=(\S+)", new["command"]):
                command = re.sub(rf"--set {method}\.lr=\S+", f"--set {method}.lr={rate[1]}", command)
        found = comparison.to_json() | {"explanation": old["explanation"], "command": command}
        found = {key: found[key] for key in old}
        known = {row["label"]: row for row in old["rows"]}
        found["rows"] = [known[row["label"]] | _known(row, known[row["label"]]) for row in found["rows"]]
        (target / "table.json").write_text(json.dumps(found, indent=1))
        (target / "table.md").write_text(f"{comparison.to_markdown()}\nMade by `{command}`.\n")
        print(f"{target.name}: {', '.join(methods)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
