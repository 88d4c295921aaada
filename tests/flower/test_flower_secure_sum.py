"""Real processes: a secure sum over five sites with TLS and pinned keys, one of them killed in mid-round."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from fedld.deployment.keys import make_peer_key, make_site_key
from fedld.deployment.launch import registrations_file
from fedld.deployment.registrations import Registrations
from fedld.privacy.peers import merged_peers, peers_text

HERE = Path(__file__).parent
FIVE = ("alpha", "beta", "delta", "gamma", "omega")
POLICY = 'updates = "summed"\nmin_sites = 4\nsmallest_count = 2\n'


@pytest.fixture(scope="module")
def five(tmp_path_factory, consortium):
    """Five sites with pinned keys and digits of their own; omega is not started yet."""
    folder = tmp_path_factory.mktemp("five")
    found, rng = load_digits(), np.random.default_rng(1)
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)
    parts = np.split(rng.permutation(len(images))[:400], [50, 110, 190, 240, 300])
    for name, part in zip((*FIVE, "test"), parts, strict=True):
        classes = np.array(list("0123456789"))
        np.savez(folder / f"{name}.npz", images=images[part], labels=found.target[part], classes=classes)
    made = consortium(folder / "consortium", folder, secure=True)
    made.start_server()
    registrations = Registrations(registrations_file(made.folder / "runs"))
    for name in FIVE:
        make_site_key(name, made.folder / "keys")
        make_peer_key(name, made.folder / "keys")
        registrations.add(name, made.folder / "keys" / f"{name}.pub")
    keys = merged_peers(made.folder / "keys" / f"{name}.peer.toml" for name in FIVE)
    (made.folder / "peers.toml").write_text(peers_text(keys))
    (made.folder / "policy.toml").write_text(POLICY)
    for name in FIVE[:-1]:
        # One site lets its updates leave in secure sums only.
        policy = ("--policy", "policy.toml") if name == "beta" else ()
        made.start_site(name, "--peers", "peers.toml", *policy)
    yield made
    made.close()


def play(five, out, dies_at, *options):
    """A run of fedld-drift in which omega is killed at a message; gives the final weights and the round."""
    program = [sys.executable, str(HERE / "dying_site.py"), str(dies_at)]
    five.start_site("omega", "--peers", "peers.toml", program=program)
    settings = {"dataset": f"npz:{five.data}/test.npz", "clients": 5, "rounds": 1, "lr": 0.05}
    settings |= {"method": "fedld-drift", "client_losses": "false", "canary": "false", "grace": 20}
    settings |= {"rule.rules": "mean", "rule.vote": "mean", "rule.samples": 40}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    run = five.submit(out, out, "--rule", "measured", *words, *options)
    code = run.wait(400)
    five.processes.pop("omega").wait(60)
    (line,) = five.records(out, "rounds.jsonl")
    assert code == 0, five.log(out)
    model = load_file(five.folder / "runs" / out / "model.safetensors")
    return torch.cat([tensor.double().flatten() for _, tensor in sorted(model.items())]), line


def test_fedld_drift_is_summed_on_five_sites_of_which_one_is_killed(five):
    """The model is that of a plain run of the four that stayed."""
    summed, line = play(five, "summed", 3, "--secure", "sum")
    assert list(line["missing"]) == ["omega"]
    assert line["choices"]["step"] > 0  # candidates were measured and summed, too
    assert "conflict" not in {file.stem for file in (five.folder / "runs" / "summed").iterdir()}
    five.kill("beta")
    five.start_site("beta", "--peers", "peers.toml")  # without the policy, which refuses plain runs
    plain, other = play(five, "plain", 1)
    assert list(other["missing"]) == ["omega"]
    assert (summed - plain).abs().max() < 1e-6
    assert (summed != 0).any()
