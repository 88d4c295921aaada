"""A consortium on loopback: real SuperLink, real SuperNodes, started as a user starts them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from sklearn.datasets import load_digits

from fedld.deployment.keys import make_certificates, make_site_key
from fedld.engine.backends.flower import backend as backend_module
from fedld.engine.backends.flower import site as site_module

SITES = ("alpha", "beta", "gamma")
FEDLD = str(Path(sys.executable).with_name("fedld"))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Consortium:
    """Processes of one federation; `secure` with TLS and a key per site."""

    sites, fedld = SITES, FEDLD

    def __init__(self, folder, data, secure):
        self.folder, self.data, self.secure = folder, data, secure
        self.port, self.processes = free_port(), {}
        (folder / "flwr").mkdir(parents=True)
        self.environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(folder / "flwr"),
            "FEDLD_CACHE": str(data / "cache"),
            "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        if secure:
            make_certificates(["127.0.0.1"], folder / "certificates")

    def call(self, *words, check=True):
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=300
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def start(self, name, *words):
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                words,
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_server(self, *program):
        words = [*(program or [FEDLD]), "server", "start", "--port", str(self.port)]
        if self.secure:
            words += ["--ca", "certificates/ca.crt", "--certificate", "certificates/server.crt"]
            words += ["--key", "certificates/server.key"]
        self.start("server", *words, *([] if self.secure else ["--insecure"]))
        self.wait((self.folder / "runs" / "running.json").exists, 120)

    def register(self, site):
        make_site_key(site, self.folder / "keys")
        self.call(FEDLD, "server", "register", "--key", f"keys/{site}.pub", "--name", site)

    def start_site(self, site, *options, data=None, program=(FEDLD,), min_images=2):
        words = [*program, "site", "start", "--name", site, "--superlink", f"127.0.0.1:{self.port}"]
        words += ["--data", str(data or self.data / f"{site}.npz"), "--state", "state"]
        words += ["--min-images", str(min_images)]
        words += (
            ["--ca", "certificates/ca.crt", "--key", f"keys/{site}.key"] if self.secure else ["--insecure"]
        )
        self.start(site, *words, *options)

    def submit(self, name, out, *options):
        words = [FEDLD, "run", "--engine", "flower", "--json", *options]
        place = ["--out"] if "--resume" not in options else []
        self.start(name, *words, *place, str(self.folder / "runs" / out))
        return self.processes[name]

    def kill(self, name):
        """As a power cut does."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def records(self, out, name):
        path = self.folder / "runs" / out / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @staticmethod
    def wait(condition, seconds):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.2)

    def close(self):
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes.values():
            self.wait(lambda group=process.pid: not _lives(group), 15)  # nothing is left behind


def _lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """The digits of three unequal sites: all in one file, one file per site, and the test set."""
    folder = tmp_path_factory.mktemp("digits")
    found, rng = load_digits(), np.random.default_rng(0)
    order = rng.permutation(len(found.target))[:600]
    images = np.rint(found.images[order] * (255 / 16)).astype(np.uint8)
    labels, classes = found.target[order], np.array(list("0123456789"))
    site = rng.choice(SITES, len(labels), p=[0.5, 0.3, 0.2])
    split = np.where(rng.random(len(labels)) < 0.25, "test", "train")
    np.savez(folder / "all.npz", images=images, labels=labels, site=site, split=split, classes=classes)
    for name in SITES:
        own = site == name
        arrays = {"images": images[own], "labels": labels[own], "split": split[own]}
        np.savez(folder / f"{name}.npz", classes=classes, **arrays)
    test = split == "test"
    np.savez(folder / "test.npz", images=images[test], labels=labels[test], site=site[test], classes=classes)
    return folder


@pytest.fixture(scope="session")
def consortium():
    """What makes a consortium, for tests that need one of their own."""
    return Consortium


@pytest.fixture(scope="session")
def secure(tmp_path_factory, digits):
    """One consortium for all tests that leave it as they found it: TLS, node keys, three sites."""
    made = Consortium(tmp_path_factory.mktemp("consortium"), digits, secure=True)
    made.start_server()
    for site in SITES:
        made.register(site)
        made.start_site(site)
    made.wait(lambda: all((made.folder / "state" / site).is_dir() for site in SITES), 120)  # they have begun
    yield made
    made.close()


class Grid:
    """Flower's grid with the sites' real ClientApp behind it, in this process."""

    def __init__(self, folder, data, suffix, facts):
        self.nodes, self.replies, self.spoil = {}, {}, {}
        self.folder, self.data, self.registered = folder, data, {}
        self.suffix, self.facts = suffix, facts
        self.app = site_module.app
        for node, site in enumerate(SITES, start=1):
            self.join(node, site)

    def join(self, node, site, data=None, name=None, **facts):
        path = str(data or self.data / f"{site}{self.suffix}")
        config = {"site": site, "data": path, "state": str(self.folder / "state"), "min-images": 2}
        self.nodes[node] = Context(0, node, config | self.facts | facts, RecordDict(), {})
        (self.folder / "state" / site).mkdir(parents=True, exist_ok=True)
        (self.folder / "state" / site / "seed").write_text("0")  # so that it draws what this machine draws
        self.registered[node] = name or ""

    def get_nodes(self):
        facts = {"status": "online", "last_activated_at": ""}
        return [SimpleNamespace(node_id=n, name=self.registered[n], **facts) for n in self.nodes]

    def push_messages(self, messages):
        ids = []
        for message in messages:
            ids.append(f"m{len(self.replies)}.{message.metadata.dst_node_id}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.replies[ids[-1]] = self._answer(message)
        return ids

    def _answer(self, message):
        context = self.nodes[message.metadata.dst_node_id]
        reply = self.app(message, context)
        spoil = self.spoil.get(context.node_config["site"])
        if spoil is not None and message.metadata.message_type == "train":
            reply = spoil(message, reply)
        return reply

    def pull_messages(self, ids):
        found = [self.replies[i] for i in ids if self.replies.get(i) is not None]
        for reply in found:
            self.replies[reply.metadata.reply_to_message_id] = None
        return found


@pytest.fixture
def make_grid(monkeypatch, tmp_path):
    """Makes a grid of the sites whose files lie in a folder; Flower lets only its tasks make messages."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(backend_module, "DEFAULT_TIMEOUT", 1.5)
    return lambda data, suffix=".npz", **facts: Grid(tmp_path, data, suffix, facts)
