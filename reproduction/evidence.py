"""Read and write the tidy file of all numbers; statistics come from the package's `Comparison`.

`evidence.csv.gz` has one number per line:

    study        name; of a study with several splits `name/split`
    federation   data set and how it is dealt to clients
    method       label of the row; the arm in a Figure 2
    seed         empty for a number of all seeds together
    settings     JSON: the settings of the row that differ between studies
    measure      `accuracy`, `auroc`, ...; `last5_accuracy`, `best_accuracy`, `personal`; terms of the loss
    value        as it is shown: accuracies in per cent

`commands.json` has what belongs to a study as a whole: title, baseline, primary measure, round, command.
"""

import csv
import gzip
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fedld.errors import FedLDError
from fedld.study.comparison import Comparison, Standing, with_differences
from fedld.study.measures import Reached
from fedld.study.paper.figure2 import Figure2, Point
from fedld.study.reasons import Account
from fedld.tasks.measure import Measure
from fedld.tasks.scores import MEASURES

FOLDER = Path(__file__).parent
NUMBERS = FOLDER / "evidence.csv.gz"
COMMANDS = FOLDER / "commands.json"
TERMS = [field.name for field in fields(Account) if field.name != "label"]
COSTS = ("megabytes", "seconds")
NEVER = "never_predicted:"
TARGET = "target_"
AT_SITE = "dice_at:"
"""Before the name of a site: mean Dice over its own test pictures, of its personal model if it has one."""


class Number(NamedTuple):
    """One line of the tidy file."""

    study: str
    federation: str
    method: str
    seed: int | None
    settings: str
    measure: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Study:
    """A comparison of methods, how it was made, and the settings of every row."""

    name: str
    federation: str
    command: str
    comparison: Comparison
    settings: Mapping[str, Mapping[str, Any]]  # label of the row: its settings

    def standing(self, label: str) -> Standing:
        """Return the row of a method.

        Raises:
            FedLDError: the study has no such row.
        """
        for standing in self.comparison.standings:
            if standing.label == label:
                return standing
        raise FedLDError(f"study '{self.name}' has no row '{label}'")

    def in_measure(self, measure: str) -> Comparison:
        """Return the same comparison decided by another measure: its differences and Holm's p values."""
        found = self.comparison
        return Comparison(
            title=found.title,
            baseline=found.baseline,
            primary=measure,
            round=found.round,
            measures=found.measures,
            standings=with_differences(found.standings, found.baseline, measure),
        )


def read_numbers(path: Path = NUMBERS) -> list[Number]:
    """Read all lines of the tidy file."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        lines = csv.reader(file)
        next(lines)
        return [
            Number(study, federation, method, int(seed) if seed else None, settings, measure, float(value))
            for study, federation, method, seed, settings, measure, value in lines
        ]


def write_numbers(numbers: Iterable[Number], path: Path = NUMBERS) -> None:
    """Write the tidy file; the same numbers give the same bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Number._fields)
    writer.writerows(number._replace(value=repr(number.value)) for number in numbers)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def read_commands(path: Path = COMMANDS) -> dict[str, dict[str, Any]]:
    """Read what belongs to whole studies, by name."""
    found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write_commands(commands: Mapping[str, Mapping[str, Any]], path: Path = COMMANDS) -> None:
    """Write what belongs to whole studies, one line each, sorted by name."""
    lines = [f"{json.dumps(name)}: {json.dumps(commands[name])}" for name in sorted(commands)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


@cache
def _numbers_by_study() -> dict[str, list[Number]]:
    by_study: dict[str, list[Number]] = {}
    for number in read_numbers():
        by_study.setdefault(number.study, []).append(number)
    return by_study


@cache
def _commands() -> dict[str, dict[str, Any]]:
    return read_commands()


def numbers_of(name: str) -> list[Number]:
    """Return the lines of a study."""
    if name not in _numbers_by_study():
        raise FedLDError(f"no study '{name}' in {NUMBERS.name}")
    return _numbers_by_study()[name]


def names(*patterns: str) -> list[str]:
    """Return the names of studies; a pattern such as `*-head-tuned` stands for all that it fits.

    Raises:
        FedLDError: a name or pattern fits no study.
    """
    found = []
    for pattern in patterns:
        fitting = sorted(name for name in _numbers_by_study() if fnmatchcase(name, pattern))
        if not fitting:
            raise FedLDError(f"no study '{pattern}' in {NUMBERS.name}")
        found += fitting
    return found


@cache
def load_study(name: str) -> Study:
    """Return a study with its comparison, computed from the values by seed.

    Raises:
        FedLDError: there is no such study, or it is a Figure 2 or a search.
    """
    numbers = numbers_of(name)
    about = _commands()[name]
    if about["kind"] != "comparison":
        raise FedLDError(f"study '{name}' is a {about['kind']}, not a comparison")
    return make_study(name, about, numbers)


def make_study(name: str, about: Mapping[str, Any], numbers: Iterable[Number]) -> Study:
    """Build a study from its lines and what belongs to it as a whole."""
    by_method: dict[str, list[Number]] = {}
    for number in numbers:
        by_method.setdefault(number.method, []).append(number)
    described = [Measure.from_json(one) for one in about.get("measures", [])] or list(MEASURES)
    measures = {measure.name: measure for measure in described}
    standings = [
        _standing(label, lines, measures, label in about["references"]) for label, lines in by_method.items()
    ]
    comparison = Comparison(
        title=about["title"],
        baseline=about["baseline"],
        primary=about["primary"],
        round=about["round"],
        measures=measures,
        standings=with_differences(standings, about["baseline"], about["primary"]),
        level=about.get("target"),
    )
    return Study(
        name=name,
        federation=next(iter(by_method.values()))[0].federation,
        command=about["command"],
        comparison=comparison,
        settings={label: json.loads(lines[0].settings) for label, lines in by_method.items()},
    )


def _standing(
    label: str, lines: list[Number], measures: Mapping[str, Measure], is_reference: bool
) -> Standing:
    by_seed: dict[str, dict[int, float]] = {}
    of_all: dict[str, float] = {}
    for line in lines:
        if line.seed is None:
            of_all[line.measure] = line.value
        else:
            by_seed.setdefault(line.measure, {})[line.seed] = line.value
    first = next(iter(measures))
    target = {key.removeprefix(TARGET): x for key, x in of_all.items() if key.startswith(TARGET)}
    return Standing(
        label=label,
        seeds=sorted({seed for values in by_seed.values() for seed in values}),
        values={name: by_seed[name] for name in measures if name in by_seed},
        last5=by_seed.get(f"last5_{first}", {}),
        best=by_seed.get(f"best_{first}", {}),
        personal=by_seed.get("personal", {}),
        account=Account(label=label, **{term: of_all.get(term) for term in TERMS}),
        never={key.removeprefix(NEVER): int(x) for key, x in of_all.items() if key.startswith(NEVER)},
        megabytes=of_all.get("megabytes", 0.0),
        seconds=of_all.get("seconds", 0.0),
        measures=tuple(measures),
        reference=is_reference,
        reached=Reached(**target | {"round": int(target["round"])}) if target else None,
    )


@cache
def load_figure(name: str) -> Figure2:
    """Return a Figure 2 with all its points.

    Raises:
        FedLDError: there is no such study, or it is no Figure 2.
    """
    about = _commands().get(name, {"kind": "study that does not exist"})
    if about["kind"] != "figure2":
        raise FedLDError(f"study '{name}' is a {about['kind']}, not a Figure 2")
    terms: dict[tuple[str, float, int], dict[str, float]] = {}
    for number in numbers_of(name):
        alpha = json.loads(number.settings)["alpha"]
        terms.setdefault((number.method, alpha, number.seed or 0), {})[number.measure] = number.value
    points = [
        Point(arm=arm, alpha=alpha, seed=seed, **values) for (arm, alpha, seed), values in terms.items()
    ]
    return Figure2(about["title"], about["command"], about["settings"], points)
