"""Tallies merge, and a model that diverged has one accuracy everywhere."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fedld
from fedld.errors import FedLDError
from fedld.tasks import METRICS, Classification, Measure, Tally
from fedld.tasks.base import worst_client
from fedld.tasks.measure import merged

TASK = Classification()


class Diverging(nn.Module):
    """A linear model whose logits are not finite, whatever it learns."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) * (torch.nan if not self.training else 1.0)


def sites(share=0.7, n=60):
    """Three sites with mostly class 0."""
    rng = np.random.default_rng(0)
    labels = (np.arange(n) >= share * n).astype(np.int64)
    return {f"site{k}": (rng.normal(size=(n, 4)).astype(np.float32), labels) for k in range(3)}


def test_tallies_of_parts_merge_to_the_tally_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(90, 3, generator=generator)
    labels = torch.arange(90) % 3
    whole = TASK.tally(logits, labels)
    parts = merged(TASK.tally(z, y) for z, y in zip(logits.split(40), labels.split(40), strict=True))
    assert (parts.count, parts.sums) == (whole.count, whole.sums)
    assert parts.mean == pytest.approx(whole.mean, rel=1e-14)
    assert parts.standard_error == pytest.approx(whole.standard_error, rel=1e-12)
    assert merged([]).count == 0
    assert math.isnan(merged([]).mean)


def test_a_diverged_model_has_one_accuracy_everywhere(tmp_path):
    federation = fedld.Federation.from_arrays(sites(), sites()["site0"])
    result = fedld.run(
        "local", federation, model=Diverging(), rounds=2, workers=0, out=tmp_path / "local", lr=0.1
    )
    assert result.rounds[-1]["personal"]["accuracy"] == 0
    metrics = ["macro-f1", "sensitivity", "specificity", "sensitivity-at-95"]
    result = fedld.run(
        "fedavg",
        federation,
        model=Diverging(),
        rounds=2,
        workers=0,
        hold_out=0.3,
        validation=0.2,
        metrics=metrics,
        out=tmp_path / "run",
    )
    line = result.rounds[-1]
    test = line["test"]
    assert test["accuracy"] == test["balanced_accuracy"] == line["validation"]["accuracy"] == 0
    assert {scores["accuracy"] for scores in line["client_tests"].values()} == {0.0}
    assert {line["test"][name] for name in metrics} == {0.0}
    assert line["test"]["worst_client"] == 0
    assert {client["before"]["accuracy"] for client in result.clients} == {0.0}
    assert test["loss"] is test["auroc"] is line["validation"]["loss"] is None


def test_predictions_that_are_not_finite_are_wrong_in_every_metric():
    logits = torch.tensor([[torch.nan, 0.0], [2.0, 0.0], [0.0, 2.0], [-torch.inf, 2.0]])
    labels = torch.tensor([0, 0, 1, 1])
    assert METRICS["sensitivity"](logits, labels) == 0.5
    assert METRICS["specificity"](logits, labels) == 0.5
    assert METRICS["sensitivity-at-95"](logits, labels) == 0.0  # the first sample is above all others
    assert METRICS["macro-f1"](logits, labels) == pytest.approx(2 / 3)
    assert math.isnan(METRICS["kappa"](logits, labels))
    assert TASK.tally(logits, labels).sums == {"correct": 2}
    assert math.isnan(TASK.tally(logits, labels).loss)


def test_the_worst_client_is_undefined_where_one_has_no_value():
    clients = {"a": {"accuracy": 0.5}, "b": {"accuracy": 0.25}}
    assert worst_client(TASK.measures, clients) == {"worst_client": 0.25}
    assert worst_client(TASK.measures, clients | {"c": {"accuracy": None}}) == {"worst_client": None}
    assert worst_client(TASK.measures, {}) == {}


def test_a_measure_survives_its_description():
    for measure in TASK.measures:
        again = Measure.from_json(measure.to_json())
        assert again.to_json() == measure.to_json()
    damaged = Measure.from_json({"name": 3, "scale": "x", "digits": -1, "better": None})
    assert (damaged.name, damaged.scale, damaged.digits, damaged.better) == ("3", 1.0, 4, "more")


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda z, y: z[:, 0] * torch.nan, "gives no finite number"),
        (lambda z, y: 1 / 0, "failed: ZeroDivisionError"),
    ],
)
def test_a_metric_without_a_number_is_refused_before_the_run(metric, words, tmp_path):
    federation = fedld.Federation.from_arrays(sites(), sites()["site0"])
    with pytest.raises(FedLDError, match=words):
        fedld.run(
            "fedavg", federation, model=nn.Linear(4, 2), metrics=[metric], out=tmp_path / "run", rounds=1
        )
    assert not (tmp_path / "run").exists()


def test_two_metrics_of_one_name_are_refused():
    def one(z, y):
        return z[:, 0]

    with pytest.raises(FedLDError, match="two metrics are called 'one'"):
        fedld.run("fedavg", "digits", metrics={"a:one": one, "b:one": one}, rounds=1)


def test_sums_have_no_samples():
    assert math.isnan(Tally(0, 0.0, 0.0, {"correct": 0}).share("correct"))


def test_metrics_and_training_are_resolved_once(monkeypatch, tmp_path):
    from fedld.engine import jobs

    calls = []
    for name in ("make_metrics", "make_training", "make_task"):
        real = getattr(jobs, name)
        monkeypatch.setattr(jobs, name, lambda e, name=name, real=real: calls.append(name) or real(e))
    fedld.run("fedavg", "digits", clients=3, rounds=2, workers=0, metrics=["kappa"], out=tmp_path / "run")
    assert sorted(calls) == ["make_metrics", "make_task", "make_training"]
