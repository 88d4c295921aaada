"""Run studies of the reproduction as `fedld` commands; finished runs are not made again."""

import json
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from fedld.errors import FedLDError
from fedld.methods import METHODS
from reproduction.studies import LAMBDAS, MUS, PARTS, PRETRAINED, Search, Study, margin

PLAIN_STACKS = ("fedma", "gamf")
"""Methods that match the neurons of plain stacks: they cannot train a head on a trunk."""
Runner = Callable[[list[str]], None]


def run_parts(
    parts: Iterable[str],
    paths: Mapping[str, Path],
    *,
    only: str = "*",
    jobs: int | None = None,
    runner: Runner | None = None,
) -> list[Path]:
    """Run the studies of some parts.

    Args:
        parts: names of `PARTS`; those with the pretrained trunk where there are none.
        paths: what DATA, WEIGHTS, WEIGHTS2 and OUT stand for.
        only: pattern of the studies' names.
        jobs: runs at a time; one per core unless given.
        runner: takes the words behind `fedld`; the command is run unless given.

    Returns:
        The folders of the studies.

    Raises:
        FedLDError: there is no such part, or a command failed.
    """
    run = runner or _run_command
    folders = []
    for part in list(parts) or PRETRAINED:
        if part not in PARTS:
            raise FedLDError(f"unknown part '{part}': there are {', '.join(PARTS)}")
        for study in PARTS[part]:
            if fnmatchcase(study.name, only):
                folders.append(_run_study(study, paths, jobs, run))
    return folders


def _run_study(study: Study, paths: Mapping[str, Path], jobs: int | None, run: Runner) -> Path:
    folder = paths["OUT"] / study.name
    chosen = _search(study, study.search, paths, run) if study.search else []
    chosen += _choose(study, paths, run) if study.choices else []
    words = [*study.command, *(["--methods", methods_of(study)] if study.methods else []), *chosen]
    words += ["--jobs", str(jobs)] if jobs else []
    run(_filled([*words, "--resume", "--out", str(folder)], paths))
    return folder


def methods_of(study: Study) -> str:
    """Return the methods of a study; `ALL` stands for all that train any network."""
    if study.methods != "ALL":
        return study.methods
    return ",".join(name for name in METHODS if name not in PLAIN_STACKS)


def _search(study: Study, search: Search, paths: Mapping[str, Path], run: Runner) -> list[str]:
    """Find the best settings of every method; return them as options of the comparison."""
    chosen = []
    for method in study.methods.split(","):
        uses_margin = method.startswith("fedld") and search.lam is not None
        given = ["--set", f"objective={margin(f'{search.lam:g}')}"] if uses_margin else []
        lr = _best(search, method, "", "lr", search.rates, given, paths, run)
        chosen += ["--set", f"{method}.lr={lr}"]
        if not search.strengths:
            continue
        given += ["--lr", lr]
        if uses_margin:
            lam = _best(search, method, "-lam", "lam", LAMBDAS, given, paths, run)
            chosen += ["--set", f"{method}.objective={margin(lam)}"]
        elif method in ("fedprox", "moon"):
            mu = _best(search, method, "-mu", "mu", MUS, given, paths, run)
            chosen += ["--set", f"{method}.mu={mu}"]
    return chosen


def _choose(study: Study, paths: Mapping[str, Path], run: Runner) -> list[str]:
    """Return the choice with the best score on held-out images, and its learning rate."""
    tried = []
    for choice in study.choices:
        search = Search(name=choice.name, options=choice.options, rates=choice.rates)
        lr = _best(search, study.methods, "", "lr", choice.rates, [], paths, run)
        file = paths["OUT"] / "tune" / f"{choice.name}-{study.methods}" / "tune.json"
        score = json.loads(file.read_text(encoding="utf-8"))["best"]["score"] if file.exists() else 0.0
        tried.append((score, [*choice.chosen, "--lr", lr]))
    return max(tried, key=lambda one: one[0])[1]


def _best(
    search: Search,
    method: str,
    ending: str,
    key: str,
    values: Iterable[float],
    given: list[str],
    paths: Mapping[str, Path],
    run: Runner,
) -> str:
    """Run one search and return the best value."""
    folder = paths["OUT"] / "tune" / f"{search.name}-{method}{ending}"
    grid = f"{key}={','.join(f'{value:g}' for value in values)}"
    words = ["tune", "--method", method, "--grid", grid, "--minutes", "60", *search.options]
    if method == "local" and "--primary" in words:  # it has no global model, so no AUROC
        words[words.index("--primary") + 1] = "accuracy"
    run(_filled([*words, *given, "--resume", "--out", str(folder)], paths))
    tuned = folder / "tuned.toml"
    if not tuned.exists():
        return "BEST"  # commands are only printed
    return f"{tomllib.loads(tuned.read_text(encoding='utf-8'))[key]:g}"


def _filled(words: list[str], paths: Mapping[str, Path]) -> list[str]:
    """Replace DATA and WEIGHTS by paths."""
    files = {name: str(path) for name, path in paths.items()}
    return [files.get(word, word.replace("npz:DATA/", f"npz:{files['DATA']}/")) for word in words]


def print_command(words: list[str]) -> None:
    """Print a command as one types it."""
    print(shlex.join(["fedld", *words]))


def _run_command(words: list[str]) -> None:
    if subprocess.run(["fedld", *words], check=False).returncode:
        raise FedLDError(f"failed: fedld {' '.join(words)}")
