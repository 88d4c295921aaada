"""Diagnoses of small federations that are really trained (softmax regression) and recorded as a run is."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fedld.aggregation import aggregate
from fedld.analysis.diagnosis.evidence import THRESHOLDS, Evidence
from fedld.analysis.diagnosis.gather import CHECKS, diagnose
from fedld.analysis.sites import Participation

ROOT = Path(__file__).parents[2]
SITES = [f"site{i}" for i in range(6)]


def loss(w, x, y):
    z = x @ w
    top = z.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(z - top).sum(1)) + top[:, 0] - z[np.arange(len(y)), y]))


def train(w, x, y, steps, lr=0.3):
    w, onehot = w.copy(), np.eye(w.shape[1])[y]
    for _ in range(steps):
        e = np.exp(x @ w - (x @ w).max(1, keepdims=True))
        w -= lr * x.T @ (e / e.sum(1, keepdims=True) - onehot) / len(y)
    return w


def federation(kind, n=150, d=8, classes=3, seed=0):
    """iid clients; `opposed`: in half of them every label is moved on by one; `label`: one class each."""
    rng = np.random.default_rng(seed)
    truth = 2 * rng.normal(size=(d, classes))
    clients = []
    for i in range(6):
        x = rng.normal(size=(4 * n, d))
        y = np.argmax(x @ truth + rng.gumbel(size=(4 * n, classes)), axis=1)
        keep = y == i % classes if kind == "label" else np.ones(len(y), bool)
        x, y = x[keep][:n], y[keep][:n]
        if kind == "opposed" and i >= 3:
            y = (y + 1) % classes
        clients.append((x, y))
    return clients


def client_line(t, name, **fields):
    return {"round": t, "index": SITES.index(name), "client": name, "size": 60, **fields}


def evidence(kind, rule="mean", rounds=5, steps=5, **options):
    clients = federation(kind, **options)
    sizes = [len(y) for _, y in clients]
    w = np.zeros((8, 3))
    reports, crosses, lines = [], [], []
    for t in range(1, rounds + 1):
        local = [train(w, x, y, steps) for x, y in clients]
        result = aggregate(np.array([(v - w).ravel() for v in local]), sizes, rule, clients=SITES)
        w = w + np.asarray(result.update).reshape(w.shape)
        reports.append({"round": t, **result.report.to_json()})
        lines += [
            client_line(t, name, cosine_to_aggregate=c)
            for name, c in zip(SITES, result.report.cosines, strict=True)
        ]
        crosses.append(
            {
                "round": t,
                "sampled": list(range(6)),
                "sizes": sizes,
                "cross_loss": [[loss(v, x, y) for v in local] for x, y in clients],
                "global_losses": [loss(w, x, y) for x, y in clients],
                "standard_errors": None,
            }
        )
    return Evidence(
        clients=SITES,
        label_counts=[np.bincount(y, minlength=3) for _, y in clients],
        reports=reports,
        client_rounds=lines,
        cross_losses=crosses,
        rule=rule,
    )


def warnings(evidence):
    return {f.check: f for f in diagnose(evidence) if f.level == "warning"}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rule", ["mean", "principal"])
def test_quiet_on_an_iid_federation(seed, rule):
    findings = diagnose(evidence("iid", rule, seed=seed))
    assert [f.check for f in findings] == ["dominant_term"]
    assert findings[0].level == "info"
    assert "local is largest" in findings[0].sentence


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rule", ["mean", "principal"])
def test_names_the_conflict_of_two_opposed_groups(seed, rule):
    found = warnings(evidence("opposed", rule, seed=seed))
    finding = found["opposed_groups"]
    groups = {frozenset(finding.numbers[side]) for side in ("majority", "minority")}
    assert groups == {frozenset(SITES[:3]), frozenset(SITES[3:])}
    assert "two opposed groups" in finding.sentence
    assert finding.thresholds == {
        name: THRESHOLDS[name].value for name in ("opposed_cosine", "agreeing_cosine", "minority_weight")
    }
    assert "label_skew" not in found or found["label_skew"].numbers["skew"] >= 0.2


def test_sees_the_principal_rule_fight_the_split():
    """Votes of 3 against 3 cancel on the first axis, so that the published rule's step shrinks or turns."""
    found = warnings(evidence("opposed", "principal"))
    assert "step" in found
    assert "principal" in found["step"].sentence
    assert "step" not in warnings(evidence("opposed", "mean"))


def test_label_skew_shows_in_data_and_in_the_losses():
    found = warnings(evidence("label", steps=20))
    assert {"label_skew", "single_class", "shift_costs"} <= set(found)
    assert found["shift_costs"].numbers["shift"] > 0.1
    assert set(found["single_class"].numbers["clients"]) == set(SITES)


def test_before_training_only_data_are_judged():
    data = Evidence(clients=["a", "b", "c"], label_counts=[[100, 0], [0, 80], [0, 900]])
    assert set(warnings(data)) == {"label_skew", "single_class", "size_imbalance"}
    assert "labels" not in data.not_measured
    assert {"updates", "loss decomposition", "training curve", "features"} <= set(data.not_measured)
    assert diagnose(Evidence()) == []


def test_feature_shift_names_the_site():
    means, spreads = np.zeros((3, 4)), np.ones(3)
    means[2, 0] = 3.0
    counts = [[50, 50]] * 3
    found = warnings(
        Evidence(clients=["a", "b", "c"], label_counts=counts, feature_means=means, feature_spreads=spreads)
    )
    assert set(found) == {"feature_shift"}
    assert found["feature_shift"].numbers["client"] == "c"


def cross_line(round_, cross, losses, **extra):
    n = len(losses)
    line = {"round": round_, "sampled": list(range(n)), "sizes": [10] * n}
    return {**line, "cross_loss": cross, "global_losses": losses, **extra}


def test_aggregation_names_who_is_hurt_and_who_gains():
    line = cross_line(3, [[0.5, 0.5], [0.5, 0.5]], [0.3, 1.2])
    found = warnings(Evidence(clients=["a", "b"], cross_losses=[line]))
    assert set(found) == {"aggregation_costs", "hurt_clients"}
    assert found["hurt_clients"].numbers["hurt"] == ["b"]
    assert found["hurt_clients"].numbers["gain"] == ["a"]
    assert found["aggregation_costs"].numbers["client"] == "b"


def test_noise_of_an_estimate_is_no_finding():
    cross, losses = [[0.2, 0.9], [0.9, 0.2]], [0.5, 0.5]
    assert "shift_costs" in warnings(Evidence(cross_losses=[cross_line(1, cross, losses)]))
    noisy = cross_line(1, cross, losses, standard_errors=[[0.3, 0.3], [0.3, 0.3]])
    assert "shift_costs" not in warnings(Evidence(cross_losses=[noisy]))


def test_over_fitting_that_averages_out_costs_nothing():
    """Small iid clients that memorise their samples: a large shift, yet a good aggregate."""
    line = cross_line(1, [[0.1, 0.5], [0.5, 0.1]], [0.12, 0.12])
    assert warnings(Evidence(cross_losses=[line])) == {}
    line = cross_line(1, [[0.1, 0.9], [0.9, 0.1]], [0.4, 0.4])
    found = warnings(Evidence(cross_losses=[line]))
    assert set(found) == {"shift_costs"}
    assert found["shift_costs"].numbers["left"] == pytest.approx(0.3)


def test_movement_of_the_terms():
    lines = [
        cross_line(9, [[0.1, 0.9], [0.9, 0.1]], [0.5, 0.5]),
        cross_line(1, [[0.9, 1.0], [1.0, 0.9]], [0.9, 0.9]),
    ]
    (account,) = (f for f in diagnose(Evidence(cross_losses=lines)) if f.check == "dominant_term")
    assert account.numbers["moves"] == {"local": "falls", "shift": "rises", "aggregation": "rises"}
    assert "since round 1" in account.sentence


def test_diverged_model_is_named():
    lines = [
        cross_line(1, [[0.5, 0.6], [0.6, 0.5]], [0.5, 0.5]),
        cross_line(2, [[0.5, None], [0.6, None]], [0.5, 0.5]),
    ]
    found = warnings(Evidence(clients=["a", "b"], cross_losses=lines))
    assert found["diverged"].numbers == {"rounds": [2], "clients": ["b"]}


def test_training_records():
    test = {"balanced_accuracy": 0.5}
    rounds = [{"round": t, "test": test, "buffer_disagreement": 0.8} for t in range(3)]
    lines = [
        {"round": 0, "index": 0, "client": "a", "size": 60, "cosine_to_aggregate": -0.6},
        {"round": 0, "index": 1, "client": "b", "size": 20},
    ]
    found = warnings(Evidence(label_counts=[[30, 30], [30, 30]], rounds=rounds, client_rounds=lines))
    assert set(found) == {"nothing_learned", "batchnorm", "overruled"}
    assert "a " in found["overruled"].sentence
    healthy = [{"round": 0, "test": {"balanced_accuracy": 0.8}, "buffer_disagreement": 0.01}]
    assert diagnose(Evidence(label_counts=[[30, 30], [30, 30]], rounds=healthy)) == []


def test_absence_is_told_with_round_reason_and_share():
    gone = {"excluded": "no answer in 30 s"}
    lines = [
        client_line(t, name, **(gone if name == "site2" and t >= 4 else {}))
        for t in range(1, 11)
        for name in SITES[:3]
    ]
    found = warnings(Evidence(client_rounds=lines))
    assert found["absent"].sentence == (
        "site2 is missing from round 4 on (7 of 10 rounds): no answer in 30 s; it holds 33% of the data."
    )
    once = [client_line(t, "site0", **(gone if t == 2 else {})) for t in range(1, 4)]
    assert "in round 2 (1 of 3 rounds)" in warnings(Evidence(client_rounds=once))["absent"].sentence


def test_a_lasting_absence_begins_after_the_last_round_with_the_client():
    gone = {"excluded": "fire"}
    lines = [client_line(t, "site0", **(gone if t in (1, 4, 5) else {})) for t in range(1, 6)]
    (one,) = Participation(lines).absences
    assert (one.since, one.until_end, one.rounds) == (4, True, (1, 4, 5))


def test_a_class_that_is_never_predicted_is_named_with_its_sites():
    found = {
        "classes": ["normal", "covid"],
        "confusion": [[50, 0, 0], [30, 0, 2]],
        "calibration": {"confidence": [], "accuracy": [], "count": [], "ece": None},
    }
    counts = [[40, 0], [30, 20], [25, 5]]
    (finding,) = (
        f
        for f in diagnose(Evidence(clients=["a", "b", "c"], label_counts=counts, predictions=found))
        if f.check == "never_predicted"
    )
    assert finding.sentence == (
        "Class covid is never predicted: none of 32 test images; the sites that hold it are b (20), c (5), "
        "21% of all training images."
    )
    found["confusion"][0][1] = 1  # predicted once, though wrongly
    assert "never_predicted" not in warnings(Evidence(predictions=found))


def report(updates, **fields):
    weights = [1.0] * len(updates)
    made = aggregate(np.array(updates), weights, "mean", clients=SITES[: len(updates)]).report
    return {"round": 1, "sampled": list(range(len(updates))), **made.to_json(), **fields}


def test_long_and_turned_updates_are_named():
    rng = np.random.default_rng(0)
    updates = 1 + 0.1 * rng.normal(size=(6, 50))
    assert "outliers" not in warnings(Evidence(reports=[report(updates)]))
    poisoned, turned = updates.copy(), updates.copy()
    poisoned[2] *= 100
    turned[4] *= -1
    assert "site2 is" in warnings(Evidence(reports=[report(poisoned)]))["outliers"].sentence
    assert list(warnings(Evidence(reports=[report(turned)]))["outliers"].numbers) == ["site4, direction"]
    once = [report(poisoned), *(report(updates) for _ in range(4))]
    assert "outliers" not in warnings(Evidence(reports=once))


@pytest.mark.parametrize(
    ("length", "gain", "word"), [(2, 0.1, "too short"), (0.5, 0.1, "too long"), (1, 0, "little")]
)
def test_advice_follows_what_the_clients_measured(length, gain, word):
    trial = {"rules": ["mean", "mean"], "lengths": [1, length], "chosen": int(length != 1), "gain": gain}
    trial |= {"losses": [0.5, 0.4], "errors": [0, 0], "votes": {}, "left_out": {}, "fallback": None}
    lines = [report(np.eye(4), trial=trial)]
    (found,) = (f for f in diagnose(Evidence(reports=lines)) if f.check == "measured_steps")
    assert word in found.advice
    assert f"In {int(length != 1)} of 1 rounds" in found.sentence
    mute = trial | {"left_out": {"site1": "its measurement is incomplete"}}
    assert (
        "site1 (its measurement"
        in warnings(Evidence(reports=[report(np.eye(4), trial=mute)]))["silent_voters"].sentence
    )


def test_conflict_does_not_contradict_itself():
    opposed = np.array([[1.0, 0, 0.4], [-1.0, 0, 0.4], [0, 1.0, 0.4], [0, -1.0, 0.4]])
    apart = warnings(Evidence(reports=[report(opposed)]))["conflict"].sentence
    assert apart.startswith("Updates pull apart: 33% of the pairs")
    assert "keeps its length" in apart
    cancelling = np.array([[1.0, 0], [-1.0, 0.1], [1.0, 0.1], [-1.0, 0]])
    assert warnings(Evidence(reports=[report(cancelling)]))["conflict"].sentence.startswith("Updates cancel")


def test_unstable_principal_rule():
    base = evidence("iid", "principal")
    shaky = [{**report, "sign_margin": 1e-9} for report in base.reports]
    assert "stability" in warnings(Evidence(reports=shaky, rule="principal"))
    assert "stability" not in warnings(Evidence(reports=shaky, rule="mean"))


def test_findings_are_plain_data():
    for finding in diagnose(evidence("opposed", "principal")):
        assert json.loads(json.dumps(finding.to_json(), allow_nan=False))["check"] == finding.check
        assert finding.sentence.endswith(".")
        assert finding.advice.endswith(".")


def test_documented_thresholds_are_the_ones_in_use():
    text = (ROOT / "docs" / "diagnosis.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (-?[\d.]+) \|", text, flags=re.MULTILINE))
    assert {name: float(value) for name, value in rows.items()} == {n: t.value for n, t in THRESHOLDS.items()}
    for name, threshold in THRESHOLDS.items():
        assert f"| {threshold.meaning} |" in text, name
    folder = ROOT / "src" / "fedld" / "analysis" / "diagnosis"
    code = "".join(p.read_text() for p in folder.glob("*.py"))
    assert [name for name in THRESHOLDS if code.count(f'"{name}"') < 2] == []  # its definition and a use


def test_every_rule_is_asked():
    from fedld.analysis.diagnosis import data_checks, training_checks

    modules = (data_checks, training_checks)
    written = {
        f
        for m in modules
        for f in vars(m).values()
        if getattr(f, "__module__", "") == m.__name__ and f.__name__[0] != "_"
    }
    assert written == set(CHECKS)
