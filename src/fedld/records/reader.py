"""Run and study directories as values. Damaged and missing files are reported, never raised.

A report is most wanted when something went wrong, so reading stops only where there is no run at all.
"""

import json
import shlex
import tomllib
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, Literal, cast

from fedld.config.experiment import SETTINGS
from fedld.errors import FedLDError
from fedld.paths import require_regular
from fedld.records import format1
from fedld.records.chain import FIELD, checked
from fedld.records.schema import (
    CLIENTS,
    CONFLICT,
    CROSS_LOSS,
    FAILED,
    FORMAT,
    REFUSED,
    ROUNDS,
    ClientLine,
    Config,
    ConflictLine,
    CrossLine,
    Environment,
    L,
    Predictions,
    RecordFile,
    RoundColumn,
    RoundLine,
    RunFacts,
    Summary,
)
from fedld.records.writer import CHECKSUMMED
from fedld.tasks.measure import Measure

CHANGED = "was changed after the run had finished"
UNREADABLE = "summary.json is damaged or was changed: `fedld run --resume` writes it again"
Evaluated = Literal["test", "validation", "personal", "personal_worst", "personal_own"]
"""Which table of a round's line holds a measure."""
COMPARED = [name for name, setting in SETTINGS.items() if setting.compared]


@dataclass(frozen=True)
class Records(Generic[L]):
    """Whole lines of one record file, and what was wrong with the others."""

    lines: list[L]
    problem: str | None = None
    changed: bool = False  # the file is not as it was written


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run directory; files are read when they are first asked for."""

    path: Path
    label: str
    seed: int
    config: Config
    problems: tuple[str, ...] = ()
    refused: str | None = None  # why its study could not begin or continue it

    @property
    def fold(self) -> int | None:
        """Which fold of a cross-validation is tested; None without one."""
        fold = self.config.get("fold")
        return fold if isinstance(fold, int) else None

    @property
    def folds(self) -> int | None:
        """How many folds the cross-validation has; None without one."""
        folds = self.config.get("folds")
        return folds if isinstance(folds, int) and folds > 1 else None

    @property
    def pair(self) -> int:
        """What runs of other methods are paired by: the fold, or without folds the seed."""
        return self.seed if self.fold is None else self.fold

    @property
    def repetition(self) -> str:
        """The seed and, where there is one, the fold in words."""
        return f"seed {self.seed}" + ("" if self.fold is None else f", fold {self.fold}")

    @cached_property
    def description(self) -> RunFacts | None:
        """What run.json says of the records; None for records of format 1."""
        return cast(RunFacts | None, read_object(self.path / "run.json"))

    @property
    def task(self) -> str:
        """What was learned."""
        return str(self.description.get("task")) if self.description else "classification"

    @cached_property
    def measures(self) -> dict[str, Measure]:
        """The measures of the run by name, the one that decides first."""
        described = self.description.get("measures") if self.description else None
        if isinstance(described, list):
            measures = [Measure.from_json(entry) for entry in described if isinstance(entry, dict)]
        else:
            measures = list(format1.measures(self.summary, self.rounds.lines))
        return {measure.name: measure for measure in measures}

    @cached_property
    def rounds(self) -> Records[RoundLine]:
        """One line per round."""
        return self._records(ROUNDS)

    @cached_property
    def clients(self) -> Records[ClientLine]:
        """One line per round and client."""
        return self._records(CLIENTS)

    @cached_property
    def conflict(self) -> Records[ConflictLine]:
        """Gram matrix and report of the rule, one line per round."""
        return self._records(CONFLICT)

    @cached_property
    def cross_loss(self) -> Records[CrossLine]:
        """M[j, i] = L_j(w_i) of the decomposed rounds."""
        return self._records(CROSS_LOSS)

    def _records(self, file: RecordFile[L]) -> Records[L]:
        """Read a record file, compared with its checksum where the run is finished."""
        return read_records(self.path, file, self._checksums.get(file.name))

    @cached_property
    def summary(self) -> Summary | None:
        """The result; None while there is none."""
        return read_summary(self.path)

    @property
    def _checksums(self) -> dict[str, Any]:
        checksums = self.summary.get("sha256") if self.summary else None
        return checksums if isinstance(checksums, dict) else {}

    def change(self, name: str) -> str | None:
        """Warn if a file differs from its checksum in summary.json."""
        try:
            require_regular(self.path / name)
            digest = sha256((self.path / name).read_bytes()).hexdigest()
        except OSError:
            return None
        return None if self._checksums.get(name, digest) == digest else f"{name} {CHANGED}"

    @cached_property
    def environment(self) -> Environment | None:
        """The machine that began the run."""
        return cast(Environment | None, read_object(self.path / "environment.json"))

    @cached_property
    def predictions(self) -> Predictions | None:
        """Confusion and calibration of the final model, where they were written."""
        return cast(Predictions | None, read_object(self.path / "predictions.json"))

    @cached_property
    def failure(self) -> str | None:
        """Why the run is in no comparison: it could not go on, or its records were changed."""
        path = self.path / FAILED
        if self.refused and not self.finished:
            return self.refused
        if not self.finished:
            if (self.path / "summary.json").is_file():
                return UNREADABLE
            return clean(path.read_text(errors="replace")) if path.is_file() else None
        return self.rounds.problem if self.rounds.changed else None

    def series(self, key: RoundColumn) -> dict[int, float]:
        """Read a number of every round; nan where there is none."""
        return {line["round"]: number(line.get(key)) for line in self.rounds.lines}

    def scores(self, measure: str, of: Evaluated = "test") -> dict[int, float]:
        """Read a measure in every round that was evaluated, as recorded; nan where it is not defined."""
        tables = {line["round"]: line.get(of) for line in self.rounds.lines}
        return {
            round_: number(table[measure])
            for round_, table in tables.items()
            if isinstance(table, dict) and measure in table
        }

    @property
    def method(self) -> str:
        """Name of the method, whatever the run is called in its study."""
        method = self.config.get("method")
        return str(method.get("name") if isinstance(method, dict) else method)

    @property
    def finished(self) -> bool:
        """Whether the last round was reached."""
        return self.summary is not None

    @property
    def setting(self) -> str:
        """What must be equal for runs to be compared: data, model, rounds. Not the method, not the seed."""
        return json.dumps({key: self.config.get(key) for key in COMPARED}, sort_keys=True, default=str)

    @cached_property
    def client_names(self) -> dict[int, str]:
        """Name of every client that ever took part or was evaluated."""
        latest = {line["index"]: line for line in self.clients.lines}
        names = {index: clean(line.get("client")) for index, line in latest.items()}
        for line in self.cross_loss.lines[:1]:
            listed = line.get("clients")
            names |= {i: clean(name) for i, name in enumerate(listed)} if isinstance(listed, list) else {}
        return dict(sorted(names.items()))


def by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by method, in order of appearance."""
    runs_by_label: dict[str, list[Run]] = {}
    for run in runs:
        runs_by_label.setdefault(run.label, []).append(run)
    return runs_by_label


def longest_run(runs: Sequence[Run]) -> Run:
    """Choose the run that represents its method where seeds are not averaged: the first of most rounds."""
    return max(runs, key=lambda run: len(run.rounds.lines))


@dataclass(frozen=True, kw_only=True)
class StudyRecords:
    """Runs that belong together, and what could not be read."""

    name: str
    command: str | None
    baseline: str | None
    runs: tuple[Run, ...]
    primary: str | None = None  # the measure that decides; None: the first one of the runs
    target: str = "0.5"
    problems: tuple[str, ...] = ()


def read(paths: Sequence[Path]) -> StudyRecords:
    """Read runs and studies, and put them together."""
    if not paths:
        raise FedLDError("name at least one run or study")
    studies = [read_one(Path(path)) for path in paths]
    runs = tuple(run for study in studies for run in study.runs)
    commands = [study.command for study in studies if study.command]
    baselines = {study.baseline for study in studies if study.baseline}
    primaries = {study.primary for study in studies}
    targets = {study.target for study in studies}
    return StudyRecords(
        name=" and ".join(dict.fromkeys(study.name for study in studies)),
        command="\n".join(commands) or None,
        baseline=baselines.pop() if len(baselines) == 1 else None,
        runs=_distinct(runs),
        primary=primaries.pop() if len(primaries) == 1 else None,
        target=targets.pop() if len(targets) == 1 else "0.5",
        problems=tuple(problem for study in studies for problem in study.problems),
    )


def read_one(path: Path) -> StudyRecords:
    """Read a study directory, or a run as a study of one."""
    if (path / "study.json").exists():
        return _read_study(path)
    if (path / "config.toml").exists() or (path / "rounds.jsonl").exists():
        run = read_run(path)
        name = f"{run.label} on {clean(run.config.get('dataset', 'unknown data'))}"
        return StudyRecords(
            name=name,
            command=shlex.join(["fedld", "run", "--config", f"{path}/config.toml"]),
            baseline=None,
            runs=(run,),
        )
    raise FedLDError(f"'{path}' is neither a run nor a study: it holds no config.toml and no study.json")


def _read_study(path: Path) -> StudyRecords:
    index, problems = read_object(path / "study.json"), []
    check_format(index, path / "study.json")
    if index is None:
        problems.append(f"{path.name}/study.json is damaged: its runs are taken from the folder 'runs'")
        configs = sorted((path / "runs").glob("*/config.toml"))
        index = {"runs": [{"path": str(file.parent.relative_to(path))} for file in configs]}
    runs = []
    refused = read_object(path / REFUSED) or {}
    for entry in index.get("runs") or []:
        where = path / str(entry.get("path"))
        if not where.resolve().is_relative_to(path.resolve()):
            problems.append(f"run '{clean(entry.get('path'))}' lies outside the study and is left out")
        elif not where.is_dir() and entry.get("path") not in refused:
            problems.append(f"run '{clean(entry.get('path'))}' has not started, or its folder is gone")
        else:
            why = refused.get(str(entry.get("path")))
            runs.append(read_run(where, entry.get("label"), entry.get("seed"), why and clean(why)))
    name, baseline = index.get("name") or path.resolve().name, index.get("baseline")
    command = index.get("command")
    return StudyRecords(
        name=clean(name),
        command=clean(command) if command else None,
        baseline=clean(baseline) if baseline else None,
        runs=tuple(runs),
        primary=str(index["primary"]) if index.get("primary") else None,
        target=str(index.get("target") or "0.5"),
        problems=tuple(problems),
    )


def read_run(
    path: Path, label: str | None = None, seed: int | None = None, refused: str | None = None
) -> Run:
    """Read a run directory, finished or not.

    Args:
        path: the directory.
        label: what the run is called in its study; default: its method.
        seed: its seed; default: that of its settings.
        refused: why its study could not begin or continue it, if it could not.

    Returns:
        The run; its `problems` say what is damaged or missing.
    """
    config, problems = _config(path / "config.toml")
    method = config.get("method")
    name = label or (method.get("name") if isinstance(method, dict) else method) or path.resolve().name
    seed = seed if seed is not None else config.get("seed", 0)
    run = Run(
        path=path,
        label=clean(name),
        seed=seed if isinstance(seed, int) else 0,
        config=config,
        refused=refused,
    )
    check_format(run.description, path / "run.json")
    for records in (run.rounds, run.clients):
        problems += [records.problem] if records.problem else []
    problems += [str(run.conflict.problem)] if run.change(CONFLICT.name) else []
    problems += [str(run.cross_loss.problem)] if run.change(CROSS_LOSS.name) else []
    problems += filter(None, map(run.change, CHECKSUMMED))
    if not run.finished and (path / "summary.json").is_file():
        problems.append(UNREADABLE)
    elif not run.finished:
        done, of = len(run.rounds.lines), config.get("rounds", "?")
        problems.append(f"unfinished: {done} of {of} rounds are recorded and there is no summary.json")
    return replace(run, problems=tuple(problems))


def _config(path: Path) -> tuple[Config, list[str]]:
    try:
        require_regular(path)
        return tomllib.loads(path.read_text(encoding="utf-8")), []
    except (OSError, ValueError, RecursionError) as error:
        missing = isinstance(error, FileNotFoundError)
        return {}, ["config.toml is missing" if missing else "config.toml is damaged"]


def _distinct(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Relabel runs with equal setting, label and seed by their directory."""
    keys = [(run.setting, run.label, run.seed, run.fold) for run in runs]
    return tuple(
        replace(run, label=f"{run.label} ({clean(run.path.resolve().name)})") if keys.count(key) > 1 else run
        for run, key in zip(runs, keys, strict=True)
    )


def check_format(content: Mapping[str, Any] | None, file: Path) -> None:
    """Refuse a file of a format that this version does not know; a file without a number has format 1.

    Raises:
        FedLDError: the file is of a later version.
    """
    format = 1 if content is None else content.get("format", 1)
    if format not in range(1, FORMAT + 1):
        raise FedLDError(
            f"'{file}' has format {clean(format)}, and this version of fedld reads formats 1 to {FORMAT}: "
            "read it with the version that wrote it, or a later one"
        )


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if it is not there or not one."""
    try:
        require_regular(path)
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_summary(folder: Path) -> Summary | None:
    """Read the summary of a run; None if there is none or it is not as it was written."""
    try:
        require_regular(folder / "summary.json")
        ((text, verdict),) = checked([(folder / "summary.json").read_bytes()])
    except OSError:
        return None
    summary = _parse(text)
    if verdict == "changed" or (summary is not None and FIELD in summary):
        return None
    return None if summary is None else cast(Summary, format1.upgrade_summary(summary))


def read_records(folder: Path, file: RecordFile[L], checksum: object = None) -> Records[L]:
    """Read the intact lines, the last one for each key; a resumed run may contain some twice.

    Args:
        folder: the run directory.
        file: which file.
        checksum: SHA-256 of the whole file, where summary.json has it.

    Returns:
        The lines, and a sentence with the numbers of those that are left out.
    """
    try:
        require_regular(folder / file.name)
        content = (folder / file.name).read_bytes()
    except OSError:
        return Records([], f"{file.name} is missing", checksum is not None)
    lines_by_key: dict[tuple[Any, ...], L] = {}
    damaged, changed = 0, []
    numbered = [(number, raw) for number, raw in enumerate(content.split(b"\n"), start=1) if raw]
    for (number, _), (raw, verdict) in zip(numbered, checked(raw for _, raw in numbered), strict=True):
        line = _parse(raw)
        sound = line is not None and all(isinstance(line.get(name), int) for name in file.key)
        if line is None or not sound or any(name not in line for name in file.needs):
            damaged += 1
        elif verdict == "changed" or FIELD in line:
            changed.append(number)
        else:
            lines_by_key[tuple(line[name] for name in file.key)] = cast(L, format1.upgrade(file.name, line))
    problems = [f"{file.name}: {damaged} damaged line(s) left out"] if damaged else []
    problems += [_changed_lines(file.name, changed)] if changed else []
    other = checksum is not None and sha256(content).hexdigest() != checksum
    problems += [f"{file.name} {CHANGED}: lines are missing or new"] if other and not problems else []
    return Records(
        [lines_by_key[k] for k in sorted(lines_by_key)], "; ".join(problems) or None, bool(changed) or other
    )


def _changed_lines(name: str, numbers: list[int]) -> str:
    """Name the first three of the lines that were changed."""
    lines = ", ".join(map(str, numbers[:3])) + (f" and {len(numbers) - 3} more" if len(numbers) > 3 else "")
    which = "line" if len(numbers) == 1 else "lines"
    return f"{name}: {which} {lines} changed since the run wrote it, or the line before is gone; left out"


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def clean(text: Any) -> str:
    """Make a name printable: control and formatting characters are invisible, or hide others.

    >>> clean("site\\x00 A\\u202e")
    'site� A�'
    """
    return "".join("�" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in str(text))


def number(value: object) -> float:
    """Convert a value of a record to float; nan if it is not a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
