"""Run and study directories as values. Whatever is damaged or missing is told, never raised.

A report is most wanted when something went wrong, so reading stops only where there is no run at all.
"""

import json
import shlex
import tomllib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedld.engine.records import Line
from fedld.errors import FedLDError

SETTING = (
    *("dataset", "data_root", "data_seed", "split", "clients", "partition", "alpha", "classes_per_client"),
    *("min_size", "image_size", "data", "model", "rounds"),
)


@dataclass(frozen=True)
class Records:
    """Whole lines of one record file, one a (round, client), and what was wrong with the others."""

    lines: list[Line]
    problem: str | None = None


@dataclass(frozen=True)
class Run:
    """One run directory; files are read when they are first asked for."""

    path: Path
    label: str
    seed: int
    config: Line
    problems: tuple[str, ...] = ()

    @cached_property
    def rounds(self) -> Records:
        """One line a round."""
        return read_records(self.path / "rounds.jsonl")

    @cached_property
    def clients(self) -> Records:
        """One line a round and client."""
        return read_records(self.path / "clients.jsonl", key=("round", "index"))

    @cached_property
    def conflict(self) -> Records:
        """Gram matrix and report of the rule, one line a round."""
        return read_records(self.path / "conflict.jsonl")

    @cached_property
    def cross_loss(self) -> Records:
        """M[j, i] = L_j(w_i) of the decomposed rounds."""
        return read_records(self.path / "cross_loss.jsonl")

    @cached_property
    def summary(self) -> Line | None:
        """The result; None while there is none."""
        return read_object(self.path / "summary.json")

    @cached_property
    def predictions(self) -> Line | None:
        """Confusion and calibration of the final model, where they were written."""
        return read_object(self.path / "predictions.json")

    @property
    def finished(self) -> bool:
        """Whether the last round was reached."""
        return self.summary is not None

    @property
    def setting(self) -> str:
        """What must be equal for runs to be compared: data, model, rounds. Not the method, not the seed."""
        return json.dumps({key: self.config.get(key) for key in SETTING}, sort_keys=True, default=str)

    @cached_property
    def client_names(self) -> dict[int, str]:
        """Name of every client that ever took part or was evaluated."""
        latest = {line["index"]: line for line in self.clients.lines}
        names = {index: clean(line.get("client")) for index, line in latest.items()}
        for line in self.cross_loss.lines[:1]:
            names |= {i: clean(name) for i, name in enumerate(line.get("clients") or [])}
        return dict(sorted(names.items()))


def fullest(runs: Sequence[Run]) -> Run:
    """The run that stands for its method where seeds cannot be averaged: the first with the most rounds."""
    return max(runs, key=lambda run: len(run.rounds.lines))


@dataclass(frozen=True)
class Study:
    """Runs that belong together, and what could not be read."""

    name: str
    command: str | None
    baseline: str | None
    runs: tuple[Run, ...]
    problems: tuple[str, ...] = ()


def read(paths: Sequence[Path]) -> Study:
    """Runs and studies, put together."""
    if not paths:
        raise FedLDError("name at least one run or study")
    studies = [read_one(Path(path)) for path in paths]
    runs = tuple(run for study in studies for run in study.runs)
    commands = [study.command for study in studies if study.command]
    baselines = {study.baseline for study in studies if study.baseline}
    return Study(
        " and ".join(dict.fromkeys(study.name for study in studies)),
        "\n".join(commands) or None,
        baselines.pop() if len(baselines) == 1 else None,
        _distinct(runs),
        tuple(problem for study in studies for problem in study.problems),
    )


def read_one(path: Path) -> Study:
    """A study directory, or a run as a study of one."""
    if (path / "study.json").exists():
        return _read_study(path)
    if (path / "config.toml").exists() or (path / "rounds.jsonl").exists():
        run = read_run(path)
        name = f"{run.label} on {clean(run.config.get('dataset', 'unknown data'))}"
        return Study(name, shlex.join(["fedld", "run", "--config", f"{path}/config.toml"]), None, (run,))
    raise FedLDError(f"'{path}' is neither a run nor a study: it holds no config.toml and no study.json")


def _read_study(path: Path) -> Study:
    index, problems = read_object(path / "study.json"), []
    if index is None:
        problems.append(f"{path.name}/study.json is damaged: its runs are taken from the folder 'runs'")
        found = sorted((path / "runs").glob("*/config.toml"))
        index = {"runs": [{"path": str(file.parent.relative_to(path))} for file in found]}
    runs = []
    for entry in index.get("runs") or []:
        where = path / str(entry.get("path"))
        if not where.resolve().is_relative_to(path.resolve()):
            problems.append(f"run '{clean(entry.get('path'))}' lies outside the study and is left out")
        elif not where.is_dir():
            problems.append(f"run '{clean(entry.get('path'))}' has not started, or its folder is gone")
        else:
            runs.append(read_run(where, entry.get("label"), entry.get("seed")))
    name, baseline = index.get("name") or path.resolve().name, index.get("baseline")
    command = index.get("command")
    return Study(
        clean(name),
        clean(command) if command else None,
        clean(baseline) if baseline else None,
        tuple(runs),
        tuple(problems),
    )


def read_run(path: Path, label: str | None = None, seed: int | None = None) -> Run:
    """A run directory, finished or not."""
    config, problems = _config(path / "config.toml")
    method = config.get("method")
    name = label or (method.get("name") if isinstance(method, dict) else method) or path.resolve().name
    seed = seed if seed is not None else config.get("seed", 0)
    run = Run(path, clean(name), seed if isinstance(seed, int) else 0, config)
    for records in (run.rounds, run.clients):
        problems += [records.problem] if records.problem else []
    if not run.finished:
        done, of = len(run.rounds.lines), config.get("rounds", "?")
        problems.append(f"unfinished: {done} of {of} rounds are recorded and there is no summary.json")
    return replace(run, problems=tuple(problems))


def _config(path: Path) -> tuple[Line, list[str]]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")), []
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        missing = isinstance(error, FileNotFoundError)
        return {}, ["config.toml is missing" if missing else "config.toml is damaged"]


def _distinct(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Runs with equal setting, label and seed are told apart by their directory."""
    keys = [(run.setting, run.label, run.seed) for run in runs]
    return tuple(
        replace(run, label=f"{run.label} ({clean(run.path.resolve().name)})") if keys.count(key) > 1 else run
        for run, key in zip(runs, keys, strict=True)
    )


def read_object(path: Path) -> Line | None:
    """A JSON object; None if it is not there or not one."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_records(path: Path, key: tuple[str, ...] = ("round",)) -> Records:
    """Whole lines, the last one for each key; a resumed run may hold some twice."""
    try:
        content = path.read_bytes().split(b"\n")
    except OSError:
        return Records([], f"{path.name} is missing")
    found, damaged = {}, 0
    for raw in filter(None, content):
        line = _parse(raw)
        if line is None or not all(isinstance(line.get(name), int) for name in key):
            damaged += 1
        else:
            found[tuple(line[name] for name in key)] = line
    problem = f"{path.name}: {damaged} damaged line(s) left out" if damaged else None
    return Records([found[k] for k in sorted(found)], problem)


def _parse(raw: bytes) -> Line | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def clean(text: Any) -> str:
    """A name as printable text: control and formatting characters would not be seen, or hide others.

    >>> clean("site\\x00 A\\u202e")
    'site� A�'
    """
    return "".join("�" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in str(text))


def number(line: Line, key: str) -> float:
    """A value as float; nan if it is not a number."""
    value = line.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
