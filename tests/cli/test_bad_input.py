"""What people mistype and enemies type: one sentence on standard error, exit code 2, nothing written."""

import io
import json
import os
import sys
import zipfile

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedld
from fedld.cli import app, start
from fedld.data import DataSpec, load
from fedld.errors import FedLDError
from fedld.models import build, load_weights


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
        (["--method", "fedpox"], "unknown method 'fedpox': did you mean 'fedprox'?"),
        (["--set", "roundz=3"], "unknown setting 'roundz': did you mean 'rounds'?"),
        (["--set", "rounds"], "'rounds' is not of the form key=value"),
        (["--method", "fedprox", "--set", "mu=1"], "unknown setting 'mu': write 'method.mu'"),
        (["--method", "fedprox", "--set", "method.mu=much"], "method fedprox: mu:"),
        (["--rounds", "0"], "rounds: input should be greater than or equal to 1, not 0"),
        (["--lr", "nan"], "lr:"),
        (["--alpha", "0"], "alpha"),
        (["--clients", "5000", "--dataset", "digits"], "5000"),
        (["--model", "resnet9"], "unknown model 'resnet9'"),
        (["--rule", "principle"], "principal"),
        (["--objective", "marglog"], "unknown objective 'marglog': did you mean 'marg-log'?"),
        (["--dataset", "npz:/nowhere/x.npz"], "/nowhere/x.npz"),
        (["--config", "/nowhere.toml"], "there is no file '/nowhere.toml'"),
        (["--sample-rate", "0"], "sample_rate"),
        (["--dtype", "float8"], "dtype"),
        (["--set", "metrics=5"], "metrics must be a list or a table, not 5"),
    ],
)
def test_settings_that_cannot_be_are_named(refuse, words, expected):
    assert expected in refuse("run", *words)


def test_a_pipe_is_neither_data_nor_settings(refuse, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "no file" in refuse("run", "--dataset", f"npz:{tmp_path / 'pipe'}")
    assert "no file of settings" in refuse("run", "--config", str(tmp_path / "pipe"))


def test_a_file_of_settings_with_a_number_of_metrics(refuse, tmp_path):
    (tmp_path / "settings.toml").write_text("metrics = 5")
    assert "metrics must be a list" in refuse("run", "--config", str(tmp_path / "settings.toml"))


def test_keys_and_demos_stay_in_their_folder(refuse, tmp_path):
    pytest.importorskip("flwr")
    (tmp_path / "file").write_text("")
    assert "é" in refuse("server", "certificates", "--host", "é", "--out", "certificates")
    assert "../x" in refuse("site", "key", "--name", "../x", "--out", "keys")
    assert "a site's name has" in refuse("site", "key", "--name", "a\n", "--out", "keys")
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
        return DataSpec(dataset=f"npz:{tmp_path / 'own.npz'}", clients=2, min_size=1)

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
        load(DataSpec(dataset="retina", data_root=tmp_path), tmp_path / "cache")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"images": np.full((20, 8, 8, 3), np.nan)}, "finite"),
        ({"labels": np.arange(20) - 5}, "label"),
        ({"images": np.zeros((7, 8, 8, 3), np.uint8)}, "7"),
    ],
)
def test_bad_arrays_are_named(refuse, tmp_path, changes, sentence):
    arrays = {"images": np.zeros((20, 8, 8, 3), np.uint8), "labels": np.arange(20) % 2} | changes
    np.savez(tmp_path / "bad.npz", **arrays)
    message = refuse("run", "--dataset", f"npz:{tmp_path}/bad.npz", "--out", "run")
    assert sentence in message
    assert "bad.npz" in message


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["run", "--learning-rate", "0.1"], "there is no option '--learning-rate': did you mean '--lr'?"),
        (["run", "--optimizer", "adam"], "did you mean '--optimiser'?"),
        (["run", "--set", "learning_rate=0.1"], "unknown setting 'learning_rate': did you mean 'lr'?"),
        (["run", "--set", "mu=0.1"], "'mu': it is an option of fedprox"),
        (["run", "--method", "fedprox", "--set", "mu=0.1"], "unknown setting 'mu': write 'method.mu'"),
        (["compare", "--set", "mu=0.1"], "write 'method.mu' in a run, 'fedprox.mu' in a comparison"),
        (
            ["compare", "--methods", "fedavg,fedld", "--set", "fedprox.mu=0.1"],
            "a setting is for 'fedprox', which is not in the study: fedavg, fedld",
        ),
    ],
)
def test_what_was_meant_is_suggested(words, hint, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fedld", *words])
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


def test_a_setting_for_a_method_that_is_not_compared_is_refused_in_python():
    with pytest.raises(FedLDError, match="a setting is for 'fedprox', which is not in the study: fedavg"):
        fedld.compare(["fedavg"], "digits", fedprox={"mu": 0.1})


def test_presets_are_listed():
    said = CliRunner().invoke(app, ["presets"]).output
    assert "retina-split1-small" in said
    assert "resnet50, 200 rounds, lr 0.01, split 1" in said
    assert json.loads(CliRunner().invoke(app, ["presets", "--json"]).output)["covid-fl-paper"]["lr"] == 0.005
