"""The drop-in parts: a Flower strategy with our rules, and the loss."""

import importlib.util
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from fedld.aggregation import RULES, aggregate
from fedld.errors import FedLDError
from fedld.flower import MarginControl, PrincipalStrategy

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower" / "app" / "digits.py"


class Grid:
    """As much of Flower's grid as a strategy needs; `answer(message)` is what a node replies."""

    def __init__(self, answer, nodes=3):
        self.answer, self.nodes = answer, nodes

    def get_node_ids(self):
        return list(range(1, self.nodes + 1))

    def send_and_receive(self, messages, *, timeout=None):
        return [self.answer(message) for message in messages]


@pytest.fixture(autouse=True)
def task(monkeypatch):
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def start():
    return {
        "layer.weight": torch.zeros(2, 3),
        "norm.running_mean": torch.zeros(3),
        "norm.num_batches_tracked": torch.tensor(0),
    }


def reply(message, spoil=None):
    """Node k moves its weights by a vector of its own."""
    node = message.metadata.dst_node_id
    state = {
        "layer.weight": torch.arange(6.0).view(2, 3).roll(node) * node,
        "norm.running_mean": torch.full((3,), float(node)),
        "norm.num_batches_tracked": torch.tensor(10 * node),
    }
    if spoil == node:
        state["layer.weight"][0, 0] = torch.nan
    parts = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": 10 * node})}
    return Message(RecordDict(parts | {"who": ConfigRecord({"site": f"s{node}"})}), reply_to=message)


def train(strategy, spoil=None, nodes=3):
    grid = Grid(lambda message: reply(message, spoil), nodes)
    options = {"min_available_nodes": nodes, "fraction_evaluate": 0.0}
    made = strategy(options)
    result = made.start(grid, ArrayRecord(start()), num_rounds=1)
    return made, result.arrays.to_torch_state_dict()


def test_the_mean_rule_is_flowers_average():
    _, ours = train(lambda options: PrincipalStrategy("mean", **options))
    _, theirs = train(lambda options: FedAvg(**options))
    for key in ("layer.weight", "norm.running_mean"):
        torch.testing.assert_close(ours[key], theirs[key], check_dtype=False)
    assert ours["norm.num_batches_tracked"] == torch.tensor(30)  # Flower's mean gives 23.33
    assert ours["norm.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"measured"}))  # which asks clients
def test_every_rule(rule):
    made, after = train(lambda options: PrincipalStrategy(rule, **options), nodes=5)
    updates = torch.stack([torch.arange(6.0).view(2, 3).roll(k).flatten() * k for k in range(1, 6)])
    order = [int(name[1]) - 1 for name in made.reports[0].clients]
    expected = aggregate(updates[order], [10.0 * (k + 1) for k in order], rule).update
    torch.testing.assert_close(after["layer.weight"].flatten(), expected)


def test_clients_are_recorded_by_name_and_bad_ones_left_out():
    made, after = train(lambda options: PrincipalStrategy(**options), spoil=3)
    lines = {line["client"]: line for line in made.clients}
    assert lines["s3"]["excluded"] == "its update holds NaN"
    assert lines["s2"]["size"] == 20
    assert lines["s2"]["update_norm"] > 0
    torch.testing.assert_close(after["norm.running_mean"], torch.full((3,), 5 / 3))


def test_a_lone_survivor_is_not_the_average():
    strategy = PrincipalStrategy(min_train_nodes=2)
    strategy._before = start()
    assert strategy.aggregate_train(1, []) == (None, None)
    messages = strategy.configure_train(1, ArrayRecord(start()), ConfigRecord(), Grid(reply, 2))
    assert strategy.aggregate_train(1, [reply(next(iter(messages)))]) == (None, None)


def test_bad_names_are_answered():
    with pytest.raises(FedLDError, match="did you mean 'marg-log'"):
        MarginControl("marglog")
    with pytest.raises(FedLDError, match="did you mean 'principal'"):
        train(lambda options: PrincipalStrategy("principle", **options))


def test_the_example_runs(capsys):
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    nodes = {k: Context(0, k, {"part": k - 1}, RecordDict(), {}) for k in (1, 2, 3)}
    grid = Grid(lambda message: example.client(message, nodes[message.metadata.dst_node_id]))
    example.server(grid, Context(0, 0, {}, RecordDict(), {"rounds": 2}))
    lines = [line for line in capsys.readouterr().out.splitlines() if "cosine_to_aggregate" in line]
    assert len(lines) == 6
