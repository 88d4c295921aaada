"""Sites that vanish in the middle of a round: the run goes on, or stops with a checkpoint; it never hangs."""

import hashlib
import re

from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.supercore.fab import Fab
from safetensors.torch import load_file

from fedld.config.experiment import make_experiment
from fedld.deployment.control import Control
from fedld.engine.loop import run

SETTINGS = {"clients": 3, "seed": 5, "lr": 0.05, "momentum": 0.0, "method": "scaffold"}


def start(consortium, name, *options, **settings):
    settings = SETTINGS | settings | {"dataset": f"npz:{consortium.data}/test.npz"}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return consortium.submit(f"run-{name}", name, *words, *options)


def test_a_killed_site_is_left_out_and_comes_back_with_its_state(secure):
    process = start(secure, "left-out", "--require-all", rounds=6, round_timeout=60)
    secure.wait(lambda: secure.records("left-out", "clients.jsonl"), 180)
    secure.kill("beta")  # round 2 has begun: its order is on the way, or on a busy machine already answered
    secure.start_site("beta")
    assert process.wait(400) == 3, secure.log("run-left-out")
    said = secure.log("run-left-out")
    assert re.search(r"'beta' was missing in \d of\s6\srounds \(away: \d\)", said)
    lines = [line for line in secure.records("left-out", "clients.jsonl") if line["client"] == "beta"]
    first = next(line["round"] for line in lines if "excluded" in line)
    assert first > 1
    assert "excluded" not in lines[-1]
    assert f"round {first} is without 'beta': away" in said
    rounds = secure.records("left-out", "rounds.jsonl")
    assert rounds[first - 1]["missing"] == {"beta": "away"}
    assert [line["clients"] for line in rounds[first - 2 : first]] == [3, 2]


def test_below_quorum_the_run_stops_and_can_be_resumed(secure, digits, tmp_path):
    process = start(secure, "lone", rounds=2, round_timeout=40, wait_for_clients=40, min_clients=3)
    secure.wait(lambda: secure.records("lone", "clients.jsonl"), 180)
    secure.kill("beta")
    secure.kill("gamma")
    assert process.wait(300) == 2
    said = secure.log("run-lone")
    assert all(word in said for word in ("round 2", "beta", "gamma", "--resume"))
    assert {line["round"] for line in secure.records("lone", "clients.jsonl")} == {1}
    secure.start_site("beta")
    secure.start_site("gamma")
    resumed = secure.submit("resumed", "lone", "--wait-for-clients", "200", "--resume")
    assert resumed.wait(300) == 0, secure.log("resumed")
    here = SETTINGS | {"rounds": 2, "dataset": f"npz:{digits}/all.npz", "workers": 0}
    run(make_experiment(here), tmp_path / "local")
    ours = load_file(tmp_path / "local" / "model.safetensors")
    theirs = load_file(secure.folder / "runs" / "lone" / "model.safetensors")
    assert all(value.equal(theirs[key]) for key, value in ours.items())


def test_somebody_elses_app_is_not_run(secure, tmp_path):
    """Even what the operator submits is not run unless it is fedld."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "trojan"\nversion = "1.0.0"\nlicense = "Apache-2.0"\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "mallory"\n'
        '[tool.flwr.app.components]\nserverapp = "trojan:app"\nclientapp = "trojan:app"\n'
    )
    (tmp_path / "trojan.py").write_text(f"open({str(tmp_path / 'open')!r}, 'w')\napp = None\n")
    control, content = Control(secure.folder / "runs"), build_fab_from_disk(tmp_path)
    fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
    run_id = control._client.StartRun(StartRunRequest(fab=fab)).run_id
    assert '"event":"error"' in "".join(control.follow(run_id))
    assert not (tmp_path / "open").exists()
