"""TLS, node keys, three sites: the same experiment on Flower and on this machine gives the same model."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load, load_file

from fedld.config.experiment import make_experiment
from fedld.deployment.control import Control, flower_defaults, submit
from fedld.deployment.keys import make_site_key
from fedld.engine import worker
from fedld.engine.backends.flower.disclosure import SiteDraws
from fedld.engine.backends.flower.limits import Limits
from fedld.engine.loop import quiet, run
from fedld.records.writer import read_checksummed

METHODS = {
    "fedavg": {"decompose": 1},
    "fedld": {},
    "fedbn": {"model": "resnet8"},
    "scaffold": {"momentum": 0.0},
    "fediir": {},
    "fednova": {
        **{"model": "resnet8", "train": "last:2", "buffers": "frozen"},
        **{"steps": "centred", "average_models": 0.5},
    },
    "fedld-drift": {"rule": {"name": "measured", "unseen": 0.3, "samples": 80}},
    "fedprox": {"model": "resnet8", "train": "head"},
}
COMMON = {"clients": 3, "rounds": 2, "seed": 3, "lr": 0.05}
SUPERNODE = str(Path(sys.executable).with_name("flower-supernode"))


def options(settings):
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def finished(secure, digits):
    """All methods at once: runs do not disturb each other.

    A site draws by a number of its own which images sit a round out; here it is the experiment's seed.
    """
    for site in secure.sites:
        file = secure.folder / "state" / site / "seed"
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
        file.write_text(str(COMMON["seed"]))

    def one(name):
        settings = COMMON | METHODS[name] | {"method": name, "dataset": f"npz:{digits}/test.npz"}
        submit(
            secure.folder / "runs",
            secure.folder / "runs" / name,
            make_experiment(flower_defaults(settings)),
            quiet,
        )

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as threads:
        for key, value in secure.environment.items():
            patch.setenv(key, value)
        list(threads.map(one, METHODS))
    return secure


@pytest.fixture
def as_a_site(monkeypatch):
    """Let this machine draw what is measured as a site does: with enough images of every class."""
    draws = lambda setup, seed: SiteDraws(setup, seed, Limits(min_images=2))  # noqa: E731
    monkeypatch.setattr(worker, "Draws", draws)


@pytest.mark.parametrize("name", METHODS)
def test_the_model_is_the_local_engines(finished, digits, tmp_path, name, as_a_site):
    settings = COMMON | METHODS[name] | {"method": name, "dataset": f"npz:{digits}/all.npz", "workers": 0}
    run(make_experiment(settings), tmp_path / "local")
    ours, theirs = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "local", finished.folder / "runs" / name)
    )
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.equal(theirs[key]), key


def close(ours, theirs):
    """Whether records are the same: sites round losses to three decimals, and terms are differences."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(close(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    return ours == theirs or (isinstance(ours, float) and ours == pytest.approx(theirs, abs=1.01e-3))


def test_the_records_are_the_local_engines(finished, digits, tmp_path):
    settings = COMMON | METHODS["fedavg"] | {"dataset": f"npz:{digits}/all.npz", "workers": 0}
    run(make_experiment(settings), tmp_path / "local")
    for name in ("rounds.jsonl", "clients.jsonl", "cross_loss.jsonl", "conflict.jsonl"):
        ours = [json.loads(line) for line in (tmp_path / "local" / name).read_text().splitlines()]
        theirs = finished.records("fedavg", name)
        for line in (*ours, *theirs):
            for key in ("seconds", "digest"):
                line.pop(key, None)
        assert close(ours, theirs)
        if name == "conflict.jsonl":
            assert ours == theirs


def test_only_what_is_trained_is_on_the_wire(finished):
    summary = json.loads((finished.folder / "runs" / "fedprox" / "summary.json").read_text())
    moments = 2 * 64  # of the head's inputs: sums in float64 before the first round, fixed numbers afterwards
    tail = 4 * (summary["trained_parameters"] + moments)
    assert summary["bytes_up"] == 3 * (2 * tail + 8 * (moments + 1))
    assert summary["bytes_down"] == 3 * 3 * tail
    assert 50 * summary["trained_parameters"] < summary["parameters"]


def test_states_are_at_the_sites_and_nowhere_else(finished):
    for site in finished.sites:
        kept = [
            load(read_checksummed(path))
            for path in (finished.folder / "state" / site).glob("*/states/*.state")
        ]
        assert any("private" in state for state in kept)
        assert any("private" not in state for state in kept)
    assert not list((finished.folder / "runs").glob("**/client_*"))


def test_status_and_ledgers_of_a_consortium_at_work(finished):
    done = finished.call(finished.fedld, "site", "status", "--name", "alpha", "--state", "state")
    assert "lines, whole" in done.stdout
    assert "lines are whole" in finished.call(finished.fedld, "ledger", "verify", "runs").stdout
    assert finished.call(finished.fedld, "server", "status").stdout.count(": online since") == 3


def test_strangers_are_refused(secure):
    """A key that nobody registered, and a node without TLS."""
    make_site_key("mallory", secure.folder / "keys")
    secure.start_site("mallory", data=secure.data / "beta.npz")
    assert secure.processes.pop("mallory").wait(60) == 2
    said = secure.log("mallory")
    assert "the key of 'mallory' is not registered" in said
    assert "Traceback" not in said
    secure.start(
        "plain", SUPERNODE, "--insecure", "--superlink", f"127.0.0.1:{secure.port}", "--max-retries", "1"
    )
    assert secure.processes.pop("plain").wait(60) != 0
    assert [node.status for node in Control(secure.folder / "runs").nodes()] == ["online"] * 3


def test_a_killed_server_resumes(secure, digits, tmp_path):
    settings = COMMON | {"rounds": 3, "method": "scaffold", "momentum": 0.0}
    words = options(settings | {"dataset": f"npz:{digits}/test.npz"})
    submitted = secure.submit("run-killed", "killed", *words)
    secure.wait(lambda: secure.records("killed", "clients.jsonl"), 120)
    secure.kill("server")
    assert submitted.wait(60) == 2
    assert "--resume" in secure.log("run-killed")
    secure.start_server()
    resumed = secure.submit("run-resumed", "killed", "--resume")
    assert resumed.wait(300) == 0, secure.log("run-resumed")
    run(make_experiment(settings | {"dataset": f"npz:{digits}/all.npz", "workers": 0}), tmp_path / "local")
    ours = load_file(tmp_path / "local" / "model.safetensors")
    theirs = load_file(secure.folder / "runs" / "killed" / "model.safetensors")
    assert all(value.equal(theirs[key]) for key, value in ours.items())
