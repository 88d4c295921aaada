"""The verbs of the package beside run and compare: tune, diagnose, report, decompose."""

import pytest

import fedld
from fedld.errors import FedLDError

SMALL = {"clients": 2, "rounds": 1, "workers": 0}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("verbs") / "run"
    return fedld.run("fedavg", "digits", out=out, decompose=1, progress=False, **SMALL)


def test_tune_tries_every_value_of_a_grid(tmp_path):
    tuned = fedld.tune("fedavg", "digits", out=tmp_path / "tune", grid={"lr": [0.001, 0.1]}, **SMALL)
    assert sorted(trial.values["lr"] for trial in tuned.trials) == [0.001, 0.1]
    assert tuned.best.values["lr"] == 0.1
    assert (tmp_path / "tune/tuned.toml").exists()


def test_tune_takes_a_grid_or_ranges(tmp_path):
    with pytest.raises(FedLDError, match="exclude each other"):
        fedld.tune(out=tmp_path / "tune", grid={"lr": [0.1]}, ranges={"lr": (0.01, 0.1)})
    assert not (tmp_path / "tune").exists()


def test_diagnose_takes_a_result_a_path_and_a_federation(result):
    by_result, by_path = fedld.diagnose(result), fedld.diagnose(str(result.path))
    assert by_result.to_markdown() == by_path.to_markdown() == result.diagnosis.to_markdown()
    federation = fedld.data("digits", clients=3, partition="dirichlet", alpha=0.1)
    assert "label_skew" in [finding.check for finding in fedld.diagnose(federation).findings]


def test_report_writes_page_and_figures(result, tmp_path):
    page = fedld.report([result, result.path], tmp_path / "page.html", figures=tmp_path / "figures")
    assert page == tmp_path / "page.html"
    assert "<html" in page.read_text()
    assert list((tmp_path / "figures").glob("*.svg"))


def test_report_of_nothing_is_one_sentence(tmp_path):
    with pytest.raises(FedLDError, match="nowhere"):
        fedld.report(tmp_path / "nowhere", tmp_path / "page.html")


def test_decompose_adds_up():
    terms = fedld.decompose([[0.2, 1.0], [0.8, 0.4]], [0.5, 0.5], [100, 100])
    assert terms.identity_error < 1e-12
