"""One table of names for every kind of part: one sentence for a wrong name, one way to add a part."""

from dataclasses import dataclass

import numpy as np
import pytest

import fedld
from fedld import FedLDError
from fedld.config.own import REGISTRIES
from fedld.data import DATASETS, PARTITIONS
from fedld.engine.backends.machine import ENGINES
from fedld.methods import METHODS, FedProx
from fedld.registry import Registry
from fedld.study.trackers import TRACKERS
from fedld.tasks import TASKS, Classification

EVERY = [*REGISTRIES.values(), ENGINES, TRACKERS]
QUICK = {"rounds": 1, "clients": 2, "workers": 0}


@pytest.mark.parametrize("registry", EVERY, ids=lambda registry: registry.kind)
def test_every_kind_has_one_class_and_one_sentence(registry):
    assert type(registry) is Registry
    kind, name = registry.kind, registry.names[0]
    with pytest.raises(FedLDError, match=rf"^unknown {kind} 'zzqq': valid names: .*{name}"):
        registry.find("zzqq")
    with pytest.raises(FedLDError, match=rf"^unknown {kind} '{name[:-1]}\+': did you mean '"):
        registry.find(name[:-1] + "+")
    with pytest.raises(FedLDError, match=rf"^{kind} 'my_parts:mine' is not part of fedld and files may not"):
        registry.find("my_parts:mine")
    with pytest.raises(FedLDError):
        registry.resolve(3)
    with pytest.raises(FedLDError, match=f"there is a {kind} '{name}' already"):
        registry.register(name, object())


def test_a_name_may_have_an_argument_where_the_kind_says_so():
    models, datasets, transforms = (REGISTRIES[kind] for kind in ("model", "dataset", "transform"))
    assert models.recognises("unet:width=16")
    assert not models.recognises("cnn:make")
    assert datasets.recognises("folder:xrays")
    assert transforms.recognises("quantise:8")
    with pytest.raises(FedLDError, match="unknown dataset 'fodler:': did you mean 'folder:'"):
        fedld.data("fodler:xrays")


def test_a_registered_part_works_like_a_built_in_one(tmp_path):
    METHODS.register("careful", FedProx(mu=2.0))
    PARTITIONS.register("halves", lambda labels: np.array_split(np.arange(len(labels)), 2))
    DATASETS.register("two-halves", lambda clients: fedld.data("digits", clients=clients, partition="halves"))
    try:
        result = fedld.run("careful", "two-halves", out=tmp_path, **QUICK)
        with pytest.raises(FedLDError, match="method is a name, or a Method, not int 3"):
            METHODS.register("three", 3)
    finally:
        for registry, name in ((METHODS, "careful"), (PARTITIONS, "halves"), (DATASETS, "two-halves")):
            del registry[name]
    assert result.summary["method"] == "careful"
    assert {line["client"] for line in result.clients} == {"client_1", "client_2"}


@dataclass(frozen=True)
class Renamed(Classification):
    """Classification under another name."""

    name = "renamed"
    kind = "classification"


def test_a_task_goes_in_as_a_value_or_under_a_name():
    plain = fedld.run("fedavg", "digits", **QUICK).summary["test"]["final"]
    assert fedld.run("fedavg", "digits", task=Renamed(), **QUICK).summary["test"]["final"] == plain
    TASKS.register("renamed", Renamed)
    try:
        assert fedld.run("fedavg", "digits", task="renamed", **QUICK).summary["test"]["final"] == plain
    finally:
        del TASKS["renamed"]
    with pytest.raises(FedLDError, match="task is a name, or a Task, not int 3"):
        fedld.run("fedavg", "digits", task=3)
