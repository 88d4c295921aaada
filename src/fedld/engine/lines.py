"""The records of a training round: one line for the round, one for every client."""

from typing import Any

import torch

from fedld.aggregation import Aggregate
from fedld.engine.cross import Member
from fedld.engine.local import Failure
from fedld.engine.records import Line
from fedld.engine.work import Setup, Trained
from fedld.layout import Tree
from fedld.methods import Replies, Server


def round_line(round_: int, replies: Replies, members: list[Member], combined: Aggregate) -> Line:
    """What the round did to the model."""
    losses = [member.trained.metrics["train_loss"] for member in members]
    return {
        "round": round_,
        "clients": len(members),
        "train_loss": float(replies.p @ torch.tensor(losses, dtype=torch.float64)),
        "update_norm": float(combined.update.double().norm()),
        "norm_ratio": combined.report.norm_ratio,
        "cosine_to_average": combined.report.cosine,
        "buffer_disagreement": buffer_disagreement(replies),
    }


def client_lines(
    setup: Setup, round_: int, sampled: list[int], results: list[Any], combined: Aggregate
) -> list[Line]:
    """One line a client: also for those that were left out, with the reason."""
    report, counts, lines = combined.report, setup.federation.label_counts(), []
    place = {name: k for k, name in enumerate(report.clients)}
    for i, result in zip(sampled, results, strict=True):
        name = setup.federation.clients[i].name
        line: Line = {"round": round_, "client": name, "index": i, "size": setup.sizes[i]}
        line["label_counts"] = counts[i].tolist()
        if isinstance(result, Trained):
            for when, sums in (("before", result.before), ("after", result.after)):
                if sums is not None:
                    line |= {f"loss_{when}": sums.mean, f"accuracy_{when}": sums.accuracy}
            line |= result.metrics | {"seconds": result.seconds}
        if name in place:
            k = place[name]
            line |= {"update_norm": report.norms[k], "cosine_to_aggregate": report.cosines[k]}
        else:
            line["excluded"] = report.rejected.get(name) or exclusion(result)
        lines.append(line)
    return lines


def exclusion(result: Any) -> str:
    """Why a client's reply is not used."""
    return result.error if isinstance(result, Failure) else "the update is not finite"


def traffic(setup: Setup, server: Server, replies: Replies, sampled: list[int]) -> Line:
    """Bytes to the server and from it: shared weights and messages, counted, not estimated."""
    layout, method = setup.layout, setup.method
    model = 4 * (layout.shared + layout.shared_end - layout.trainable)
    common = _bytes(method.broadcast(server))
    own = [method.personal(server, i) for i in sampled]
    return {
        "bytes_up": model * len(replies.clients) + sum(_bytes(message) for message in replies.messages),
        "bytes_down": sum((0 if "weights" in m else model) + common + _bytes(m) for m in own),
    }


def buffer_disagreement(replies: Replies) -> float | None:
    """How far clients' BatchNorm means lie apart, in units of the running standard deviation."""
    places = {e.name: slice(e.start, e.start + e.size) for e in replies.layout.entries if not e.private}
    means = [name for name in places if name.endswith("running_mean")]
    if not means or len(replies.clients) < 2:
        return None
    spreads = []
    for name in means:
        variance = replies.updates[:, places[name.replace("running_mean", "running_var")]]
        deviation = variance.mean(0).sqrt().clamp_min(1e-6)
        spreads.append((replies.updates[:, places[name]].std(0) / deviation).mean())
    return float(torch.stack(spreads).mean())


def _bytes(tree: Tree) -> int:
    return sum(t.numel() * t.element_size() for t in tree.values())
