"""Methods in closed form against solutions by hand, for every way of dealing the images."""

import json
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedld.config.experiment import make_experiment
from fedld.engine.loop import run
from fedld.engine.network import load_model
from fedld.errors import FedLDError
from fedld.methods import closed
from fedld.methods.closed import TEMPERATURES
from fedld.methods.lda import LDA
from fedld.methods.newton import Newton
from fedld.methods.regmean import RegMean
from fedld.methods.ridge import Ridge
from fedld.methods.start import ClosedStart, start_message
from fedld.models.base import Block, Model

N, D, C = 90, 6, 3


class Head(Model):
    """A linear head for features as they are."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(D, C).double()
        self.blocks = (Block("fc", ("fc",)),)


def samples(seed=0):
    """Features of three classes that overlap, of unequal scale and away from zero."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, C, (N,), generator=generator)
    noise = torch.randn(N, D, generator=generator, dtype=torch.float64)
    features = noise + 1.5 * F.one_hot(labels, D) + 0.5
    return features * torch.arange(1, D + 1), labels


def head(federation):
    weight, bias = federation.server.weights[: C * D].view(C, D), federation.server.weights[C * D :]
    return weight, bias


def standardised(features):
    deviation = features.std(0, correction=0) + 1e-3
    return (features - features.mean(0)) / deviation


def ridge_by_hand(z, y, lam):
    """Least squares with a bias that is not regularised; gives a function of z."""
    mean, target = z.mean(0), F.one_hot(y, C).double()
    A = (z - mean).T @ (z - mean) + lam * torch.eye(D)
    weight = torch.linalg.solve(A, (z - mean).T @ target)
    return lambda new: (new - mean) @ weight + target.mean(0)


def lda_by_hand(z, y, lam, n):
    means = torch.stack([z[y == c].mean(0) for c in range(C)])
    scatter = sum((z[y == c] - means[c]).T @ (z[y == c] - means[c]) for c in range(C))
    inverse = torch.linalg.inv((scatter + lam * torch.eye(D)) / len(z))
    prior = torch.log(torch.bincount(torch.as_tensor(n), minlength=C) / len(n))
    return lambda new: new @ inverse @ means.T - (means @ inverse * means).sum(1) / 2 + prior


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.sampled_from([Ridge(), LDA(), Ridge(balanced=True)]))
def test_the_head_is_the_same_however_the_images_are_dealt(dealt, seed, clients, method):
    features, labels = samples()
    whole = dealt(method, Head(), features, labels, [torch.arange(N)])
    whole.round()
    rng = np.random.default_rng(seed)
    owner = rng.permutation(np.concatenate([np.arange(clients), rng.integers(0, clients, N - clients)]))
    parts = [torch.from_numpy(np.flatnonzero(owner == k)) for k in range(clients)]
    apart = dealt(method, Head(), features, labels, parts)
    apart.round()
    assert (whole.server.weights - apart.server.weights).abs().max() < 1e-10
    assert method.choices(whole.server) == method.choices(apart.server)


@pytest.mark.parametrize("method", [Ridge(), LDA()], ids=["ridge", "lda"])
def test_the_choices_are_those_of_refitting_without_each_image(dealt, method):
    """Regularisation and temperature by leave-one-out, every image left out by hand."""
    features, labels = samples()
    federation = dealt(method, Head(), features, labels, [torch.arange(40), torch.arange(40, N)])
    federation.round()
    z, truth = standardised(features), F.one_hot(labels, C)
    errors, logits = [], []
    grid = N * 2.0 ** torch.arange(-12, 4, dtype=torch.float64)
    for lam in grid:
        without = []
        for i in range(N):
            rest = torch.arange(N) != i
            if isinstance(method, Ridge):
                fitted = ridge_by_hand(z[rest], labels[rest], lam)
            else:
                fitted = lda_by_hand(z[rest], labels[rest], lam, labels.tolist())
            without.append(fitted(z[i]))
        logits.append(torch.stack(without))
        squares, entropies = (logits[-1] - truth).square().sum(), F.cross_entropy(logits[-1], labels)
        errors.append(squares if isinstance(method, Ridge) else entropies)
    best = int(torch.stack(errors).argmin())
    losses = torch.stack([F.cross_entropy(t * logits[best], labels) for t in TEMPERATURES])
    told = {key: sum(reply[key] for reply in federation.replies.messages) for key in ("errors", "losses")}
    assert torch.allclose(told["losses"][best] / N, losses, rtol=1e-5)
    assert method.choices(federation.server) == {
        "lam": grid[best].item(),
        "temperature": TEMPERATURES[losses.argmin()].item(),
    }


GRID = N * 2.0 ** torch.arange(-12, 4, dtype=torch.float64)


def generalised_by_hand(features, labels):
    """|Y - HY|^2 / (1 - tr H / N)^2 of least squares with a bias, for all regularisations."""
    z, y = F.pad(standardised(features), (0, 1), value=1.0), F.one_hot(labels, C).double()
    errors = []
    for lam in GRID:
        hat = z @ torch.linalg.solve(z.T @ z + lam * torch.diag(torch.tensor([1.0] * D + [0])), z.T)
        errors.append((y - hat @ y).square().sum() / (1 - hat.trace() / N).square())
    return torch.stack(errors)


@pytest.mark.parametrize("method", [Ridge(), LDA()], ids=["ridge", "lda"])
def test_generalised_errors_are_those_of_the_hat_matrix(dealt, method):
    features, labels = samples()
    whole = dealt(method, Head(), features, labels, [torch.arange(N)])
    problem = method.problem(method.sums(whole.client(0)))
    errors = method.generalised_errors(problem, method.plan(problem, GRID))
    assert torch.allclose(errors, generalised_by_hand(features, labels), rtol=1e-10)


@pytest.mark.parametrize("method", [Ridge(), LDA()], ids=["ridge", "lda"])
@pytest.mark.parametrize("wanted", range(16))
def test_a_client_that_lies_about_its_errors_chooses_no_bad_regularisation(
    dealt, monkeypatch, method, wanted
):
    """A tenth of the images; it tells of no error at one candidate and of huge ones at all others."""
    features, labels = samples()
    parts = [torch.arange(9), torch.arange(9, N)]
    told, liars = closed.leave_one_out_sums, [True, False]

    def tell(*given):
        message = told(*given)
        if liars.pop(0):
            message["errors"] = torch.full_like(message["errors"], 1e12)
            message["errors"][wanted] = 0.0
        return message

    monkeypatch.setattr(closed, "leave_one_out_sums", tell)
    federation = dealt(method, Head(), features, labels, parts)
    errors = generalised_by_hand(features, labels)
    good = errors <= (1.1 if isinstance(method, Ridge) else 1.25) * errors.min()
    assert not good.all()
    with nullcontext() if good[wanted] else pytest.warns(UserWarning, match="far from the best"):
        federation.round()
    chosen = method.choices(federation.server)["lam"]
    assert good[GRID.tolist().index(chosen)]
    assert chosen == GRID[wanted] or not good[wanted]


@pytest.mark.parametrize("wanted", [14, 15])
def test_a_closed_start_is_not_chosen_by_one_client_either(dealt, wanted):
    features, labels = samples()
    federation = dealt(Ridge(), Head(), features, labels, [torch.arange(9), torch.arange(9, N)])
    start = ClosedStart([start_message(federation.client(k)) for k in range(2)])
    answers = []
    for k in range(2):
        client = federation.client(k)
        client.message = start.plan
        answers.append(start_message(client))
    honest = start.solve(answers)[1]["lam"]
    answers[0]["errors"] = torch.full_like(answers[0]["errors"], 1e12)
    answers[0]["errors"][wanted] = 0.0
    with pytest.warns(UserWarning, match="far from the best"):
        chosen = start.solve(answers)[1]["lam"]
    errors = generalised_by_hand(features, labels)
    good = (GRID[errors <= 1.1 * errors.min()]).tolist()
    assert {honest, chosen} <= set(good)


def test_ridge_and_lda_are_the_pooled_solutions(dealt):
    features, labels = samples()
    z = standardised(features)
    for method, by_hand in (
        (Ridge(lam=7.0, temperature=2.0), ridge_by_hand(z, labels, 7.0)),
        (LDA(lam=7.0, temperature=2.0), lda_by_hand(z, labels, 7.0, labels.tolist())),
    ):
        federation = dealt(method, Head(), features, labels, [torch.arange(30), torch.arange(30, N)])
        federation.round()
        weight, bias = head(federation)
        assert torch.allclose(features @ weight.T + bias, 2 * by_hand(z), atol=1e-9)


def test_balanced_classes_count_alike(dealt):
    """As if every class had been repeated until all are of one size."""
    features, labels = samples()
    keep = torch.cat([(labels == c).nonzero().flatten()[:k] for c, k in enumerate((4, 8, 16))])
    features, labels = features[keep], labels[keep]
    often = torch.cat([(labels == c).nonzero().flatten().repeat(16 // k) for c, k in enumerate((4, 8, 16))])
    few = dealt(
        Ridge(lam=3.0, temperature=1.0, balanced=True), Head(), features, labels, [torch.arange(len(labels))]
    )
    few.round()
    many = dealt(
        Ridge(lam=3.0 * 48 / 28, temperature=1.0), Head(), features[often], labels[often], [torch.arange(48)]
    )
    many.round()
    assert torch.allclose(few.server.weights, many.server.weights, atol=1e-10)


def test_sums_accumulate_as_clients_appear_and_nobody_counts_twice(dealt):
    features, labels = samples()
    parts = [torch.arange(30), torch.arange(30, 50), torch.arange(50, N)]
    whole, later = (dealt(Ridge(lam=5.0), Head(), features, labels, parts) for _ in range(2))
    whole.round()
    later.round(0, 1)
    assert (whole.server.weights - later.server.weights).abs().max() > 1e-3
    later.round(1, 2)
    assert [sorted(message) for message in later.prepared] == [[], ["moments", "targets"]]
    difference = head(whole)[0] / whole.method.choices(whole.server)["temperature"]
    difference -= head(later)[0] / later.method.choices(later.server)["temperature"]
    assert difference.abs().max() < 1e-12
    before = later.server.weights.clone()
    later.round(0, 1)
    assert torch.equal(before, later.server.weights)


def test_sums_travel_as_triangles_and_where_asked_in_half_the_bytes(dealt):
    features, labels = samples()
    for precision, bytes_ in (("float64", 8), ("float32", 4)):
        federation = dealt(Ridge(precision=precision), Head(), features, labels, [torch.arange(N)])
        federation.round()
        moments = federation.prepared[0]["moments"]
        assert moments.numel() == (D + 1) * (D + 2) // 2
        assert moments.element_size() == bytes_


def test_newton_goes_down_to_pooled_softmax_regression(dealt):
    features, labels = samples()
    federation = dealt(Newton(lam=0.1), Head(), features, labels, [torch.arange(20), torch.arange(20, N)])
    z, losses = standardised(features), []
    for _ in range(150):
        federation.round()
        weight, bias = head(federation)
        W = (weight * (features.std(0, correction=0) + 1e-3)).detach()
        inner = features @ weight.T + bias
        losses.append(F.cross_entropy(inner, labels).item() + 0.05 * W.square().sum().item())
    assert all(after <= before + 1e-12 for before, after in pairwise(losses))
    W = torch.zeros(C, D, dtype=torch.float64, requires_grad=True)
    b = torch.zeros(C, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([W, b], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-15)

    def pooled():
        solver.zero_grad()
        loss = F.cross_entropy(z @ W.T + b, labels) + 0.05 * W.square().sum()
        loss.backward()
        return loss

    solver.step(pooled)
    assert losses[-1] == pytest.approx(pooled().item(), abs=1e-8)


def test_regmean_is_its_formula_and_absent_clients_hold_the_incoming_head(dealt):
    features, labels = samples()
    parts = [torch.arange(30), torch.arange(30, 50), torch.arange(50, N)]
    federation = dealt(RegMean(), Head(), features, labels, parts)
    federation.round()
    start = torch.cat([head(federation)[0], head(federation)[1][:, None]], 1).T.clone()
    federation.round(0, 2)
    A, right = 0, 0
    for k, part in enumerate(parts):
        X = F.pad(features[part], (0, 1), value=1.0)
        W = start.clone()
        if k != 1:
            update = federation.replies.updates[0 if k == 0 else 1]
            W += torch.cat([update[: C * D].view(C, D), update[C * D :, None]], 1).T
        A, right = A + X.T @ X, right + X.T @ X @ W
    found = torch.cat([head(federation)[0], head(federation)[1][:, None]], 1).T
    assert torch.allclose(found, torch.linalg.solve(A, right), atol=1e-4)
    assert [sorted(message) for message in federation.prepared] == [[], []]


@dataclass(frozen=True)
class Frozen:
    """Settings of a small network with a frozen trunk."""

    settings: dict = field(
        default_factory=lambda: {
            "dataset": "digits",
            "clients": 3,
            "rounds": 1,
            "workers": 0,
            "train": "head",
            "image_size": 8,
        }
    )

    def experiment(self, **changes):
        return make_experiment(self.settings | changes)


def test_random_units_are_drawn_from_the_seed_and_saved_as_one_number(tmp_path):
    method = {"name": "ridge", "features": "random:200"}
    summary = run(Frozen().experiment(method=method), tmp_path / "run")
    again = run(Frozen().experiment(method=method), tmp_path / "again")
    other = run(Frozen().experiment(method=method, seed=1, data_seed=0), tmp_path / "other")
    assert summary["test"]["final"]["accuracy"] == again["test"]["final"]["accuracy"]
    assert summary["test"]["final"]["accuracy"] != other["test"]["final"]["accuracy"]
    assert (tmp_path / "run/model.safetensors").read_bytes() == (
        tmp_path / "again/model.safetensors"
    ).read_bytes()
    assert summary["test"]["final"]["accuracy"] > 0.8
    assert load_model(tmp_path / "run").facts.features == "random:200"
    line = json.loads((tmp_path / "run/rounds.jsonl").read_text().splitlines()[0])
    assert set(line["choices"]) == {"lam", "temperature"}
    sums = 8 * (201 * 202 // 2 + 201 * 10)
    assert line["bytes_up"] > 3 * sums
    assert line["bytes_up"] < 3 * (sums + 2**16)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": "all"}, "method 'ridge' solves for the head on a frozen trunk: set train to 'head'"),
        ({"train": "last:2"}, "Ridge needs a frozen trunk and a linear head"),
        ({"head": "mlp:8"}, "Ridge needs a frozen trunk and a linear head"),
        ({"augment": "retina"}, "augment = 'retina' cannot apply"),
        ({"method": {"name": "ridge", "features": "random:x"}}, "features are 'linear' or 'random:N'"),
        ({"method": {"name": "lda", "lam": -1}}, "lam is a positive number, or 0 to have it chosen"),
        ({"method": {"name": "newton", "lam": 0}}, "lam is a positive number"),
    ],
)
def test_what_has_no_closed_form_is_refused_in_a_sentence(tmp_path, changes, sentence):
    with pytest.raises(FedLDError, match=sentence.replace("(", r"\(")):
        run(Frozen().experiment(**{"method": "ridge", "model": "cnn"} | changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_fewer_images_than_classes_are_refused_and_singular_sums_get_the_smallest_safe_lambda(dealt):
    features, labels = samples()
    with pytest.raises(FedLDError, match=r"3 classes needs at least as many training images.* have 2"):
        dealt(Ridge(), Head(), features, labels, [torch.arange(2)]).round()
    features[:, 1] = features[:, 0]
    federation = dealt(Ridge(lam=1e-300), Head(), features, labels, [torch.arange(N)])
    with pytest.warns(UserWarning, match="Ridge: lam = 1e-300 leaves the sums singular; .* is used"):
        federation.round()
    assert federation.server.weights.isfinite().all()
    assert federation.method.choices(federation.server)["lam"] > 1e-12


def test_a_class_that_no_client_has_changes_nothing_of_the_others(dealt):
    features, labels = samples()
    labels = labels.clamp(max=1)
    for method in (Ridge(), LDA(), Ridge(balanced=True)):
        federation = dealt(method, Head(), features, labels, [torch.arange(50), torch.arange(50, N)])
        federation.round()
        weight, bias = head(federation)
        assert (features @ weight.T + bias).argmax(1).max() < 2


def test_options_are_checked_where_a_method_is_made():
    with pytest.raises(FedLDError, match="at most 16384"):
        replace(Ridge(), features="random:99999")
