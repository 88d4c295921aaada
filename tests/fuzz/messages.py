"""Messages between a server and a site as an enemy writes them: good ones with parts replaced by bad ones.

Whatever an order says, a site answers, tells nothing of few images, and keeps its account. Whatever an answer
says, the server refuses it in one sentence or has numbers that a measurement can give.
"""

import json
import random
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from sklearn.datasets import load_digits

from fedld import __version__
from fedld.config.experiment import make_experiment
from fedld.config.resolve import make_method
from fedld.engine.backends.flower import site
from fedld.engine.backends.flower.orders import Orders
from fedld.engine.backends.flower.wire import Answer, Description, pack, tree, unpack
from fedld.engine.jobs import (
    CandidateJob,
    Incoming,
    LossJob,
    PersonalJob,
    PrepareJob,
    SharedMemory,
    SiteTestJob,
    TrainJob,
)
from fedld.engine.network import divided, make_layout
from fedld.methods.moments import symmetric, triangle
from fedld.tasks import Classification
from fedld.transforms import Chain

CLASSES = ["low", "high", "rare"]
LEAST = 20
HERE = {"incoming": {"client": "a"}}
JOBS: list[dict[str, Any]] = [
    {"kind": "loss", "clients": ["a"]},
    {"kind": "loss", "clients": ["a"], "validation": True},
    {"kind": "loss", "clients": ["a"], "slot": 0, **HERE},
    {"kind": "train", "round": 1, "slot": 0, **HERE},
    {"kind": "candidates", "round": 1, "coefficients": [[1.0, 0.0], [0.0, 2.0]], "samples": 32, **HERE},
    {"kind": "personal", **HERE},
    {"kind": "site-test", **HERE},
    {"kind": "prepare", "round": 1, **HERE},
    {"kind": "prepare", "round": 0, "what": "closed", **HERE},
    {"kind": "prepare", "round": 0, "what": "features", **HERE},
]
SETTINGS = [
    *("", "decompose = 1", "validation = 0.4", "decompose_samples = 30", "local_steps = 3", "rounds = 900"),
    *('method = "fedpac"', 'method = "feddisco"', 'method = {name = "fedprox", mu = 100.0}'),
    *("batch_size = 1", "batch_size = 1000000000", "lr = 10.0\nweight_decay = 0.1", "image_size = 999"),
    *(f'method = "{name}"\ntrain = "head"' for name in ("ridge", "lda", "newton", "regmean")),
    *('method = {name = "ridge", features = "random:9"}\ntrain = "head"', 'transform = ["quantise:4"]'),
    *('rule = {name = "measured", samples = 32, lengths = "1,2"}', "local_epochs = 100000", "seed = 3"),
]
ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**53, 2**64, 10**30, -0.0, 1e308, float("nan"), float("inf"), -5, 0.5),
    *("", "a", "b", "\x00", "x" * 500, [], {}, [[]], ["a"] * 300, {"x": 1}, [1e308] * 9),
]


@lru_cache(maxsize=1)
def _site() -> tuple[Path, dict[str, Any]]:
    """A site's data and state, outside of the folder in which a case must not write."""
    for name in ("_task_id", "_run_id", "_node_id"):
        setattr(TaskIdentity, name, 1)
    folder = Path(tempfile.mkdtemp(prefix="fedld-fuzz-"))
    found = load_digits()
    images = np.rint(found.images[:200] * (255 / 16)).astype(np.uint8)
    labels = (found.target[:200] >= 5).astype(np.int64)
    labels[3] = 2
    split = np.where(np.arange(200) % 3 == 0, "test", "train")
    np.savez(folder / "a.npz", images=images, labels=labels, split=split, classes=np.array(CLASSES))
    config = {"site": "a", "data": str(folder / "a.npz"), "state": str(folder), "min-images": LEAST}
    return folder, config | {"max-runs": 10**6, "memory-gb": 1.5, "max-epochs": 3, "cache-gb": 0.1}


def _federation() -> Any:
    return SimpleNamespace(input_shape=(1, 8, 8), classes=CLASSES, outputs=len(CLASSES), output_shape=(3,))


@lru_cache(maxsize=1)
def _size() -> Any:
    experiment = make_experiment({})
    method = make_method(experiment)
    return make_layout(experiment, method, divided(experiment, method, _federation())[1])


def _spoil(value: Any, rng: random.Random) -> Any:
    """The value with one part of it replaced, removed or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        changed = {**value, key: _spoil(value[key], rng)}
        if rng.random() < 0.1:
            changed.pop(key)
        return {**changed, "more": 1} if rng.random() < 0.05 else changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        k = rng.randrange(len(value))
        return [*value[:k], _spoil(value[k], rng), *value[k + rng.randrange(2) :]]
    return rng.choice(ODD)


def _tensor(rng: random.Random) -> torch.Tensor:
    size = rng.choice([_size().size] * 6 + [0, 1, _size().size + 1])
    return rng.choice([0.0, 0.1, 1.0, 1e6, 1e30, float("nan")]) * torch.ones(size)


def _order(rng: random.Random) -> Callable[[], object]:
    """An order to a site, by chance a bad one."""
    _, config = _site()
    jobs = [dict(rng.choice(JOBS)) for _ in range(rng.choice([1, 1, 2, 3]))]
    order: Any = {"version": __version__, "run": f"{rng.randrange(8):032x}", "kept": [], "jobs": jobs}
    order |= {"settings": rng.choice(SETTINGS), "classes": CLASSES, "mean": [0.5], "std": [0.3]}
    for _ in range(rng.choice([0, 0, 1, 2])):
        order = _spoil(order, rng)
    trees: dict[str, dict[str, torch.Tensor]] = {"weights": {"weights": _tensor(rng)}}
    trees["models"] = {"0": _tensor(rng)}
    if rng.random() < 0.5:
        trees["candidates"] = {"directions": torch.zeros(rng.choice([1, 2, 5]), _size().shared)}
    if rng.random() < 0.1:
        trees.pop(rng.choice(list(trees)))

    def case() -> None:
        content = pack(Answer(), **trees)
        content.config_records["part"]["json"] = json.dumps(order)
        reply = site.app(Message(content, 1, "train"), Context(0, 1, config, RecordDict(), {}))
        answer = unpack(Answer, reply.content)
        for result in answer.results:
            _check_told(result)
        for name in ("counts", "prototypes"):
            if name in (message := tree(reply.content, "message")):
                assert not message[name][2].any(), f"{name} of one image left"

    return case


def _check_told(result: dict[str, Any]) -> None:
    """Nothing of few images, and no exact loss."""
    for tally in (result, result.get("before"), result.get("after"), result.get("own")):
        if isinstance(tally, dict) and "count" in tally:
            count = tally["count"]
            assert count == 0 or count >= LEAST, f"a measurement of {count} images left"
            mean = tally["loss"] / max(count, 1) if "loss" in tally else 0.0
            assert abs(mean * 1000 - round(mean * 1000)) < 1e-6, "a loss left that is not rounded"


@lru_cache(maxsize=1)
def _orders() -> tuple[Orders, list[Any], dict[str, Any]]:
    """A server that waits for the answers to some jobs, and a good answer."""
    layout = _size()
    experiment = make_experiment({})
    setup: Any = SimpleNamespace(
        experiment=experiment,
        method=make_method(experiment),
        layout=layout,
        sizes={"a": 100},
        task=Classification(),
        transforms=Chain(),
        private={},
    )
    memory = SharedMemory(
        weights=torch.zeros(layout.size),
        **{part: torch.zeros(1, layout.size) for part in ("updates", "logits", "basis")},
    )
    here = Incoming("a")
    jobs = [
        LossJob(clients=("a",)),
        TrainJob(1, 0, here),
        CandidateJob(round=1, incoming=here, coefficients=((1.0,),), samples=32),
        PersonalJob(here),
    ]
    jobs.append(SiteTestJob(here))
    tally = {"count": 50, "loss": 20.0, "loss_squared": 9.0, "sums": {"correct": 30}}
    part = {"value": 0.5, "low": 0.4, "high": 0.6}
    models = {
        "global": {"pictures": 40, "patients": None, "accuracy": part, "auroc": part, "sensitivity": part}
    }
    trained = {"message": {}, "has_state": False, "metrics": {"steps": 2.0, "train_loss": 0.5, "lr": 0.1}}
    trained |= {"before": tally, "after": tally, "finite": True, "seconds": 1.0}
    vote = {"count": 40, "losses": [0.5], "squares": [0.0]}
    results = [tally, trained, vote, {"test": None, "own": tally}, {"models": models}]
    return Orders(setup, memory, "0" * 32, {"a": 60}), jobs, {"results": results}


def _answer(rng: random.Random) -> Callable[[], object]:
    """An answer to the server, by chance a bad one."""
    orders, jobs, answer = _orders()
    for _ in range(rng.choice([1, 1, 2, 4])):
        answer = _spoil(answer, rng)

    def case() -> None:
        content = pack(Answer(), update={"update": torch.zeros(_size().shared_size)})
        content.config_records["part"]["json"] = json.dumps(answer)
        loss, trained, vote, personal, tests = orders.read(jobs, content)
        for tally, most in ((loss, 100), (trained.before, 100), (trained.after, 100), (personal.own, 60)):
            if tally is not None:
                assert 0 <= tally.count <= most
                assert 0 <= tally.sums.get("correct", 0) <= tally.count
                assert 0 <= tally.loss <= 21 * tally.count
        assert not trained.finite or trained.metrics["steps"] >= 1
        assert vote.count <= 100
        assert all(one.pictures <= 60 for one in tests.models.values())

    return case


@lru_cache(maxsize=1)
def _sums() -> tuple[Orders, dict[str, torch.Tensor]]:
    """A server that waits for a site's sums, and those of a hundred samples."""
    orders, _, _ = _orders()
    setup: Any = SimpleNamespace(**vars(orders.setup))
    experiment = make_experiment({"method": "ridge", "train": "head"})
    setup.method = make_method(experiment)
    setup.layout = make_layout(experiment, setup.method, divided(experiment, setup.method, _federation())[1])
    generator = torch.Generator().manual_seed(0)
    X = torch.nn.functional.pad(torch.randn(100, 5, generator=generator).double(), (0, 1), value=1.0)
    Y = torch.nn.functional.one_hot(torch.arange(100) % 3).double()
    message = {"moments": triangle(X.T @ X), "targets": X.T @ Y}
    return Orders(setup, orders.memory, "0" * 32, {"a": 60}), message


def _closed_form(rng: random.Random) -> Callable[[], object]:
    """A site's sums for a head in closed form, by chance with some numbers replaced."""
    orders, good = _sums()
    message = {key: value.clone() for key, value in good.items()}
    for _ in range(rng.choice([0, 1, 1, 3])):
        key = rng.choice(list(message))
        values = message[key].flatten()
        values[rng.randrange(len(values))] = rng.choice([0.0, -1.0, 0.5, 1e3, 1e8, -1e30, float("nan")])
        message[key] = values.view(message[key].shape)
    if rng.random() < 0.2:
        key = rng.choice(list(message))
        message[key] = rng.choice(
            [message[key][:-1], message[key].float(), message[key].long(), message[key] * 7]
        )
    if rng.random() < 0.1:
        message.pop(rng.choice(list(message)))

    def case() -> None:
        content = pack(Answer(results=[{}]), message=message)
        content.config_records["part"]["json"] = json.dumps({"results": [{"message": {}, "finite": True}]})
        [prepared] = orders.read([PrepareJob(1, Incoming("a"))], content)
        if prepared.finite and prepared.message:
            assert 0 < prepared.message["targets"][-1].sum() <= 100
            assert torch.linalg.eigvalsh(symmetric(prepared.message["moments"])).min() > -1e-2

    return case


def _description(rng: random.Random) -> Callable[[], object]:
    """A site's description of its data, by chance a bad one."""
    told: Any = {"site": "a", "version": __version__, "shape": [8, 8, 1], "train": 100, "test": 20}
    told |= {"label_counts": [60, None, None], "pixel_sums": [[1000], [50000]]}
    for _ in range(rng.choice([1, 1, 2])):
        told = _spoil(told, rng)

    def case() -> None:
        content = pack(Answer())
        content.config_records["part"]["json"] = json.dumps(told)
        found = unpack(Description, content)
        if found.problem(3) is None:
            assert sum(count or 0 for count in found.label_counts) <= found.train

    return case


def make_case(rng: random.Random, _: Path) -> Callable[[], object]:
    """One message, sent."""
    _site()
    return rng.choice([_order, _order, _order, _answer, _answer, _closed_form, _description])(rng)
