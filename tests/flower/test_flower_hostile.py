"""Real processes: what a server with crafted orders learns of a site, and what a lying site does to a run."""

import json
import sys
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fedld import __version__
from fedld.config.experiment import make_experiment
from fedld.config.resolve import make_method
from fedld.deployment.control import Control
from fedld.engine.network import divided, make_layout
from fedld.layout import FlatModel
from fedld.records.ledger import Ledger

HERE = Path(__file__).parent
CLASSES = ["low", "high", "rare"]
INCOMING = {"incoming": {"client": "alpha"}}
TRAIN = {"kind": "train", "round": 1, "slot": 0, **INCOMING}
DECOMPOSED = "decompose = 1"


def layout(settings):
    experiment = make_experiment(settings)
    method = make_method(experiment)
    federation = type(
        "F", (), {"input_shape": (1, 8, 8), "classes": CLASSES, "outputs": len(CLASSES), "output_shape": (3,)}
    )
    return make_layout(experiment, method, divided(experiment, method, federation)[1])


def order(settings="", jobs=(), run=None, classes=CLASSES, weights=None, **trees):
    """An order as the hostile server sends it."""
    if weights is None:
        size = layout({}).size
        weights = 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(0))
    part = {"version": __version__, "run": run or uuid4().hex, "kept": [], "jobs": list(jobs)}
    part |= {"settings": settings, "classes": classes, "mean": [0.5], "std": [0.3]}
    return "train", json.dumps(part), {"weights": {"weights": weights}, **trees}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, digits, consortium):
    """A server that means harm, and one site with usual limits: two large classes, one image of a third."""
    made = consortium(tmp_path_factory.mktemp("hostile"), digits, secure=True)
    with np.load(digits / "alpha.npz") as found:
        arrays = dict(found)
    labels = (arrays["labels"] >= 5).astype(np.int64)
    labels[np.flatnonzero(arrays["split"] == "train")[7]] = 2
    np.savez(made.folder / "alpha.npz", **arrays | {"labels": labels, "classes": np.array(CLASSES)})
    made.start_server(sys.executable, str(HERE / "hostile_server.py"))
    made.register("alpha")
    made.start_site("alpha", data=made.folder / "alpha.npz", min_images=50)
    control = Control(made.folder / "runs")
    made.wait(lambda: [node.status for node in control.nodes()] == ["online"], 120)
    control.close()
    yield made
    made.close()


def ask(consortium, *orders):
    """The site's answers to some orders, in one run of the server."""
    file = consortium.folder / f"{uuid4().hex}.orders"
    torch.save(list(orders), file)
    control = Control(consortium.folder / "runs")
    run = control.start(
        {"out": str(consortium.folder / "runs" / "x"), "resume": False, "experiment": str(file)}
    )
    said = "\n".join(control.follow(run))
    control.close()
    assert '"event":"end"' in said, said
    return [
        (json.loads(text), trees)
        for text, trees in torch.load(file.with_suffix(".answers"), weights_only=True)
    ]


def crafted_head(k):
    """An update after which every image of another class has loss log 2, and of 'rare' 8 plus feature k."""
    shape = layout({})
    head = [entry for entry in shape.entries if entry.kind == "parameter"][-2:]
    update = torch.zeros(shape.size)
    weight, bias = (entry.view(update) for entry in head)
    start = 0.1 * torch.randn(shape.size, generator=torch.Generator().manual_seed(0))
    old_weight, old_bias = (entry.view(start) for entry in head)
    weight.copy_(-old_weight)
    bias.copy_(-old_bias)
    bias[2] -= 8.0
    if k is not None:
        weight[2, k] -= 1.0
    return shape.shared_part(update)


def losses(count, run=None):
    """An order for the losses of that many crafted models."""
    models = {str(k): crafted_head(k % 128 if k else None) for k in range(count)}
    jobs = [{"kind": "loss", "clients": ["alpha"], "slot": k, **INCOMING} for k in range(count)]
    return order(DECOMPOSED, jobs, run, models=models)


def test_crafted_models_tell_nothing_of_the_only_image_of_a_class(hostile):
    """One order of 129 losses gave its 128 features to 2e-6; each told mean is now that of the others."""
    many, allowed, alone = ask(
        hostile, losses(129), losses(64), order(jobs=[{"kind": "loss", "clients": ["alpha"]}])
    )
    assert "at most 64 models of other sites in a round" in many[0]["error"]
    told = [(one["count"], one["loss"] / one["count"]) for one in allowed[0]["results"]]
    assert {count for count, _ in told} == {alone[0]["results"][0]["count"]} == {239}
    assert {round(mean, 6) for _, mean in told} == {0.693}
    entries = Ledger(hostile.folder / "state" / "alpha" / "ledger.jsonl").check().entries
    assert any("refused" in entry for entry in entries)


TRUNKS = 24


def trunk(seed):
    """A random network whose head is the crafted one, and its features as a function of pictures."""
    shape, experiment = layout({}), make_experiment({})
    federation = type(
        "F", (), {"input_shape": (1, 8, 8), "classes": CLASSES, "outputs": len(CLASSES), "output_shape": (3,)}
    )
    model = divided(experiment, make_method(experiment), federation)[1]
    flat = FlatModel(model, shape)
    flat.load(0.3 * torch.randn(shape.size, generator=torch.Generator().manual_seed(seed)))
    head = [entry for entry in shape.entries if entry.kind == "parameter"][-2:]
    for entry in head:
        entry.view(flat.vector).zero_()
    return flat.vector.clone(), model.double().eval().requires_grad_(False)


def reading(shape, k):
    """The update of a head that adds feature k to the loss of 'rare' and nothing to the others'."""
    update = torch.zeros(shape.size)
    weight, bias = (e.view(update) for e in [e for e in shape.entries if e.kind == "parameter"][-2:])
    bias[2] = -8.0
    if k is not None:
        weight[2, k] = -0.05
    return shape.shared_part(update)


def features(model, picture):
    return model.embed((picture.reshape(1, 1, 8, 8) - 0.5) / 0.3)[0, :63]


def reconstructed(models, told):
    """The picture whose first 63 features under every trunk are closest to the told ones."""
    picture = torch.full((64,), 0.5, dtype=torch.float64, requires_grad=True)
    steps = torch.optim.LBFGS([picture], max_iter=40, history_size=30, line_search_fn="strong_wolfe")
    with torch.no_grad():
        scale = torch.stack([features(model, picture).std() for model in models])[:, None]

    def distance():
        steps.zero_grad()
        found = torch.stack([features(model, picture) for model in models])
        loss = ((found - told) / scale).square().mean()
        loss.backward()
        return loss

    steps.step(distance)
    return picture.detach().numpy()


def correlation(guess, picture):
    """The correlation of two pictures; 0 for a guess that is one grey, where the search did not begin."""
    return np.corrcoef(guess, picture)[0, 1] if np.ptp(guess) else 0.0


def test_random_trunks_do_not_give_the_picture(hostile):
    """24 orders with random trunks gave the only image of a class: its features tell all of its pixels."""
    shape, made = layout({}), [trunk(seed) for seed in range(TRUNKS)]
    models = [model for _, model in made]
    readings = {str(k): reading(shape, k - 1 if k else None) for k in range(64)}
    jobs = [{"kind": "loss", "clients": ["alpha"], "slot": k, **INCOMING} for k in range(64)]
    settings, run = f"{DECOMPOSED}\nrounds = {TRUNKS}", uuid4().hex
    answers = ask(hostile, *(order(settings, jobs, run, weights=w, models=readings) for w, _ in made))
    means = torch.tensor([[one["loss"] / one["count"] for one in a["results"]] for a, _ in answers])
    told = (means[:, 1:] - means[:, :1]).double() * 240 / 0.05  # as if the image were one of those measured
    with np.load(hostile.folder / "alpha.npz") as found:
        picture = found["images"][np.flatnonzero(found["labels"] == 2)[0]].reshape(64) / 255
    with torch.no_grad():
        exact = torch.stack([features(model, torch.tensor(picture)) for model in models])
    before, after = (reconstructed(models, values) for values in (exact, told))
    correlations = [correlation(guess, picture) for guess in (before, after)]
    print("correlation with the picture, before and after:", correlations)
    assert correlations[0] > 0.99  # what an unbounded site would tell is the picture
    assert means.round(decimals=6).unique().tolist() == pytest.approx([0.693])
    assert abs(correlations[1]) < 0.5


def test_a_server_cannot_spread_crafted_models_over_orders_and_rounds(hostile):
    run, more = uuid4().hex, uuid4().hex
    loss = [{"kind": "loss", "clients": ["alpha"]}]
    models = [torch.full((layout({}).size,), 0.01 * k) for k in range(19)]
    again = [order("rounds = 1", loss, more, weights=model) for model in models]
    answers = ask(hostile, losses(64, run), losses(65, run), *again)
    assert answers[0][0]["error"] is None
    assert "at most 64 models" in answers[1][0]["error"]
    assert [answer["error"] for answer, _ in answers[2:20]] == [None] * 18
    assert "at most 18 global models" in answers[20][0]["error"]


def test_no_class_of_few_images_is_told_of(hostile):
    question = {"version": __version__, "classes": CLASSES, "image_size": None}
    common = {"frozen": torch.tensor(0)}
    prepare = {"kind": "prepare", "round": 1, **INCOMING}
    size = layout({"method": "fedpac"}).size
    answers = ask(
        hostile,
        ("query", json.dumps(question), {}),
        order('method = "fedpac"', [TRAIN], weights=0.1 * torch.ones(size)),
        order('method = "ccvr"', [prepare]),
        order('method = "fedma"', [TRAIN], common=common),
        order(jobs=[{"kind": "site-test", **INCOMING}]),
    )
    described, fedpac, ccvr, fedma, tested = answers
    assert described[0]["label_counts"].count(None) == 2
    assert described[0]["label_counts"][2] is None
    for answer, message in (fedpac, ccvr, fedma):
        assert answer["error"] is None
        assert message["message"]["counts"][2] == 0
        assert message["message"]["counts"][:2].all()
    assert not fedpac[1]["message"]["prototypes"][2].any()
    assert not ccvr[1]["message"]["means"][2].any()
    assert tested[0]["results"][0]["models"] == {}  # 86 test images, no class with 50 of them


def test_no_update_of_the_last_image_and_no_work_without_end(hostile):
    fedpac = 'method = {name = "fedpac", head_epochs = 1000000000}'
    orders = {
        "at least 8 images in a step": order("batch_size = 1\nlocal_steps = 50", [TRAIN]),
        "lr x weight_decay is at most 0.1": order("lr = 1.0\nweight_decay = 1.0", [TRAIN]),
        "at most 1000 rounds": order("rounds = 100000", [TRAIN]),
        "steps in a round, not 5000000000": order(fedpac, [TRAIN]),
        "GB of memory": order("image_size = 1024\nbatch_size = 100000", [TRAIN]),
        "malformed": order(jobs=[TRAIN], classes=["c"] * 2_000_000),
    }
    answers = ask(hostile, *orders.values())
    for reason, (answer, _) in zip(orders, answers, strict=True):
        assert reason in answer["error"]


LIES = [
    {"before.loss": -0.2},
    {"before.count": -7},
    {"after.sums.correct": 500, "after.count": 60},
    {"after.loss": 1e308},
    {"metrics.steps": -5.0},
    {"before.count": 2**52},
]


def test_a_lying_site_is_left_out_and_chooses_no_model(secure, digits):
    """Its losses, hits, counts and steps are those of a measurement, or its whole reply is refused."""
    secure.register("mallory")
    program = [sys.executable, str(HERE / "hostile_site.py"), json.dumps(LIES)]
    (secure.folder / "mallory.npz").write_bytes((digits / "beta.npz").read_bytes())
    secure.start_site("mallory", data=secure.folder / "mallory.npz", program=program)
    settings = {"dataset": f"npz:{digits}/test.npz", "clients": 4, "rounds": len(LIES), "validation": 0.3}
    settings |= {"seed": 3, "lr": 0.05}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    try:
        assert secure.submit("run-lies", "lies", *words).wait(400) == 0, secure.log("run-lies")
    finally:
        secure.kill("mallory")
        secure.call(secure.fedld, "server", "unregister", "--name", "mallory")
    lines = [line for line in secure.records("lies", "clients.jsonl") if line["client"] == "mallory"]
    assert [line["reason"] for line in lines] == ["malformed"] * len(LIES)
    for line, said in zip(
        lines, ("mean loss", "malformed", "hits of", "mean loss", "number of steps", "hits of"), strict=True
    ):
        assert said in line["excluded"]
    rounds = secure.records("lies", "rounds.jsonl")
    measured = {line["round"]: line["validation"] for line in rounds}
    assert all(one["loss"] > 0 and one["count"] < 300 for one in measured.values())
    with safe_open(secure.folder / "runs" / "lies" / "best.safetensors", "pt") as model:
        best = int(model.metadata()["round"])
    assert best == min(measured, key=lambda number: measured[number]["loss"])
