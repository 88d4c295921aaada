"""What personalised models share is computed once, and gives the same bits."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedld.config.experiment import make_experiment
from fedld.engine import jobs as work
from fedld.engine.backends.inprocess import InProcess, units
from fedld.engine.backends.machine import allocate
from fedld.engine.client_data import StateStore
from fedld.engine.jobs import Incoming, PersonalJob, TrainJob
from fedld.engine.loop import run
from fedld.engine.measure import evaluation_jobs, evaluation_line
from fedld.engine.setup import prepare
from fedld.engine.worker import Worker
from fedld.methods.fedpac import FedPAC
from fedld.records.reader import read_run

TINY = {
    "dataset": "fundus-sim",
    "data": {"samples": 400},
    "clients": 3,
    "rounds": 1,
    "image_size": 16,
    "model": "cnn",
    "workers": 0,
}


@pytest.fixture
def trained(tmp_path):
    """A setup, a backend, and jobs for three clients whose heads, and nothing else, differ."""

    def make(method, **changes):
        setup, server = prepare(make_experiment(TINY | {"method": method} | changes), tmp_path / "states")
        memory = allocate(setup, 3, shared=False)
        memory.weights.copy_(server.weights)
        store, size = StateStore(setup.states), len(setup.layout.private_part(server.weights))
        for k, name in enumerate(setup.sizes):
            noise = 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(k))
            store.save(name, 1, {"private": setup.layout.private_part(server.weights) + noise})
        return setup, InProcess(setup, memory), [PersonalJob(Incoming(name, 1)) for name in setup.sizes]

    return make


def first_layer(backend):
    return next(m for m in backend.worker.flat.model.modules() if isinstance(m, nn.Conv2d))


@pytest.mark.parametrize("method", ["fedpac", "fedrod"])
def test_heads_on_one_body_are_measured_in_one_pass_with_the_same_bits(trained, method, monkeypatch):
    setup, backend, jobs = trained(method)
    logits, honest = [], Worker._measured

    def watched(self, job, found, labels):
        logits.append(found.clone())
        return honest(self, job, found, labels)

    monkeypatch.setattr(Worker, "_measured", watched)
    assert setup.one_body
    embedded = []
    handle = first_layer(backend).register_forward_hook(lambda _, inputs, __: embedded.append(len(inputs[0])))
    together = backend.run(jobs, {})
    assert sum(embedded) == len(setup.federation.test)
    handle.remove()
    alone = [backend.worker.run(job) for job in jobs]
    assert together == alone
    assert all(map(torch.equal, logits[:3], logits[3:]))
    assert not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedbn", {"model": "resnet8"}),
        ("ditto", {}),
        ("local", {}),
        ("fedavg", {}),
        ("fedpac", {"model": "resnet8", "buffers": "local"}),
    ],
)
def test_models_that_differ_in_their_body_are_measured_alone(trained, method, changes):
    setup, _, jobs = trained(method, **changes)
    assert not setup.one_body
    assert units([work.TestJob(0, 8), *jobs], setup, 1) == [(0,), (1,), (2,), (3,)]


def test_units_are_spread_over_the_workers(trained):
    setup, _, jobs = trained("fedpac")
    assert units([work.TestJob(0, 8), *jobs], setup, 2) == [(0,), (1, 2), (3,)]
    compiled = replace(setup, experiment=setup.experiment.model_copy(update={"compile": True}))
    assert len(units(jobs, compiled, 1)) == 3


def test_clients_that_hold_the_global_model_count_with_its_measures(trained):
    setup, backend, _ = trained("fedbn", model="resnet8")
    memory, names = backend.worker.memory, list(setup.sizes)

    def line(incoming):
        jobs = evaluation_jobs(setup, 1, incoming)
        evaluated = list(zip(jobs, backend.run(jobs, {}), strict=True))
        return jobs, evaluation_line(setup, 1, evaluated, memory.logits)

    few, short = line(lambda name: Incoming(name, 1 if name == names[1] else 0))
    assert [job.incoming.client for job in few if isinstance(job, PersonalJob)] == [names[1]]
    backend.worker.store.save(names[0], 2, {})  # a state of its own that holds nothing: the global model
    for name in names[2:]:
        backend.worker.store.save(name, 2, {})
    _, long = line(lambda name: Incoming(name, 1 if name == names[1] else 2))
    assert short == long
    assert "personal_own" in short


@pytest.mark.parametrize("client_losses", [True, False])
def test_fedpac_looks_at_its_features_once_per_model(trained, client_losses):
    """The losses before and after training come from the passes that read the features."""
    setup, backend, jobs = trained("fedpac", client_losses=client_losses)
    modes = []
    first_layer(backend).register_forward_hook(
        lambda module, inputs, _: modes.append((module.training, len(inputs[0])))
    )
    job = TrainJob(2, 0, jobs[0].incoming)
    (result,) = backend.run([job], {})
    size = setup.sizes[jobs[0].incoming.client]
    assert sum(n for training, n in modes if not training) == 2 * size
    assert (result.before is not None) == client_losses


def test_losses_from_the_features_are_those_of_a_pass_of_their_own(trained, monkeypatch):
    _, backend, jobs = trained("fedpac")
    job = TrainJob(2, 0, jobs[0].incoming)
    (shared,) = backend.run([job], {})
    update = backend.worker.memory.updates[0].clone()
    monkeypatch.setattr(FedPAC, "reads_features", False)
    (apart,) = backend.run([job], {})
    assert (shared.before, shared.after) == (apart.before, apart.after)
    assert torch.equal(update, backend.worker.memory.updates[0])


def test_personal_models_may_be_evaluated_less_often(tmp_path):
    changes = {"method": "fedpac", "rounds": 3, "personal_every": 2, "client_losses": False}
    run(make_experiment(TINY | changes), tmp_path / "run")
    lines = read_run(tmp_path / "run").rounds.lines
    assert ["test" in line for line in lines] == [True, True, True]
    assert ["personal" in line for line in lines] == [False, True, True]
