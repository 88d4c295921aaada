"""Python misuse is one sentence that names the thing, like bad input on the command line."""

import numpy as np
import pytest
import torch

import fedld
from fedld.errors import FedLDError

TINY = {"federation": "digits", "clients": 3, "rounds": 1, "workers": 0, "progress": False}
SAMPLES = np.random.default_rng(0).integers(0, 256, (12, 8, 8), np.uint8)
LABELS = np.arange(12) % 3


def arrays(labels=LABELS, samples=SAMPLES, **options):
    return fedld.Federation.from_arrays({"a": (samples, labels), "b": (samples, labels)}, **options)


MISUSE = {
    "metrics is a number": lambda: fedld.run(metrics=5, **TINY),
    "a metric is a number": lambda: fedld.run(metrics=[5], **TINY),
    "out is a number": lambda: fedld.run(out=5, **TINY),
    "out has a zero byte": lambda: fedld.run(out="a\0b", **TINY),
    "methods is a number": lambda: fedld.compare(5, "digits"),
    "methods is None": lambda: fedld.compare(None, "digits"),
    "methods is one name": lambda: fedld.compare("fedavg", "digits"),
    "a method is a number": lambda: fedld.compare([5], "digits"),
    "labels are numbers of a mapping": lambda: fedld.compare({1: "fedavg", 2: "fedprox"}, "digits"),
    "seeds is a number": lambda: fedld.compare(["fedavg"], "digits", seeds=5),
    "no seeds": lambda: fedld.compare(["fedavg"], "digits", seeds=[]),
    "seeds are words": lambda: fedld.compare(["fedavg"], "digits", seeds=["a"]),
    "a seed is negative": lambda: fedld.compare(["fedavg"], "digits", seeds=[-1]),
    "a seed twice": lambda: fedld.compare(["fedavg"], "digits", seeds=[0, 0]),
    "jobs is a word": lambda: fedld.compare(["fedavg"], "digits", jobs="two"),
    "callbacks is a number": lambda: fedld.run(callbacks=5, **TINY),
    "updates are a number": lambda: fedld.aggregate(5, [1.0]),
    "updates are None": lambda: fedld.aggregate(None, [1.0]),
    "client names are a number": lambda: fedld.aggregate(torch.ones(2, 3), [1.0, 1.0], clients=5),
    "weights are a word": lambda: fedld.aggregate(torch.ones(2, 3), "equal"),
    "mixed labels": lambda: arrays(np.array([0, "a", None] * 4, object)),
    "labels are None": lambda: arrays(np.array([None] * 12)),
    "labels are fractions": lambda: arrays(LABELS + 0.5),
    "labels of another kind per client": lambda: fedld.Federation.from_arrays(
        {"a": (SAMPLES, LABELS), "b": (SAMPLES, np.array(list("abc") * 4))}
    ),
    "labels near 1e9": lambda: arrays(np.arange(12) + 10**9),
    "classes is a number": lambda: arrays(classes=5),
    "class names are numbers": lambda: arrays(classes=[0, 1, 2]),
    "class names twice": lambda: arrays(classes=["a", "a", "b"]),
    "samples are words": lambda: arrays(samples=np.array(["x"] * 12)),
    "a sample is a number": lambda: arrays(samples=5),
    "load nothing": lambda: fedld.load(),
    "load a number": lambda: fedld.load(5),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedLDError) as caught:
        MISUSE[name]()
    sentence = str(caught.value)
    assert sentence
    assert "\n" not in sentence
    assert len(sentence) < 400
    assert list(tmp_path.iterdir()) == []
