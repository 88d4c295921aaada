"""Methods that are a rule: what their server does to given updates, against the oracles."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedld.aggregation import Principal, aggregate
from fedld.layout import Layout
from fedld.local.objectives import MarginLog
from fedld.methods import METHODS, Replies
from fedld.models import build


def replies_of(G, sizes, lens=None, weights="size"):
    """Replies with given updates; `lens` cuts the parameters into tensors."""
    lens = lens or [G.shape[1]]
    model = nn.ParameterDict({f"t{k}": nn.Parameter(torch.zeros(n).double()) for k, n in enumerate(lens)})
    names = tuple(f"c{i}" for i in range(len(G)))
    updates = torch.as_tensor(np.array(G, dtype=np.float64))
    blank = [{}] * len(G)
    return Replies(
        clients=names,
        rows=list(range(len(G))),
        sizes=tuple(sizes),
        messages=blank,
        client_weights=weights,
        layout=Layout.of(model),
        updates=updates,
        steps=(1.0,) * len(G),
    )


def one_step(name, replies):
    method = METHODS[name]
    server = method.init(torch.zeros(replies.layout.size).double(), replies.layout, replies.sizes)
    return method.server_update(server, replies)[0].weights.numpy()


@pytest.mark.parametrize("case", ["m5", "m8"])
def test_fedgh(oracle, case):
    file = oracle("rule_methods")
    G, p = file[f"fedgh_pairwise_own_{case}/G"], file[f"fedgh_pairwise_own_{case}/p"]
    found = one_step("fedgh", replies_of(G, p))
    np.testing.assert_allclose(found, file[f"fedgh_pairwise_own_{case}/out"], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("fedavg", "fedavg"),
        ("fedld", "agg_l2"),
        ("fedld-drop", "agg_l2_drop"),
        ("fedld-smooth", "agg_l2_aftersum"),
    ],
)
def test_principal_family(oracle, name, key):
    file = oracle("rule_methods")
    assert file["paper/L"] == 4  # 0.8 of five clients
    found = one_step(name, replies_of(file["paper/G"].T, file["paper/n"]))
    np.testing.assert_allclose(found, file[f"paper/{key}"], rtol=1e-10, atol=1e-12)


def test_fedld_official_over_several_rounds(oracle):
    """Round 0 moves nothing and round 1 is a plain mean; then the rule, tensor by tensor, clients alike."""
    file, method = oracle("rule_methods"), METHODS["fedld-official"]
    lens = file["sequence/lens"].tolist()
    layout = replies_of(file["sequence/G"][0], [1] * 5, lens).layout
    server = method.init(torch.zeros(layout.size).double(), layout, [5, 1, 1, 1, 9])
    for G, expected in zip(file["sequence/G"], file["sequence/out_float64"], strict=True):
        before = server.weights
        server, _ = method.server_update(server, replies_of(G, [5, 1, 1, 1, 9], lens, "uniform"))
        np.testing.assert_allclose((server.weights - before).numpy(), expected, rtol=1e-8, atol=1e-10)


def test_fedld_tensor_is_the_rule_on_every_tensor_by_itself(oracle):
    file = oracle("rule_methods")
    G, n = file["paper/G"].T, file["paper/n"]
    found = one_step("fedld-tensor", replies_of(G, n, [25, 15]))
    parts = [one_step("fedld", replies_of(part, n)) for part in (G[:, :25], G[:, 25:])]
    np.testing.assert_allclose(found, np.concatenate(parts), rtol=1e-10, atol=1e-13)
    assert not np.allclose(found, one_step("fedld", replies_of(G, n, [25, 15])))


def test_robfedavg_drops_a_wild_coordinate_and_keeps_the_rest():
    G = np.array([[1.0, 1.0], [1.1, 1.2], [0.9, 0.8], [1.0, 500.0]])
    found = one_step("robfedavg", replies_of(G, [1, 1, 1, 1]))
    np.testing.assert_allclose(found, [1.0, 1.0])


@pytest.mark.parametrize("name", ["consensus", "fedld-consensus"])
def test_consensus_keeps_the_length_of_the_average_and_its_side(oracle, name):
    file = oracle("rule_methods")
    G, n = file["paper/G"].T, file["paper/n"]
    found, average = one_step(name, replies_of(G, n)), one_step("fedavg", replies_of(G, n))
    assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(average))
    assert found @ average > 0
    spread = [np.std(G @ u) / np.mean(G @ u) for u in (found, average)]
    assert spread[0] < spread[1]


PARTS = {"objective": MarginLog(lam=0.5), "rule": Principal()}


@pytest.mark.parametrize("name", ["scaffold", "fedprox", "fedbn", "fedpac", "fedcm", "fediir", "fedavgm"])
def test_margin_control_and_the_principal_rule_go_around_any_method(images, name):
    def network():
        return build("resnet8", classes=2, image_size=8, seed=0)

    plain, around = images(METHODS[name], network()), images(replace(METHODS[name], **PARTS), network())
    plain.round(), around.round()
    replies = around.replies
    assert not torch.allclose(replies.gradients, plain.replies.gradients), "the objective must be used"
    expected = aggregate(replies.gradients, replies.sizes, "principal").update
    torch.testing.assert_close(around.combined.update, expected)
    assert not torch.allclose(expected, replies.gradients.mean(0)), "the rule must be used"
    moved = (around.server.weights - plain.layout.flatten(network()))[: around.layout.shared]
    torch.testing.assert_close(moved, getattr(METHODS[name], "eta", 1.0) * expected.to(moved))
    around.round()
    assert around.server.weights.isfinite().all()


@pytest.mark.parametrize("name", ["scaffold", "fedbn"])
def test_the_first_update_under_margin_control_is_that_of_fedavg_under_margin_control(images, name):
    """Control variates start at zero and BatchNorm is common, so the objective alone decides round one."""
    models = [build("resnet8", classes=2, image_size=8, seed=0) for _ in range(2)]
    one = images(replace(METHODS[name], objective=MarginLog()), models[0])
    other = images(replace(METHODS["fedavg"], objective=MarginLog()), models[1])
    one.round(), other.round()
    views = [run.layout.views(run.replies.updates[1]) for run in (one, other)]
    for entry in other.layout.entries:
        if entry.kind == "parameter":
            torch.testing.assert_close(views[0][entry.name], views[1][entry.name])
