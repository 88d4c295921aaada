"""BatchNorm statistics on the server: whose are refused, and what a robust rule makes of the others."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedld.aggregation import make_rule
from fedld.engine.exchange import refusals
from fedld.layout import Layout
from fedld.methods import METHODS, Replies


def replies(spoil=lambda views: None, clients=5):
    """Updates of ones and sane statistics; the last client's are spoiled."""
    layout = Layout.of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    updates = torch.ones(clients, layout.size)
    for i, row in enumerate(updates):
        layout.views(row)["1.running_mean"].fill_(0.1 * i)
    spoil(layout.views(updates[-1]))
    return Replies(
        clients=tuple("abcde"),
        rows=list(range(clients)),
        sizes=(1,) * clients,
        messages=[{}] * clients,
        layout=layout,
        updates=updates,
        steps=(1.0,) * clients,
    )


def after(rule, found, **options):
    """The server's step: screening, then the method on the clients that are left."""
    method, layout = replace(METHODS["fedavg"], rule=make_rule(rule), **options), found.layout
    rows = dict(zip(found.clients, found.updates, strict=True))
    messages = dict(zip(found.clients, found.messages, strict=True))
    refused = refusals(method, layout, rows, messages)
    keep = [k for k, name in enumerate(found.clients) if name not in refused]
    accepted = replace(
        found,
        clients=tuple(found.clients[k] for k in keep),
        rows=keep,
        sizes=tuple(found.sizes[k] for k in keep),
        messages=[found.messages[k] for k in keep],
        updates=found.updates[keep],
        steps=tuple(found.steps[k] for k in keep),
    )
    server = method.init(torch.zeros(layout.size), layout, found.sizes)
    server, combined = method.server_update(server, accepted)
    return layout.views(server.weights), combined.without(refused).report


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "norm-clip", "geometric-median"])
def test_one_clients_mean_cannot_spoil_those_of_a_robust_rule(rule):
    views, report = after(rule, replies(lambda views: views["1.running_mean"].fill_(1e6)))
    assert views["1.running_mean"].tolist() == pytest.approx([0.2] * 3)
    assert report.rejected == {}


def test_the_plain_rule_averages():
    views, _ = after("mean", replies())
    assert views["1.running_mean"].tolist() == pytest.approx([0.2] * 3)


@pytest.mark.parametrize("rule", ["mean", "principal", "median"])
@pytest.mark.parametrize(
    ("entry", "value", "reason"),
    [
        ("1.running_var", -1.0, "its variance '1.running_var' is negative"),
        ("1.running_var", float("nan"), "its statistic '1.running_var' is not finite"),
        ("1.running_mean", float("inf"), "its statistic '1.running_mean' is not finite"),
    ],
)
def test_impossible_statistics_are_refused_by_name_with_their_update(rule, entry, value, reason):
    def spoil(views):
        views[entry].fill_(value)
        views["0.weight"].fill_(50.0)

    views, report = after(rule, replies(spoil))
    assert report.rejected == {"e": reason}
    assert report.clients == list("abcd")
    assert views["0.weight"].flatten().tolist() == pytest.approx([1.0] * 6)
    assert views["1.running_mean"].tolist() == pytest.approx([0.15] * 3)
    assert views["1.running_var"].tolist() == pytest.approx([1.0] * 3)


@pytest.mark.parametrize(("value", "options"), [(50.0, {"max_update_ratio": 10.0}), (float("nan"), {})])
def test_statistics_of_a_rejected_update_do_not_count(value, options):
    def spoil(views):
        views["0.weight"].fill_(value)

    views, report = after("mean", replies(spoil), **options)
    assert list(report.rejected) == ["e"]
    assert views["1.running_mean"].tolist() == pytest.approx([0.15] * 3)


def test_a_methods_bound_on_weights():
    found = replace(replies(), sizes=(1, 1, 1, 1, 16))
    assert after("mean", found, max_weight=0.3)[1].weights[-1] == pytest.approx(0.3)
