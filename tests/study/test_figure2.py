import json

import pytest

from fedld.errors import FedLDError
from fedld.records.schema import CROSS_LOSS
from fedld.records.writer import read_lines
from fedld.study.paper.figure2 import plan, run_figure2

SETTINGS = {"dataset": "digits", "clients": 4, "model": "cnn", "lr": 0.05}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("figure") / "out"
    planned = plan(SETTINGS, [0, 1], out, command="x", warm_rounds=1, alphas=(100.0, 0.01))
    figure = run_figure2(planned, out, resume=False, jobs=1, progress=lambda line: None)
    return planned, out, figure


def matrix(out, arm, alpha="0.01", seed=0):
    return read_lines(out / f"runs/{arm}-alpha{alpha}-seed{seed}", CROSS_LOSS)[0]["cross_loss"]


def test_all_rules_aggregate_the_same_naive_models(done):
    _, out, figure = done
    assert matrix(out, "plain") == matrix(out, "principal") == matrix(out, "measured")
    assert matrix(out, "plain") != matrix(out, "margin")
    plain, principal = (figure.values(arm, "shift", 0.01) for arm in ("plain", "principal"))
    assert plain == principal
    assert figure.values("plain", "aggregation", 0.01) != figure.values("principal", "aggregation", 0.01)


def test_the_terms_add_up_and_shift_grows_with_heterogeneity(done):
    _, _, figure = done
    assert len(figure.points) == 2 * 2 * 4
    for p in figure.points:
        assert p.local + p.shift + p.aggregation == pytest.approx(p.total, rel=1e-9)
    assert min(figure.values("plain", "shift", 0.01)) > max(figure.values("plain", "shift", 100.0))


def test_files_and_paired_differences(done):
    _, out, figure = done
    assert (out / "figure2.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "figure2.svg").read_text()
    written = json.loads((out / "figure2.json").read_text())
    assert len(written["differences"]) == 3 * 2 * 2
    one = next(d for d in written["differences"] if d["term"] == "shift" and d["alpha"] == 0.01)
    ours, plain = figure.values("margin", "shift", 0.01), figure.values("plain", "shift", 0.01)
    assert one["mean"] == pytest.approx(sum(a - b for a, b in zip(ours, plain, strict=True)) / 2)
    page = (out / "figure2.md").read_text()
    assert "| principal - plain [95 %] | measured - plain [95 %] |" in page
    assert "| 0.01 |" in page


def test_resuming_repeats_nothing(done):
    planned, out, figure = done
    seen = []
    again = run_figure2(planned, out, resume=True, jobs=1, progress=seen.append)
    assert again == figure
    assert seen == []
    with pytest.raises(FedLDError, match="already holds a study"):
        run_figure2(planned, out, resume=False, jobs=1, progress=seen.append)


def test_warm_rounds_exclude_weights(tmp_path):
    with pytest.raises(FedLDError, match="not both"):
        plan(SETTINGS | {"weights": "w.safetensors"}, [0], tmp_path, command="x", warm_rounds=1)
