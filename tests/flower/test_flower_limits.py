"""What a site does not do, whoever asks."""

import json

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedld import __version__
from fedld.config.experiment import make_experiment
from fedld.engine.backends.flower import MADE_FOR, check_flower
from fedld.engine.backends.flower import site as site_module
from fedld.engine.backends.flower.limits import Limits
from fedld.engine.backends.flower.wire import Answer, Description, Question, pack, unpack
from fedld.engine.network import divided, make_layout
from fedld.engine.setup import prepare
from fedld.errors import FedLDError

CLASSES = list("0123456789")
LOSS = {"kind": "loss", "clients": ["alpha"]}


@pytest.fixture
def ask(monkeypatch, tmp_path, digits):
    """Alpha's real ClientApp; gives the answer to an order with a loss, training or candidates job."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setenv("FEDLD_CACHE", str(digits / "cache"))
    config = {"site": "alpha", "data": str(digits / "alpha.npz"), "state": str(tmp_path)}

    def ask(settings="", jobs=(LOSS,), question=None, **limits):
        context = Context(0, 1, config | limits, RecordDict(), {})
        if question is not None:
            return site_module.app(Message(pack(question), 1, "query"), context).content
        order = {"version": __version__, "run": "0" * 32, "kept": [], "jobs": list(jobs)}
        order |= {"settings": settings, "classes": CLASSES, "mean": [0.5], "std": [0.3]}
        content = pack(Answer(), weights={"weights": weights()}, candidates=directions())
        content.config_records["part"]["json"] = json.dumps(order)
        return unpack(Answer, site_module.app(Message(content, 1, "train"), context).content)

    return ask


def layout():
    experiment = make_experiment({})
    method = site_module.make_method(experiment)
    federation = type("F", (), {"input_shape": (1, 8, 8), "classes": CLASSES})
    return make_layout(experiment, method, divided(experiment, method, federation)[1])


def weights():
    return torch.zeros(layout().size)


def directions():
    return {"directions": torch.zeros(1, layout().shared)}


HERE = {"incoming": {"client": "alpha"}}
CANDIDATES = {"kind": "candidates", "round": 1, "coefficients": [[0.0], [1.0]], **HERE}
TRAIN = {"kind": "train", "round": 1, "slot": 0, **HERE}


def test_no_measurement_of_few_images_leaves(ask):
    for samples in (1, 49):
        assert f"not {samples}" in ask(f"decompose_samples = {samples}").error
        assert f"not {samples}" in ask(jobs=[CANDIDATES | {"samples": samples}]).error
    assert ask("decompose_samples = 50").results[0]["count"] == 50
    assert ask(jobs=[CANDIDATES | {"samples": 64}]).results[0]["count"] == 64
    assert ask(jobs=[{"kind": "personal", **HERE}], **{"min-images": 200}).results[0]["own"] is None
    test = [{"kind": "site-test", **HERE}]
    assert ask(jobs=test).results[0]["models"]["global"]["pictures"] == 86
    assert ask(jobs=test, **{"min-images": 87}).results[0]["models"] == {}
    aside = [LOSS | {"validation": True}]
    assert ask("validation = 0.25", aside).results[0]["count"] >= 50
    for share in (0.1, 0.9):  # of 240: 24 to measure, or 24 to train on
        assert ask(f"validation = {share}", aside).results[0]["count"] == 0
    assert "takes part with at least 1000" in ask(**{"min-images": 1000}).error
    question = Question(version=__version__, classes=CLASSES, image_size=None)
    assert unpack(Description, ask(question=question)).train == 240
    assert "240 training images" in unpack(Answer, ask(question=question, **{"min-images": 1000})).error
    with pytest.raises(FedLDError, match="at least 2"):
        Limits(min_images=1)


def test_a_site_draws_what_it_measures(ask):
    """Nor does a part of all images but a few tell of those few."""
    first, second = (ask(f"decompose_samples = 60\nseed = {seed}").results for seed in (1, 2))
    assert first[0] == second[0]
    assert ask("decompose_samples = 239").results[0]["count"] == 240
    aside = [LOSS | {"validation": True}]
    first, second = (ask(f"validation = 0.3\nseed = {seed}", aside).results for seed in (1, 2))
    assert first[0] == second[0]


def test_who_sits_a_round_out_is_drawn_by_the_site(ask, digits, tmp_path):
    """By its own number and not by the server's seed; nobody does where too few would be measured."""

    def out(seed, own, **limits):
        settings = {
            "dataset": f"npz:{digits}/all.npz",
            "partition": "site",
            "method": "measured",
            "seed": seed,
        }
        setup, _ = prepare(make_experiment(settings), tmp_path)
        drawn = site_module.SiteDraws(setup, own, Limits(**limits))
        everything = setup.federation.client("alpha").train
        return sorted(set(everything) - set(drawn.lessons("alpha", 1)))

    assert out(seed=1, own=7) == out(seed=2, own=7) != out(seed=1, own=8)
    assert len(out(seed=1, own=7)) == pytest.approx(32, abs=5)
    assert out(seed=1, own=7, min_images=80) == []
    assert ask('method = "measured"', [CANDIDATES | {"samples": 64}]).results[0]["count"] >= 50


@pytest.mark.parametrize(
    ("settings", "jobs", "reason"),
    [
        ("image_size = 4096", 1, "at most 1024 pixels"),
        ("local_epochs = 1000000", 1, "at most 100 epochs"),
        ("local_steps = 1000000", 1, "at most 100 epochs, 5 steps each"),
        ("", 2000, "at most 1024 jobs"),
    ],
)
def test_a_site_bounds_what_it_is_asked(ask, settings, jobs, reason):
    assert reason in ask(settings, [LOSS] * jobs).error


def test_a_cache_has_a_quota(ask):
    assert "would not fit its cache of 1e-06 GB" in ask("image_size = 16", **{"cache-gb": 1e-6}).error
    assert ask("decompose_samples = 50").error is None


def test_an_update_is_of_many_images(ask):
    assert "it makes no update of 1 steps" in ask("local_steps = 1\nbatch_size = 1", [TRAIN]).error
    assert "at most 100 epochs" in ask("local_steps = 1000000", [TRAIN]).error
    assert ask("local_steps = 2\nbatch_size = 50", [TRAIN]).error is None


def test_second_moments_are_of_enough_images(ask):
    """240 images and 128 features: a site that wants two images for each feature gives none."""
    settings, prepare = 'method = "ridge"\ntrain = "head"', [{"kind": "prepare", "round": 1, **HERE}]
    assert (
        "second moments of 128 features for at least 256"
        in ask(settings, prepare, **{"images-per-feature": 2.0}).error
    )
    assert "second moments" not in (ask(settings, prepare).error or "")
    assert "second moments" not in (ask(**{"images-per-feature": 2.0}).error or "")


def test_an_order_for_another_site_is_refused(ask):
    assert "the order is for 'beta'" in ask(jobs=[LOSS | {"clients": ["beta"]}]).error
    assert "the order is for 'beta'" in ask(jobs=[TRAIN | {"incoming": {"client": "beta"}}]).error


def test_two_trainings_are_not_one_order(ask):
    assert "one training" in ask(jobs=[TRAIN] * 2).error


def test_another_flower_is_refused():
    check_flower(f"{MADE_FOR}.7")
    for found, said in (
        ("1.42.0", "were written for flwr 1.41"),
        ("2.0", "written for"),
        (None, "not installed"),
    ):
        with pytest.raises(FedLDError, match=said):
            check_flower(found)
