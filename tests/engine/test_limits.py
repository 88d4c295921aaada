"""Limits of the machine: open files, shared memory, a container's memory, time."""

import os
import resource
import subprocess
import time
from pathlib import Path

import pytest
import torch

from fedld.engine import jobs
from fedld.engine.backends import machine
from fedld.engine.backends.pool import WorkerPool, receive, send
from fedld.engine.backends.processes import processes
from fedld.engine.hardware import free_memory
from fedld.engine.loop import run
from fedld.engine.setup import prepare
from fedld.errors import FedLDError

LIMIT = 4.0


def test_tensors_pass_a_pipe_without_open_files():
    """What a thousand clients of SCAFFOLD send, at a limit of so many files that none may stay open."""
    ours, theirs = processes().Pipe()
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    sent = [{"c": torch.arange(12).reshape(3, 4).to(kind), "none": None} for kind in kinds]
    before = len(os.listdir("/proc/self/fd"))
    kept = []
    for value in sent * 300:
        send(ours, value)
        kept.append(receive(theirs))
    assert len(os.listdir("/proc/self/fd")) == before
    for value, got in zip(sent * 300, kept, strict=True):
        assert got["c"].dtype == value["c"].dtype
        assert got["c"].equal(value["c"])


def test_many_clients_with_messages_and_states_need_few_files(small, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    settings = {"method": "scaffold", "clients": 40, "min_size": 1, "partition": "iid", "rounds": 1}
    few = len(os.listdir("/proc/self/fd")) + 34  # fewer than clients
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        summary = run(small(**settings, workers=1, client_losses=False), tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert summary["clients"] == 40


def test_where_shared_memory_is_small_workers_share_a_file(small, tmp_path, contents, monkeypatch):
    run(small(rounds=2), tmp_path / "here")
    small_disk = tmp_path / "shm"
    small_disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small_disk], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        monkeypatch.setattr(machine, "SHM", small_disk)
        mapped = []
        monkeypatch.setattr(machine, "map_file", lambda *a: mapped.append(a[0]) or original(*a))
        run(small(rounds=2, workers=1), tmp_path / "run")
        assert mapped == [tmp_path / "run/.memory"]
        assert not mapped[0].exists()
        assert contents(tmp_path / "run") == contents(tmp_path / "here")
        monkeypatch.setattr(machine, "SPARE", 1 << 60)
        with pytest.raises(FedLDError, match=r"MiB that workers share.* take workers = 0"):
            run(small(rounds=2, workers=1), small_disk / "run")
    finally:
        subprocess.run(["umount", "-l", small_disk], check=False)


original = machine.map_file


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_containers_memory_limit_counts(tmp_path):
    """The kernel's files, in both versions of control groups."""
    _write(tmp_path / "proc/meminfo", "MemTotal: 8000 kB\nMemAvailable: 4000 kB\n")
    assert free_memory(tmp_path) == 4000 * 1024
    _write(tmp_path / "proc/self/cgroup", "0::/box/inner\n")
    group = tmp_path / "sys/fs/cgroup"
    _write(group / "box/memory.max", "1000000\n")
    _write(group / "box/memory.current", "900000\n")
    _write(group / "box/memory.stat", "inactive_file 50000\n")
    _write(group / "box/inner/memory.max", "max\n")
    _write(group / "box/inner/memory.current", "900000\n")
    assert free_memory(tmp_path) == 150_000
    _write(tmp_path / "proc/self/cgroup", "4:memory:/docker/1\n0::/\n")
    _write(group / "memory/memory.limit_in_bytes", "700000\n")  # a container sees its own group as the root
    _write(group / "memory/memory.usage_in_bytes", "600000\n")
    assert free_memory(tmp_path) == 100_000


def test_a_client_over_the_time_limit_is_named_with_how_to_go_on(small, tmp_path):
    match = r"client 'client_1' failed in round 1: not done within .* s \(round_timeout\); no round was kept"
    with pytest.raises(FedLDError, match=match):
        run(small(round_timeout=1e-9, on_client_failure="stop"), tmp_path / "run")


def test_training_over_the_time_limit_is_given_up_and_the_evaluation_still_done(small, tmp_path):
    """In worker processes a client is interrupted; whether it is left out is the policy's choice."""
    setup, _ = prepare(small(local_epochs=10**6, clients=2, workers=1), tmp_path)
    memory = machine.allocate(setup, 2, shared=True)
    pool = WorkerPool(setup, memory, 1)
    try:
        pool.run([jobs.TestJob(0, 8)], {})  # the worker has started
        work = [jobs.TrainJob(1, 0, jobs.Incoming("client_2")), jobs.TestJob(0, 8)]
        late, test = pool.run(work, {}, deadline=time.monotonic() + LIMIT)
    finally:
        pool.close()
    assert isinstance(late, jobs.Failure)
    assert f"not done within {LIMIT:g} s" in late.error
    assert test is None  # its logits are in the memory


def test_more_clients_needed_than_there_are_is_refused_before_anything_runs(small, tmp_path):
    with pytest.raises(FedLDError, match="min_clients is 5, but only 2 of 4 clients take part in a round"):
        run(small(min_clients=5, sample_rate=0.5), tmp_path / "run")
    assert not (tmp_path / "run").exists()
