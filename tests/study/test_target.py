"""Rounds, traffic and seconds until a method stays at an accuracy."""

import csv
import json

import pytest

from fedld.errors import FedLDError
from fedld.records.reader import read_run
from fedld.study.comparison import compare_runs
from fedld.study.measures import Target
from fedld.study.report.tables import target_table


@pytest.fixture
def course(write_run):
    """A finished run with an accuracy for every round; None where it was not evaluated."""

    def write(method, seed, accuracies):
        path = write_run(method, seed).path
        lines = [
            {"round": k + 1, "bytes_up": 1_000_000, "bytes_down": 2_000_000, "seconds": 4.0}
            | ({} if a is None else {"accuracy": a})
            for k, a in enumerate(accuracies)
        ]
        (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read_run(path)

    return write


@pytest.fixture
def runs(course):
    return [
        course("fedavg", 0, (0.5, 0.6, 0.70, 0.80)),
        course("fedavg", 1, (0.5, 0.6, 0.70, 0.82)),
        course("fedld", 0, (0.9, 0.6, 0.82, 0.81)),  # early, but it does not stay
        course("fedld", 1, (0.9, 0.6, 0.80, 0.81)),
        course("fedbn", 0, (0.5, 0.6, 0.60, 0.70)),
        course("scaffold", 0, (None, 0.85, None, 0.85)),
    ]


def test_a_method_has_reached_the_target_where_it_stays(runs):
    comparison = compare_runs("t", runs, "fedavg", target="0.5")
    assert comparison.level == pytest.approx(80.5)
    rows = {row["label"]: row["target"] for row in comparison.to_json()["rows"]}
    assert rows["fedavg"] == {"round": 4, "megabytes_up": 4.0, "megabytes_down": 8.0, "seconds": 16.0}
    assert rows["fedld"]["round"] == 3
    assert rows["scaffold"]["round"] == 2
    assert rows["fedbn"] is None


def test_table_page_and_exports_tell_it(runs):
    comparison = compare_runs("t", runs, "fedavg", target="1@75.5")
    head, *body = comparison.table
    found = {row[0]: dict(zip(head, row, strict=True)) for row in body}
    assert found["fedld"]["rounds to 74.5 %"] == "3"
    assert found["fedld"]["MB to it"] == "9.0"
    assert found["fedld"]["s to it"] == "12.0"
    assert found["fedbn"]["rounds to 74.5 %"] == "not reached"
    assert "not reached" in comparison.to_markdown()
    assert "not reached" in comparison.to_latex()
    values = {tuple(row[:3]): row[3] for row in csv.reader(comparison.to_csv().splitlines())}
    assert values["fedld", "all", "target_round"] == "3"
    page = target_table(comparison)
    assert [[cell.text for cell in row] for row in page.rows][2][:2] == ["fedbn", "not reached"]
    assert page.columns == ["method", "rounds", "MB up", "MB down", "seconds"]


def test_a_method_without_a_global_model_has_no_target(runs, write_run):
    comparison = compare_runs("t", [*runs, write_run("local", 0, personal_accuracy=0.9)], "fedavg")
    assert comparison.standing("local").reached is None
    assert "local" not in [row[0].text for row in target_table(comparison).rows]


@pytest.mark.parametrize("text", ["", "x", "0.5@", "-1", "@80", "1@x"])
def test_a_target_that_cannot_be_read_is_refused(text):
    with pytest.raises(FedLDError, match=r"such as 0\.5 or 0\.5@85"):
        Target.parse(text)
