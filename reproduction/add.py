"""Add finished studies to the tidy file: folders that `fedld compare`, `reproduce` or `tune` wrote."""

import csv
import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from fedld.errors import FedLDError
from fedld.records.reader import Run, read_one
from fedld.study.sites import case_means
from reproduction.evidence import (
    AT_SITE,
    COMMANDS,
    COSTS,
    NEVER,
    NUMBERS,
    TARGET,
    TERMS,
    Number,
    read_commands,
    read_numbers,
    write_commands,
    write_numbers,
)

SHARED = ("model", "head", "train", "rounds", "batch-size", "momentum", "lr")
"""Options of a command that are written beside every number."""
SCORES = ("balanced_accuracy", "auroc", "worst_client", "loss", "ece")
Table = Mapping[str, Any]
Added = tuple[str, dict[str, Any], list[Number]]


def add(
    folders: list[Path],
    replaced: Mapping[str, str] | None = None,
    numbers: Path = NUMBERS,
    commands: Path = COMMANDS,
) -> list[str]:
    """Add the studies of some folders, or replace those of the same name.

    Args:
        folders: each has a `table.json`, a `figure2.json` or a `tune.json`; its name is the study's name.
        replaced: paths of this machine and what stands for them in commands, such as `DATA`.
        numbers: the tidy file.
        commands: the file of commands.

    Returns:
        The names of the studies that were added.

    Raises:
        FedLDError: a folder has none of the three files.
    """
    lines = read_numbers(numbers) if numbers.exists() else []
    about = read_commands(commands) if commands.exists() else {}
    added = [study for folder in folders for study in read_folder(folder, replaced or {})]
    new = {name for name, _, _ in added}
    lines = [line for line in lines if line.study not in new]
    for name, described, own_lines in added:
        about[name] = described
        lines += own_lines
    order = {name: k for k, name in enumerate(sorted(about))}
    write_numbers(sorted(lines, key=lambda line: order[line.study]), numbers)
    write_commands(about, commands)
    return sorted(new)


def replace_rows(folders: list[Path], methods: Collection[str], numbers: Path = NUMBERS) -> list[str]:
    """Replace the rows of some methods in studies that are there; all else of the studies stays.

    Rows stay where they were. Their `seconds` stay as well: times of another day do not compare with the
    other rows of the study.

    Args:
        folders: studies that were run again for these methods, as `add` takes them.
        methods: labels of the rows.
        numbers: the tidy file.

    Returns:
        What moved: study, method, seeds, and the mean of the first measure before and after.

    Raises:
        FedLDError: a study is not there, or its rows have other methods, settings, seeds or measures.
    """
    lines, moved = read_numbers(numbers), []
    for name, _, again in (study for folder in folders for study in read_folder(folder, {})):
        for method in methods:
            old = [line for line in lines if (line.study, line.method) == (name, method) and _replaced(line)]
            new = [line for line in again if line.method == method and _replaced(line)]
            if old or new:
                lines = _exchanged(lines, old, new)
                moved.append(_moved(old, new))
    write_numbers(lines, numbers)
    return moved


def _replaced(line: Number) -> bool:
    """Whether a number depends neither on the other rows of the study nor on the machine."""
    return line.measure != "seconds" and not line.measure.startswith(TARGET)


def _exchanged(lines: list[Number], old: list[Number], new: list[Number]) -> list[Number]:
    """Lines with those of one row exchanged, at the place of the old ones."""
    seeds = [
        {(line.seed, line.settings, line.measure) for line in row if line.seed is not None}
        for row in (old, new)
    ]
    if seeds[0] != seeds[1]:
        one = (old or new)[0]
        raise FedLDError(
            f"study '{one.study}' has other seeds, settings or measures of '{one.method}' than before"
        )
    first, gone = lines.index(old[0]), set(old)
    before, after = lines[:first], [line for line in lines[first:] if line not in gone]
    return [*before, *new, *after]


def _moved(old: list[Number], new: list[Number]) -> str:
    first = next(line.measure for line in old if line.seed is not None)
    before, after = ([line.value for line in rows if line.measure == first] for rows in (old, new))
    what = f"{old[0].study}: {old[0].method}, {len(before)} seeds, {first}"
    return f"{what} {fmean(before):.2f} -> {fmean(after):.2f}"


def read_folder(folder: Path, replaced: Mapping[str, str]) -> Iterator[Added]:
    """Read the studies of one folder: a table has one for each of its splits."""
    readers = {"table.json": _tables, "figure2.json": _figure, "tune.json": _search}
    for file, reader in readers.items():
        if (folder / file).exists():
            text = (folder / file).read_text(encoding="utf-8")
            for path, name in replaced.items():
                text = text.replace(path, name)
            yield from reader(folder, json.loads(text))
            return
    raise FedLDError(f"'{folder}' has no {', '.join(readers)}")


def _tables(folder: Path, written: Table) -> Iterator[Added]:
    tables = written.get("columns", [written])
    for table in tables:
        name = folder.name if len(tables) == 1 else f"{folder.name}/{table['split']}"
        about = {
            "kind": "comparison",
            "title": table.get("title", written.get("title", name)),
            "baseline": table["baseline"],
            "primary": table.get("primary", "accuracy"),
            "round": table.get("round", 0),
            "references": [row["label"] for row in table["rows"] if row.get("reference")],
            "command": written["command"],
        }
        about |= {key: table[key] for key in ("measures", "target", "paper", "data") if table.get(key)}
        if all(one["name"] in ("accuracy", *SCORES) for one in about.get("measures", [])):
            about.pop("measures", None)
        yield (
            name,
            about,
            [*_lines(name, table, written["command"]), *_site_lines(folder, name, table, written)],
        )


def _site_lines(folder: Path, name: str, table: Table, written: Table) -> Iterator[Number]:
    """Mean Dice of every site's own test pictures, from the runs of a study of segmentation."""
    command = written["command"]
    if "--task segmentation" not in command or not (folder / "study.json").exists():
        return
    where = federation_of(command, table.get("data"))
    for run in read_one(folder).runs:
        settings = json.dumps(settings_of(command, run.label))
        for site, dice in sorted(site_dice(run).items()):
            yield Number(name, where, run.label, run.seed, settings, f"{AT_SITE}{site}", dice)


def site_dice(run: Run) -> dict[str, float]:
    """Give the mean Dice at every site: of its personal model, else of the global one.

    A pooled run has one client; its test pictures are told apart by their site.
    """
    means = case_means(run.summary)
    if len(means) > 1:
        chosen = {site: models.get("personal") or models["global"] for site, models in means.items()}
        return {site: one.measures["dice"].value or 0.0 for site, one in chosen.items()}
    by_site: dict[str, list[float]] = {}
    with (run.path / "predictions.csv").open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            by_site.setdefault(row["site"], []).append(float(row["dice"]))
    return {site: fmean(values) for site, values in by_site.items()}


def _lines(name: str, table: Table, command: str) -> Iterator[Number]:
    first = table["measures"][0]["name"] if table.get("measures") else "accuracy"
    causes = {cause["label"]: cause for cause in table.get("causes", [])}
    where = federation_of(command, table.get("data")) if command.startswith("fedld ") else name
    for row in table["rows"]:
        label = row["label"]
        settings = json.dumps(settings_of(command, label))
        for measure, values in _by_seed(row, first).items():
            if len(values) != len(row["seeds"]):
                raise FedLDError(
                    f"study '{name}': '{label}' has {len(values)} values of {measure} for "
                    f"{len(row['seeds'])} seeds"
                )
            for seed, value in zip(row["seeds"], values, strict=True):
                yield Number(name, where, label, seed, settings, measure, value)
        for measure, value in (_of_all_seeds(row) | _terms(causes.get(label, {}))).items():
            yield Number(name, where, label, None, settings, measure, value)


def _by_seed(row: Table, first: str) -> dict[str, list[float]]:
    """Values of every measure, one for each seed."""
    scores = row.get("values") or {first: row["final"], **{key: row.get(key) for key in SCORES}}
    over_rounds = {f"last5_{first}": row.get("last5"), f"best_{first}": row.get("best")}
    every = scores | over_rounds | {"personal": row.get("personal")}
    return {measure: values for measure, values in every.items() if values}


def _of_all_seeds(row: Table) -> dict[str, float]:
    """Costs, classes that are never predicted, and when the target was reached."""
    found = {key: float(row[key]) for key in COSTS if row.get(key) is not None}
    found |= {f"{NEVER}{name}": float(seeds) for name, seeds in (row.get("never_predicted") or {}).items()}
    found |= {f"{TARGET}{key}": float(value) for key, value in (row.get("target") or {}).items()}
    return found


def _terms(cause: Table) -> dict[str, float]:
    return {term: cause[term] for term in TERMS if cause.get(term) is not None}


def _figure(folder: Path, figure: Table) -> Iterator[Added]:
    about = {"kind": "figure2", **{key: figure[key] for key in ("title", "command", "settings")}}
    where = federation_of(figure["command"], None, dataset=figure["settings"]["dataset"])
    lines = [
        Number(
            folder.name,
            where,
            point["arm"],
            point["seed"],
            json.dumps({"alpha": point["alpha"]}),
            term,
            point[term],
        )
        for point in figure["points"]
        for term in ("local", "shift", "aggregation", "total")
    ]
    yield folder.name, about, lines


def _search(folder: Path, search: Table) -> Iterator[Added]:
    """Values that were tried on held-out images, and their scores."""
    name, primary = f"tune/{folder.name}", search.get("primary", "accuracy")
    command = search["command"]
    about = {"kind": "search", "title": f"fedld tune, {primary} on held-out training images"}
    about |= {"seeds": search["seeds"], "best": search["best"]["values"], "command": command}
    where = federation_of(command, None, dataset=search["experiment"]["dataset"])
    method = search["experiment"]["method"]["name"]
    lines = [
        Number(name, where, method, None, json.dumps(trial["values"]), f"held_out_{primary}", _score(trial))
        for trial in search["trials"]
        if _score(trial) is not None
    ]
    lines += [
        Number(name, where, method, None, json.dumps(trial["values"]), measure, value)
        for trial in search["trials"]
        for measure, value in trial.get("measures", {}).items()
    ]
    yield name, about, lines


def _score(trial: Table) -> float | None:
    """Return the score of a trial; early searches called it by the name of the measure."""
    score: float | None = trial.get("score", trial.get("accuracy"))
    return score


def words_of(command: str) -> list[str]:
    """Return the words of a command; of a sentence those between spaces."""
    try:
        return shlex.split(command)
    except ValueError:  # an apostrophe in a sentence
        return command.split()


def option(words: list[str], name: str) -> str | None:
    """Return the value of an option, the last one where it is given twice.

    >>> option(["fedld", "run", "--lr", "0.1"], "lr")
    '0.1'
    """
    values = [after.rstrip(";,") for word, after in pairwise(words) if word == f"--{name}"]
    return values[-1] if values else None


def settings_of(command: str, label: str) -> dict[str, Any]:
    """Return the settings of a row: shared options, then those that are set for its method alone.

    >>> settings_of("fedld compare --lr 0.1 --set fedld.lr=0.03", "fedld")
    {'lr': 0.03}
    """
    words = words_of(command)
    found: dict[str, Any] = {}
    for name in SHARED:
        value = option(words, name)
        if value is not None:
            found[name.replace("-", "_")] = _plain(value)
    for word, after in pairwise(words):
        key, sign, value = after.partition("=")
        if word == "--set" and sign and key.startswith(f"{label}."):
            found |= _setting(key.removeprefix(f"{label}."), value)
    return found


def _setting(key: str, value: str) -> dict[str, Any]:
    """Return a setting; of an objective with a strength also `lam`."""
    if lam := re.search(r"lam\s*=\s*([\d.e-]+)", value):
        return {key: value, "lam": _plain(lam[1])}
    return {key: _plain(value)}


def _plain(value: str) -> Any:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(value, value)


def federation_of(command: str, split: str | None, dataset: str | None = None) -> str:
    """Describe the data set and how it is dealt.

    >>> federation_of("fedld compare --dataset npz:DATA/a/a96.npz --partition dirichlet --alpha 0.1", None)
    'a96, dirichlet 0.1'
    """
    words = words_of(command)
    source = option(words, "dataset") or dataset or "fundus-sim"
    parts = [source.partition(":")[2].rpartition("/")[2].rpartition(".")[0] or source]
    partition = option(words, "partition")
    alpha = option(words, "alpha") or next((w[6:] for w in words if w.startswith("alpha=")), None)
    if partition:
        parts.append(" ".join(filter(None, (partition, alpha if partition == "dirichlet" else None))))
    elif split:
        parts.append(split)
    return ", ".join(parts)
