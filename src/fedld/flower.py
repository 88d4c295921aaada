"""For your own Flower apps: the two parts of the paper as a strategy and as a loss.

    strategy = PrincipalStrategy()                        # instead of FedAvg()
    criterion = MarginControl()                           # instead of torch.nn.CrossEntropyLoss()

For whole methods, states, quorum and records use `fedld run --engine flower` instead (docs/deployment.md).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from fedld.aggregation import Report, aggregate, statistic_problem
from fedld.errors import FedLDError
from fedld.layout import Tree
from fedld.local import OBJECTIVES
from fedld.registry import configure

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Ends of the names of BatchNorm's statistics: averaged, never treated as gradients."""


class MarginControl(nn.Module):
    """Cross-entropy with margin control (Eq. 3): `criterion(logits, labels)` in anybody's training loop.

    >>> MarginControl("marg-log", lam=0.1)(torch.zeros(1, 2), torch.tensor([0])).item() > 0.69
    True
    """

    def __init__(self, name: str = "marg-log", **options: Any) -> None:
        super().__init__()
        self.objective = configure(OBJECTIVES.find(name), options, f"objective {name}")

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean loss of a batch."""
        return self.objective(logits, labels)


class PrincipalStrategy(FedAvg):
    """FedAvg with any rule of `fedld.aggregation`, by default the paper's (Eq. 4-7).

    Clients reply as to FedAvg: their arrays, and a metric `num-examples`. A round with fewer sound replies
    than `min_train_nodes` is not aggregated. `reports` keeps what the rule did, `clients` one line a client
    and round; a client that puts `site` into a ConfigRecord of its reply is listed under that name.
    """

    def __init__(
        self,
        rule: str = "principal",
        *,
        granularity: str = "model",
        rule_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.rule, self.granularity, self.rule_options = rule, granularity, rule_options or {}
        self.reports: list[Report] = []
        self.clients: list[dict[str, Any]] = []
        self._before: Tree = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure as FedAvg, and remember the global arrays: updates are differences from them."""
        self._before = _tensors(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Apply the rule to the updates of the parameters; statistics of BatchNorm are averaged."""
        sound, _ = self._check_and_log_replies(replies, is_train=True)
        contents = [message.content for message in sound]
        names = [_name(message) for message in sound]
        if len(sound) < max(1, self.min_train_nodes):
            return None, None
        sizes = [self._size(content) for content in contents]
        states = [_tensors(next(iter(content.array_records.values()))) for content in contents]
        after, report = self._combine(states, sizes, names)
        self.reports.append(report)
        self.clients += _lines(server_round, report, dict(zip(names, sizes, strict=True)))
        arrays = ArrayRecord({key: Array(after[key].numpy()) for key in states[0]})
        return arrays, self.train_metrics_aggr_fn(contents, self.weighted_by_key)

    def _size(self, content: RecordDict) -> float:
        return float(next(iter(content.metric_records.values()))[self.weighted_by_key])  # type: ignore[arg-type]

    def _combine(self, states: list[Tree], sizes: list[float], names: list[str]) -> tuple[Tree, Report]:
        """Move parameters by the aggregate, and average the rest over the same clients."""
        if states[0].keys() != self._before.keys():
            raise FedLDError("the clients' arrays have other names than those they were sent")
        parameters = [key for key, value in self._before.items() if _is_parameter(key, value)]
        updates = [{key: state[key] - self._before[key] for key in parameters} for state in states]
        options = {"granularity": self.granularity, "min_clients": self.min_train_nodes, **self.rule_options}
        combined = aggregate(
            updates, sizes, self.rule, clients=names, refused=_refused(states, names), **options
        )
        after = {key: self._before[key] + combined.update[key] for key in parameters}
        kept = [states[names.index(name)] for name in combined.report.clients]
        for key in self._before.keys() - after.keys():
            values = torch.stack([state[key] for state in kept])
            after[key] = combined.location(values) if values.is_floating_point() else values.amax(0)
        return after, combined.report


def _tensors(record: ArrayRecord) -> Tree:
    return {key: torch.from_numpy(np.array(array.numpy())) for key, array in record.items()}


def _name(message: Message) -> str:
    for record in message.content.config_records.values():
        if "site" in record:
            return str(record["site"])
    return str(message.metadata.src_node_id)


def _is_parameter(key: str, value: Tensor) -> bool:
    return value.is_floating_point() and not key.endswith(STATISTICS)


def _refused(states: list[Tree], names: list[str]) -> dict[str, str]:
    """List sites with unusable BatchNorm statistics, and the reasons."""
    refused = {}
    for name, state in zip(names, states, strict=True):
        for key in state:
            if key.endswith(STATISTICS) and (problem := statistic_problem(key, state[key])):
                refused[name] = problem
    return refused


def _lines(round_: int, report: Report, sizes: dict[str, float]) -> list[dict[str, Any]]:
    """Write one line per client: its size, the length of its update, and its angle to the aggregate."""
    values = zip(report.clients, report.norms, report.cosines, strict=True)
    lines: list[dict[str, Any]] = [
        {
            "round": round_,
            "client": name,
            "size": sizes[name],
            "update_norm": norm,
            "cosine_to_aggregate": cos,
        }
        for name, norm, cos in values
    ]
    return lines + [
        {"round": round_, "client": name, "size": sizes[name], "excluded": why}
        for name, why in report.rejected.items()
    ]
