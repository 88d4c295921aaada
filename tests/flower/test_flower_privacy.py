"""Real processes: differential privacy across sites, with noise and ledgers of the sites' own."""

import json

import pytest
from safetensors.torch import load_file

from fedld.config.experiment import make_experiment
from fedld.deployment.control import flower_defaults, submit
from fedld.engine.loop import quiet, run

pytest.importorskip("opacus")


def test_sites_add_noise_that_the_seed_does_not_tell_and_keep_their_ledgers(
    secure, digits, tmp_path, monkeypatch
):
    settings = {"clients": 3, "rounds": 1, "local_steps": 2, "lr": 0.05, "client_losses": False}
    settings |= {"dp": "epsilon=8,delta=1e-5,clip=1", "min_clients": "all"}
    run(make_experiment(settings | {"dataset": f"npz:{digits}/all.npz", "workers": 0}), tmp_path / "local")
    for key, value in secure.environment.items():
        monkeypatch.setenv(key, value)
    out = secure.folder / "runs" / "private"
    asked = settings | {"dataset": f"npz:{digits}/test.npz"}
    submit(secure.folder / "runs", out, make_experiment(flower_defaults(asked)), quiet)
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "local", out))
    assert not any(ours[key].equal(theirs[key]) for key in ours if key.endswith("weight"))
    for site in secure.sites:
        (line,) = (secure.folder / "state" / site / "privacy.jsonl").read_text().splitlines()
        assert json.loads(line)["steps"] == 2
