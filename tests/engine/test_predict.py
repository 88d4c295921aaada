"""A saved model says by itself how to use it: `fedld predict`, and predictions.csv of a run."""

import csv
import json
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fedld.api import compare
from fedld.cli import app
from fedld.config.experiment import make_experiment
from fedld.config.resolve import make_federation
from fedld.data.prediction import read_pictures
from fedld.engine.ensemble import load_predictor
from fedld.engine.loop import run
from fedld.engine.network import load_model
from fedld.errors import FedLDError
from fedld.records.tables import read_predictions
from fedld.results import Result

TINY = {"rounds": 1, "model": "cnn", "workers": 0, "batch_size": 8, "image_size": 8, "min_size": 2}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Two sites with two classes each, 14 x 12 pixels, colours that differ by class."""
    rng, root = np.random.default_rng(0), tmp_path_factory.mktemp("pictures")
    for site in "ab":
        for k, kind in enumerate(("dark", "light, or so")):
            (root / site / kind).mkdir(parents=True)
            for i in range(10):
                pixels = rng.integers(100 * k, 150 + 100 * k, (12, 14, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / site / kind / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def trained(pictures, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    run(make_experiment(TINY | {"dataset": f"folder:{pictures}"}), out)
    return out


def predicted(*arguments):
    result = CliRunner().invoke(app, ["predict", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return list(csv.DictReader(result.stdout.splitlines()))


def test_predict_gives_what_the_run_measured(trained, pictures):
    """The file alone repeats, from the pictures on, what the run measured of its test pictures."""
    rows = {row["name"]: row for row in predicted(trained / "model.safetensors", pictures)}
    assert len(rows) == 40
    table = read_predictions(trained / "predictions.csv")
    assert table.classes == ("dark", "light, or so")
    for name, label, site, told, seen in zip(
        *(table.columns[key] for key in ("name", "label", "site", "predicted")),
        table.probabilities,
        strict=True,
    ):
        assert name.startswith(f"{site}/{label}/")
        row = rows[name]
        np.testing.assert_allclose([float(row[f"p_{kind}"]) for kind in table.classes], seen, atol=1e-6)
        assert row["predicted"] == told or abs(seen[0] - seen[1]) < 1e-5
    right = np.mean([a == b for a, b in zip(table.columns["label"], table.columns["predicted"], strict=True)])
    assert right == json.loads((trained / "summary.json").read_text())["test"]["final"]["accuracy"]


@pytest.mark.parametrize(
    "changes",
    [{"method": "fedrod"}, {"method": "fedsr"}, {"model": "resnet8", "train": "head"}, {"head": "mlp:4"}],
    ids=str,
)
def test_networks_that_were_changed_are_made_again(changes, pictures, tmp_path):
    experiment, out = make_experiment(TINY | {"dataset": f"folder:{pictures}"} | changes), tmp_path / "run"
    run(experiment, out)
    saved, table = load_model(out), read_predictions(out / "predictions.csv")
    federation = make_federation(experiment)
    seen = saved.probabilities(np.asarray(federation.images[federation.test]))
    np.testing.assert_allclose(seen, table.probabilities, atol=1e-5)


def test_an_npz_file_a_picture_and_a_csv_file(trained, pictures, tmp_path):
    one = pictures / "a" / "dark" / "3.png"
    file = tmp_path / "some.npz"
    np.savez(file, images=np.stack([np.asarray(Image.open(one))] * 2))
    [single], double = predicted(trained, one), predicted(trained, file)
    assert (single["name"], [row["name"] for row in double]) == ("3.png", ["0", "1"])
    assert [row["p_dark"][:6] for row in double] == [single["p_dark"][:6]] * 2
    out = tmp_path / "told.csv"
    assert predicted(trained, one, "--out", out) == []
    assert out.read_text().splitlines()[0] == 'name,predicted,p_dark,"p_light, or so"'


def test_colours_and_sizes_are_brought_to_the_models(pictures, tmp_path):
    [(_, grey)] = read_pictures(pictures / "a", (1, 8, 8))
    assert (grey.shape, grey.dtype) == ((20, 8, 8, 1), np.uint8)
    file = tmp_path / "grey.npz"
    np.savez(file, images=grey)
    [(_, coloured)] = read_pictures(file, (3, 8, 8))
    assert (coloured == grey).all()
    with pytest.raises(FedLDError, match="wants 8 x 9"):
        next(read_pictures(file, (1, 8, 9)))


def test_many_pictures_are_read_some_at_a_time(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr("fedld.data.prediction.BATCH", 7)
    parts = list(read_pictures(pictures, (3, 8, 8)))
    assert [len(names) for names, _ in parts] == [len(images) for _, images in parts] == [7] * 5 + [5]
    file = tmp_path / "all.npz"
    np.savez(file, images=np.concatenate([images for _, images in parts]))
    rows = list(read_pictures(file, (3, 8, 8)))
    assert [name for names, _ in rows for name in names] == [str(row) for row in range(40)]
    assert all((a == b).all() for (_, a), (_, b) in zip(parts, rows, strict=True))


def changed(file, tmp_path, **facts):
    """The model file, with other facts in its metadata."""
    with safe_open(file, "pt") as content:
        told = json.loads(content.metadata()["fedld"])
    out = tmp_path / "model.safetensors"
    save_file(load_file(file), out, {"fedld": json.dumps({**told, **facts})})
    return out


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"model": None}, "own network"),
        ({"model": "os:system"}, "own network"),
        ({"model": "resnet8"}, "does not hold the network it names"),
        ({"method": "nobody"}, "not installed here"),
        ({"classes": ["a"]}, "cannot be understood"),
        ({"classes": ["a", "b", "c"]}, "does not hold the network"),
        ({"std": [0, 0, 0]}, "cannot be understood"),
        ({"mean": "x"}, "cannot be understood"),
        ({"mean": [0.5]}, "cannot be understood"),
        ({"input_shape": [3, 8, 10**9]}, "cannot be understood"),
        ({"head": "mlp:x"}, "a head is"),
        ({"more": 1}, "cannot be understood"),
        ({"pictures": False}, "not trained on pictures or a table"),
    ],
    ids=str,
)
def test_a_file_that_says_other_things_is_refused(trained, tmp_path, facts, sentence):
    with pytest.raises(FedLDError, match=sentence):
        load_model(changed(trained / "model.safetensors", tmp_path, **facts))


def test_bad_input_is_one_sentence(trained, pictures, tmp_path):
    plain = tmp_path / "plain.safetensors"
    save_file({"x": torch.zeros(2)}, plain)
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes((trained / "model.safetensors").read_bytes()[:500])
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    empty = tmp_path / "empty"
    empty.mkdir()
    for model, images, sentence in (
        (plain, pictures, "of no fedld run"),
        (torn, pictures, "no readable safetensors"),
        (tmp_path / "none", pictures, "there is no model"),
        (trained, broken, "broken.png is damaged"),
        (trained, empty, "holds no pictures"),
        (trained, tmp_path / "none", "there are no pictures"),
        (trained, tmp_path / "none.npz", "there are no pictures"),
    ):
        result = CliRunner().invoke(
            app, ["predict", str(model), str(images), "--out", str(tmp_path / "x.csv")]
        )
        assert isinstance(result.exception, FedLDError)
        assert sentence in str(result.exception)
        assert not (tmp_path / "x.csv").exists()


def test_a_flipped_bit_of_the_model_is_noticed_by_whoever_reads_it(trained, pictures, tmp_path):
    """It gave other predictions once, with exit code 0."""
    folder = shutil.copytree(trained, tmp_path / "run")
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 64
    file.write_bytes(content)
    for command in (["predict", str(folder), str(pictures)], ["card", str(folder)]):
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, FedLDError)
        assert f"'{file}' is damaged" in str(result.exception)
    settings = {"dataset": f"folder:{pictures}"}
    with pytest.raises(FedLDError, match="is damaged"):
        _ = Result(folder, "fedavg", make_experiment(TINY | settings)).model


def test_a_model_without_a_checksum_is_used_with_a_note(trained, pictures, tmp_path):
    file = changed(trained / "model.safetensors", tmp_path)
    result = CliRunner().invoke(app, ["predict", str(file), str(pictures)])
    assert result.exit_code == 0
    assert "has no checksum" in result.stderr
    assert len(result.stdout.splitlines()) == 41


def test_a_device_is_written_to_and_stays_one(trained, pictures, tmp_path):
    """`--out /dev/null` as root replaced the device by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = ThreadPoolExecutor().submit(pipe.read_text)
    predicted(trained, pictures, "--out", pipe)
    assert len(reading.result().splitlines()) == 41
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    predicted(trained, pictures, "--out", os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert not Path(f"{os.devnull}.tmp").exists()


def test_the_seeds_of_a_method_predict_together(pictures, tmp_path):
    out = tmp_path / "study"
    settings = TINY | {"jobs": 0, "progress": False}
    del settings["workers"]
    study = compare(["fedavg", "fedprox"], f"folder:{pictures}", seeds=[0, 1], out=out, **settings)
    [(_, pixels)] = read_pictures(pictures / "a", (3, 8, 8))
    singly = [load_model(out / f"runs/fedavg-seed{seed}").probabilities(pixels) for seed in (0, 1)]
    np.testing.assert_array_equal(study.ensemble("fedavg").probabilities(pixels), np.mean(singly, axis=0))
    rows = predicted(out, pictures / "a", "--method", "fedavg")
    np.testing.assert_allclose(
        [float(row["p_dark"]) for row in rows], np.mean(singly, axis=0)[:, 0], atol=1e-8
    )
    for more, sentence in (
        ([], "is a study of fedavg, fedprox: choose one with --method"),
        (["--method", "fedagv"], "did you mean 'fedavg'?"),
    ):
        result = CliRunner().invoke(app, ["predict", str(out), str(pictures), *more])
        assert sentence in str(result.exception)
    result = CliRunner().invoke(
        app, ["predict", str(out / "runs/fedavg-seed0"), str(pictures), "--method", "x"]
    )
    assert "is no study" in str(result.exception)
    (out / "runs/fedavg-seed1/model.safetensors").unlink()
    assert load_predictor(out, "fedavg").notes == ("seed 1 of fedavg has no model",)
