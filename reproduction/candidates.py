"""Candidates of a search that was made by hand: one run each, judged on held-out training images.

    fedld run ... --hold-out 0.2 --out RUNS/NAME
    python -m reproduction candidates RUNS

makes `RUNS/tune.json`, which `add` reads like that of `fedld tune`. A run that was stopped counts with the
rounds that it reached.
"""

import json
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

from fedld.errors import FedLDError

LAST = 3
"""So many evaluations at the end are averaged, because a single one has a standard error of a point."""
SETTINGS = ("local_steps", "batch_size", "lr", "head_lr", "lr_warmup", "lr_schedule", "optimiser", "moments")
SHARED = (
    *("dataset", "partition", "image_size", "model", "weights"),
    *("train", "buffers", "start", "hold_out", "momentum"),
)
DEFAULTS = {"lr_warmup": 0, "lr_schedule": "constant", "optimiser": "sgd", "moments": "reset"}
"""Settings with these values are not written."""


def write_candidates(runs: Path) -> Path:
    """Write the search file of a folder of runs.

    Args:
        runs: holds run directories, each under its candidate's name.

    Returns:
        The file.

    Raises:
        FedLDError: no run there has an evaluation.
    """
    trials = [trial for run in sorted(runs.iterdir()) if run.is_dir() and (trial := read_candidate(run))]
    if not trials:
        raise FedLDError(f"no run in '{runs}' has an evaluation")
    trials.sort(key=lambda trial: -trial["score"])
    config = read_config(runs / trials[0]["values"]["candidate"])
    options = " ".join(f"--{key.replace('_', '-')} {config[key]}" for key in SHARED)
    search = {
        "primary": "accuracy",
        "seeds": [config["seed"]],
        "experiment": {"dataset": config["dataset"], "method": {"name": "candidates"}},
        "best": trials[0],
        "trials": trials,
        "command": f"fedld run {options} (and the settings of each candidate)",
    }
    file = runs / "tune.json"
    file.write_text(json.dumps(search, indent=1) + "\n", encoding="utf-8")
    return file


def read_candidate(run: Path) -> dict[str, Any] | None:
    """Read one run: its settings and what the held-out images said; None without an evaluation."""
    lines = _lines(run / "rounds.jsonl")
    tests = [line["test"] for line in lines if line.get("test")]
    if not tests:
        return None
    config = read_config(run)
    method = dict(config["method"])
    values = {"candidate": run.name, "method": method.pop("name"), "rounds": len(lines)}
    values |= {key: config[key] for key in SETTINGS if key in config and config[key] != DEFAULTS.get(key)}
    values |= {f"method.{key}": value for key, value in method.items()}
    accuracies = [100 * test["accuracy"] for test in tests]
    measures = {
        "held_out_best": max(accuracies),
        "held_out_auroc": fmean(test["auroc"] for test in tests[-LAST:]),
        "held_out_loss": fmean(test["loss"] for test in tests[-LAST:]),
    }
    for number in (1, 2):
        losses = [line["train_loss"] for line in _lines(run / "clients.jsonl") if line["round"] == number]
        measures[f"largest_train_loss_round{number}"] = max(losses)
    return {"values": values, "score": fmean(accuracies[-LAST:]), "measures": measures}


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def read_config(run: Path) -> dict[str, Any]:
    """Read the settings of a run."""
    return tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
