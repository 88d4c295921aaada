"""Engines are values: by name, or one class in the user's file; the same bits from each."""

import re

import pytest
import torch

import fedld
from fedld.engine.backends.inprocess import attempt
from fedld.engine.worker import Worker
from fedld.errors import FedLDError


class Backwards:
    """A backend that does its jobs in this process, the last one first."""

    def __init__(self, setup, memory, seen):
        self.worker, self.seen = Worker(setup, memory), seen

    def run(self, jobs, common, done=None, deadline=None):
        self.worker.common = common
        results = [attempt(self.worker, job) for job in reversed(jobs)]
        self.seen += [type(job).__name__ for job in reversed(jobs)]
        if done is not None:
            for job, result in zip(reversed(jobs), results, strict=True):
                done(job, result)
        return results[::-1]

    def close(self):
        self.seen.append("closed")


class Reversed(fedld.ThisMachine):
    """An engine with a backend of its own."""

    def __init__(self):
        super().__init__(workers=0)
        self.seen = []

    def backend(self, setup, memory):
        return Backwards(setup, memory, self.seen)

    def provenance(self):
        return {"engine": "reversed"}


def weights(result):
    return torch.cat([value.flatten().float() for value in result.model.state_dict().values()])


@pytest.fixture(scope="module")
def plain():
    return weights(fedld.run("scaffold", "digits", clients=3, rounds=2, workers=0))


def test_an_own_engine_is_one_class_and_gives_the_same_bits(plain, tmp_path):
    engine = Reversed()
    result = fedld.run("scaffold", "digits", clients=3, rounds=2, engine=engine, out=tmp_path / "run")
    assert torch.equal(weights(result), plain)
    assert engine.seen.count("TrainJob") == 6
    assert engine.seen[-1] == "closed"
    assert b"reversed" in (tmp_path / "run/model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["process", "workers", "local"])
def test_engines_by_name_give_the_same_bits(plain, name):
    result = fedld.run("scaffold", "digits", clients=3, rounds=2, workers=1, engine=name)
    assert torch.equal(weights(result), plain)


def test_a_study_runs_on_an_own_engine(tmp_path):
    engine = Reversed()
    study = fedld.compare(
        ["fedavg", "fedprox"], "digits", seeds=[0], clients=2, rounds=1, engine=engine, jobs=0, out=tmp_path
    )
    assert len(study.results) == 2
    assert engine.seen.count("closed") == 2


class Local:
    """Has one of the methods only."""

    keeps_states = True


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ("worker", "unknown engine 'worker': did you mean 'workers'?"),
        (Local(), "which has no 'federation'"),
        (Reversed, "which is a class"),
        (7, "not 7"),
    ],
)
@pytest.mark.parametrize("verb", [fedld.run, lambda m, *a, **k: fedld.compare([m], *a, **k)])
def test_what_is_no_engine_is_refused_before_the_run(tmp_path, engine, sentence, verb):
    with pytest.raises(FedLDError, match=re.escape(sentence)):
        verb("fedavg", "digits", engine=engine, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_simulation_takes_names_and_one_run(tmp_path):
    with pytest.raises(FedLDError, match="one experiment at a time"):
        fedld.compare(["fedavg"], "digits", engine="flower-simulation", out=tmp_path / "run")
    with pytest.raises(FedLDError, match="takes parts by name: model"):
        fedld.run(
            "fedavg",
            "digits",
            model=torch.nn.Linear(2, 2),
            engine="flower-simulation",
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()
