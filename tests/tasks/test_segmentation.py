"""Segmentation: losses and measures against definitions, the data it takes, and whole runs."""

import csv
import importlib.util
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import stats
from typer.testing import CliRunner

import fedld
from fedld.cli import app
from fedld.cli.predict import predict as predict_command
from fedld.data import DataSpec, Federation, load
from fedld.errors import FedLDError
from fedld.local.base import PixelObjective
from fedld.local.objectives import MarginLog, SigmaDamp
from fedld.models.unet import build_unet
from fedld.records.reader import read_one
from fedld.study.card import make_card
from fedld.study.report import write_report
from fedld.study.sites import case_means
from fedld.tasks.measure import merged
from fedld.tasks.segmentation import Segmentation, hausdorff, overlap, soft_dice
from reproduction.add import site_dice

SIZE = 16


def squares(count, seed, shift=0):
    """Pictures (N, 16, 16) with one bright square each, and their masks."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 60, (count, SIZE, SIZE)).astype(np.uint8)
    masks = np.zeros((count, SIZE, SIZE), np.uint8)
    for k in range(count):
        row, column, side = rng.integers(1, 8, 3)
        masks[k, row : row + side + 1, column : column + side + 1] = 1
    images[masks > 0] += np.uint8(120 + shift)
    return images, masks


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    sites = {name: squares(24, k, 20 * k) for k, name in enumerate(("oslo", "lima", "delhi"))}
    patch = pytest.MonkeyPatch()
    patch.setenv("FEDLD_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield Federation.from_arrays(sites, task="segmentation", name="squares")
    patch.undo()


def run(federation, out, method="fedavg", **changes):
    given = {"model": "unet:depth=1", "rounds": 2, "lr": 0.1, "batch_size": 8, "workers": 0}
    return fedld.run(method, federation, out=out, **(given | changes))


def test_the_loss_is_its_equation_and_a_mean_over_samples():
    torch.manual_seed(0)
    outputs, masks = torch.randn(5, 3, 4, 6), torch.randint(0, 3, (5, 4, 6))
    task = Segmentation()
    p = outputs.double().softmax(1)
    for i, loss in enumerate(task.losses(outputs, masks)):
        pixels = -np.mean([math.log(p[i, masks[i, a, b], a, b]) for a in range(4) for b in range(6)])
        dice = []
        for k in (1, 2):
            t = (masks[i] == k).double()
            dice.append((2 * (p[i, k] * t).sum() + 1) / (p[i, k].sum() + t.sum() + 1))
        assert loss.item() == pytest.approx(pixels + 1 - float(sum(dice)) / 2, abs=1e-12)
    assert task.objective(outputs, masks).item() == pytest.approx(task.losses(outputs, masks).mean().item())
    whole, parts = (
        task.tally(outputs, masks),
        [task.tally(outputs[:2], masks[:2]), task.tally(outputs[2:], masks[2:])],
    )
    both = merged(parts)
    assert both.loss == pytest.approx(whole.loss)
    assert both.sums == pytest.approx(whole.sums)


def test_a_diverged_model_has_no_dice_and_no_loss():
    outputs, masks = torch.zeros(2, 2, 4, 4), torch.ones(2, 4, 4, dtype=torch.long)
    outputs[:, 1] = 1.0
    outputs[0, 0, 0, 0] = float("nan")
    task = Segmentation()
    assert task.losses(outputs, masks).isnan().tolist() == [True, False]
    scores = task.scores(task.sample_tally(outputs, masks))
    assert scores["dice"] == 0.5
    assert scores["hausdorff"] == pytest.approx(math.hypot(4, 4) / 2)
    assert scores["loss"] is None


def test_margin_control_acts_on_every_pixel():
    torch.manual_seed(0)
    outputs, masks = torch.randn(3, 2, 5, 4), torch.randint(0, 2, (3, 5, 4))
    found = PixelObjective(Segmentation(), MarginLog(lam=0.3))(outputs, masks)
    penalty = torch.log1p(outputs.square().sum(1)).mean()
    assert found.item() == pytest.approx((Segmentation().objective(outputs, masks) + 0.3 * penalty).item())
    damped = PixelObjective(Segmentation(), SigmaDamp())(outputs, masks)
    by_hand = [
        SigmaDamp()(outputs[n, :, a, b][None], masks[n, a, b][None])
        for n in range(3)
        for a in range(5)
        for b in range(4)
    ]
    assert damped.item() == pytest.approx(
        (sum(by_hand) / 60 + soft_dice(outputs, masks).mean()).item(), rel=1e-5
    )


def test_distances_are_those_between_borders():
    rng = np.random.default_rng(1)
    a, b = (
        F.avg_pool2d(torch.tensor(rng.random((1, 1, 20, 24))), 5, 1, 2)[0, 0].numpy() > 0.5 for _ in range(2)
    )

    def border(mask):
        wide = np.pad(mask, 1)
        around = [np.roll(wide, step, axis) for axis in (0, 1) for step in (-1, 1)]
        return np.argwhere((wide & ~np.logical_and.reduce(around))[1:-1, 1:-1])

    apart = np.linalg.norm(border(a)[:, None] - border(b)[None], axis=2)
    wanted = max(np.percentile(apart.min(1), 95), np.percentile(apart.min(0), 95))
    assert hausdorff(a[None].astype(int), b[None].astype(int), 2)[0, 0] == pytest.approx(wanted)
    none, some = np.zeros((1, 3, 4), int), np.ones((1, 3, 4), int)
    assert hausdorff(none, none, 2) == 0
    assert hausdorff(none, some, 2) == 5
    assert [float(v[0, 0]) for v in overlap(none, none, 2)] == [1, 1]
    assert [float(v[0, 0]) for v in overlap(none, some, 2)] == [0, 0]


def test_a_federation_is_segmented_and_its_loss_adds_up(federation, tmp_path):
    result = run(federation, tmp_path / "run", rounds=6, decompose=1)
    assert all(abs(line["identity_error"]) < 1e-9 for line in result.rounds)
    last = result.rounds[-1]["test"]
    assert last["loss"] < result.rounds[0]["test"]["loss"]
    assert last["dice"] > 0.8
    assert set(result.rounds[-1]["client_tests"]) == {"oslo", "lima", "delhi"}
    rows = list(csv.DictReader((tmp_path / "run/predictions.csv").open()))
    assert len(rows) == len(federation.test)
    assert np.mean([float(row["dice"]) for row in rows]) == pytest.approx(last["dice"], abs=1e-5)
    assert np.mean([float(row["hausdorff"]) for row in rows]) == pytest.approx(last["hausdorff"], rel=1e-4)
    assert "oslo" in make_card(tmp_path / "run").to_markdown()
    check_cases(tmp_path / "run", rows)
    again = run(federation, tmp_path / "again", rounds=6, workers=2)
    assert again.rounds[-1]["test"] == last


def check_cases(folder, rows):
    """The cases of each site are its best, median and worst; its means are those of predictions.csv."""
    means = case_means(read_one(folder).runs[0].summary)
    kept = np.load(folder / "cases.npz", allow_pickle=False)
    for site in ("oslo", "lima", "delhi"):
        dice = sorted((float(row["dice"]) for row in rows if row["site"] == site), reverse=True)
        chosen = kept["site"] == site
        wanted = [dice[0], dice[len(dice) // 2], dice[-1]]
        assert kept["rank"][chosen].tolist() == ["best", "median", "worst"]
        assert kept["dice"][chosen] == pytest.approx(wanted, abs=1e-5)
        told = means[site]["global"]
        assert told.pictures == len(dice)
        by_hand = stats.t.interval(0.95, len(dice) - 1, np.mean(dice), stats.sem(dice))
        found = told.measures["dice"]
        assert found.low == pytest.approx(max(by_hand[0], 0), abs=1e-4)
        assert found.high == pytest.approx(min(by_hand[1], 1), abs=1e-4)
    again, _ = overlap(kept["predicted"], kept["truth"], 2)
    assert again[:, 0] == pytest.approx(kept["dice"])


def test_the_page_shows_outlines_and_survives_damage(federation, tmp_path):
    study = fedld.compare(
        ["fedavg", "fedbn", "local"],
        federation,
        seeds=[0],
        jobs=0,
        out=tmp_path / "study",
        model="unet:depth=1,norm=batch",
        rounds=1,
        batch_size=8,
        workers=0,
    )
    assert study.table
    page = (tmp_path / "study/report.html").read_text()
    assert "Best, median and worst case of every site" in page
    assert page.count("data:image/png") >= 9
    assert "personal" in page
    assert "The paper's numbers" not in page
    assert not re.search(
        r"accuracy", re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL), re.IGNORECASE
    )
    for trained in read_one(tmp_path / "study").runs:
        found = site_dice(trained)
        own = case_means(trained.summary)
        which = "global" if trained.label == "fedavg" else "personal"
        assert found == {site: own[site][which].measures["dice"].value for site in ("oslo", "lima", "delhi")}
    for file in (tmp_path / "study/runs").glob("*/cases.npz"):
        file.write_bytes(file.read_bytes()[:200])
    write_report([tmp_path / "study"], tmp_path / "again.html")
    again = (tmp_path / "again.html").read_text()
    assert "cases.npz was changed after the run had finished" in again
    assert "Dice at every site" in again


def test_methods_and_rules_that_need_no_classes_work(federation, tmp_path):
    study = fedld.compare(
        ["fedavg", "scaffold", "fedbn", "fedld-drift", "ditto", "local", "central"],
        federation,
        seeds=[0],
        jobs=0,
        out=tmp_path / "study",
        model="unet:depth=1,norm=batch",
        rounds=1,
        batch_size=8,
        decompose=1,
        workers=0,
    )
    assert study.table[0][1].startswith("Dice")
    assert len(study.table) == 8
    line = run(federation, tmp_path / "measured", rule="measured", rounds=1, validation=0.2).rounds[-1]
    assert line["validation"]["count"] > 0


def test_masks_of_new_pictures_are_png_files(federation, tmp_path):
    trained = run(federation, tmp_path / "run", rounds=4).path
    images, masks = squares(3, 9)
    for k, name in enumerate(("a.png", "a.tif", "deep/b.png")):
        (tmp_path / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[k]).save(tmp_path / "new" / name)

    def predict(*words):
        return CliRunner().invoke(app, ["predict", str(trained), str(tmp_path / "new"), *map(str, words)])

    done = predict("--out", tmp_path / "out.csv")
    assert done.exit_code == 0, done.output
    files = sorted(
        file.relative_to(tmp_path / "out-masks") for file in (tmp_path / "out-masks").rglob("*.png")
    )
    assert [file.as_posix() for file in files] == ["a.png", "a.tif.png", "deep/b.png"]
    found = np.stack([np.asarray(Image.open(tmp_path / "out-masks" / file)) for file in files])
    dice, _ = overlap(found, masks, 2)
    assert dice.mean() > 0.6
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [int(row["predicted_foreground"]) for row in rows] == (found == 1).sum((1, 2)).tolist()
    assert "is not empty" in str(predict("--out", tmp_path / "out.csv").exception)
    assert "name,predicted_foreground" in predict().stdout
    digits = fedld.run("fedavg", "digits", model="linear", rounds=1, workers=0, out=tmp_path / "digits").path
    with pytest.raises(FedLDError, match="--masks is for segmentation"):
        predict_command(digits, tmp_path / "new", masks=tmp_path / "m")


def test_what_needs_one_class_a_picture_is_refused_before_the_run(federation, tmp_path):
    for method, reason in (("ccvr", "statistics of every class"), ("fedlc", "needs classes")):
        with pytest.raises(FedLDError, match=f"{reason}.*segmentation gives a mask to a sample"):
            run(federation, tmp_path / "run", method=method)
    with pytest.raises(FedLDError, match="features and a head are needed, which UNet does not have"):
        run(federation, tmp_path / "run", method="moon")
    with pytest.raises(FedLDError, match="changes pictures and not their masks"):
        run(federation, tmp_path / "run", augment="fundus")
    with pytest.raises(FedLDError, match=r"one answer for a picture.*take unet"):
        run(federation, tmp_path / "run", model="resnet8")
    with pytest.raises(FedLDError, match="needs --task segmentation"):
        fedld.run("fedavg", "digits", model="unet", out=tmp_path / "run")
    with pytest.raises(FedLDError, match="no option 'widht': did you mean 'width'"):
        run(federation, tmp_path / "run", model="unet:widht=8")
    assert not (tmp_path / "run").exists()


def test_simulated_eyes_have_masks_of_their_lesions(tmp_path):
    spec = DataSpec(task="segmentation", samples=200, clients=2)
    eyes = load(spec, tmp_path)
    assert eyes.classes == ("background", "haemorrhage", "exudate")
    assert eyes.strata_names == ("healthy", "diseased")
    marked = (np.array(eyes.labels) > 0).any((1, 2))
    assert marked[eyes.strata == 1].mean() > 0.8
    plain = load(DataSpec(samples=200, clients=2, image_size=48), tmp_path)
    assert np.array_equal(plain.images, eyes.images)  # the same pictures


def test_the_example_runs():
    file = Path(__file__).parents[2] / "examples/segmentation.py"
    spec = importlib.util.spec_from_file_location("segmentation_example", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.main(rounds=1, samples=60)
    assert len(found) == 6
    assert all(0 <= dice <= 1 for dice in found.values())


def test_npz_and_folder_give_the_same_federation(tmp_path):
    images, masks = squares(12, 0)
    sites = np.array(["oslo", "lima"] * 6)
    split = np.array(["train", "train", "test", "test"] * 3)
    np.savez(tmp_path / "a.npz", images=images, masks=masks, site=sites, split=split)
    for k in range(12):
        for kind, picture in (("images", images[k]), ("masks", masks[k] * 255)):
            folder = tmp_path / "tree" / split[k] / sites[k] / kind
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(folder / f"{k:02}.png")
    spec = DataSpec(dataset=f"npz:{tmp_path}/a.npz", task="segmentation")
    one = load(spec, tmp_path / "cache")
    two = load(
        DataSpec(dataset=f"folder:{tmp_path}/tree", task="segmentation", image_size=SIZE), tmp_path / "cache"
    )
    assert (
        [client.name for client in two.clients] == [client.name for client in one.clients] == ["lima", "oslo"]
    )
    for a, b in zip(one.clients, two.clients, strict=True):
        assert np.array_equal(one.labels[a.train], two.labels[b.train])
        assert np.array_equal(one.images[a.test], two.images[b.test][..., :1])


def test_bad_masks_are_named(tmp_path):
    images, masks = squares(4, 0)

    def npz(**arrays):
        np.savez(tmp_path / "a.npz", **({"images": images, "masks": masks} | arrays))
        return load(DataSpec(dataset=f"npz:{tmp_path}/a.npz", task="segmentation"), tmp_path / "cache")

    with pytest.raises(FedLDError, match=r"masks of shape \(4, 8, 8\), its pictures need \(4, 16, 16\)"):
        npz(masks=masks[:, :8, :8])
    wrong = masks.copy()
    wrong[2, 3, 4] = 77
    with pytest.raises(FedLDError, match=r"a.npz, row 3: the mask has the value 77"):
        npz(masks=wrong)
    with pytest.raises(FedLDError, match="masks have 2 to 21 different classes"):
        npz(classes=np.array(["background"]))
    np.savez(tmp_path / "b.npz", images=images, labels=np.arange(4))
    with pytest.raises(FedLDError, match="no array 'masks'"):
        load(DataSpec(dataset=f"npz:{tmp_path}/b.npz", task="segmentation"), tmp_path / "cache")
    with pytest.raises(FedLDError, match=r"client 'oslo', row 3: the mask has the value 77"):
        Federation.from_arrays({"oslo": (images, wrong)}, task="segmentation")
    for kind in ("images", "masks"):
        (tmp_path / "tree" / kind).mkdir(parents=True)
        Image.fromarray(images[0]).resize((16, 16 if kind == "images" else 20)).save(
            tmp_path / "tree" / kind / "x.png"
        )
    with pytest.raises(FedLDError, match=r"masks/x.png is not usable: it has \(16, 20\) pixels"):
        load(DataSpec(dataset=f"folder:{tmp_path}/tree", task="segmentation"), tmp_path / "cache")
    Image.fromarray(images[0]).save(tmp_path / "tree/masks/x.png")
    with pytest.raises(FedLDError, match=r"masks/x.png.*has the value"):
        load(DataSpec(dataset=f"folder:{tmp_path}/tree", task="segmentation"), tmp_path / "cache")


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_the_network_takes_any_size_and_follows_its_options(norm):
    network = build_unet(f"unet:width=16,depth=2,norm={norm}", classes=4, input_shape=(1, 19, 25), seed=3)
    assert network(torch.zeros(2, 1, 19, 25)).shape == (2, 4, 19, 25)
    kinds = {type(module).__name__ for module in network.modules()}
    assert ("BatchNorm2d" in kinds) == (norm == "batch")
    same = build_unet(f"unet:width=16,depth=2,norm={norm}", classes=4, input_shape=(1, 19, 25), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), same.parameters(), strict=True))
