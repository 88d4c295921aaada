"""Engine speed as ratios within one run: `python benchmarks/engine.py [PART ...]`.

Parts: steps, masks (steps of a U-Net), job, cross, profile (where a step's time goes), frameworks.

Every figure compares with the loop one would write: plain PyTorch with all cores as threads, float images
in memory, NCHW, an ordinary optimiser. Both sides alternate, so that a busy machine disturbs both. REPEATS in
the environment asks for more or fewer than 5 repeats.
`frameworks` compares with others, in an environment of their own (benchmarks/frameworks/README.md):
`FRAMEWORKS_PYTHON=.../bin/python python benchmarks/engine.py frameworks`.
"""

import json
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from machine import descendants, describe, product_rate, spread
from torch.utils.flop_counter import FlopCounterMode

from fedld.config.experiment import make_experiment
from fedld.engine import loop
from fedld.engine.backends.pool import WorkerPool
from fedld.engine.backends.processes import one_thread, tune_process
from fedld.layout import FlatModel, Layout
from fedld.local import LocalClient, Objective, Samples, Training
from fedld.local.base import as_objective
from fedld.models import build
from fedld.models.unet import build_unet, is_unet
from fedld.tasks.segmentation import Segmentation

CASES = {
    "cnn 28x28": ("cnn", 28, 40),
    "resnet18 64x64": ("resnet18", 64, 6),
    "resnet50 224x224": ("resnet50", 224, 1),
}
MASK_CASES = {
    "unet 48x48": ("unet", 48, 10),
    "unet of width 16, 96x96": ("unet:width=16", 96, 2),
}
REPEATS, BATCH, CLASSES = int(os.environ.get("REPEATS", "5")), 50, 10
FEDLD = str(Path(sys.executable).with_name("fedld"))


def images(count, size):
    return np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def network(name, size):
    """The network of a case: a U-Net for masks of three classes, else one for ten classes of pictures."""
    if is_unet(name):
        return build_unet(name, classes=3, input_shape=(3, size, size), seed=0)
    return build(name, classes=CLASSES, image_size=size, seed=0)


def targets(name, count, size):
    """Class numbers of pictures, or for a U-Net of their pixels."""
    if is_unet(name):
        return np.random.default_rng(1).integers(0, 3, (count, size, size))
    return np.arange(count) % CLASSES


def plain_loss(logits, labels):
    """Cross-entropy; for masks plus soft Dice, as one would write it."""
    loss = F.cross_entropy(logits, labels)
    if labels.ndim == 1:
        return loss
    p, t = logits.softmax(1)[:, 1:], F.one_hot(labels, 3).permute(0, 3, 1, 2)[:, 1:].float()
    both, total = (p * t).sum((2, 3)), p.sum((2, 3)) + t.sum((2, 3))
    return loss + 1 - ((2 * both + 1) / (total + 1)).mean()


def plain_steps(name, size, steps):
    """Steps a second of the plain loop on all cores."""
    torch.set_num_threads(mp.cpu_count())
    model = network(name, size).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pixels = torch.from_numpy(images(BATCH * 2, size)).permute(0, 3, 1, 2).float().contiguous() / 255
    labels = torch.from_numpy(targets(name, len(pixels), size))
    start = 0.0
    for step in range(steps + 1):
        if step == 1:
            start = time.perf_counter()  # the first step only warms up
        chosen = torch.randint(len(pixels), (BATCH,))
        optimiser.zero_grad()
        plain_loss(model(pixels[chosen]), labels[chosen]).backward()
        optimiser.step()
    return steps / (time.perf_counter() - start)


def our_steps(name, size, steps, bfloat16):
    """Client-steps a second of as many single-threaded workers as there are cores."""
    context = mp.get_context("spawn")
    with one_thread():
        barrier, queue = context.Barrier(mp.cpu_count()), context.Queue()
        args = (name, size, steps, bfloat16, barrier, queue)
        workers = [context.Process(target=_worker, args=args) for _ in range(mp.cpu_count())]
        for worker in workers:
            worker.start()
        rate = sum(queue.get() for _ in workers)
        for worker in workers:
            worker.join()
    return rate


def _worker(name, size, steps, bfloat16, barrier, queue):
    tune_process()
    model = network(name, size)
    flat = FlatModel(model, Layout.of(model))
    data = images(BATCH * max(steps, 1), size)
    labels = targets(name, len(data), size)
    samples = Samples(data, labels, np.arange(len(data)), (0.5,) * 3, (0.25,) * 3)
    client = LocalClient(
        name="x",
        round=1,
        flat=flat,
        samples=samples,
        training=Training(
            epochs=1, batch_size=BATCH, lr=0.01, momentum=0.9, dtype="bfloat16" if bfloat16 else "float32"
        ),
        seed=0,
    )
    loss = as_objective(Segmentation().objective).loss if is_unet(name) else Objective().loss
    client.train(loss)  # warm-up epoch
    barrier.wait()
    start = time.perf_counter()
    client.train(loss)
    queue.put(steps / (time.perf_counter() - start))


def step_flops(name, size):
    """Multiplications and additions of one training step, counted by torch."""
    model = build(name, classes=CLASSES, image_size=size, seed=0).train()
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(BATCH, 3, size, size)).sum().backward()
    return counter.get_total_flops()


def steps():
    """Training steps alone."""
    table, peak = {}, product_rate(mp.cpu_count())
    print(f"sgemm {peak / 1e9:.0f} Gflop/s on {mp.cpu_count()} threads", flush=True)
    for case, (name, size, count) in CASES.items():
        rows, flops = {"float32": [], "bfloat16": []}, step_flops(name, size)
        shares = []
        for _ in range(REPEATS):
            plain = plain_steps(name, size, count)
            ours = our_steps(name, size, count, False)
            rows["float32"].append(ours / plain)
            shares.append(ours * flops / peak)
            if native_bfloat16():
                rows["bfloat16"].append(our_steps(name, size, count, True) / plain)
        table[case] = {key: spread(values) for key, values in rows.items() if values}
        table[case]["share of sgemm"] = spread(shares)
        print(case, table[case], flush=True)
    return table


def masks():
    """Training steps of U-Nets."""
    table = {}
    for case, (name, size, count) in MASK_CASES.items():
        ratios = []
        for _ in range(REPEATS):
            plain = plain_steps(name, size, count)
            ratios.append(our_steps(name, size, count, False) / plain)
        table[case] = spread(ratios)
        print(case, table[case], flush=True)
    return table


GROUPS = {
    "convolutions": ("convolution", "conv"),
    "normalisation": ("batch_norm", "group_norm"),
    "pooling": ("pool",),
    "activations": ("relu", "threshold", "clamp"),
    "linear layers": ("addmm", "aten::mm", "linear"),
    "optimiser": ("sgd",),
    "reading and normalising a batch": ("index", "sub_", "mul_", "copy_"),
}


def profile():
    """Where a worker's training step goes: shares of the time that torch's profiler counts, one thread."""
    tune_process()
    for case, (name, size, count) in CASES.items():
        model = build(name, classes=CLASSES, image_size=size, seed=0)
        flat, data = FlatModel(model, Layout.of(model)), images(BATCH * count, size)
        samples = Samples(data, np.arange(len(data)) % CLASSES, np.arange(len(data)), (0.5,) * 3, (0.25,) * 3)
        client = LocalClient(
            name="x",
            round=1,
            flat=flat,
            samples=samples,
            training=Training(epochs=1, batch_size=BATCH, lr=0.01, momentum=0.9),
            seed=0,
        )
        client.train(Objective().loss)  # warm-up
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            client.train(Objective().loss)
        times, shares = {e.key: e.self_cpu_time_total for e in found.key_averages()}, {}
        whole, left = sum(times.values()), dict(times)
        for group, words in GROUPS.items():
            own = [key for key in left if any(word in key.lower() for word in words)]
            shares[group] = sum(left.pop(key) for key in own) / whole
        shares["the rest"] = sum(left.values()) / whole
        print(case, ", ".join(f"{group} {share:.0%}" for group, share in shares.items()), flush=True)


def native_bfloat16():
    """Without AVX512-BF16 or AMX a bfloat16 product is emulated, some fifty times slower than float32."""
    flags = Path("/proc/cpuinfo").read_text()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def plain_job(path, clients=10, rounds=5):
    """The bare federated loop: copies, plain means, evaluation after every round, all cores as threads."""
    data = np.load(path)
    pixels = torch.from_numpy(data["images"]).permute(0, 3, 1, 2).float().contiguous() / 255
    labels, train = torch.from_numpy(data["labels"]), torch.from_numpy(data["split"] == "train")
    shards = torch.nonzero(train).flatten().chunk(clients)
    test = torch.nonzero(~train).flatten()
    torch.set_num_threads(mp.cpu_count())
    model = build("cnn", classes=CLASSES, image_size=28, seed=0)
    start = time.perf_counter()
    for _ in range(rounds):
        incoming = {k: v.clone() for k, v in model.state_dict().items()}
        total = {k: torch.zeros_like(v) for k, v in incoming.items()}
        for shard in shards:
            model.load_state_dict(incoming)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            model.train()
            for chosen in shard[torch.randperm(len(shard))].split(BATCH):
                optimiser.zero_grad()
                F.cross_entropy(model(pixels[chosen]), labels[chosen]).backward()
                optimiser.step()
            for key, value in model.state_dict().items():
                total[key] += value / clients
        model.load_state_dict(total)
        model.eval()
        with torch.no_grad():
            for chosen in test.split(256):
                model(pixels[chosen]).argmax(1)
    return time.perf_counter() - start


def job_file(folder):
    """12,000 images of 28x28, the last 2,000 for testing."""
    path = Path(folder) / "job.npz"
    labels = np.random.default_rng(0).integers(0, CLASSES, 12_000)
    split = np.where(np.arange(12_000) < 10_000, "train", "test")
    np.savez(path, images=images(12_000, 28), labels=labels, split=split)
    return path


def job_command(path, out):
    options = ["--dataset", f"npz:{path}", "--partition", "iid", "--clients", "10", "--rounds", "5"]
    return [FEDLD, "run", *options, "--lr", "0.01", "--set", "client_losses=false", "--out", str(out)]


def frameworks():
    """The same whole job, end to end with start-up, in other frameworks."""
    python, scripts = os.environ["FRAMEWORKS_PYTHON"], Path(__file__).parent / "frameworks"
    ratios = {"flower": [], "pfl": [], "fedlab": []}
    with tempfile.TemporaryDirectory() as folder:
        path = job_file(folder)
        for repeat in range(REPEATS):
            ours = _timed(job_command(path, Path(folder) / f"run{repeat}"))
            for name, values in ratios.items():
                values.append(_timed([python, str(scripts / f"{name}_job.py"), str(path)]) / ours)
            print(
                f"fedld {ours:.1f} s;",
                {name: f"{values[-1]:.2f}" for name, values in ratios.items()},
                flush=True,
            )
    print(json.dumps({name: spread(values) for name, values in ratios.items()}, indent=1))


def job():
    """Whole job: 10 clients x 1,000 images, small CNN, 5 rounds with evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        path = job_file(folder)
        rounds, ends, starts = [], [], []
        for repeat in range(REPEATS):
            bare_end = _timed([sys.executable, __file__, "plain-job", str(path)])
            bare = plain_job(path)
            out = Path(folder) / f"run{repeat}"
            end = _timed(job_command(path, out))
            lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
            seconds = [
                line["seconds"] for line in lines
            ]  # the last has an evaluation only, the first a start
            steady = statistics.median(seconds[1:4])
            rounds.append(bare / 5 / steady)
            ends.append(bare_end / end)
            starts.append(end - 5 * steady - seconds[-1])
        between, idle = overhead(path, folder)
        result = {
            "rounds, against the bare loop": spread(rounds),
            "end to end, against the bare loop's process": spread(ends),
            "seconds before the first round and after the last": spread(starts),
            "share of a round between jobs": spread(between, 3),
            "share of a round in which workers do not compute": spread(idle, 3),
        }
        print(json.dumps(result, indent=1), flush=True)
        return result


def overhead(path, folder, rounds=12):
    """Shares of each round: in which no job is handed out, and in which workers do not compute.

    The second also holds what one worker waits for the other, and what the machine gives to others.
    """
    settings = {"dataset": f"npz:{path}", "partition": "iid", "clients": 10, "rounds": rounds, "lr": 0.01}
    marks, working, run_jobs = [], [0.0], WorkerPool.run

    def timed(self, *arguments):
        start = time.perf_counter()
        result = run_jobs(self, *arguments)
        working[0] += time.perf_counter() - start
        return result

    def mark(line):
        if line["event"] == "round":
            busy = sum(_cpu_seconds(pid) for pid in descendants(os.getpid()))
            marks.append((time.perf_counter(), working[0], busy / mp.cpu_count()))

    WorkerPool.run = timed
    try:
        loop.run(make_experiment(settings | {"client_losses": False}), Path(folder) / "run", progress=mark)
    finally:
        WorkerPool.run = run_jobs
    pairs = list(pairwise(marks[1:-1]))  # not the start, nor the evaluation that ends the run
    return [[1 - (b[k] - a[k]) / (b[0] - a[0]) for a, b in pairs] for k in (1, 2)]


def _cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _timed(command):
    # With this variable set, a package installed from its sources would be compiled anew at every start.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - start


def cross():
    """Cross evaluation: images a second of single-threaded workers against the plain loop on all threads."""
    from fedld.engine.worker import EVAL_BATCH

    ratios = []
    for _ in range(REPEATS):
        torch.set_num_threads(mp.cpu_count())
        model = build("cnn", classes=CLASSES, image_size=28, seed=0).eval()
        pixels = torch.from_numpy(images(4000, 28)).permute(0, 3, 1, 2).float().contiguous() / 255
        with torch.no_grad():
            model(pixels[:EVAL_BATCH])
            start = time.perf_counter()
            for chunk in pixels.split(BATCH):
                model(chunk)
            plain = len(pixels) / (time.perf_counter() - start)
        context = mp.get_context("spawn")
        with one_thread():
            barrier, queue = context.Barrier(mp.cpu_count()), context.Queue()
            workers = [
                context.Process(target=_evaluator, args=(barrier, queue)) for _ in range(mp.cpu_count())
            ]
            for worker in workers:
                worker.start()
            ratios.append(sum(queue.get() for _ in workers) / plain)
            for worker in workers:
                worker.join()
    print("cross evaluation", spread(ratios), flush=True)
    return {"cross evaluation, cnn 28x28": spread(ratios)}


def _evaluator(barrier, queue):
    from fedld.engine.worker import EVAL_BATCH

    tune_process()
    model = build("cnn", classes=CLASSES, image_size=28, seed=0)
    flat = FlatModel(model, Layout.of(model))
    data = images(4000, 28)
    samples = Samples(data, np.arange(4000) % CLASSES, np.arange(4000), (0.5,) * 3, (0.25,) * 3)
    flat.model.eval()
    with torch.inference_mode():
        flat.model(samples.batch(slice(0, EVAL_BATCH))[0])  # warm-up
        barrier.wait()
        start = time.perf_counter()
        for pixels, _ in samples.in_order(EVAL_BATCH):
            flat.model(pixels)
    queue.put(len(samples) / (time.perf_counter() - start))


if __name__ == "__main__":
    if sys.argv[1:2] == ["plain-job"]:
        plain_job(sys.argv[2])
    else:
        parts = {
            "steps": steps,
            "masks": masks,
            "job": job,
            "cross": cross,
            "profile": profile,
            "frameworks": frameworks,
        }
        for name in sys.argv[1:] or [name for name in parts if name != "frameworks"]:
            print(f"== {name}; {describe()}", flush=True)
            parts[name]()
