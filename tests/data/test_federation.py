import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from fedld.data import DataSpec, describe, load
from fedld.data.table import cached, write_table
from fedld.errors import FedLDError
from fedld.paths import cache_root

SMALL = DataSpec(samples=240, clients=3)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return load(SMALL, tmp_path_factory.mktemp("cache"))


def test_pickling_moves_no_pixels(federation):
    assert federation.images.nbytes > 500_000
    packed = pickle.dumps(federation)
    assert len(packed) < 20_000
    again = pickle.loads(packed)
    assert np.shares_memory(again.images, federation.images)  # one map a process
    assert not again.images.flags.writeable


def test_clients_and_test_set_are_disjoint(federation):
    rows = np.concatenate([*(client.train for client in federation.clients), federation.test])
    assert sorted(rows) == list(range(240))
    assert (federation.label_counts().sum(axis=1) == [len(c.train) for c in federation.clients]).all()
    assert sum(len(client.test) for client in federation.clients) == len(federation.test)


def test_hold_out_never_sees_the_test_set(federation):
    held = federation.hold_out(0.25, seed=1)
    for before, after in zip(federation.clients, held.clients, strict=True):
        assert sorted([*after.train, *after.test]) == before.train.tolist()
        assert len(after.test) == pytest.approx(0.25 * len(before.train), abs=1)
    assert not np.isin(held.test, federation.test).any()
    assert (held.test == np.sort(np.concatenate([client.test for client in held.clients]))).all()
    assert (held.test == federation.hold_out(0.25, seed=1).test).all()
    assert not np.array_equal(held.test, federation.hold_out(0.25, seed=2).test)


def test_hold_out_leaves_a_training_image(federation):
    client = federation.clients[0]
    tiny = replace(federation, clients=(replace(client, train=client.train[:1]), *federation.clients[1:]))
    assert len(tiny.hold_out(0.9, seed=0).clients[0].train) == 1
    with pytest.raises(FedLDError, match="between 0 and 1"):
        federation.hold_out(1.0, seed=0)
    with pytest.raises(FedLDError, match="holds out no image"):
        federation.hold_out(1e-6, seed=0)


def test_describe_is_plain_data(federation):
    summary = json.loads(json.dumps(describe(federation)))
    assert summary["train"] == 192
    assert summary["test"] == 48
    assert summary["classes"] == ["healthy", "diseased"]
    assert summary["image_shape"] == [32, 32, 3]
    assert [client["name"] for client in summary["clients"]] == ["site_1", "site_2", "site_3"]
    assert [sum(client["labels"]) for client in summary["clients"]] == [
        client["train"] for client in summary["clients"]
    ]


def test_digits(tmp_path):
    federation = load(DataSpec(dataset="digits", clients=4), tmp_path)
    assert federation.images.shape == (1797, 8, 8, 1)
    assert federation.images.max() == 255
    assert len(federation.test) == 359
    assert load(DataSpec(dataset="digits", image_size=16), tmp_path).images.shape[1:] == (16, 16, 1)


def test_two_builders_may_race(tmp_path):
    """Both are inside the build at once; one wins, both get the same complete entry."""
    meet = Barrier(2, timeout=30)

    def build(folder: Path) -> None:
        images = np.zeros((4, 8, 8, 1), np.uint8)
        write_table(folder, images, np.arange(4) % 2, ("a", "b"), split=np.full(4, "draw"))
        meet.wait()

    with ThreadPoolExecutor(2) as pool:
        tables = list(pool.map(lambda _: cached(tmp_path, "x", "0" * 64, build), range(2)))
    assert [table.folder for table in tables] == [tables[0].folder] * 2
    assert list(tmp_path.iterdir()) == [tables[0].folder]


def test_a_failed_build_leaves_nothing(tmp_path):
    def build(folder: Path) -> None:
        (folder / "half").write_text("done")
        raise FedLDError("stop")

    with pytest.raises(FedLDError, match="stop"):
        cached(tmp_path, "x", "0" * 64, build)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_entry_is_named(tmp_path):
    folder = load(SMALL, tmp_path).folder
    (folder / "table.json").write_text("{")
    with pytest.raises(FedLDError, match=f"{folder.name} is damaged; delete it"):
        load(SMALL, tmp_path)


def test_cache_root_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLD_CACHE", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
    (tmp_path / "file").write_text("")
    with pytest.raises(FedLDError, match="set FEDLD_CACHE"):
        cache_root(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "fundus-smi"}, "did you mean 'fundus-sim'"),
        ({"dataset": "npy:x"}, "did you mean 'npz:'"),
        ({"test_fraction": 1.0}, "test_fraction"),
        ({"image_size": 4}, "image_size"),
        ({"shortcut": 1.5}, "shortcut"),
        ({"feature_shift": float("nan")}, "feature_shift"),
        ({"samples": 0}, "samples"),
        ({"samples": 40}, "5 clients with at least 10 images each need 50 training images"),
        ({"clients": 0}, "at least one client"),
        ({"alpha": 0.0}, "alpha"),
        ({"partition": "site"}, "iid gives equal sites"),
        ({"partition": "dirichlet", "split": 1}, "published client list"),
        ({"dataset": "digits", "partition": "site"}, "no text column 'site'"),
    ],
)
def test_impossible_requests(tmp_path, options, message):
    with pytest.raises(FedLDError, match=message):
        load(DataSpec(**options), tmp_path)


def test_a_federation_is_shown_in_one_line():
    federation = load(DataSpec(dataset="digits", clients=3, partition="iid"))
    text = repr(federation)
    assert text == "<Federation 'digits', classification: 3 clients, 1,438 training and 359 test samples>"
