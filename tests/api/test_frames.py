"""Results as data frames of numbers, whichever library is there."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

import fedld
from fedld.errors import FedLDError


@pytest.fixture(scope="module")
def study():
    settings = {"clients": 3, "rounds": 2, "jobs": 0, "progress": False}
    return fedld.compare(["fedavg", "fedprox"], "digits", seeds=[0, 1], **settings)


@pytest.fixture
def without_pandas(monkeypatch):
    monkeypatch.setattr("fedld.frames.find_spec", lambda name: None)


def test_rounds_and_clients_are_tables_of_numbers(study, without_pandas):
    result = study.results["fedavg", 0]
    rounds, clients = result.frame(), result.frame("clients")
    assert rounds["round"].to_list() == [1, 2]
    assert rounds["accuracy"].to_list() == [line["test"]["accuracy"] for line in result.rounds]
    assert rounds["accuracy"].dtype.is_float()
    assert clients.height == 6
    with pytest.raises(FedLDError, match="there is no table 'laps'"):
        result.frame("laps")


def test_the_table_of_a_study_has_numbers(study, without_pandas):
    frame = study.frame()
    assert frame["method"].to_list() == ["fedavg", "fedprox"]
    assert frame["seeds"].to_list() == [2, 2]
    means = [standing.mean("accuracy") for standing in study.comparison.standings]
    assert frame["accuracy"].to_list() == pytest.approx(means)
    found = study.comparison.standing("fedprox").difference
    row = frame.row(1, named=True)
    assert row["difference"] == pytest.approx(found.mean)
    assert (row["difference_low"], row["difference_high"]) == pytest.approx(found.interval)
    assert frame["difference"].to_list()[0] is None


def test_pandas_is_preferred(study, monkeypatch):
    pandas = ModuleType("pandas")
    pandas.__spec__ = ModuleSpec("pandas", None)
    pandas.DataFrame = lambda rows: ("pandas", rows)
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    kind, rows = study.frame()
    assert kind == "pandas"
    assert [row["method"] for row in rows] == ["fedavg", "fedprox"]
