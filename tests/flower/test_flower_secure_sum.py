"""Real processes: secure rounds over five sites with TLS and pinned keys, two of them killed in mid-round."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from tests.flower.test_flower_secure_rounds import MEAN, SecureGrid, run, same_sketch

from fedld.deployment.keys import make_peer_key, make_site_key
from fedld.deployment.launch import registrations_file
from fedld.deployment.registrations import Registrations
from fedld.privacy.peers import merged_peers, peers_text

HERE = Path(__file__).parent
FIVE = ("alpha", "beta", "delta", "gamma", "omega")
POLICY = 'updates = "summed"\nmin_sites = 3\nsmallest_count = 2\n'


@pytest.fixture(scope="module")
def five(tmp_path_factory, consortium):
    """Five sites with pinned keys and digits of their own; delta and omega are not started yet."""
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
    (folder / "peers.toml").write_text(peers_text(keys))
    for name in FIVE:
        shutil.copy(made.folder / "keys" / f"{name}.peer.key", folder)
    (made.folder / "policy.toml").write_text(POLICY)
    for name in ("alpha", "beta", "gamma"):
        # One site lets its updates leave in secure sums only.
        policy = ("--policy", "policy.toml") if name == "beta" else ()
        made.start_site(name, "--peers", "peers.toml", *policy)
    yield made
    made.close()


def settings_words(**settings):
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def start_dying(five, site, message):
    """Start a site that is killed at a message."""
    program = [sys.executable, str(HERE / "dying_site.py"), message]
    five.start_site(site, "--peers", "peers.toml", program=program)


def restart(five, site, policy):
    """Start a site again with a policy of its own."""
    five.kill(site)
    (five.folder / "policy.toml").write_text(policy)
    five.start_site(site, "--peers", "peers.toml", "--policy", "policy.toml")


def model(run):
    arrays = load_file(run / "model.safetensors")
    return torch.cat([tensor.double().flatten() for _, tensor in sorted(arrays.items())])


COMMON = {"clients": 5, "rounds": 1, "lr": 0.05, "client_losses": "false", "dry_run": "false", "grace": 15}
DRIFT = {"method": "fedld-drift", **MEAN}
DRIFT_WORDS = ("--method", "fedld-drift", "--rule", "measured", "--set", "rule.rules=mean")
DRIFT_WORDS = (*DRIFT_WORDS, "--set", "rule.vote=mean", "--set", "rule.samples=40")


def play(five, out, dying, *options):
    """A run in which sites are killed at messages; gives the final weights and the round."""
    for site, message in dying.items():
        start_dying(five, site, message)
    words = settings_words(dataset=f"npz:{five.data}/test.npz", **COMMON)
    run = five.submit(out, out, *words, *options)
    code = run.wait(400)
    for site in dying:
        five.processes.pop(site).wait(60)
    assert code == 0, five.log(out)
    (line,) = five.records(out, "rounds.jsonl")
    assert list(line["missing"]) == ["omega"]
    return model(five.folder / "runs" / out), line


@pytest.fixture
def plain_weights(five, tmp_path, monkeypatch):
    """Gives the final weights of a plain run without omega, over the sites' real message handlers."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)

    class SameDraws(SecureGrid):
        """Sites with the secret numbers of the real ones, from which they draw what is held out."""

        def __init__(self, folder, data):
            super().__init__(folder, data)
            for site in FIVE:
                shutil.copy(five.folder / "state" / site / "seed", folder / "state" / site)

    def weights(**settings):
        out, _ = run(tmp_path, five.data, {"omega": 1}, secure=None, grid=SameDraws, **settings)
        return model(out)

    return weights


def test_fedld_drift_is_summed_on_five_sites_of_which_two_are_killed(five, plain_weights):
    """omega's update is in no sum; delta leaves when its losses of candidates are in theirs."""
    summed, line = play(
        five, "summed", {"omega": "3", "delta": "candidates 4"}, "--secure", "sum", *DRIFT_WORDS
    )
    assert line["choices"]["step"] > 0  # candidates were measured and summed, too
    assert "conflict" not in {file.stem for file in (five.folder / "runs" / "summed").iterdir()}
    assert (summed - plain_weights(**DRIFT)).abs().max() < 1e-6
    assert (summed != 0).any()


def test_consensus_runs_by_a_secure_gram_matrix_on_five_sites_of_which_two_are_killed(
    five, plain_weights, monkeypatch
):
    """omega leaves the matrix, delta when its update is in the sum; the model is that of the same sketch."""
    restart(five, "beta", 'updates = "gram"\nmin_sites = 3\nsmallest_count = 2\n')
    dying = {"omega": "gram3", "delta": "5"}
    secure, _ = play(five, "gram", dying, "--secure", "gram", "--method", "consensus")
    same_sketch(monkeypatch, five.folder / "runs" / "gram")
    assert (secure - plain_weights(method="consensus")).abs().max() < 1e-6
    assert (secure != 0).any()


def test_a_private_run_of_secure_sums_ends_by_the_budget_of_one_site(five):
    """The site's policy allows the first of two rounds; the operator reads which site refused, and why."""
    pytest.importorskip("opacus")
    file = five.folder / "state" / "beta" / "policy.toml"  # the copy that the site reads
    file.write_text(file.read_text() + "epsilon = 6.0\n")
    private = {"dp": '"epsilon=8,delta=1e-5,clip=1"', "local_steps": 1}
    quorum = {"min_clients": 3, "wait_for_clients": 15}
    settings = COMMON | private | quorum | {"clients": 3, "rounds": 2, "dataset": f"npz:{five.data}/test.npz"}
    run = five.submit("private", "private", *settings_words(**settings), "--secure", "sum")
    assert run.wait(300) == 2, five.log("private")
    (line,) = five.records("private", "rounds.jsonl")
    assert line["clients"] == 3
    assert line["train_loss"] is None
    told = five.log("private")
    assert "beta: the privacy budget of this site is epsilon 6" in told
    assert "round 1 is" in told  # and how to continue with it
    assert list((five.folder / "runs" / "private" / "checkpoints").iterdir())
    for site, rounds in (("alpha", 2), ("beta", 1), ("gamma", 2)):
        ledger = (five.folder / "state" / site / "privacy.jsonl").read_text().splitlines()
        assert len(ledger) == rounds
