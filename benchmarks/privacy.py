"""Cost of privacy: CPU time of secure computations, fixed-point error, noisy steps, membership inference.

    python benchmarks/privacy.py [secure] [dp] [membership] [--parameters 25600000] [--sites 12] [--repeats 5]

One thread. `masks` is what a site adds to its vector: its own mask and one for each peer.
`plain sum` is the server's time to add all vectors as float32, to compare with.
"""

import argparse
import time
from dataclasses import replace
from statistics import median

import numpy as np
import torch
from machine import describe, spread
from sklearn.metrics import roc_auc_score
from torch import nn

from fedld.engine.backends.processes import tune_process
from fedld.layout import FlatModel, Layout
from fedld.local import LocalClient, Objective, Training
from fedld.local.private import PrivateSteps
from fedld.local.samples import FeatureSamples
from fedld.privacy.accounting import noise_for
from fedld.privacy.fixed_point import FixedPoint, Segment
from fedld.privacy.masks import add_mask
from fedld.privacy.simulation import secure_gram, secure_sum


def seconds(repeats, work):
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return median(taken)


def timing(parameters, sites, repeats):
    print(f"{parameters:,} parameters, {sites} sites, CPU seconds of one site (median of {repeats})\n")
    print("| bits | encode | masks | decode | plain sum at the server |")
    print("|---|---|---|---|---|")
    vector = np.random.default_rng(0).normal(0, 0.01, parameters).astype(np.float32)
    for bits in (32, 64):
        segments = (Segment("update", parameters, 1.0),)
        code = FixedPoint(bits=bits, sites=sites, largest_weight=1000, segments=segments)
        coded = code.encode(vector, 7)
        times = [
            seconds(repeats, lambda code=code: code.encode(vector, 7)),
            seconds(repeats, lambda coded=coded: [add_mask(coded, bytes([k]) * 32) for k in range(sites)]),
            seconds(repeats, lambda code=code, coded=coded: code.decode(coded)),
            seconds(repeats, lambda: sum((vector for _ in range(sites)), start=np.zeros_like(vector))),
        ]
        print(f"| {bits} | {' | '.join(f'{t:.2f}' for t in times)} |")


def error(sites):
    print("\nFixed-point error of a weighted sum, bound 1, values of standard deviation 0.01\n")
    print("| bits | largest weight | resolution | relative error |")
    print("|---|---|---|---|")
    generator = np.random.default_rng(0)
    names = [f"site{k}" for k in range(sites)]
    for bits, largest in ((32, 100), (32, 1000), (32, 10_000), (64, 10_000)):
        segment = Segment("update", 100_000, 1.0)
        code = FixedPoint(bits=bits, sites=sites, largest_weight=largest, segments=(segment,))
        vectors = {name: generator.normal(0, 0.01, segment.length) for name in names}
        weights = {name: int(generator.integers(largest // 10, largest + 1)) for name in names}
        opened = secure_sum(vectors, weights, code).total
        exact = sum(weights[name] * vectors[name] for name in names)
        relative = np.linalg.norm(opened - exact) / np.linalg.norm(exact)
        print(f"| {bits} | {largest} | {code.resolution(segment):.1e} | {relative:.1e} |")


def gram(sites, length):
    """One site's time and bytes for a Gram matrix, without the sketch itself."""
    names = [f"site{k:02}" for k in range(sites)]
    vectors = {name: np.random.default_rng(k).normal(size=8 * length) for k, name in enumerate(names)}
    start = time.process_time()
    opened = secure_gram(vectors, lambda v, k, seed: v[:k], length=length, bound=1e3)
    each = (time.process_time() - start) / sites
    print(f"\nGram matrix of {sites} sites, sketches of {length}: {opened.sent[names[0]] / 1000:.0f} kB and")
    print(f"{1000 * each:.0f} ms a site, the server's work and every site's own opening included")


def head(features, classes, samples=2000):
    """A client with a linear head on features, as a frozen trunk leaves them."""
    generator = np.random.default_rng(0)
    values = generator.normal(size=(samples, features)).astype(np.float32)
    labels = generator.integers(0, classes, samples)
    flat = FlatModel(network := nn.Linear(features, classes), Layout.of(network))
    return flat, FeatureSamples(values, labels, np.arange(samples))


def dp(repeats):
    """Time of an epoch of noisy steps over that of plain steps, one after the other in each repeat."""
    print("\nNoisy steps over plain steps, a linear head on cached features, 2,000 samples, batches of 50\n")
    print("| features | classes | ratio: median (smallest - largest) |")
    print("|---|---|---|")
    for features, classes in ((512, 2), (1280, 5), (2048, 10)):
        flat, samples = head(features, classes)
        plain = Training(epochs=1, batch_size=50, lr=0.01, momentum=0.9)
        noisy = replace(plain, private=PrivateSteps(noise=1.0, clip=1.0, rate=50 / 2000, steps=40))
        ratios = []
        for _ in range(repeats + 1):
            times = []
            for training in (plain, noisy):
                client = LocalClient(name="a", round=1, flat=flat, samples=samples, training=training, seed=0)
                start = time.process_time()
                client.train(Objective().loss)
                times.append(time.process_time() - start)
            ratios.append(times[1] / times[0])
        print(f"| {features} | {classes} | {spread(ratios[1:])} |")


def membership(repeats):
    """How well an attacker tells members by their loss, on a network that learnt random labels by heart."""
    print("\nMembership inference by the loss: AUROC of 100 members against 100 others, random labels\n")
    print("| training | AUROC: median (smallest - largest) |")
    print("|---|---|")
    steps, rate = 600, 0.5
    for epsilon in (None, 8.0, 1.0):
        private = None
        if epsilon is not None:
            noise = noise_for(epsilon, 1e-5, rate, steps)
            private = PrivateSteps(noise=noise, clip=1.0, rate=rate, steps=steps)
        found = [attacked(private, steps, seed) for seed in range(repeats)]
        print(f"| {'plain' if epsilon is None else f'epsilon {epsilon:g}'} | {spread(found)} |")


def attacked(private, steps, seed):
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(200, 100)).astype(np.float32)
    labels = generator.integers(0, 2, 200)
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 2))
    flat = FlatModel(network, Layout.of(network))
    members = FeatureSamples(values, labels, np.arange(100))
    training = Training(epochs=1, batch_size=50, lr=0.1, momentum=0.0, steps=steps, private=private)
    LocalClient(name="a", round=1, flat=flat, samples=members, training=training, seed=seed).train(
        Objective().loss
    )
    with torch.no_grad():
        logits = network(torch.from_numpy(values))
    losses = nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="none").numpy()
    return float(roc_auc_score(np.arange(200) < 100, -losses))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["secure", "dp", "membership"])
    parser.add_argument("--parameters", type=int, default=25_600_000)
    parser.add_argument("--sites", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    tune_process()  # as in the processes that train
    print(describe())
    if "secure" in args.parts:
        timing(args.parameters, args.sites, args.repeats)
        error(args.sites)
        gram(args.sites, 1024)
    if "dp" in args.parts:
        dp(args.repeats)
    if "membership" in args.parts:
        membership(args.repeats)


if __name__ == "__main__":
    main()
