"""The studies of the reproduction are commands that fedld understands; nothing is run."""

import shlex

import click
import pytest
import typer

from fedld.cli import app
from fedld.errors import FedLDError
from fedld.methods import METHODS
from reproduction.__main__ import main
from reproduction.evidence import read_commands
from reproduction.run import run_parts
from reproduction.studies import PARTS, PRETRAINED

COMPARED = ("dataset", "partition", "alpha", "clients", "rounds", "train", "head", "model", "lr", "seeds")
"""Options that a definition must share with the command that made the numbers."""


def commands(parts, tmp_path, only="*", tuned="lr = 0.03\nlam = 0.1\nmu = 0.1\n"):
    """What some parts would run."""
    seen = []

    def record(words):
        seen.append(words)
        if words[0] == "tune":
            out = tmp_path / "out" / "tune" / words[-1].rpartition("/")[2]
            out.mkdir(parents=True, exist_ok=True)
            (out / "tuned.toml").write_text(tuned)

    paths = {"DATA": tmp_path / "data", "OUT": tmp_path / "out", "WEIGHTS": tmp_path / "w.safetensors"}
    run_parts(parts, paths, only=only, runner=record)
    return seen


def parse(words):
    """Options of a command line, or click's complaint."""
    command, name = typer.main.get_command(app), "fedld"
    while isinstance(command, click.Group):
        name, *words = words
        command = command.commands[name]
    return command.make_context(name, words).params


@pytest.mark.parametrize("part", PARTS)
def test_every_command_is_understood(part, tmp_path):
    seen = commands([part], tmp_path)
    assert seen
    for words in seen:
        assert not {"DATA", "WEIGHTS"} & set(words)
        options = parse(words)
        assert options["resume"], "an interrupted part goes on"
        for name in filter(None, (options.get("methods") or "").split(",")):
            assert name.rpartition("=")[2] in METHODS


@pytest.mark.parametrize("part", [part for part in PARTS if part != "methods"])
def test_definitions_are_the_commands_that_made_the_numbers(part, tmp_path):
    made = read_commands()
    recorded_names = {key.partition("/")[0] for key in made}
    expected = {study.name for study in PARTS[part]} & recorded_names
    checked = set()
    for words in commands([part], tmp_path):
        name = words[-1].rpartition("/")[2]
        recorded = next((about for key, about in made.items() if key.partition("/")[0] == name), None)
        if recorded is None or words[0] == "tune":
            continue
        ours, theirs = parse(words), parse(shlex.split(recorded["command"])[1:])
        searched = {"lr"} if part == "private_heads" else set()  # chosen by a search
        for key in set(COMPARED) - searched:
            data = str(ours.get(key)).replace(str(tmp_path / "data"), "DATA")
            assert data == str(theirs.get(key)), (name, key)
        checked.add(name)
    assert checked == expected


def test_each_method_is_compared_at_the_settings_that_were_found_for_it(tmp_path):
    *tuning, study = commands(["tuned_heads"], tmp_path, only="covid-*")
    options = parse(study)
    methods, settings = options["methods"].split(","), dict(word.split("=", 1) for word in options["set_"])
    searches = {}
    for words in tuning:
        key, values = words[words.index("--grid") + 1].split("=")
        searches.setdefault(key, {})[words[words.index("--method") + 1]] = values
        assert key == "lr" or parse(words)["lr"] == 0.03, "at the rate that was found"
    assert list(searches["lr"]) == methods
    assert all(len(set(grids.values())) == 1 for grids in searches.values()), "the same values for all"
    assert {settings[f"{name}.lr"] for name in methods} == {"0.03"}
    assert set(searches["lam"]) == {name for name in methods if name.startswith("fedld")}
    assert {settings[f"{name}.objective"] for name in searches["lam"]} == {'{name="marg-log",lam=0.1}'}
    assert {settings[f"{name}.mu"] for name in searches["mu"]} == {"0.1"}


def test_the_best_of_several_choices_is_compared(tmp_path):
    for clip, score in (("1", 0.7), ("10", 0.8)):
        out = tmp_path / f"out/tune/covid-private-epsilon4-clip{clip}-fedavg"
        out.mkdir(parents=True)
        (out / "tune.json").write_text(f'{{"best": {{"score": {score}}}}}')
    *tuning, study = commands(["private_heads"], tmp_path, only="covid-private-epsilon4")
    assert [words[words.index("--grid") + 1] for words in tuning] == [
        "lr=0.1,0.3,1,3",
        "lr=0.01,0.03,0.1,0.3",
    ]
    assert study[study.index("--dp") + 1] == "epsilon=4,delta=1e-5,clip=10"
    assert study[study.index("--lr") + 1] == "0.03"


def test_without_a_word_all_parts_with_the_pretrained_trunk_are_made(tmp_path):
    names = {words[-1].rpartition("/")[2] for words in commands([], tmp_path) if words[0] != "tune"}
    assert names == {study.name for part in PRETRAINED for study in PARTS[part]}


def test_an_unknown_part_is_named(tmp_path):
    with pytest.raises(FedLDError, match="unknown part 'table9'"):
        commands(["table9"], tmp_path)


def test_commands_can_be_printed(tmp_path, capsys):
    main(["run", "figure2_heads", "--print", "--only", "*retina*", "--data", "D", "--out", "O"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("fedld reproduce figure2 ")
    assert "npz:D/retina_kaggle96/retina_kaggle96.npz" in line
