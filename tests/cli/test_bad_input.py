"""What people mistype and enemies type: one sentence on standard error, exit code 2, nothing written."""

import io
import os
import sys
import zipfile

import numpy as np
import pytest
import torch

from fedld.cli import start
from fedld.data import DataSpec, load
from fedld.errors import FedLDError
from fedld.models import build, load_weights


@pytest.fixture
def refuse(monkeypatch, capsys, tmp_path):
    """Run a command in an empty folder; give its sentence."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FEDLD_CACHE", str(tmp_path / "cache"))

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["fedld", *words])
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as left:
            start()
        text = capsys.readouterr().err.strip()
        assert left.value.code == 2, text
        assert text.startswith("fedld: ") or "Usage" in text, text
        assert len(text.splitlines()) == 1 or "Usage" in text, text
        after = sorted(tmp_path.rglob("*"))
        assert [p for p in after if p not in before and "cache" not in p.parts] == []
        return text

    return run


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--method", "fedprox", "--set", "method.mu=nan"], "mu must be a finite number"),
        (["--objective", "marg-log", "--set", "objective.lam=nan"], "lam"),
        (["--set", "clients=3", "--set", "clients.x=1"], "which is no table"),
        (["--set", f"rounds={'9' * 5000}"], "rounds"),
        (["--set", f"method.x={'[' * 2000}{']' * 2000}"], "no option"),
        (["--dataset", f"npz:{'y' * 300}"], "cannot be used: File name too long"),
        (["--dataset", "folder:~nobody-at-all/.."], "user that this machine does not know"),
        (["--set", 'dataset="npz:a\\u0000b"'], "character that no path has"),
        (["--dataset", "folder:/proc"], "/proc"),
        (["--dataset", "npz:/dev/zero"], "no file /dev/zero"),
        (["--config", "/dev/zero"], "no file of settings"),
        (["--config", "~nobody-at-all/x.toml"], "does not know"),
    ],
)
def test_settings_that_cannot_be_are_named(refuse, words, expected):
    assert expected in refuse("run", *words)


def test_a_pipe_is_neither_data_nor_settings(refuse, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "no file" in refuse("run", "--dataset", f"npz:{tmp_path / 'pipe'}")
    assert "no file of settings" in refuse("run", "--config", str(tmp_path / "pipe"))


def test_keys_and_demos_stay_in_their_folder(refuse, tmp_path):
    pytest.importorskip("flwr")
    (tmp_path / "file").write_text("")
    assert "é" in refuse("server", "certificates", "--host", "é", "--out", "certificates")
    assert "../x" in refuse("site", "key", "--name", "../x", "--out", "keys")
    assert "file" in refuse("site", "key", "--name", "alpha", "--out", str(tmp_path / "file"))
    assert "file" in refuse("site", "demo", "--dataset", "digits", "--out", str(tmp_path / "file"))


@pytest.fixture
def archive(tmp_path):
    """An npz file of thirty good images, with members changed or added."""

    def write(**members: object) -> DataSpec:
        good = {"images": np.arange(30 * 64, dtype=np.uint8).reshape(30, 8, 8), "labels": np.arange(30) % 3}
        with zipfile.ZipFile(tmp_path / "own.npz", "w", zipfile.ZIP_DEFLATED) as file:
            for name, member in (good | members).items():
                buffer = io.BytesIO()
                if isinstance(member, bytes):
                    buffer.write(member)
                else:
                    np.save(buffer, member)
                file.writestr(name if "." in name else f"{name}.npy", buffer.getvalue())
        return DataSpec(f"npz:{tmp_path / 'own.npz'}", clients=2, min_size=1)

    return lambda **members: load(write(**members), tmp_path / "cache")


def test_an_archive_is_read_by_what_is_used_of_it(archive):
    """A foreign file and an array that nobody asks for are not opened."""
    huge = (
        b"\x93NUMPY\x01\x00v\x00"
        + b"{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }".ljust(117)
        + b"\n"
    )
    federation = archive(**{"readme.txt": b"text", "weights": np.zeros((9, 9)), "other": huge + bytes(3)})
    assert len(federation.labels) == 30


def test_an_archive_that_unfolds_to_gigabytes_is_refused_by_its_header(archive):
    with pytest.raises(FedLDError, match="would unfold to 153 MiB, over 200 times its length"):
        archive(images=np.zeros((100_000, 40, 40), np.uint8), labels=np.arange(100_000) % 3)


def test_a_header_that_promises_more_than_there_is_is_refused(archive):
    text = (
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (999999999999, 99999, 99), }".ljust(117) + b"\n"
    )
    with pytest.raises(FedLDError, match="too short"):
        archive(images=b"\x93NUMPY\x01\x00v\x00" + text)


def test_class_names_without_end_are_refused(archive):
    with pytest.raises(FedLDError, match="names 100000 classes; 1000 are the most"):
        archive(classes=np.arange(100_000).astype(str))


@pytest.mark.parametrize("change", [torch.Tensor.to_sparse, lambda t: t.to("meta")])
def test_weights_that_are_not_plain_tensors_are_refused(tmp_path, change):
    model = build("cnn", classes=3, channels=1, image_size=8, seed=0)
    state = {name: change(value) for name, value in model.state_dict().items()}
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(FedLDError, match=r"not a plain, dense one|cannot be read"):
        load_weights(model, tmp_path / "w.pth")


def test_a_file_with_two_labels_is_named(tmp_path):
    home = tmp_path / "Retina"
    (home / "train").mkdir(parents=True)
    (home / "train.csv").write_text("a.npy\nb.npy\n")
    (home / "test.csv").write_text("")
    (home / "labels.csv").write_text("a.npy,0\nb.npy,1\na.npy,1\n")
    with pytest.raises(FedLDError, match=r"labels.csv line 3 gives a.npy label 1, .*line 1 gives it 0"):
        load(DataSpec("retina", data_root=tmp_path), tmp_path / "cache")
