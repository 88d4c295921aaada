"""Studies on a Dask cluster: a real scheduler and real worker processes on 127.0.0.1."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedld
from fedld.cli import start
from fedld.engine.hardware import environment
from fedld.errors import FedLDError
from fedld.study.cluster import SESSION, Session, _check_worker

distributed = pytest.importorskip("distributed")
WORDS = ["--methods", "fedavg,fedprox,consensus", "--seeds", "0,1,2,3", "--clients", "3", "--rounds", "6"]
WORDS += ["--image-size", "8", "--batch-size", "25"]


class Machines:
    """A scheduler and workers, each a process."""

    def __init__(self, folder):
        self.folder, self.started, self.file = folder, [], folder / "scheduler.json"
        self.start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        self.wait(self.file.exists)
        self.address = json.loads(self.file.read_text())["address"]

    def start(self, kind, *words):
        command = [sys.executable, "-m", "dask", kind, *words, "--scheduler-file", str(self.file)]
        log = (self.folder / f"{kind}{len(self.started)}.log").open("wb")
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        self.started.append(process)
        return process

    def worker(self):
        return self.start("worker", "--host", "127.0.0.1", "--nthreads", "1", "--no-nanny", "--no-dashboard")

    def wait(self, condition):
        end = time.monotonic() + 900
        while not (found := condition()):
            assert time.monotonic() < end, [log.read_text() for log in self.folder.glob("*.log")]
            time.sleep(0.02)
        return found

    def end(self):
        for process in self.started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    running = Machines(tmp_path_factory.mktemp("machines"))
    yield running
    running.end()


def lines(file):
    return file.read_bytes().count(b"\n") if file.exists() else 0


def open_runs(process):
    """Folders of the runs that a process is writing."""
    files = []
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            files.append(Path(os.readlink(entry)))
        except OSError:
            continue
    return {file.parent for file in files if file.name == "rounds.jsonl"}


def kill_in_the_middle(process):
    """Kill a worker that is between two rounds of a run, and give the run's folder; None: it is in no run."""
    begun = [run for run in open_runs(process) if lines(run / "rounds.jsonl") >= 1]
    if not begun:
        return None
    process.send_signal(signal.SIGSTOP)  # it does not finish while it is looked at
    if (begun[0] / "summary.json").exists():
        process.send_signal(signal.SIGCONT)
        return None
    process.kill()
    process.wait()
    return begun[0]


def numbers(out):
    """A study's table without what depends on the machine's speed and the command."""

    def plain(value):
        if isinstance(value, dict):
            return {
                key: plain(one) for key, one in value.items() if "seconds" not in key and key != "command"
            }
        return [plain(one) for one in value] if isinstance(value, list) else value

    return plain(json.loads((out / "table.json").read_text()))


def models(out):
    return {file.parent.name: file.read_bytes() for file in sorted(out.glob("runs/*/model.safetensors"))}


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(150) % 3
    images = (rng.integers(0, 128, (150, 8, 8, 1)) + 60 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=labels)
    return f"npz:{tmp_path / 'own.npz'}"


def test_a_study_whose_worker_is_killed_gives_the_tables_of_this_machine(tmp_path, machines, data):
    here, there = tmp_path / "here", tmp_path / "there"
    command = [sys.executable, "-m", "fedld", "compare", "--dataset", data, *WORDS]
    workers = [machines.worker(), machines.worker()]
    study = subprocess.Popen(
        [*command, "--scheduler", machines.address, "--out", str(there)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    cut = machines.wait(lambda: kill_in_the_middle(workers[0]) or kill_in_the_middle(workers[1]))
    assert study.poll() is None
    assert (there / SESSION).exists()
    machines.worker()  # it comes back
    said = study.communicate()[0]
    assert study.returncode == 0, said
    assert f"{cut.name}  round 6" in said
    assert not (there / SESSION).exists()
    subprocess.run([*command, "--out", str(here)], check=True, capture_output=True)
    assert len(models(here)) == 12
    assert models(there) == models(here)
    assert numbers(there) == numbers(here)
    assert (there / "report.html").exists()


def test_executor_takes_own_values_and_leaves_a_finished_study_alone(tmp_path, machines, data):
    machines.worker()

    def rate(round_):  # in no module that a worker could import
        return 1 / round_

    methods = ["fedavg", "fedprox"]
    settings = {"seeds": [0], "clients": 3, "rounds": 2, "image_size": 8, "lr_schedule": rate}
    with distributed.Client(machines.address, set_as_default=False) as client:
        there = fedld.compare(methods, data, executor=client, out=tmp_path / "a", **settings)
        before = models(there.path)
        fedld.compare(methods, data, executor=client, out=tmp_path / "a", resume=True, **settings)
        lock = threading.Lock()
        with pytest.raises(FedLDError, match=r"lr_schedule '.*' cannot be sent"):
            fedld.compare(
                methods, data, executor=client, **settings | {"lr_schedule": lambda _: 1.0 if lock else 0.5}
            )
        with pytest.raises(FedLDError, match="leave 'workers' out"):
            fedld.compare(methods, data, executor=client, workers=2, **settings)
    here = fedld.compare(methods, data, out=tmp_path / "b", jobs=0, **settings)
    assert models(there.path) == before == models(here.path)
    assert numbers(here.path) == numbers(there.path)


def test_a_worker_without_the_folder_or_with_another_version_says_so(tmp_path):
    session = Session(tmp_path / SESSION, "name", fedld.__version__, environment())
    with pytest.raises(FedLDError, match="worker tcp://w:1 does not see the study's folder"):
        _check_worker(session, "tcp://w:1", print)
    session.file.write_text('{"session": "name"}')
    _check_worker(session, "tcp://w:1", print)
    with pytest.raises(FedLDError, match=r"worker tcp://w:1 has fedld .*, the study 9\.9"):
        _check_worker(replace(session, version="9.9"), "tcp://w:1", print)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:8786", "http://h:1", "tcp://127.0.0.1:1", "tls://127.0.0.1:1"]
)
def test_a_scheduler_that_cannot_be_used_is_one_sentence(tmp_path, capsys, monkeypatch, address):
    monkeypatch.setattr("fedld.study.cluster.CONNECT_SECONDS", 1)
    out = tmp_path / "study"
    monkeypatch.setattr(sys, "argv", ["fedld", "compare", "--scheduler", address, "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 2
    assert address in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists()


def test_an_executor_of_another_kind_is_refused():
    with pytest.raises(FedLDError, match="executor is a Dask client"):
        fedld.compare(["fedavg"], executor=3)
