"""Large federations, personalised models, studies, busy machines, as ratios within one run.

    python benchmarks/scale.py [many|everyone|personal|candidates|study|straggler] [--tiny]

many       10,000 clients, 50 per round, against 100 clients on the same images: memory, start, rounds
everyone   1,000 clients of 50 images, all in every round: memory
personal   rounds of FedPAC, FedRoD and FedBN on 12 sites against FedAvg's
candidates the share of a round in which clients measure candidate steps (rule measured), on 5 sites
study      4 methods and 5 seeds in runs of ten seconds: the share of the cores' time that no run used
straggler  rounds while one worker shares its core with another program, against quiet ones
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from machine import MIB, busy_process, describe, proportional, spread

from fedld.config.experiment import make_experiment
from fedld.engine import loop
from fedld.engine.backends.pool import Paces, WorkerPool

TINY = "--tiny" in sys.argv
FEDLD = [sys.executable, "-m", "fedld"]
REPEATS = 1 if TINY else 2
SIDE, CLASSES = 28, 10


def write_images(path, train, test, sites=None):
    """Grey images of noise; with `sites`, both parts are dealt to so many of them in turn."""
    random, count = np.random.default_rng(0), train + test
    arrays = {
        "images": random.integers(0, 256, (count, SIDE, SIDE, 1), dtype=np.uint8),
        "labels": random.integers(0, CLASSES, count),
        "split": np.where(np.arange(count) < train, "train", "test"),
    }
    if sites:
        arrays["site"] = np.array([f"site_{i % sites:02d}" for i in range(count)])
    np.savez(path, **arrays)
    return path


def rounds_of(out):
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


def watched(command, out):
    """Peak memory of a run and its workers, and seconds until its first round was recorded."""
    begin, peak, first = time.perf_counter(), 0, None
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, proportional(process.pid))
        if first is None and (out / "rounds.jsonl").exists():
            first = time.perf_counter() - begin
        time.sleep(0.05)
    assert process.returncode == 0, command
    return peak / MIB, first


def run_command(path, out, clients, rounds, *options):
    common = ["--dataset", f"npz:{path}", "--partition", "iid", "--clients", str(clients), "--min-size", "1"]
    return [*FEDLD, "run", *common, "--rounds", str(rounds), *options, "--out", str(out)]


def many(folder):
    """Clients that are not drawn cost (almost) nothing: the same images with few clients and with many."""
    few, lots, drawn = (30, 300, 10) if TINY else (100, 10_000, 50)
    path = write_images(folder / "many.npz", 12 * lots, 1000)
    subprocess.run([*FEDLD, "data", "--dataset", f"npz:{path}"], check=True, stdout=subprocess.DEVNULL)
    found = {}
    for clients in (few, lots):
        out = folder / f"many-{clients}"
        options = ["--sample-clients", str(drawn), "--local-steps", "1", "--batch-size", "12"]
        peak, first = watched(run_command(path, out, clients, 6, *options), out)
        seconds = statistics.median(line["seconds"] for line in rounds_of(out)[1:-1])
        found[clients] = {"peak, MiB": peak, "first round after, s": first, "a round, s": seconds}
        print(f"{clients:,} clients, {drawn} per round: {rounded(found[clients])}", flush=True)
    more = {key: found[lots][key] - found[few][key] for key in found[lots]}
    print(f"{lots:,} clients cost more than {few}: {rounded(more)}")
    print(f"images {12 * lots * SIDE**2 / MIB:.0f} MiB, part of both peaks")


def rounded(facts):
    return ", ".join(f"{key} {value:.2f}" for key, value in facts.items())


def everyone(folder):
    """All of 1,000 clients in every round."""
    clients = 50 if TINY else 1000
    path, out = write_images(folder / "everyone.npz", 50 * clients, 1000), folder / "everyone"
    peak, _ = watched(run_command(path, out, clients, 2, "--set", "client_losses=false"), out)
    images = 51 * clients * SIDE**2 / MIB
    print(f"all of {clients:,} clients: peak {peak:.0f} MiB, images {images:.0f} of it (wanted 1,229)")
    size = (out / "conflict.jsonl").stat().st_size / MIB / 2
    print(f"conflict.jsonl {size:.2f} MiB per round")


PERSONAL = {
    "fedpac": ("cnn", {"method": "fedpac"}),
    "fedrod": ("cnn", {"method": "fedrod"}),
    "fedbn": ("resnet8", {"method": "fedbn"}),
    "fedbn, personal_every = 5": ("resnet8", {"method": "fedbn", "personal_every": 5}),
}


def personal(folder):
    """Seconds of a round, against FedAvg's with the same network: means of rounds 2 to 6."""
    each = (20, 10) if TINY else (100, 25)
    path = write_images(folder / "sites.npz", 12 * each[0], 12 * each[1], sites=12)
    ratios = {name: [] for name in PERSONAL}
    for repeat in range(REPEATS):
        base = {}
        for model in ("cnn", "resnet8"):
            base[model] = steady(folder / f"fedavg-{model}-{repeat}", path, {"model": model})
        for k, (name, (model, settings)) in enumerate(PERSONAL.items()):
            seconds = steady(folder / f"personal-{k}-{repeat}", path, settings | {"model": model})
            ratios[name].append(seconds / base[model])
    for name, values in ratios.items():
        print(f"{name} / fedavg, 12 sites: {spread(values)}" + " (wanted 1.4)" * (name == "fedpac"))


def candidates(folder):
    """Seconds of measuring in those of the rounds: 64 images a client, five candidates."""
    each = 20 if TINY else 400
    path = write_images(folder / "sites.npz", 5 * each, 5 * each, sites=5)
    for model in ("cnn", "resnet8"):
        shares = []
        for repeat in range(REPEATS):
            out = folder / f"candidates-{model}-{repeat}"
            steady(out, path, {"method": "fedld-measured", "model": model})
            lines = rounds_of(out)
            shares.append(
                sum(line["measuring_seconds"] for line in lines) / sum(line["seconds"] for line in lines)
            )
        print(f"share of a round spent on measuring, {model}: {spread(shares)} (wanted 0.15)")


def steady(out, path, settings):
    """Mean seconds of a round in the middle of a run."""
    common = {"dataset": f"npz:{path}", "partition": "site", "rounds": 7}
    loop.run(make_experiment(common | settings), out)
    return statistics.mean(line["seconds"] for line in rounds_of(out)[1:6])


def study(folder):
    """Seconds of all runs against what the cores could have done between the command and its end."""
    cores, methods = os.cpu_count(), "fedavg,fedprox,scaffold,fedpac"
    seeds, target = ("0,1", 0.5) if TINY else ("0,1,2,3,4", 10)
    trial = folder / "trial"
    subprocess.run(
        [*FEDLD, "run", "--workers", "0", "--rounds", "4", "--out", str(trial)], check=True, **QUIET
    )
    pace = statistics.median(line["seconds"] for line in rounds_of(trial)[1:-1])
    rounds, out = max(2, round(target / pace)), folder / "study"
    command = [*FEDLD, "compare", "--methods", methods, "--seeds", seeds, "--rounds", str(rounds)]
    begin, started = time.time(), time.perf_counter()
    subprocess.run([*command, "--out", str(out)], check=True, **QUIET)
    wall = time.perf_counter() - started
    files = list(out.glob("runs/*/summary.json"))
    runs = [json.loads(file.read_text())["seconds"] for file in files]
    first = min(file.with_name("config.toml").stat().st_mtime for file in files) - begin
    last = begin + wall - max(file.stat().st_mtime for file in files)
    print(f"{len(runs)} runs of {spread(runs)} s in {wall:.1f} s on {cores} cores")
    print(f"wasted {1 - sum(runs) / (cores * wall):.1%} (wanted 10 %)")
    print(f"before the first run {first:.1f} s, after the last {last:.1f} s")


QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def straggler(folder):
    """A worker that shares its core with another program holds up the round by its share, and no more."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        print("this part needs two cores")
        return
    path = write_images(folder / "straggler.npz", 800 if TINY else 3000, 100 if TINY else 500)
    share = 2 / 1.5  # both workers on two cores, of which one has half to give
    found = {"quiet": [], "busy, by pace": [], "busy, longest first": []}
    idle = {name: [] for name in found}
    for repeat in range(REPEATS):
        for name in found:
            out = folder / f"straggler-{repeat}-{name.replace(' ', '-')}"
            with busy_process(name != "quiet", cores[0]):
                seconds, unused = shared_rounds(out, path, cores, by_pace="longest" not in name)
            found[name].append(seconds)
            idle[name].append(unused)
    for name, values in found.items():
        ratios = [value / quiet for value, quiet in zip(values, found["quiet"], strict=True)]
        unused = spread([100 * value for value in idle[name]], 1)
        print(f"{name}: a round takes {spread(ratios)} times a quiet one; workers have no job {unused} %")
    print(f"one core of two at half its speed: {share:.2f} times would be its share")


def shared_rounds(out, path, cores, by_pace):
    """Median seconds of a round, and the share of it in which workers have no job; each keeps its core."""
    begin, learn, choose, busy, marks = WorkerPool._start, Paces.learn, Paces.choose, [0.0], []

    def pinned(self, rank):
        member = begin(self, rank)
        os.sched_setaffinity(member.process.pid, {cores[rank]})
        return member

    def noted(self, worker, unit, seconds):
        busy[0] += seconds
        learn(self, worker, unit, seconds)

    def mark(event):
        if event["event"] == "round":
            marks.append((time.perf_counter(), busy[0]))

    WorkerPool._start, Paces.learn = pinned, noted
    if not by_pace:
        Paces.choose = lambda self, worker, waiting, left: len(waiting) - 1
    settings = {"dataset": f"npz:{path}", "partition": "dirichlet", "alpha": 1.0, "clients": 8, "workers": 2}
    try:
        loop.run(make_experiment(settings | {"rounds": 8}), out, progress=mark)
    finally:
        WorkerPool._start, Paces.learn, Paces.choose = begin, learn, choose
    spans = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks[1:-1])]
    whole, used = sum(span for span, _ in spans), sum(working for _, working in spans)
    return statistics.median(span for span, _ in spans), 1 - used / (2 * whole)


PARTS = {
    "many": many,
    "everyone": everyone,
    "personal": personal,
    "candidates": candidates,
    "study": study,
    "straggler": straggler,
}

if __name__ == "__main__":
    for name in [word for word in sys.argv[1:] if word != "--tiny"] or PARTS:
        print(f"== {name}; {describe()}", flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            os.environ["FEDLD_CACHE"] = f"{temporary}/cache"
            PARTS[name](Path(temporary))
