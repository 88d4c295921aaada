import hashlib
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedld.data.partition import PARTITIONS, _fill_up, dirichlet_sslfl, partition, repair
from fedld.errors import FedLDError

PUBLISHED = {1: 100.0, 2: 1.0, 3: 0.5}
MANIFESTS = Path("/work/shared/data/sslfl_csv_manifests/manifests.tar.gz")
FIXTURE = json.loads((Path(__file__).parent / "retina_partition.json").read_text())


def retina_labels():
    """The labels of Retina's training files in the order of labels.csv."""
    packed = np.frombuffer(bytes.fromhex(FIXTURE["labels"]), np.uint8)
    return np.unpackbits(packed)[: FIXTURE["count"]].astype(np.int64)


def digest(part):
    return hashlib.sha256(",".join(map(str, part)).encode()).hexdigest()


@pytest.mark.parametrize("split", PUBLISHED)
def test_sslfl_gives_the_published_client_lists(split):
    parts = dirichlet_sslfl(retina_labels(), 5, PUBLISHED[split])
    assert [len(part) for part in parts] == FIXTURE["sizes"][str(split)]
    assert [digest(part.tolist()) for part in parts] == FIXTURE["digests"][str(split)]


@pytest.mark.skipif(not MANIFESTS.exists(), reason="needs the published csv files")
@pytest.mark.parametrize("split", PUBLISHED)
def test_sslfl_matches_the_manifests_file_for_file(split):
    with tarfile.open(MANIFESTS) as archive:

        def read(name):
            return archive.extractfile(f"Retina/{name}").read().decode().split()

        train = set(read("train.csv"))
        rows = [line.split(",") for line in read("labels.csv")]
        rows = [(name, int(float(label))) for name, label in rows if name in train]
        labels = np.array([label for _, label in rows])
        assert (labels == retina_labels()).all()
        for client, part in enumerate(dirichlet_sslfl(labels, 5, PUBLISHED[split]), start=1):
            assert {rows[i][0] for i in part} == set(read(f"5_clients/split_{split}/client_{client}.csv"))


def test_sslfl_gives_up_after_a_while():
    with pytest.raises(
        FedLDError, match="found no draw that gives 5 clients at least 10 images each at alpha"
    ):
        dirichlet_sslfl(np.arange(100) % 2, 5, 1e-6)
    parts = dirichlet_sslfl(np.arange(200) % 5, 8, 0.3)
    assert min(map(len, parts)) >= 10
    assert sorted(np.concatenate(parts)) == list(range(200))


def test_the_name_uses_seed_2022_first():
    labels = np.arange(400) % 2
    named = partition("dirichlet-sslfl", labels, 4, alpha=1.0)
    assert all((a == b).all() for a, b in zip(named, dirichlet_sslfl(labels, 4, 1.0), strict=True))
    other = partition("dirichlet-sslfl", labels, 4, alpha=1.0, seed=1)
    assert [len(part) for part in named] != [len(part) for part in other]


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(["iid", "dirichlet", "quantity"]),
    classes=st.integers(1, 5),
    clients=st.integers(1, 12),
    spare=st.integers(0, 200),
    min_size=st.integers(1, 12),
    alpha=st.sampled_from([1e-6, 0.01, 0.3, 1.0, 100.0, 1e6]),
    seed=st.integers(0, 5),
)
def test_every_image_goes_to_one_client_and_no_client_is_short(
    name, classes, clients, spare, min_size, alpha, seed
):
    labels = np.random.default_rng(seed).integers(0, classes, clients * min_size + spare)
    parts = partition(name, labels, clients, alpha=alpha, min_size=min_size, seed=seed)
    assert len(parts) == clients
    assert min(map(len, parts)) >= min_size
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    assert all((np.diff(part) > 0).all() for part in parts)


@pytest.mark.parametrize("name", PARTITIONS)
def test_the_seed_decides(name):
    labels = np.arange(600) % 3

    def draw(seed):
        return partition(name, labels, 4, alpha=0.5, classes_per_client=2, seed=seed)

    def same(one, other):
        return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    assert same(draw(0), draw(0))
    assert not same(draw(0), draw(1))


def spread(parts, labels):
    """Mean distance of the clients' class shares from the even mix."""
    shares = [np.bincount(labels[part], minlength=2) / len(part) for part in parts]
    return np.abs(np.array(shares) - 0.5).mean()


def test_alpha_dials_label_skew():
    labels = np.arange(5000) % 2
    skews = [spread(partition("dirichlet", labels, 10, alpha=alpha), labels) for alpha in (0.1, 1, 100)]
    assert skews[0] > skews[1] > skews[2]
    assert skews[2] < 0.05


def test_quantity_skews_sizes_and_not_labels():
    labels = np.arange(5000) % 2
    parts = partition("quantity", labels, 5, alpha=0.5)
    sizes = sorted(map(len, parts))
    assert sizes[-1] > 3 * sizes[0]
    assert spread([part for part in parts if len(part) > 300], labels) < 0.08


@pytest.mark.parametrize(("clients", "per_client"), [(5, 2), (10, 1), (3, 4), (7, 3)])
def test_classes_per_client_is_exact(clients, per_client):
    labels = np.arange(2000) % 10
    parts = partition("classes", labels, clients, classes_per_client=per_client)
    assert {len(np.unique(labels[part])) for part in parts} == {per_client}
    assert sum(map(len, parts)) == 2000


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf"), 1e-9])
@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-sslfl", "quantity"])
def test_impossible_alpha(name, alpha):
    with pytest.raises(FedLDError, match="alpha must be a positive number"):
        partition(name, np.arange(100) % 2, 2, alpha=alpha)


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize(
    ("clients", "min_size", "message"),
    [
        (101, 1, "101 clients cannot share 100 training images"),
        (10, 11, "10 clients with at least 11 images each need 110 training images, but there are 100"),
        (0, 10, "at least one client"),
        (2, 0, "min_size must be at least 1"),
    ],
)
def test_impossible_sizes(name, clients, min_size, message):
    with pytest.raises(FedLDError, match=message):
        partition(name, np.arange(100) % 2, clients, min_size=min_size, classes_per_client=1)


def test_impossible_classes():
    labels = np.arange(100) % 10
    with pytest.raises(FedLDError, match="between 1 and 10"):
        partition("classes", labels, 2, classes_per_client=11)
    with pytest.raises(FedLDError, match="cannot hold all 10 classes"):
        partition("classes", labels, 2, classes_per_client=2)
    with pytest.raises(FedLDError, match="fewer than min_size 20"):
        partition("classes", np.array([0] * 190 + [1] * 10), 2, classes_per_client=1, min_size=20)


def test_unknown_partition_offers_the_nearest():
    with pytest.raises(FedLDError, match="did you mean 'dirichlet'"):
        partition("dirichelt", np.arange(100) % 2, 2)


def test_a_repaired_partition_says_by_how_much():
    labels = np.arange(400) % 4
    drawn, fixed = (partition("dirichlet", labels, 20, alpha=0.01, min_size=size) for size in (1, 10))
    text = repair(labels, 20, 0.01, min_size=10)
    assert repair(labels, 5, 100.0) is None
    moved = int(re.search(r"(\d+) of 400 images changed their client", text)[1])
    assert min(map(len, fixed)) == 10 > min(map(len, drawn))
    assert 10 <= moved <= 200


def test_a_raw_draw_is_the_plain_one_or_an_error():
    labels = np.arange(400) % 4
    plain = partition("dirichlet-raw", labels, 4, alpha=100.0)
    assert all(
        (a == b).all() for a, b in zip(plain, partition("dirichlet", labels, 4, alpha=100.0), strict=True)
    )
    with pytest.raises(FedLDError, match=r"smallest of 20 clients draws \d images, fewer than min_size 10"):
        partition("dirichlet-raw", labels, 20, alpha=0.01)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=20), st.integers(1, 5))
def test_repair_takes_from_the_largest_client_one_by_one(sizes, least):
    """Looking for the largest among all clients each time gives the same, slowly."""
    sizes[0] += least * len(sizes)  # room enough
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    slow = list(parts)
    for poor in range(len(slow)):
        while (need := least - len(slow[poor])) > 0:
            rich = max(range(len(slow)), key=lambda i: len(slow[i]))
            give = min(need, max(1, (len(slow[rich]) - least) // 2))
            slow[poor] = np.concatenate([slow[poor], slow[rich][-give:]])
            slow[rich] = slow[rich][:-give]
    assert [part.tolist() for part in _fill_up(parts, least)] == [part.tolist() for part in slow]
