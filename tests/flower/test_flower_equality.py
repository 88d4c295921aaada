"""TLS, node keys, three sites: the same experiment on Flower and on this machine gives the same model."""

import json
import subprocess

import pytest
from safetensors.torch import load_file

from fedld.engine.experiment import make_experiment
from fedld.engine.loop import run

METHODS = {
    "fedavg": {"decompose": 1},
    "fedld": {},
    "fedbn": {"model": "resnet8"},
    "scaffold": {"momentum": 0.0},
}
COMMON = {"clients": 3, "rounds": 2, "seed": 3, "lr": 0.05}
SITES = ("alpha", "beta", "gamma")


def options(settings):
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def secure(consortium):
    made = consortium(secure=True)
    for site in SITES:
        made.register(site)
        made.start_site(site)
    return made


@pytest.fixture(scope="module")
def finished(secure, digits):
    """All methods at once: runs do not disturb each other."""
    runs = {}
    for name, settings in METHODS.items():
        words = options(COMMON | settings | {"method": name, "dataset": f"npz:{digits}/test.npz"})
        runs[name] = secure.submit(f"run-{name}", name, *words)
    for name, process in runs.items():
        assert process.wait(300) == 0, secure.log(f"run-{name}")
    return secure


@pytest.mark.parametrize("name", METHODS)
def test_the_model_is_the_local_engines(finished, digits, tmp_path, name):
    settings = COMMON | METHODS[name] | {"method": name, "dataset": f"npz:{digits}/all.npz", "workers": 0}
    run(make_experiment(settings), tmp_path / "local")
    ours, theirs = (
        load_file(path / "model.safetensors") for path in (tmp_path / "local", finished.folder / "runs" / name)
    )
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.equal(theirs[key]), key


def test_the_records_are_the_local_engines(finished, digits, tmp_path):
    settings = COMMON | METHODS["fedavg"] | {"dataset": f"npz:{digits}/all.npz", "workers": 0}
    run(make_experiment(settings), tmp_path / "local")
    for name in ("rounds.jsonl", "clients.jsonl", "cross_loss.jsonl", "conflict.jsonl"):
        ours = [json.loads(line) for line in (tmp_path / "local" / name).read_text().splitlines()]
        theirs = finished.records("fedavg", name)
        for line in (*ours, *theirs):
            line.pop("seconds", None)
        assert ours == theirs


def test_private_parts_stay_at_the_site(finished):
    for site in SITES:
        (run_folder,) = [
            path for path in (finished.folder / "state" / site).iterdir() if any(path.glob("states/*private*"))
        ] or [None]
        del run_folder
    rounds = finished.records("fedbn", "rounds.jsonl")
    shared = rounds[0]["bytes_up"]
    model = load_file(finished.folder / "runs" / "fedbn" / "model.safetensors")
    assert shared < 3 * 4 * sum(value.numel() for value in model.values())


def test_strangers_are_refused(secure):
    secure.make_key("mallory")
    secure.start_site("mallory", data=secure.data / "beta.npz")
    assert secure.processes.pop("mallory").wait(60) != 0
    plain = secure.start
    plain("plain", *secure.plain_node())
    with pytest.raises(subprocess.TimeoutExpired):
        secure.processes["plain"].wait(10)
    listed = secure.call(*secure.flwr("supernode", "list", "test", "--format", "json")).stdout
    online = [node for node in json.loads(listed)["nodes"] if node["status"] == "online"]
    assert len(online) == 3


def test_a_killed_server_resumes(secure, digits, tmp_path):
    settings = COMMON | {"rounds": 3, "method": "scaffold", "momentum": 0.0}
    words = options(settings | {"dataset": f"npz:{digits}/test.npz"})
    submitted = secure.submit("run-killed", "killed", *words)
    secure.wait(lambda: secure.records("killed", "clients.jsonl"), 120)
    secure.kill("server")
    assert submitted.wait(60) == 2
    assert "--resume" in secure.log("run-killed")
    secure.start_server()
    secure.run("killed", "--resume")
    run(make_experiment(settings | {"dataset": f"npz:{digits}/all.npz", "workers": 0}), tmp_path / "local")
    ours = load_file(tmp_path / "local" / "model.safetensors")
    theirs = load_file(secure.folder / "runs" / "killed" / "model.safetensors")
    assert all(value.equal(theirs[key]) for key, value in ours.items())
