import os
import time

import numpy as np
import pytest

from fedld.data import DataSpec, load
from fedld.errors import FedLDError


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "images": rng.integers(0, 256, (120, 12, 10, 3), dtype=np.uint8),
        "labels": np.arange(120) % 3,
        "split": np.where(np.arange(120) < 90, "train", "test"),
        "site": np.array(["rome", "oslo", "lima", "only-test"])[np.r_[np.arange(90) % 3, np.arange(30) % 4]],
        "round_list": np.array(["", "client_2", "client_10"])[np.arange(120) % 3],
    }


@pytest.fixture
def open_npz(tmp_path):
    def opener(arrays, **options):
        np.savez(tmp_path / "own.npz", **arrays)
        return load(DataSpec(dataset=f"npz:{tmp_path / 'own.npz'}", **options), tmp_path / "cache")

    return opener


def test_sites_are_the_clients_and_keep_their_test_images(arrays, open_npz):
    federation = open_npz(arrays)
    assert [client.name for client in federation.clients] == ["lima", "oslo", "rome"]
    assert (federation.test == np.arange(90, 120)).all()
    for client in federation.clients:
        assert (arrays["site"][client.train] == client.name).all()
        assert (arrays["site"][client.test] == client.name).all()
        assert len(client.train) == 30
        assert np.isin(client.test, federation.test).all()
    assert (federation.images == arrays["images"]).all()
    assert (federation.label_counts() == 10 * np.array([[0, 0, 3], [0, 3, 0], [3, 0, 0]])).all()


def test_any_text_column_names_clients_and_blank_rows_stay_out(arrays, open_npz):
    federation = open_npz(arrays, partition="column:round_list")
    assert [client.name for client in federation.clients] == ["client_2", "client_10"]
    assert [len(client.train) for client in federation.clients] == [30, 30]


def test_split_is_short_for_the_published_column(arrays, open_npz):
    arrays["sslfl_split2"] = arrays.pop("round_list")
    assert open_npz(arrays, split=2).partition == "column:sslfl_split2"
    with pytest.raises(FedLDError, match=r"no text column 'sslfl_split3'.*it has: site, sslfl_split2"):
        open_npz(arrays, split=3)


def test_statistics_are_those_of_the_training_pixels(arrays, open_npz):
    federation = open_npz(arrays)
    pixels = arrays["images"][:90].reshape(-1, 3) / 255
    assert federation.mean == pytest.approx(pixels.mean(axis=0), rel=1e-12)
    assert federation.std == pytest.approx(pixels.std(axis=0), rel=1e-12)


def test_without_a_split_a_stratified_fifth_is_the_test_set(arrays, open_npz):
    del arrays["split"]
    one, again, other = (open_npz(arrays, partition="iid", seed=k, test_seed=k) for k in (0, 0, 1))
    assert np.bincount(one.labels[one.test]).tolist() == [8, 8, 8]
    assert (one.test == again.test).all()
    assert (one.test != other.test).any()
    assert not np.isin(one.test, np.concatenate([client.train for client in one.clients])).any()


@pytest.mark.parametrize("kind", ["float01", "float255", "int64"])
def test_pixels_of_any_common_kind(arrays, open_npz, kind):
    wanted = arrays["images"]
    arrays["images"] = {
        "float01": wanted.astype(np.float32) / 255,
        "float255": wanted.astype(np.float64),
        "int64": wanted.astype(np.int64),
    }[kind]
    assert (open_npz(arrays).images == wanted).all()


@pytest.mark.parametrize(("shape", "channels"), [((), 1), ((1,), 1), ((4,), 3)])
def test_grey_and_alpha(arrays, open_npz, shape, channels):
    arrays["images"] = np.zeros((120, 12, 10, *shape), np.uint8)
    federation = open_npz(arrays)
    assert federation.images.shape == (120, 12, 10, channels)
    assert min(federation.std) > 0  # constant pixels must not divide by zero


def test_image_size_crops_the_centre(arrays, open_npz):
    arrays["images"] = np.zeros((120, 20, 60, 3), np.uint8)
    arrays["images"][:, :, 20:40] = 200
    federation = open_npz(arrays, image_size=10)
    assert federation.images.shape == (120, 10, 10, 3)
    assert (np.abs(federation.images[:, :, 2:-2].astype(int) - 200) < 5).all()


def test_bytes_and_number_columns(arrays, open_npz):
    arrays["split"] = arrays["split"].astype("S")
    arrays["site"] = np.r_[np.arange(90) % 3, np.arange(30) % 3] + 9
    assert [client.name for client in open_npz(arrays).clients] == ["9", "10", "11"]


def non_finite(arrays):
    arrays["images"] = np.full((120, 12, 10, 3), np.nan, np.float32)


def out_of_range(arrays):
    arrays["images"] = arrays["images"].astype(np.float32) * 2


def broken(key, value):
    def change(arrays):
        if value is None:
            del arrays[key]
        else:
            arrays[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (non_finite, "non-finite pixels"),
        (out_of_range, "pixels from 0 to 510"),
        (broken("images", np.zeros((120, 5), np.uint8)), r"shape \(120, 5\)"),
        (broken("images", np.zeros((120, 8, 8, 2), np.uint8)), "C = 1, 3 or 4"),
        (broken("images", np.array(["a"] * 120)), "shape"),
        (broken("images", np.zeros((120, 8, 8), complex)), "pixels of type complex"),
        (broken("images", None), "no array 'images'; it has: labels"),
        (broken("labels", None), "no array 'labels'"),
        (broken("labels", np.arange(120) / 2), "not integers"),
        (broken("labels", np.full(120, np.nan)), "not integers"),
        (broken("labels", np.arange(120) % 3 - 1), "label -1, out of range"),
        (broken("labels", np.arange(119) % 3), r"labels of shape \(119,\) for 120 images"),
        (broken("labels", np.arange(120) % 2 * 7), "label 7 but no label 1"),
        (broken("labels", np.array([None, {}] * 60)), "pickled objects, which are never opened"),
        (broken("classes", np.array(["a", "b"])), "label 2, but names only 2 classes"),
        (broken("split", np.array(["train", "val"] * 60)), "split 'val'"),
        (broken("split", np.arange(120)), "no usable 'split'"),
        (broken("site", np.array(["x"])), "no usable 'site'"),
    ],
)
def test_bad_arrays_are_named(arrays, open_npz, tmp_path, change, message):
    change(arrays)
    with pytest.raises(FedLDError, match=message):
        open_npz(arrays)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(("split", "message"), [("train", "no test images"), ("test", "no training images")])
def test_a_one_sided_split(arrays, open_npz, split, message):
    arrays["split"] = np.full(120, split)
    with pytest.raises(FedLDError, match=message):
        open_npz(arrays)


def test_a_column_without_names(arrays, open_npz):
    arrays["round_list"] = np.full(120, "")
    with pytest.raises(FedLDError, match="names no client"):
        open_npz(arrays, partition="column:round_list")


def test_bad_files_are_named(arrays, tmp_path):
    def trouble(file):
        with pytest.raises(FedLDError) as caught:
            load(DataSpec(dataset=f"npz:{file}"), tmp_path / "cache")
        assert str(file) in str(caught.value)
        return str(caught.value)

    file = tmp_path / "own.npz"
    assert "no file" in trouble(file)
    file.write_bytes(b"no archive")
    assert "not a readable npz" in trouble(file) or "pickled" in trouble(file)
    np.savez_compressed(file, **arrays)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "not a readable npz" in trouble(file)
    damaged = bytearray(whole)
    damaged[200:4000] = bytes(3800)
    file.write_bytes(damaged)
    assert "not a readable npz" in trouble(file)
    np.save(tmp_path / "one.npy", np.zeros(3))
    assert "single array" in trouble(tmp_path / "one.npy")
    file.write_bytes(b"")
    assert "not a readable npz" in trouble(file)


def test_what_a_killed_build_left_behind_is_removed_after_a_day(arrays, open_npz, tmp_path):
    (tmp_path / "cache").mkdir()
    for name, age in ((".build-old", 90_000), (".build-new", 60)):
        (tmp_path / "cache" / name).mkdir()
        os.utime(tmp_path / "cache" / name, (time.time() - age,) * 2)
    open_npz(arrays)
    assert [folder.name for folder in (tmp_path / "cache").glob(".build-*")] == [".build-new"]
