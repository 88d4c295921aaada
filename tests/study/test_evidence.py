"""Every command of results/evidence.sh is one that fedld understands; nothing is run."""

import os
import subprocess
from pathlib import Path

import click
import pytest
import typer

from fedld.cli import app
from fedld.methods import METHODS

SCRIPT = Path(__file__).parents[2] / "results" / "evidence.sh"
RECORDER = """#!/bin/sh
printf '%s\\0' "$@" >> "$COMMANDS"
printf '\\n' >> "$COMMANDS"
if [ "$1" = tune ]; then
    while [ "$1" != --out ]; do shift; done
    mkdir -p "$2"
    printf 'lr = 0.03\nlam = 0.1\nmu = 0.1\n' > "$2/tuned.toml"
fi
"""
HEADS = {
    "sensitivity_rate": "covid",
    "tuned_heads": "covid",
    "shared_heads": "retina-split3",
    "last4": "covid",
}
HEADS |= {
    "sensitivity_alpha": "fundus",
    "figure2_heads": "retina",
    "table2_heads": "covid",
    "table3_heads": "retina",
    "closed_heads": "covid",
    "closed_trunk2": "covid",
    "private_heads": "covid",
    "long_heads": "covid",
}
PARTS = HEADS | dict.fromkeys(("rules", "fundus", "tuned", "covid", "retina_published"), "")


def commands(part, tmp_path):
    """What a part would run."""
    (tmp_path / "fedld").write_text(RECORDER)
    (tmp_path / "fedld").chmod(0o755)
    (tmp_path / "out").mkdir()
    told = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "COMMANDS": str(tmp_path / "commands"),
        "ON": PARTS[part],
    }
    done = ["sh", str(SCRIPT), str(tmp_path / "data"), str(tmp_path / "out"), part]
    subprocess.run(done, env=os.environ | told, check=True, capture_output=True)
    return [line.split("\0")[:-1] for line in (tmp_path / "commands").read_text().splitlines()]


def parse(words):
    """Options of a command line, or click's complaint."""
    command, name = typer.main.get_command(app), "fedld"
    while isinstance(command, click.Group):
        name, *words = words
        command = command.commands[name]
    return command.make_context(name, words).params


@pytest.mark.parametrize("part", PARTS)
def test_every_command_is_understood(part, tmp_path):
    found = commands(part, tmp_path)
    assert found
    for words in found:
        options = parse(words)
        assert options["resume"], "an interrupted part goes on"
        for name in filter(None, (options.get("methods") or "").split(",")):
            assert name in METHODS
    assert (tmp_path / "out" / "minutes.txt").read_text().startswith(part)


def test_each_method_is_compared_at_the_numbers_that_were_found_for_it(tmp_path):
    *tuning, study = commands("tuned_heads", tmp_path)
    options = parse(study)
    methods, own = options["methods"].split(","), dict(word.split("=", 1) for word in options["set_"])
    searches = {}
    for words in tuning:
        key, values = words[words.index("--grid") + 1].split("=")
        searches.setdefault(key, {})[words[words.index("--method") + 1]] = values
        assert key == "lr" or parse(words)["lr"] == 0.03, "at the rate that was found"
    assert list(searches["lr"]) == methods
    assert all(len(set(found.values())) == 1 for found in searches.values()), "the same values for all"
    assert {own[f"{name}.lr"] for name in methods} == {"0.03"}
    assert set(searches["lam"]) == {name for name in methods if name.startswith("fedld")}
    assert {own[f"{name}.objective"] for name in searches["lam"]} == {'{name="marg-log",lam=0.1}'}
    assert {own[f"{name}.mu"] for name in searches["mu"]} == {"0.1"}


def test_without_a_word_all_parts_with_the_pretrained_trunk_are_made():
    (default,) = [line for line in SCRIPT.read_text().splitlines() if line.startswith("[ $# -gt 0 ]")]
    assert set(default.split("set -- ")[1].split()) == {*HEADS, "collect"}
