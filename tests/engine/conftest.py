import json
from pathlib import Path

import pytest

from fedld.config.experiment import make_experiment

# And the checksums, which cover the seconds.
CLOCK = ("seconds", "measuring_seconds", "finished", "digest", "sha256")
SMALL = {"dataset": "digits", "clients": 4, "rounds": 4, "model": "cnn", "lr": 0.05, "workers": 0}


@pytest.fixture
def small():
    """Settings of a run of a second or two, changed by keyword."""
    return lambda **changes: make_experiment(SMALL | changes)


@pytest.fixture
def contents():
    """All that a run wrote, without the clock: what must be equal between two runs."""
    return _contents


def _contents(path: Path) -> dict:
    lines = {}
    for name in ("rounds.jsonl", "clients.jsonl", "conflict.jsonl", "cross_loss.jsonl", "summary.json"):
        if (path / name).exists():
            lines[name] = [
                _without_clock(json.loads(line)) for line in (path / name).read_text().splitlines()
            ]
    model = path / "model.safetensors"
    return lines | {"model": model.read_bytes() if model.exists() else None}


def _without_clock(line: dict) -> dict:
    return {key: value for key, value in line.items() if key not in CLOCK}
