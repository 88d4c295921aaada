"""A finished run goes on, a saved configuration repeats from elsewhere, a bug leaves its traceback."""

from dataclasses import dataclass

import numpy as np
import pytest

from fedld.config.experiment import make_experiment, read_toml
from fedld.engine.loop import resume, run
from fedld.errors import FedLDError
from fedld.local import LocalClient, Reply
from fedld.methods import METHODS, FedAvg


def test_a_finished_run_given_more_rounds_ends_as_if_begun_with_them(small, tmp_path, contents):
    run(small(rounds=3, clients=3, decompose=2), tmp_path / "long")
    run(small(rounds=2, clients=3, decompose=2), tmp_path / "short")
    assert resume(tmp_path / "short", rounds=3)["rounds"] == 3
    assert contents(tmp_path / "short") == contents(tmp_path / "long")
    assert (tmp_path / "short/config.toml").read_text() == (tmp_path / "long/config.toml").read_text()
    with pytest.raises(FedLDError, match="has 3 rounds, which cannot become 2"):
        resume(tmp_path / "short", rounds=2)


def test_a_saved_configuration_names_its_files_from_the_root(tmp_path, monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (90, 8, 8), np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=np.arange(90) % 3)
    monkeypatch.chdir(tmp_path)
    settings = {"dataset": "npz:own.npz", "clients": 2, "rounds": 1, "workers": 0}
    first = run(make_experiment(settings), tmp_path / "first")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = run(make_experiment(read_toml(tmp_path / "first/config.toml")), tmp_path / "again")
    assert again["test"]["final"]["accuracy"] == first["test"]["final"]["accuracy"]


@dataclass(frozen=True)
class Broken(FedAvg):
    """A method with a bug."""

    def client_update(self, client: LocalClient) -> Reply:
        return {}["a key that is not there"]


def test_a_bug_in_a_method_is_kept_with_its_traceback(small, tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "broken", Broken())
    with pytest.raises(FedLDError, match="client_1' failed in round 1: KeyError") as caught:
        run(small(method="broken"), tmp_path / "run")
    assert "in client_update" in caught.value.__notes__[0]
    assert 'return {}["a key that is not there"]' in (tmp_path / "run/failures.log").read_text()
