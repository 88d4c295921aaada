"""What an engineer types: checks, keys, safe defaults."""

import re
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from flwr.supercore.object_ref import validate
from PIL import Image
from typer.testing import CliRunner

from fedld.cli.site import server, site
from fedld.config.experiment import make_experiment
from fedld.deployment.control import flower_defaults, submit
from fedld.deployment.launch import FlowerServer, Node
from fedld.deployment.server_app import allowed
from fedld.engine.backends.flower.check import check_site
from fedld.errors import FedLDError

ROOT = Path(__file__).parents[2]
RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("FEDLD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_check_tells_what_is_there_and_what_would_leave(digits):
    result = RUNNER.invoke(site, ["check", "--data", str(digits / "alpha.npz")])
    assert result.exit_code == 0
    for words in (
        "training images: 240",
        "8 x 8, 1 channel",
        "class '3': 20",
        "what would leave",
        "never leaves",
    ):
        assert words in result.output


def test_a_policy_is_shown_and_an_unreadable_one_starts_no_site(digits, tmp_path):
    (tmp_path / "policy.toml").write_text('methods = ["fedavg"]\nupdates = "summed"')
    words = ["check", "--data", str(digits / "alpha.npz"), "--policy", str(tmp_path / "policy.toml")]
    shown = RUNNER.invoke(site, words).output
    assert "methods: fedavg" in shown
    assert "no update but in a secure sum" in shown
    (tmp_path / "policy.toml").write_text("methods = 3")
    node = Node(
        site="a",
        data=digits / "alpha.npz",
        superlink="localhost:1",
        state=tmp_path,
        insecure=True,
        policy=tmp_path / "policy.toml",
    )
    with pytest.raises(FedLDError, match="everything is refused"):
        node.start()
    assert "policy=true" in " ".join(node.words())


def test_peers_are_assembled_and_a_site_without_its_own_pin_does_not_start(digits, tmp_path):
    for name in "abc":
        assert RUNNER.invoke(site, ["peer-key", "--name", name, "--out", str(tmp_path)]).exit_code == 0
    assert stat.S_IMODE((tmp_path / "a.peer.key").stat().st_mode) == 0o600
    parts, whole = [str(tmp_path / f"{name}.peer.toml") for name in "abc"], str(tmp_path / "peers.toml")
    made = RUNNER.invoke(site, ["peers", *parts, "--out", whole]).output
    checked = RUNNER.invoke(site, ["check", "--data", str(digits / "alpha.npz"), "--peers", whole]).output
    assert made.splitlines() == checked.splitlines()[-2:]
    assert "3 sites (a, b, c)" in made
    facts = {"data": digits / "alpha.npz", "superlink": "localhost:1", "state": tmp_path, "insecure": True}
    node = Node(site="a", **facts, peers=tmp_path / "peers.toml", peer_key=tmp_path / "a.peer.key")
    assert "a.peer.key" in " ".join(node.words())
    RUNNER.invoke(site, ["peers", *parts[1:], "--out", whole])
    with pytest.raises(FedLDError, match="does not have the key of 'a' itself"):
        node.start()
    (tmp_path / "mallory.peer.toml").write_text((tmp_path / "b.peer.toml").read_text().replace('"b"', '"m"'))
    twice = RUNNER.invoke(site, ["peers", *parts, str(tmp_path / "mallory.peer.toml"), "--out", whole])
    assert "two sites have the same key" in str(twice.exception)


def test_check_finds_what_does_not_fit(digits, tmp_path):
    assert not check_site(digits / "alpha.npz", classes=list("0123456789")).problems
    (problem,) = check_site(digits / "alpha.npz", classes=["cat", "dog"]).problems
    assert "class '0' is not one of" in problem
    for k in range(4):
        (tmp_path / "own" / f"class{k % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 9), 60 * k, np.uint8)).save(
            tmp_path / "own" / f"class{k % 2}" / f"{k}.png"
        )
    (tmp_path / "own" / "class0" / "broken.png").write_text("no image")
    report = check_site(tmp_path / "own")
    assert "broken.png" in "\n".join(report.lines())
    assert "1 files cannot be read" in report.problems[0]
    with pytest.raises(FedLDError, match="no file or folder"):
        check_site(tmp_path / "nowhere")


def test_check_tells_the_size_of_an_update(digits):
    whole = check_site(digits / "alpha.npz", make_experiment({"model": "resnet8"}))
    personal = check_site(digits / "alpha.npz", make_experiment({"model": "resnet8", "method": "fedbn"}))
    assert 0 < personal.bytes_up < whole.bytes_up
    assert not whole.decompose
    assert "other sites" in "\n".join(
        check_site(digits / "alpha.npz", make_experiment({"decompose": 1})).lines()
    )


def test_insecure_is_for_this_machine_only(tmp_path):
    assert "--insecure" in FlowerServer(host="127.0.0.1", port=8000, runs=tmp_path, insecure=True).words()
    with pytest.raises(FedLDError, match=r"not for '0.0.0.0'"):
        FlowerServer(host="0.0.0.0", port=8000, runs=tmp_path, insecure=True).words()
    node = {"site": "a", "data": tmp_path, "superlink": "example.org:8000", "state": tmp_path}
    with pytest.raises(FedLDError, match=r"not for 'example.org'"):
        Node(**node, insecure=True).words()
    with pytest.raises(FedLDError, match="--ca is needed"):
        Node(**node).words()
    with pytest.raises(FedLDError, match="--ca is needed"):
        FlowerServer(host="0.0.0.0", port=8000, runs=tmp_path).words()
    with pytest.raises(FedLDError, match="letters, digits"):
        Node(
            site='a" data="/etc', data=tmp_path, superlink="localhost:1", state=tmp_path, insecure=True
        ).words()


def test_certificates_and_keys(tmp_path):
    assert (
        RUNNER.invoke(server, ["certificates", "--host", "127.0.0.1", "--out", str(tmp_path)]).exit_code == 0
    )
    assert RUNNER.invoke(site, ["key", "--name", "alpha", "--out", str(tmp_path)]).exit_code == 0
    for name in ("server.key", "alpha.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    ca, own = (x509.load_pem_x509_certificate((tmp_path / f"{n}.crt").read_bytes()) for n in ("ca", "server"))
    own.verify_directly_issued_by(ca)
    assert (tmp_path / "alpha.pub").read_text().startswith("ecdsa-sha2-nistp384 ")
    again = RUNNER.invoke(site, ["key", "--name", "alpha", "--out", str(tmp_path)])
    assert isinstance(again.exception, FedLDError)
    command = Node(
        site="alpha",
        data=tmp_path,
        superlink="example.org:1",
        state=tmp_path,
        ca=tmp_path / "ca.crt",
        key=tmp_path / "alpha.key",
    ).words()
    assert {"--root-certificates", "--auth-supernode-private-key"} <= set(command)
    secure = FlowerServer(
        host="0.0.0.0",
        port=1,
        runs=tmp_path,
        ca=tmp_path / "ca.crt",
        certificate=tmp_path / "server.crt",
        key=tmp_path / "server.key",
    )
    assert {"--enable-supernode-auth", "--ssl-certfile", "--database"} <= set(secure.words())


def test_runs_are_written_where_the_server_says(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLD_RUNS", str(tmp_path / "runs"))
    assert allowed(tmp_path / "runs" / "a")
    with pytest.raises(FedLDError, match="keeps its runs"):
        allowed(tmp_path / "runs" / ".." / "elsewhere")


def test_a_foreign_app_is_never_loaded():
    """Whatever app a message belongs to, the guarded programs load fedld's."""
    code = """
from fedld.deployment import supervisor
from fedld.engine.backends.flower import site
supervisor._only_fedld("clientapp")
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.supernode.runtime import run_clientapp
import sys
module = sys.modules["flwr.supernode.runtime.run_clientapp"]
module.install_from_fab(b"not even a file")
assert module.get_load_client_app_fn("", None, True)("mallory/trojan", "1.0", "beef") is site.app
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_quorum_defaults_and_servers_that_are_not_there(tmp_path):
    assert flower_defaults({"clients": 5})["min_clients"] == 3
    assert flower_defaults({"clients": 10, "sample_rate": 0.2})["min_clients"] == 2
    assert flower_defaults({"clients": 3, "min_clients": 1})["min_clients"] == 1
    assert flower_defaults({"dataset": "npz:x.npz"})["dataset"] == f"npz:{Path.cwd()}/x.npz"
    with pytest.raises(FedLDError, match="no server keeps its runs in"):
        submit(tmp_path / "nowhere", tmp_path / "out", make_experiment({}), lambda _: None)


def test_flower_finds_the_apps():
    assert validate("digits:server", project_dir=ROOT / "examples" / "flower" / "app") == (True, None)
    assert validate("fedld.deployment.server_app:app") == (True, None)
    assert validate("fedld.engine.backends.flower.site:app") == (True, None)


def test_logs_are_plain_have_the_time_and_are_rotated(tmp_path):
    """Also of what processes print that were started by the one that logs; the output goes on as before."""
    code = (
        "import os, sys; from pathlib import Path; from fedld.deployment.launch import logged\n"
        "with logged(Path('site.log'), largest=2000):\n"
        "    print('\\x1b[92mINFO\\x1b[0m: ready', flush=True)\n"
        "    os.system('echo from a child >&2')\n"
        "    [print('line', k, '.' * 50) for k in range(200)]\n"
        "print('afterwards')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[:2] == ["INFO: ready", "from a child"]
    assert done.stdout.splitlines()[-1] == "afterwards"
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["site.log", *(f"site.log.{k}" for k in range(1, 6))]
    assert all((tmp_path / name).stat().st_size <= 2000 for name in files)
    text = (tmp_path / "site.log").read_text()
    assert re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z  line \d+ \.+\n)+", text)
