import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedld.cli import app
from fedld.config.experiment import make_experiment
from fedld.config.presets import FINE_TUNE, names, read_preset
from fedld.config.resolve import make_method
from fedld.errors import FedLDError
from fedld.methods import METHODS
from fedld.study.compare import of_one_method, plan

SITES = ["bimcv", "cohen", "gz"]
LAMBDAS = {"retina-split1": 0.1, "retina-split2": 0.03, "retina-split3": 0.03, "covid-fl": 0.01}


def lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{row}\n" for row in rows))


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Retina (60 training images, of which each published split lists five) and COVID-FL, as published."""
    root = tmp_path_factory.mktemp("published")
    train, test = [f"{i}_right.npy" for i in range(60)], ["60_right_test.npy", "61_right_test.npy"]
    retina = root / "Retina"
    rng = np.random.default_rng(0)
    for folder, files in (("train", train), ("test", test)):
        (retina / folder).mkdir(parents=True)
        for file in files:
            np.save(retina / folder / file, rng.integers(0, 255, (16, 16, 3), np.uint8))
    lines(retina / "labels.csv", [f"{name},{i % 2}.0" for i, name in enumerate([*train, *test])])
    lines(retina / "train.csv", train)
    lines(retina / "test.csv", test)
    for split in (1, 2, 3):
        for client in range(1, 6):
            lines(retina / f"5_clients/split_{split}/client_{client}.csv", [train[5 * split + client]])
    covid = root / "COVID-FL"
    files = [f"{i}.png" for i in range(len(SITES) + 3)]
    for i, file in enumerate(files):
        folder = covid / ("train" if i < len(SITES) else "test")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (20, 24), np.uint8)).save(folder / file)
    lines(covid / "labels.csv", [f"{file},{i % 3}.0" for i, file in enumerate(files)])
    lines(covid / "train.csv", files[: len(SITES)])
    lines(covid / "test.csv", files[len(SITES) :])
    for site, file in zip(SITES, files, strict=False):
        lines(covid / f"12_clients/split_real/{site}.csv", [file])
    return {"retina": retina, "covid-fl": covid}


PAPER = [name for name in names() if name != FINE_TUNE]


def test_there_are_five_experiments_in_two_scales_and_fine_tuning():
    assert len(PAPER) == 10
    assert len(names()) == 11
    with pytest.raises(FedLDError, match="did you mean 'covid-fl-small'"):
        read_preset("covid-fl-smal")


def test_fine_tuning_by_preset_is_the_recipe_for_one_method_and_for_many(tmp_path):
    one = make_experiment(of_one_method(read_preset(FINE_TUNE)))
    assert make_method(one).beta == 0.9
    study = plan(read_preset(FINE_TUNE), ["fedavg", "scaffold", "fedavgm"], [0], command="x")
    _, scaffold, momentum = (make_method(experiment) for _, experiment in study.cells)
    assert scaffold == make_method(one)
    assert (momentum.beta, momentum.eta) == (0.9, 1.0)
    words = ["run", "--preset", FINE_TUNE, "--dataset", "fundus-sim", "--set", "data.samples=120"]
    words += ["--model", "mobilenet_v2", "--image-size", "32", "--clients", "2", "--rounds", "2"]
    result = CliRunner().invoke(app, [*words, "--workers", "0", "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    config = (tmp_path / "run" / "config.toml").read_text()
    assert 'steps = "centred"' in config
    assert "rounds = 2" in config


@pytest.mark.parametrize("name", PAPER)
def test_every_preset_is_valid_for_one_method_and_for_many(name):
    settings = read_preset(name)
    one = make_experiment(of_one_method(settings))
    family = [method for method in METHODS if method.startswith("fedld-")]
    study = plan(settings, ["fedavg", "fedld", *family], [0], command="x")
    fedavg, fedld, *relatives = (experiment for _, experiment in study.cells)
    assert make_method(one) == make_method(fedld)
    assert make_method(fedavg).objective != make_method(fedld).objective
    stem, _, scale = name.rpartition("-")
    lam = LAMBDAS.get(stem, 0.03)
    assert {make_method(experiment).objective.lam for experiment in (fedld, *relatives)} == {lam}
    if scale == "paper":
        shared = (one.model, one.rounds, one.momentum, one.weight_decay, one.batch_size, one.image_size)
        assert shared == ("resnet50", 200, 0.5, 5e-4, 50, 384)
        assert one.lr == (0.005 if stem == "covid-fl" else 0.01)
        assert one.buffers == "global"


@pytest.mark.parametrize("name", ["retina-split1-paper", "retina-50-clients-paper", "covid-fl-paper"])
def test_paper_scale_completes_a_round_on_a_tiny_published_folder(name, roots, tmp_path):
    """ResNet-50 at 384 pixels, as it is; only the number of rounds and the least size of a client change."""
    root = roots[read_preset(name)["dataset"]]
    asked = ["run", "--preset", name, "--data-root", str(root), "--rounds", "1", "--set", "min_size=1"]
    asked += ["--set", "client_losses=false", "--workers", "0", "--out", str(tmp_path / "run"), "--json"]
    answer = CliRunner().invoke(app, asked)
    assert answer.exit_code == 0, answer.output or answer.exception
    summary = json.loads(answer.stdout)
    assert summary["model"] == "resnet50"
    assert 0 <= summary["test"]["final"]["accuracy"] <= 1
    assert summary["clients"] == {"covid-fl-paper": 3, "retina-50-clients-paper": 50}.get(name, 5)


def test_own_settings_win_over_the_preset(tmp_path):
    settings = ["--preset", "retina-split1-small", "--method", "fedavg", "--lr", "0.2", "--dataset", "digits"]
    asked = ["run", *settings, "--model", "cnn", "--set", "image_size=8", "--rounds", "1", "--workers", "0"]
    answer = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "run")])
    assert answer.exit_code == 0, answer.output or answer.exception
    config = (tmp_path / "run/config.toml").read_text()
    assert "lr = 0.2" in config
    assert "alpha = 100.0" in config
    assert "objective" not in config
