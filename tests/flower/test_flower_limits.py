"""What a site does not do, whoever asks."""

import json
import math
from types import SimpleNamespace
from uuid import uuid4

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedld import __version__
from fedld.config.experiment import make_experiment
from fedld.engine.backends.flower import MADE_FOR, check_flower
from fedld.engine.backends.flower import site as site_module
from fedld.engine.backends.flower.disclosure import SiteDraws
from fedld.engine.backends.flower.federation import told_counts
from fedld.engine.backends.flower.limits import Limits
from fedld.engine.backends.flower.wire import Answer, Description, Question, pack, tree, unpack
from fedld.engine.network import divided, make_layout
from fedld.engine.setup import prepare
from fedld.errors import FedLDError
from fedld.privacy.budget import spent_line
from fedld.privacy.policy import read_policy
from fedld.records.ledger import Ledger

CLASSES = ["low", "high", "rare"]
LOSS = {"kind": "loss", "clients": ["alpha"]}
HERE = {"incoming": {"client": "alpha"}}
MEASURED = 'method = "measured"\nrule = {name = "measured", samples = 64, lengths = "1,2"}'
STEPS = [[1.0, 0.0], [0.0, 1.0]]
CANDIDATES = {"kind": "candidates", "round": 1, "coefficients": STEPS, "samples": 64, **HERE}
PREPARE = {"kind": "prepare", "round": 1, **HERE}
TRAIN = {"kind": "train", "round": 1, "slot": 0, **HERE}
TEST = {"kind": "site-test", **HERE}


@pytest.fixture(scope="session")
def rare(digits):
    """Alpha's digits as two large classes, and one image of a third."""
    with np.load(digits / "alpha.npz") as found:
        arrays = dict(found)
    labels = (arrays["labels"] >= 5).astype(np.int64)
    labels[np.flatnonzero(arrays["split"] == "train")[7]] = 2
    np.savez(digits / "rare.npz", **arrays | {"labels": labels, "classes": np.array(CLASSES)})
    return digits / "rare.npz"


@pytest.fixture
def ask(monkeypatch, tmp_path, digits, rare):
    """Alpha's real ClientApp; gives the answer to an order, of a run of its own unless `run` names one."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setenv("FEDLD_CACHE", str(digits / "cache"))
    config = {"site": "alpha", "data": str(rare), "state": str(tmp_path)}

    def ask(settings="", jobs=(LOSS,), question=None, run=None, trees=None, basis=0.0, **limits):
        context = Context(0, 1, config | limits, RecordDict(), {})
        if question is not None:
            return site_module.app(Message(pack(question), 1, "query"), context).content
        if run is None and any(job["kind"] == "candidates" for job in jobs):
            run = uuid4().hex
            ask(settings, [TRAIN], run=run, **limits)  # candidate steps are steps after a training
        order = {"version": __version__, "run": run or uuid4().hex, "kept": [], "jobs": list(jobs)}
        order |= {"settings": settings, "classes": CLASSES, "mean": [0.5], "std": [0.3]}
        sent = {"weights": {"weights": weights()}, **(trees or {})}
        if any(job["kind"] == "candidates" for job in jobs):
            sent["candidates"] = {"directions": torch.full((2, layout().shared), basis)}
        content = pack(Answer(), **sent)
        content.config_records["part"]["json"] = json.dumps(order)
        answer = site_module.app(Message(content, 1, "train"), context).content
        trees = {name: tree(answer, name) for name in ("message", "update")}
        return SimpleNamespace(**vars(unpack(Answer, answer)), **trees)

    return ask


def layout():
    experiment = make_experiment({})
    method = site_module.make_method(experiment)
    federation = type(
        "F", (), {"input_shape": (1, 8, 8), "classes": CLASSES, "outputs": len(CLASSES), "output_shape": (3,)}
    )
    return make_layout(experiment, method, divided(experiment, method, federation)[1])


def weights():
    return 0.1 * torch.randn(layout().size, generator=torch.Generator().manual_seed(0))


def test_no_measurement_of_few_images_leaves(ask):
    for samples in (1, 49):
        assert f"not {samples}" in ask(f"decompose_samples = {samples}").error
        few = MEASURED.replace("64", f"{samples}, unseen = 0.0")
        assert f"not {samples}" in ask(few, [CANDIDATES | {"samples": samples}]).error
    assert 110 <= ask("decompose_samples = 110").results[0]["count"] < 150
    assert ask(MEASURED, [CANDIDATES]).results[0]["count"] >= 100
    assert ask(jobs=[{"kind": "personal", **HERE}], **{"min-images": 200}).results[0]["own"] is None
    assert ask(jobs=[TEST], **{"min-images": 30}).results[0]["models"]["global"]["pictures"] == 86
    assert ask(jobs=[TEST], **{"min-images": 87}).results[0]["models"] == {}
    aside = [LOSS | {"validation": True}]
    assert ask("validation = 0.5", aside).results[0]["count"] >= 100
    for share in (0.1, 0.9):  # of 240: 24 to measure, or 24 to train on
        assert ask(f"validation = {share}", aside).results[0]["count"] == 0
    assert "takes part with at least 1000" in ask(**{"min-images": 1000}).error
    question = Question(version=__version__, classes=CLASSES, image_size=None)
    assert unpack(Description, ask(question=question)).train == 240
    assert "240 training images" in unpack(Answer, ask(question=question, **{"min-images": 1000})).error
    with pytest.raises(FedLDError, match="at least 2"):
        Limits(min_images=1)
    with pytest.raises(FedLDError, match="--max-runs is not negative"):
        Limits(max_runs=-1)


def test_the_only_image_of_a_class_is_in_no_measurement(ask):
    """Nor few images of a class that has many: a part that is measured has enough of each, or none."""
    everything, part = ask().results[0], ask("decompose_samples = 110").results[0]
    assert everything["count"] == 239
    assert everything["count"] - part["count"] >= 50
    assert ask(jobs=[LOSS], **{"min-images": 140}).results[0] == {
        "count": 0, "loss": 0.0, "loss_squared": 0.0, "sums": {"correct": 0}
    }  # fmt: skip
    assert ask(MEASURED, [CANDIDATES], **{"min-images": 60}).results[0]["count"] >= 164  # all 104, and 60
    trained = ask(jobs=[TRAIN], settings="batch_size = 20").results[0]
    assert trained["before"]["count"] == trained["after"]["count"] == 239


def test_the_number_of_a_small_class_is_not_told(ask):
    """Nor can it be found from the others: the smallest of them stays untold with it."""
    question = Question(version=__version__, classes=CLASSES, image_size=None)
    counts = unpack(Description, ask(question=question)).label_counts
    assert counts[2] is None
    assert sum(count is None for count in counts) == 2
    every = unpack(Description, ask(question=question, **{"min-images": 2})).label_counts
    assert told_counts(np.array([100, 90, 5, 0]), 2) == [100, 90, 5, 0]
    assert [None if count is None else count > 50 for count in every].count(True) == 1
    assert told_counts(np.array([60, 3]), 50) == [None, None]
    assert told_counts(np.array([100, 90, 80, 30, 30]), 50) == [100, 90, 80, None, None]


@pytest.mark.parametrize(
    ("method", "key"),
    [("fedpac", "counts"), ("fedpac", "prototypes"), ("fedma", "counts"), ("ccvr", "means")],
)
def test_features_and_counts_of_a_small_class_stay(ask, method, key):
    job = PREPARE if method == "ccvr" else TRAIN
    told = ask(f'method = "{method}"', [job], trees={"common": {"frozen": torch.tensor(0)}}).message[key]
    assert not told[2].any()
    assert told[:2].any(-1).all() if told.ndim > 1 else told[:2].all()


def test_a_method_copes_without_small_classes_or_is_refused(ask):
    assert "features by class stay" in ask('method = "fedpac"', [TRAIN], **{"min-images": 140}).error
    uneven = ask('method = "feddisco"', [TRAIN]).message["discrepancy"]
    assert uneven == pytest.approx(0.405, abs=0.01)  # log(3 / 2): as if there were two classes of equal size
    assert ask('method = "feddisco"', [TRAIN], **{"min-images": 140}).message["discrepancy"] == 0
    few = ask('method = "ccvr"', [PREPARE], **{"min-images": 140})
    assert not few.message["counts"].any()


def test_losses_are_rounded_and_bounded(ask):
    """A crafted head of any size tells of an image at most log2(20000 / n) bits."""
    large = {"weights": {"weights": 1e6 * torch.randn(layout().size, generator=torch.manual_seed(0))}}
    for found in (ask().results[0], ask(trees=large).results[0]):
        mean = found["loss"] / found["count"]
        assert 0 <= mean <= 20
        assert mean == pytest.approx(round(mean, 3), abs=1e-12)
    vote = ask(MEASURED, [CANDIDATES]).results[0]
    assert all(round(value, 3) == value for value in (*vote["losses"], *vote["squares"]))


def test_the_loss_in_training_is_bounded_and_of_large_classes_only(ask, digits, rare):
    """It is a mean over all images that are trained on, also over the only one of its class."""
    with np.load(rare) as found:
        arrays = dict(found)
    arrays["labels"] = np.minimum(arrays["labels"], 1)
    np.savez(digits / "even.npz", **arrays)
    even, large = {"data": str(digits / "even.npz")}, {"weights": {"weights": 30 * weights()}}
    loss = ask(jobs=[TRAIN], **even).results[0]["metrics"]["train_loss"]
    assert 0 < loss == round(loss, 3) < 2
    assert ask("lr = 1e-9", [TRAIN], trees=large, **even).results[0]["metrics"]["train_loss"] == 20
    for trees in ({}, large):
        assert math.isnan(ask(jobs=[TRAIN], trees=trees).results[0]["metrics"]["train_loss"])


def other_model(k):
    return {"models": {"0": torch.full((layout().shared_size,), float(k))}}


OTHER = {"kind": "loss", "clients": ["alpha"], "slot": 0, "incoming": {"client": "alpha"}}


def test_what_is_measured_is_tied_to_the_run(ask):
    assert "only where a run decomposes" in ask(jobs=[OTHER], trees=other_model(1)).error
    assert "only under the rule 'measured'" in ask(jobs=[CANDIDATES]).error
    assert "no validation images" in ask(jobs=[LOSS | {"validation": True}]).error
    repeated, crafted = [[1.0, 0.0]] * 2, [[1.0, 0.0], [0.5, 0.5]]
    for changes in ({"samples": 65}, {"coefficients": repeated}, {"coefficients": crafted}):
        assert "the run's 3 candidate steps on 64 images" in ask(MEASURED, [CANDIDATES | changes]).error
    run = uuid4().hex
    assert ask("decompose = 1", run=run).error is None
    for settings in ("decompose = 1\nseed = 1", "decompose = 2", "decompose = 1\ndecompose_samples = 60"):
        assert "not those that it began with" in ask(settings, run=run).error
    assert ask("decompose = 1\nrounds = 20", run=run).error is None  # an extended run


def test_candidate_steps_are_those_after_a_training(ask):
    """From the announced model, along the run's own steps, and in as many sets as a round may have."""
    run, moved = uuid4().hex, {"weights": {"weights": weights() + 1}}
    assert "from which it has trained" in ask(MEASURED, [CANDIDATES], run=run).error
    assert ask(MEASURED, [TRAIN], run=run).error is None
    assert ask(MEASURED, [CANDIDATES], run=run).error is None
    assert "from which it has trained" in ask(MEASURED, [CANDIDATES], run=run, trees=moved).error
    sets = [ask(MEASURED, [CANDIDATES], run=run, basis=k).error for k in (0.0, 1.0, 2.0)]
    assert sets[:2] == [None, None]  # the first is the one above
    assert "at most 2 sets" in sets[2]


def test_a_site_test_is_of_classes_with_enough_images(ask, rare):
    """Accuracy too: of the test images of a class with few of them nothing leaves."""
    with np.load(rare) as found:
        labels = found["labels"][found["split"] == "test"]
    counts = np.bincount(labels)
    least = int(counts[:2].max())
    assert counts[:2].min() < least
    some = ask(jobs=[TEST], **{"min-images": least}).results[0]["models"]["global"]
    assert some["pictures"] == least
    assert some["accuracy"]["value"] is not None
    assert some["auroc"]["value"] is some["sensitivity"]["value"] is None
    assert ask(jobs=[TEST], **{"min-images": least + 1}).results[0]["models"] == {}


def test_measurements_have_a_budget(ask, tmp_path):
    run, order = uuid4().hex, {"settings": "decompose = 1\nrounds = 2", "jobs": [OTHER]}
    for k in range(4):
        assert ask(**order, run=run, trees=other_model(k), **{"max-models": 4}).error is None
    again = ask(**order, run=run, trees=other_model(2), **{"max-models": 4})
    assert again.error is None  # it tells nothing new
    assert (
        "at most 4 models of other sites"
        in ask(**order, run=run, trees=other_model(4), **{"max-models": 4}).error
    )
    assert "at most 0 models" in ask(**order, trees=other_model(1), **{"max-models": 0}).error
    run = uuid4().hex
    told = [
        ask("rounds = 1", run=run, trees={"weights": {"weights": weights() + k}}).error for k in range(19)
    ]
    assert told[:18] == [None] * 18
    assert "a run of 1 rounds has at most 18 global models" in told[18]
    run = uuid4().hex
    assert ask("rounds = 900", run=run, **{"max-measurements": 1}).error is None
    more = {"weights": {"weights": weights() + 1}}
    assert (
        "at most 1 measurements in a run"
        in ask("rounds = 900", run=run, trees=more, **{"max-measurements": 1}).error
    )
    (tmp_path / "alpha" / run / "measured.json").write_text("{}")
    assert "is damaged, so nothing leaves" in ask("rounds = 900", run=run).error
    assert "at most 3 runs within a day" in ask(**{"max-runs": 3}).error


def test_a_site_draws_what_it_measures(ask):
    """Nor does a part of all images but a few tell of those few."""
    first, second = (ask(f"decompose_samples = 110\nseed = {seed}").results for seed in (1, 2))
    assert first[0] == second[0]
    assert ask("decompose_samples = 230").results[0]["count"] == 239
    aside = [LOSS | {"validation": True}]
    first, second = (ask(f"validation = 0.5\nseed = {seed}", aside).results for seed in (1, 2))
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
        drawn = SiteDraws(setup, own, Limits(**limits))
        everything = setup.federation.client("alpha").train
        return sorted(set(everything) - set(drawn.training_images("alpha", 1)))

    assert out(seed=1, own=7) == out(seed=2, own=7) != out(seed=1, own=8)
    assert len(out(seed=1, own=7)) == pytest.approx(32, abs=5)
    assert out(seed=1, own=7, min_images=80) == []
    assert ask(MEASURED, [CANDIDATES]).results[0]["count"] >= 50


@pytest.mark.parametrize(
    ("settings", "jobs", "reason"),
    [
        ("image_size = 4096", 1, "at most 1024 pixels"),
        ("local_epochs = 1000000", 1, "at most 100 epochs"),
        ("local_steps = 1000000", 1, "at most 100 epochs, 5 steps each"),
        ("rounds = 2000", 1, "at most 1000 rounds"),
        ("batch_size = 7", 1, "at least 8 images in a step, not 7"),
        ("lr = 2.0\nweight_decay = 0.5", 1, "lr x weight_decay is at most 0.1 there, not 1"),
        ('method = {name = "fedprox", mu = 100.0}', 1, "proximal term) is at most 0.1 there"),
        ('method = {name = "fedspeed", lam = 0.01}', 1, "at most 0.1 there"),
        ('method = {name = "fedpac", head_lr = 100.0}\nweight_decay = 0.01', 1, "at most 0.1 there, not 1"),
        ("head_lr = 100.0\nweight_decay = 0.01", 1, "at most 0.1 there, not 1"),
        ("batch_size = 1000\nimage_size = 512", 1, "GB of memory and has 1.0 GB"),
        ("", 2000, "at most 1024 jobs"),
    ],
)
def test_a_site_bounds_what_it_is_asked(ask, settings, jobs, reason):
    assert reason in ask(settings, [LOSS] * jobs, **{"memory-gb": 1.0}).error


def test_epochs_of_a_methods_own_are_bounded_too(ask):
    settings = 'method = {name = "fedpac", head_epochs = 1000000000}'
    assert "at most 500 steps in a round, not 5000000000" in ask(settings, [TRAIN]).error
    assert ask('method = {name = "fedpac", head_epochs = 2}', [TRAIN]).error is None


def test_an_order_of_millions_of_classes_is_refused(ask, monkeypatch):
    monkeypatch.setitem(globals(), "CLASSES", ["c"] * 2_000_000)
    assert "malformed" in ask().error


def test_a_cache_has_a_quota(ask):
    assert "would not fit its cache of 1e-06 GB" in ask("image_size = 16", **{"cache-gb": 1e-6}).error
    assert ask("decompose_samples = 110").error is None


def test_an_update_is_of_many_images(ask):
    assert "it makes no update of 1 steps" in ask("local_steps = 1\nbatch_size = 10", [TRAIN]).error
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


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ('methods = ["scaffold"]', "the method 'fedavg' is not one of scaffold"),
        ('rules = ["median"]', "the rule 'mean' is not one of median"),
        ("tasks = []", "the task 'classification' is not one of none"),
        ("min_sites = 3", "a run has at least 3 sites, not 1"),
        ("max_rounds = 3", "a run has at most 3 rounds, not 15"),
        ("models_to_sites = false", "its models do not go to other sites"),
        ('updates = "summed"', "its updates leave in secure sums only"),
        ("epsilon = 4.0", "it trains with differential privacy only (epsilon at most 4)"),
        ("epsilonn = 4.0", "did you mean 'epsilon'"),
        ("min_sites = 0", "is not valid, so everything is refused"),
        ("= broken", "cannot be read, so everything is refused"),
        (None, "cannot be read, so everything is refused"),
    ],
)
def test_a_policy_refuses_what_it_does_not_allow(ask, tmp_path, policy, reason):
    """With a sentence for the server's operator, which is in the site's ledger too."""
    folder = tmp_path / "alpha"
    folder.mkdir()
    if policy is not None:
        (folder / "policy.toml").write_text(policy)
    assert reason in ask("decompose = 1\nrounds = 15", [TRAIN], policy=True).error
    entry = Ledger(folder / "ledger.jsonl").check().entries[-1]
    assert reason in entry["refused"]
    assert entry["left"] == {}


def test_under_its_policy_a_site_works_and_small_counts_stay(ask, tmp_path):
    (tmp_path / "alpha").mkdir()
    file = tmp_path / "alpha" / "policy.toml"
    file.write_text('methods = ["fedavg"]\nrules = ["mean"]\nsmallest_count = 140')
    assert ask(jobs=[TRAIN], policy=True, **{"min-images": 2}).results[0]["before"]["count"] == 0
    question = Question(version=__version__, classes=CLASSES, image_size=None)
    told = unpack(Description, ask(question=question, policy=True, **{"min-images": 2}))
    assert told.label_counts == [None] * 3
    lines = "\n".join(read_policy(file).lines())
    for words in (
        "methods: fedavg",
        "tasks: any",
        "of at least 140 images of a class",
        "which the server sees",
    ):
        assert words in lines
    file.write_text('updates = "summed"\nmodels_to_sites = false\nepsilon = 2.0')
    lines = "\n".join(read_policy(file).lines())
    assert "no update but in a secure sum; nothing is trained without differential privacy, at most" in lines
    assert "no model to other sites" in lines


PRIVATE = 'dp = "epsilon=8,delta=1e-5,clip=1"\nclient_losses = false\nlocal_steps = 1\nrounds = 2'


def test_a_repeated_private_order_has_other_noise_and_is_counted_again(ask, tmp_path):
    pytest.importorskip("opacus")
    run = uuid4().hex
    updates = [ask(PRIVATE, [TRAIN], run=run).update["update"] for _ in range(2)]
    assert not updates[0].equal(updates[1])
    lines = (tmp_path / "alpha/privacy.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in lines] == [run, run]


def test_the_sites_own_budget_ends_its_part_in_all_runs(ask, tmp_path):
    """Every order is done by a new process at a site, so this is also what holds after a restart."""
    pytest.importorskip("opacus")
    (tmp_path / "alpha").mkdir()
    (tmp_path / "alpha/policy.toml").write_text("epsilon = 9.0")
    assert ask(PRIVATE, [TRAIN], policy=True).error is None
    more = PRIVATE.replace("rounds = 2", "rounds = 1")  # a server that asks for less noise than it may
    refused = "the privacy budget of this site is epsilon 9 (delta 1e-05)"
    assert refused in ask(more, [TRAIN], policy=True).error
    assert "of 9 spent over all runs (delta 1e-05)" in spent_line(tmp_path / "alpha")
    assert len((tmp_path / "alpha/privacy.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "jobs", "reason"),
    [
        (PRIVATE, [TRAIN, LOSS], "tells nothing else of its training images"),
        (PRIVATE, [PREPARE], "tells nothing else of its training images"),
        (PRIVATE.replace("client_losses = false", ""), [TRAIN], "losses on training samples have no epsilon"),
        (PRIVATE + '\nmodel = "resnet8"', [TRAIN], "BatchNorm mixes the samples"),
        ("client_losses = false", [LOSS], "it trains with differential privacy only"),
    ],
)
def test_what_has_no_epsilon_is_refused_by_the_site_itself(ask, tmp_path, settings, jobs, reason):
    pytest.importorskip("opacus")
    (tmp_path / "alpha").mkdir()
    (tmp_path / "alpha/policy.toml").write_text("epsilon = 9.0")
    assert reason in ask(settings, jobs, policy=True).error
    assert not (tmp_path / "alpha/privacy.jsonl").exists()


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
