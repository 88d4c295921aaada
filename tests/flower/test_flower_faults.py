"""Sites that vanish in the middle of a round: the run goes on, or stops with a checkpoint; it never hangs."""

import json

import pytest
from safetensors.torch import load_file

from fedld.engine.experiment import make_experiment
from fedld.engine.loop import run

SITES = ("alpha", "beta", "gamma")
SETTINGS = {"clients": 3, "seed": 5, "lr": 0.05, "momentum": 0.0, "method": "scaffold"}


@pytest.fixture(scope="module")
def insecure(consortium):
    made = consortium(secure=False)
    for site in SITES:
        made.start_site(site)
    return made


def start(consortium, name, **settings):
    settings = SETTINGS | settings | {"dataset": f"npz:{consortium.data}/test.npz"}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return consortium.submit(f"run-{name}", name, *words)


def test_a_killed_site_is_left_out_and_comes_back_with_its_state(insecure):
    process = start(insecure, "left-out", rounds=4, round_timeout=30)
    insecure.wait(lambda: insecure.records("left-out", "clients.jsonl"), 180)
    insecure.kill("beta")  # round 2 has begun: its order is on the way
    insecure.start_site("beta")
    assert process.wait(400) == 0, insecure.log("run-left-out")
    lines = [line for line in insecure.records("left-out", "clients.jsonl") if line["client"] == "beta"]
    assert ["excluded" in line for line in lines][:2] == [False, True]
    assert "excluded" not in lines[-1]
    assert [line["clients"] for line in insecure.records("left-out", "rounds.jsonl")][:2] == [3, 2]


def test_below_quorum_the_run_stops_and_can_be_resumed(insecure, digits, tmp_path):
    process = start(insecure, "lone", rounds=3, round_timeout=40, wait_for_clients=40, min_clients=3)
    insecure.wait(lambda: insecure.records("lone", "clients.jsonl"), 180)
    insecure.kill("beta")
    insecure.kill("gamma")
    assert process.wait(300) == 2
    said = insecure.log("run-lone")
    assert all(word in said for word in ("round 2", "beta", "gamma", "--resume"))
    assert {line["round"] for line in insecure.records("lone", "clients.jsonl")} == {1}
    insecure.start_site("beta")
    insecure.start_site("gamma")
    assert insecure.submit("resumed", "lone", "--resume").wait(300) == 0, insecure.log("resumed")
    here = SETTINGS | {"rounds": 3, "dataset": f"npz:{digits}/all.npz", "workers": 0}
    run(make_experiment(here), tmp_path / "local")
    ours = load_file(tmp_path / "local" / "model.safetensors")
    theirs = load_file(insecure.folder / "runs" / "lone" / "model.safetensors")
    assert all(value.equal(theirs[key]) for key, value in ours.items())


def test_somebody_elses_app_is_not_run(insecure, tmp_path):
    """Whoever reaches the SuperLink may submit an app; ours runs fedld and nothing else."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "trojan"\nversion = "1.0.0"\nlicense = "Apache-2.0"\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "mallory"\n'
        '[tool.flwr.app.components]\nserverapp = "trojan:app"\nclientapp = "trojan:app"\n'
    )
    (tmp_path / "trojan.py").write_text(f"open({str(tmp_path / 'open')!r}, 'w')\napp = None\n")
    insecure.call("flwr", "run", str(tmp_path), "test", "--stream", check=False)
    listed = json.loads(insecure.call("flwr", "list", "test", "--format", "json").stdout)
    assert "finished:failed" in json.dumps(listed)
    assert not (tmp_path / "open").exists()
