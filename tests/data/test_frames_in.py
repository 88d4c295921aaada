"""Federations from frames, from datasets of mappings and from iterators."""

import numpy as np
import pytest
from PIL import Image

import fedld
from fedld.data import Federation
from fedld.errors import FedLDError

polars = pytest.importorskip("polars")


def rows(count=60):
    rng = np.random.default_rng(0)
    ill = rng.integers(0, 2, count)
    return {
        "age": [None if i == 5 else float(60 + 10 * x + rng.normal()) for i, x in enumerate(ill)],
        "sex": ["f" if i % 2 else "m" for i in range(count)],
        "id": [f"case {i}" for i in range(count)],
        "hospital": [("oslo", "rome", "bern")[i % 3] for i in range(count)],
        "patient": [f"p{i // 2}" for i in range(count)],
        "ill": ["yes" if x else "no" for x in ill],
    }


def make(frame, **options):
    return Federation.from_frame(frame, "ill", site="hospital", drop=["id"], **options)


def test_a_polars_frame_is_a_federation():
    found = make(polars.DataFrame(rows()))
    assert [client.name for client in found.clients] == ["bern", "oslo", "rome"]
    assert found.classes == ("no", "yes")
    assert found.images.shape == (60, 4)  # age, age missing, sex = f, sex = m
    assert not {found.patients[i] for c in found.clients for i in c.train} & set(found.patients[found.test])
    result = fedld.run("fedavg", found, model="linear", rounds=5, lr=0.5, workers=0, progress=False)
    assert result.rounds[-1]["test"]["accuracy"] > 0.8


def test_a_pandas_frame_is_the_same_federation():
    pandas = pytest.importorskip("pandas")
    assert make(pandas.DataFrame(rows())).fingerprint() == make(polars.DataFrame(rows())).fingerprint()


class LikePandas:
    """The part of pandas' interface that is used: columns, and values with NaN for what is missing."""

    class Series(list):
        def to_list(self):
            return [float("nan") if value is None else value for value in self]

    def __init__(self, columns):
        self.held, self.columns = columns, list(columns)

    def __getitem__(self, name):
        return self.Series(self.held[name])


def test_missing_values_may_be_nan():
    assert make(LikePandas(rows())).fingerprint() == make(polars.DataFrame(rows())).fingerprint()


def test_bad_frames_are_refused():
    frame = polars.DataFrame(rows())
    with pytest.raises(FedLDError, match="has no column 'il'"):
        Federation.from_frame(frame, "il")
    with pytest.raises(FedLDError, match="columns by name, which list has not"):
        Federation.from_frame([1, 2], "ill")
    with pytest.raises(FedLDError, match="the frame has no rows"):
        Federation.from_frame(frame.head(0), "ill")


class LikeHuggingFace:
    """The part of `datasets.Dataset` that is used: length, items as mappings, names of classes."""

    class ClassLabel:
        names = ("well", "ill")

    def __init__(self, level, count=10):
        self.features = {"image": None, "label": self.ClassLabel()}
        self.level, self.count, self.reads = level, count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        self.reads += 1
        return {"image": Image.new("L", (8, 8), self.level + place), "label": place % 2}


def test_items_may_be_mappings_with_pictures():
    held = {"oslo": LikeHuggingFace(0), "rome": LikeHuggingFace(100)}
    found = Federation.from_datasets(held)
    assert found.classes == ("well", "ill")
    assert found.images.shape == (20, 8, 8, 1)
    assert [one.reads for one in held.values()] == [10, 10]
    assert found.images[:, 0, 0, 0].tolist() == [*range(10), *range(100, 110)]


def test_iterators_are_read_once():
    def stream(start):
        for i in range(12):
            yield {"x": np.full(3, start + i, np.float32), "diagnosis": ("well", "ill")[i % 2]}

    found = Federation.from_datasets({"oslo": stream(0), "rome": stream(50)}, columns=("x", "diagnosis"))
    assert found.classes == ("ill", "well")
    assert len(found.images) == 24
    with pytest.raises(FedLDError, match=r"has x, diagnosis: say columns=\(sample, label\)"):
        Federation.from_datasets({"oslo": stream(0)})
    with pytest.raises(FedLDError, match="neither a length and items, nor can it be iterated"):
        Federation.from_datasets({"oslo": 3})
