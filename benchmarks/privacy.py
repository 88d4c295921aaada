"""CPU time of a secure sum for one site, its fixed-point error, and a Gram matrix's cost.

    python benchmarks/privacy.py [--parameters 25600000] [--sites 12] [--repeats 5]

One thread. `masks` is what a site adds to its vector: its own mask and one for each peer.
`plain sum` is the server's time to add all vectors as float32, to compare with.
"""

import argparse
import time
from statistics import median

import numpy as np
from machine import describe

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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=25_600_000)
    parser.add_argument("--sites", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(describe())
    timing(args.parameters, args.sites, args.repeats)
    error(args.sites)
    gram(args.sites, 1024)


if __name__ == "__main__":
    main()
