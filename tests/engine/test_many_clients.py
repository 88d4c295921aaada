"""Federations of many clients: what is written and read stays small, and says the same."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from fedld.analysis.diagnosis.gather import diagnose_all
from fedld.analysis.updates import gram_clients, mean_cosines
from fedld.data import DataSpec, load
from fedld.data.client import NO_IMAGES, Client, pack, unpack
from fedld.engine.backends.machine import _zeros
from fedld.engine.backends.processes import tune_process
from fedld.engine.loop import run
from fedld.engine.recording import GRAM_CLIENTS
from fedld.records.reader import read_run
from fedld.study.report.conflict import MOST_CLIENTS, cosine_chart

CLIENTS, DRAWN = 260, 130


class Linear(nn.Module):
    """Pixels to classes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(x.flatten(1))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    from fedld.config.experiment import make_experiment

    own = {"model": Linear, "clients": CLIENTS, "sample_clients": DRAWN, "partition": "iid", "min_size": 1}
    settings = {"dataset": "digits", "rounds": 2, "workers": 0, "batch_size": 10, "client_losses": False}
    out = tmp_path_factory.mktemp("large") / "run"
    run(make_experiment(settings | own), out)
    return read_run(out)


def test_the_gram_matrix_of_a_large_round_is_written_for_some_clients_all_else_for_all(large):
    for line in large.conflict.lines:
        assert len(line["clients"]) == len(line["norms"]) == len(line["eigenvalues"]) == DRAWN
        names, weights = gram_clients(line)
        assert len(names) == len(weights) == len(line["gram"]) == len(line["gram"][0]) == GRAM_CLIENTS
        assert names == [name for name in line["clients"] if name in set(names)]
        lengths = dict(zip(line["clients"], line["norms"], strict=True))
        assert np.sqrt(np.diagonal(line["gram"])) == pytest.approx([lengths[name] for name in names])


def test_readers_take_the_clients_whose_matrix_is_there(large):
    lines = large.conflict.lines
    names, cosine, _ = mean_cosines(lines)
    assert set(names) <= {name for line in lines for name in gram_clients(line)[0]}
    assert np.diagonal(cosine) == pytest.approx(1)
    assert diagnose_all([large])


def test_of_sampled_clients_the_first_have_their_cosines_drawn(large):
    """Clients' numbers go beyond how many were ever drawn; once the chart was then left out."""
    assert max(max(line["sampled"]) for line in large.conflict.lines) >= len(large.client_names)
    chart = cosine_chart([large])
    assert chart is not None
    assert len(large.client_names) > MOST_CLIENTS


def test_older_records_have_the_matrix_of_all_clients():
    line = {"clients": ["a", "b"], "weights": [0.25, 0.75], "gram": [[1, 0], [0, 1]]}
    assert gram_clients(line) == (["a", "b"], [0.25, 0.75])


def test_label_counts_of_some_clients_are_rows_of_the_whole():
    federation = load(DataSpec(dataset="digits", clients=7, alpha=0.3))
    whole = federation.label_counts()
    expected = [np.bincount(federation.labels[c.train], minlength=10) for c in federation.clients]
    assert np.array_equal(whole, expected)
    assert np.array_equal(federation.label_counts(["client_6", "client_1"]), whole[[5, 0]])
    assert federation.label_counts([]).shape == (0, 10)


def test_shared_memory_leaves_no_copy_of_itself_in_this_process():
    def own_memory():
        facts = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        return next(int(line.split()[1]) for line in facts if line.startswith("Anonymous:")) << 10

    tune_process()
    before, size = own_memory(), 128 << 20
    shared = _zeros((size // 4,), shared=True)
    assert shared.is_shared()
    assert not shared[::4096].any()
    assert own_memory() - before < size / 2


def test_clients_travel_as_a_few_arrays_and_arrive_as_they_were():
    federation = load(DataSpec(dataset="fundus-sim", samples=300, clients=6))
    away = Client(name="away", train=NO_IMAGES, test=federation.test[:3], elsewhere=(4, 5))
    sent = replace(federation, clients=(*federation.clients, away))
    again = pickle.loads(pickle.dumps(sent))
    assert again.fingerprint() == sent.fingerprint()
    for one, other in zip(sent.clients, again.clients, strict=True):
        assert (one.name, one.elsewhere, one.size) == (other.name, other.elsewhere, other.size)
        for kind in ("train", "test", "validation"):
            assert np.array_equal(getattr(one, kind), getattr(other, kind))
    assert again.client("away").size == 9


def test_ten_thousand_clients_are_small_on_their_way():
    rows = np.arange(20_000).reshape(-1, 2)
    clients = [Client(name=f"client_{i}", train=row, test=NO_IMAGES) for i, row in enumerate(rows)]
    assert len(pickle.dumps(pack(clients))) < 80 * len(clients)  # names, three counts, two positions
    assert unpack(pack([])) == ()
