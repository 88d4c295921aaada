"""A run from start to end: the records, and the same bits for any number of workers."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedld.config.resolve import make_data_spec, make_method
from fedld.data import load
from fedld.engine.loop import run
from fedld.engine.network import divided
from fedld.engine.setup import sample
from fedld.errors import FedLDError
from fedld.records.schema import CLIENTS, CROSS_LOSS, ROUNDS
from fedld.records.writer import read_lines


def test_the_records_say_what_happened(small, tmp_path):
    experiment = small(method="fedld", sample_rate=0.5, rounds=3)
    summary = run(experiment, tmp_path / "run")
    rounds = read_lines(tmp_path / "run", ROUNDS)
    clients = read_lines(tmp_path / "run", CLIENTS)
    assert [line["round"] for line in rounds] == [1, 2, 3]
    for key in ("update_norm", "cosine_to_average", "seconds"):
        assert all(math.isfinite(line[key]) for line in rounds), key
    for key in ("accuracy", "auroc", "balanced_accuracy", "loss"):
        assert all(math.isfinite(line["test"][key]) for line in rounds), key
    assert len(clients) == 6
    for key in ("size", "label_counts", "before", "after", "update_norm", "cosine_to_aggregate"):
        assert all(key in line for line in clients), key
    assert all(sum(line["label_counts"]) == line["size"] for line in clients)
    assert np.mean([line["after"]["loss"] - line["before"]["loss"] for line in clients]) < 0
    assert summary["test"]["final"]["accuracy"] == rounds[-1]["test"]["accuracy"]
    assert summary["test"]["best"]["accuracy"] == max(line["test"]["accuracy"] for line in rounds)
    assert summary["test"]["last5"]["accuracy"] == pytest.approx(
        np.mean([line["test"]["accuracy"] for line in rounds])
    )
    assert {"rounds", "seconds", "method", "dataset", "seed", "version"} <= set(summary)
    confusion = json.loads((tmp_path / "run/predictions.json").read_text())["confusion"]
    assert np.trace(confusion) / np.sum(confusion) == pytest.approx(rounds[-1]["test"]["accuracy"])


def test_the_saved_model_has_ordinary_names_shapes_and_dtypes(small, tmp_path):
    experiment = small(model="resnet8", rounds=1)
    run(experiment, tmp_path / "run")
    saved = load_file(tmp_path / "run/model.safetensors")
    method = make_method(experiment)
    expected = divided(experiment, method, load(make_data_spec(experiment)))[1].state_dict()
    assert {k: v.shape for k, v in saved.items()} == {k: tuple(v.shape) for k, v in expected.items()}
    counters = [v for k, v in saved.items() if k.endswith("num_batches_tracked")]
    assert counters
    assert all(c.dtype == np.int64 and c > 0 for c in counters)


def test_any_number_of_workers_gives_the_same_bytes(small, tmp_path, contents):
    settings = {"method": "fedld", "model": "resnet8", "rounds": 2, "decompose": 1}
    for workers in (0, 1, 2):
        run(small(**settings, workers=workers), tmp_path / str(workers))
    one = contents(tmp_path / "1")
    assert one["model"] is not None
    assert one == contents(tmp_path / "2")
    assert one == contents(tmp_path / "0")


def test_sampling_is_by_rate_or_number_and_by_round(small):
    names = list("abcdefghij")
    assert sample(small(), names, 1) == names
    assert len(sample(small(sample_rate=0.25), names, 1)) == 2
    assert len(sample(small(sample_clients=3), names, 1)) == 3
    assert sample(small(sample_rate=0.01), names, 1)
    draws = {tuple(sample(small(sample_clients=3), names, r)) for r in range(20)}
    assert len(draws) > 10
    with pytest.raises(FedLDError, match="cannot sample 12 of 10"):
        sample(small(sample_clients=12), names, 1)


def test_bad_data_leaves_no_directory(small, tmp_path):
    with pytest.raises(FedLDError):
        run(small(dataset=f"npz:{tmp_path}/missing.npz"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_directory_with_a_run_is_refused_and_untouched(small, tmp_path, contents):
    run(small(rounds=1), tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(FedLDError, match="already holds a run"):
        run(small(rounds=2), tmp_path / "run")
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("buffers", ["global", "local", "frozen"])
def test_the_buffer_policy_decides_who_keeps_batchnorm_statistics(small, tmp_path, buffers):
    run(small(model="resnet8", buffers=buffers, rounds=1), tmp_path / "run")
    mean = load_file(tmp_path / "run/model.safetensors")["bn1.running_mean"]
    states = list((tmp_path / "run/states").glob("*.state"))
    assert np.any(mean != 0) == (buffers != "frozen")  # the statistics start at 0
    assert bool(states) == (buffers == "local")


def test_one_client_and_a_single_class_client_are_fine(small, tmp_path):
    summary = run(small(method="fedld", clients=1, partition="iid", rounds=1), tmp_path / "one")
    assert summary["clients"] == 1
    classes = small(method="fedld", partition="classes", classes_per_client=1, clients=10, rounds=1)
    assert np.isfinite(run(classes, tmp_path / "classes")["test"]["final"]["loss"])
    lines = read_lines(tmp_path / "classes", CLIENTS)
    assert all(np.count_nonzero(line["label_counts"]) == 1 for line in lines)


def test_the_identity_of_the_decomposition_holds_on_a_sampled_run(small, tmp_path):
    run(small(method="fedld", sample_rate=0.5, decompose=2, rounds=4), tmp_path / "run")
    rounds = read_lines(tmp_path / "run", ROUNDS)
    decomposed = [line for line in rounds if "local_loss" in line]
    assert [line["round"] for line in decomposed] == [1, 2, 4]
    matrices = read_lines(tmp_path / "run", CROSS_LOSS)
    for line, matrix in zip(decomposed, matrices, strict=True):
        p = np.array(matrix["sizes"]) / sum(matrix["sizes"])
        total = line["local_loss"] + line["shift_loss"] + line["aggregation_loss"]
        assert total == pytest.approx(p @ matrix["global_losses"], rel=1e-9)
        assert np.shape(matrix["cross_loss"]) == (4, 2)


def test_losses_that_come_with_training_equal_those_measured_for_the_decomposition(small, tmp_path):
    """`client_losses = false` measures every entry by itself; the default reuses what training measured."""
    for losses in (True, False):
        run(small(decompose=1, rounds=2, client_losses=losses), tmp_path / str(losses))
    reused, measured = (read_lines(tmp_path / str(x), CROSS_LOSS) for x in (True, False))
    for one, other in zip(reused, measured, strict=True):
        assert one["global_losses"] == other["global_losses"]
        # a local model is sent as w + (w_i - w), which rounds
        np.testing.assert_allclose(one["cross_loss"], other["cross_loss"], rtol=1e-5)


def test_an_estimated_decomposition_comes_with_standard_errors(small, tmp_path):
    run(small(decompose=1, decompose_samples=40, rounds=1), tmp_path / "estimate")
    run(small(decompose=1, rounds=1), tmp_path / "exact")
    estimate, exact = (
        json.loads((tmp_path / name / "cross_loss.jsonl").read_text()) for name in ("estimate", "exact")
    )
    assert exact["standard_errors"] is None
    line = json.loads((tmp_path / "estimate/rounds.jsonl").read_text())
    assert 0 < line["shift_loss_error"] < 1
    z = np.subtract(estimate["cross_loss"], exact["cross_loss"]) / np.array(estimate["standard_errors"])
    assert 0.01 < np.abs(z).mean() < 2.5


SCRIPT = """
from dataclasses import dataclass
from pathlib import Path
from fedld.config.experiment import make_experiment
from fedld.engine.loop import run
{own}
settings = {{"method": "{name}", "rounds": 1, "dataset": "digits", "clients": 2, "workers": 1}}
{guard}print(run(make_experiment(settings), Path("out"))["rounds"])
"""
OWN = """
from fedld.methods import METHODS, FedAvg
@dataclass(frozen=True)
class Mine(FedAvg):
    pass
METHODS["mine"] = Mine()
"""


@pytest.mark.parametrize(
    ("name", "own", "guard", "says"),
    [
        ("fedavg", "", "", "1"),
        ("mine", OWN, "if __name__ == '__main__': ", "1"),
        ("mine", OWN, "", "outside `if __name__ == '__main__':`"),
    ],
)
def test_a_script_runs_with_workers(name, own, guard, says, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(name=name, own=own, guard=guard))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert says in (done.stdout + done.stderr).splitlines()[-1], done.stderr
