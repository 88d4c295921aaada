"""Frozen trunks as ratios within one run: `python benchmarks/pretrained.py [train|extract|closed] [--tiny]`.

MobileNetV2 at 96 pixels. `train`: samples a second of a client that trains the head, or the last four blocks,
on cached features, against the same client with the trunk run for every batch. `extract`: images a second of
the cache's own extraction against a plain loop over batches on all cores. Both sides of a ratio alternate, so
that a busy machine disturbs both. `closed`: seconds of each step of ridge regression over the images of one
client. `command NPZ WEIGHTS`: seconds of a 20-round FedAvg run with `--train head`, and of `ridge`, from the
command to the summary, with a warm cache. `auto NPZ WEIGHTS`: the share of all cores that `fedld auto` leaves
idle; let nothing else run.

BatchNorm keeps its statistics in `train`. Its bound is the ratio if the products of the trained 1x1
convolutions and linear layers, at the speed of a large product, were all that a cached step did.
"""

import multiprocessing as mp
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from machine import product_rate, spread

from fedld.data import Client, Federation
from fedld.engine.backends.processes import tune_process
from fedld.engine.features import cached_features
from fedld.layout import FlatModel, Layout
from fedld.local import FeatureSamples, LocalClient, Objective, Samples, Training
from fedld.methods import Messages, Replies
from fedld.methods.ridge import Ridge
from fedld.models import build, cut

TINY = "--tiny" in sys.argv
SIZE, CLASSES, BATCH, REPEATS = 96, 3, 50, 2 if TINY else 5
CACHED, COMPUTED = (400, 100) if TINY else (6000, 400)
EXTRACTED = 128 if TINY else 3000
TARGETS = {"head": 50, "last:4": 5, "extraction": 1.5}
CLOSED, UNITS = (200, 64) if TINY else (5000, 4096)
COMMAND = ["--partition", "site", "--image-size", "96", "--model", "mobilenet_v2", "--train", "head"]
COMMANDS = {  # settings and target in seconds
    "20 rounds of fedavg": (["--method", "fedavg", "--rounds", "20", "--lr", "0.001"], 15),
    "ridge": (["--method", "ridge", "--head", "linear", "--rounds", "1"], 6),
}
AUTO = ["--rounds", "60", "--minutes", "5"]
FEDLD = str(Path(sys.executable).with_name("fedld"))


def network():
    return build("mobilenet_v2", classes=CLASSES, image_size=SIZE, seed=0).eval()


def pictures(count):
    return np.random.default_rng(0).integers(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)


def client(model, samples):
    flat = FlatModel(model, Layout.of(model))
    return LocalClient(
        name="x",
        round=1,
        flat=flat,
        samples=samples,
        training=Training(epochs=1, batch_size=BATCH, lr=0.001, momentum=0.9, buffers="frozen"),
        seed=0,
    )


def product_flops(model, shape):
    """Operations an image of training the 1x1 convolutions and linear layers: forward, weights, inputs.

    The first layer needs no gradient of its inputs.
    """
    counts = []

    def count(module, inputs, output):
        if getattr(module, "groups", 1) == 1:
            counts.append(2 * module.weight.numel() * output[0].numel() // output.shape[1])

    layers = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    model.eval()(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    return 3 * sum(counts) - counts[0]


def speed(work, count):
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


def train(how):
    """Samples a second on cached features and with the trunk, one thread each."""
    tune_process()
    pixels, objective = pictures(COMPUTED), Objective()
    trunk, tail = cut(network(), how)
    shape = trunk(torch.zeros(1, 3, SIZE, SIZE)).shape[1:]
    stored = (shape[1], shape[2], shape[0]) if len(shape) == 3 else shape
    features = np.random.default_rng(1).random((CACHED, *stored), dtype=np.float32)
    labels, flops = np.arange(CACHED) % CLASSES, product_flops(tail, shape)
    cached = client(tail, FeatureSamples(features, labels, np.arange(CACHED)))
    trunk, tail = cut(network(), how)
    tail.behind(trunk)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    computed = client(tail, Samples(pixels, labels[:COMPUTED], np.arange(COMPUTED), mean, std))
    ratios, speeds, rates = [], [], []
    for one in (cached, computed):
        one.train(objective.loss)  # warms up
    for _ in range(REPEATS):
        rates.append(product_rate(threads=1))
        fast = speed(lambda: cached.train(objective.loss), CACHED)
        slow = speed(lambda: computed.train(objective.loss), COMPUTED)
        ratios.append(fast / slow)
        speeds.append((fast, slow))
    fast, slow = (statistics.median(column) for column in zip(*speeds, strict=True))
    show(f"{how}: {fast:.0f} samples/s on cached features, {slow:.0f} with the trunk", ratios, TARGETS[how])
    if how == "head":
        return
    rate = statistics.median(rates)
    print(
        f"  products: {flops / 1e6:.1f} Mflop an image, {fast * flops / rate:.0%} of the {rate / 1e9:.0f} "
        f"Gflop/s of a large one; bound {rate / flops / slow:.1f} times"
    )


def plain_loop(model, pixels):
    """The loop one would write: float images, batches of 50, every core."""
    torch.set_num_threads(mp.cpu_count())
    found = []
    with torch.no_grad():
        for start in range(0, len(pixels), BATCH):
            batch = torch.from_numpy(pixels[start : start + BATCH]).permute(0, 3, 1, 2).float().contiguous()
            found.append(model.embed(batch / 255))
    return torch.cat(found)


def extract():
    """Images a second of the extraction, its files and checksum included, against the plain loop."""
    pairs = [_extraction() for _ in range(REPEATS + 1)][1:]  # the first starts the server of processes
    fast, slow = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = [one / other for one, other in pairs]
    show(f"extraction: {fast:.0f} images/s, plain loop {slow:.0f}", ratios, TARGETS["extraction"])


def _extraction():
    pixels, everything = pictures(EXTRACTED), np.arange(EXTRACTED)
    model, (trunk, _) = network(), cut(network(), "head")
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "images.npy", pixels)
        clients = (Client(name="x", train=everything, test=everything),)
        federation = Federation(
            name="x",
            folder=Path(folder),
            classes=("a", "b"),
            clients=clients,
            test=everything,
            mean=(0.5,) * 3,
            std=(0.25,) * 3,
        )
        slow = speed(lambda: plain_loop(model, pixels), EXTRACTED)
        return speed(lambda: cached_features(trunk, federation), EXTRACTED), slow


def closed(features):
    """Seconds of the steps of ridge regression: with one thread at the client, as in a run, else with all."""
    columns: dict[str, list[float]] = {}
    for _ in range(min(REPEATS, 3) + 1):
        for step, seconds in _closed_steps(Ridge(features=features)).items():
            columns.setdefault(step, []).append(seconds)
    print(f"ridge, {CLOSED} images, {features} features, seconds:")
    for step, values in columns.items():
        print(f"  {step}: {spread(values[1:])}", flush=True)  # the first repeat warms up


def _closed_steps(method):
    labels, everything = np.arange(CLOSED) % CLASSES, np.arange(CLOSED)
    rows = np.random.default_rng(1).random((CLOSED, 1280), dtype=np.float32)
    one = client(method.adapt(cut(network(), "head")[1]), FeatureSamples(rows, labels, everything))
    sender = {"clients": ("x",), "rows": [0], "sizes": (CLOSED,)}
    server, seconds = method.init(one.flat.vector.clone(), one.layout, (CLOSED,)), {}
    message, seconds["sums of a client"] = timed(1, lambda: method.prepare(one))
    sums = Messages(**sender, messages=[message])
    server, seconds["eigenvectors at the server"] = timed(mp.cpu_count(), lambda: method.gather(server, sums))
    one.message = method.broadcast(server)
    reply, seconds["leave-one-out errors of a client"] = timed(1, lambda: method.client_update(one))
    replies = Replies(
        **sender, messages=[reply.message], layout=one.layout, updates=reply.update[None], steps=(0.0,)
    )
    _, seconds["choice and solution"] = timed(mp.cpu_count(), lambda: method.server_update(server, replies))
    return seconds


def timed(threads, work):
    torch.set_num_threads(threads)
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def command(npz, weights):
    """Seconds of whole runs with a warm cache; the first one makes it warm."""
    for name, (settings, target) in COMMANDS.items():
        words = [FEDLD, "run", "--dataset", f"npz:{npz}", "--weights", weights, *COMMAND, *settings]
        seconds = []
        for _ in range(REPEATS + 1):
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                subprocess.run([*words, "--out", f"{folder}/run"], check=True, capture_output=True)
                seconds.append(time.perf_counter() - start)
        print(f"{name}, command to summary, s: {spread(seconds[1:])} with a warm cache (target {target})")


def idle_jiffies():
    """Time that all cores have been idle, in hundredths of a second."""
    return int(Path("/proc/stat").read_text().split()[4])


def auto(npz, weights):
    """Share of the cores that a search leaves idle, with a warm cache; the machine's own count."""
    words = [FEDLD, "auto", "--dataset", f"npz:{npz}", "--weights", weights, *COMMAND, "--head", "linear"]
    shares, seconds = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            start, idle = time.perf_counter(), idle_jiffies()
            subprocess.run([*words, *AUTO, "--out", f"{folder}/auto"], check=True, capture_output=True)
            seconds.append(time.perf_counter() - start)
            shares.append((idle_jiffies() - idle) / 100 / seconds[-1] / mp.cpu_count())
    print(f"auto, s: {spread(seconds)}; share of the cores left idle: {spread(shares)} (wanted 0.1)")


def show(what, ratios, target):
    middle, least = statistics.median(ratios), min(ratios)
    print(f"{what}: {middle:.1f} times (target {target}), at least {least:.1f}", flush=True)


def main():
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    part = words[0] if words else ""
    if part in ("command", "auto"):
        {"command": command, "auto": auto}[part](*words[1:3])
        return
    if part in ("", "extract"):
        extract()
    if part in ("", "train"):
        train("head")
        train("last:4")
    if part in ("", "closed"):
        closed("linear")
        closed(f"random:{UNITS}")


if __name__ == "__main__":
    main()
