"""The end of a run: the final model, its predictions, and the summary that marks the run as finished."""

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import numpy as np
from torch import Tensor

from fedld import __version__
from fedld.engine.best import seal_best
from fedld.engine.environment import environment
from fedld.engine.exchange import Exchange
from fedld.engine.jobs import Setup, SiteTestJob
from fedld.engine.measure import picture_predictions, predictions
from fedld.engine.network import exported, parameters
from fedld.records.schema import (
    CLIENTS,
    ROUNDS,
    ClientLine,
    FinalMeasures,
    ParticipationRecord,
    RoundLine,
    SiteMeasures,
    Summary,
    Which,
)
from fedld.records.writer import dump, each_line, read_lines, write_atomically


def finish(exchange: Exchange, provenance: Callable[[], dict[str, str]], seconds: float) -> Summary:
    """Write model, predictions and summary; the summary comes last."""
    setup, state, path = exchange.setup, exchange.state, exchange.directory.path
    experiment, logits = setup.experiment, exchange.memory.logits
    sites = at_sites(exchange)  # the last exchange: provenance ends the ledger
    if setup.method.has_global:
        origin = provenance()
        write_atomically(path / "model.safetensors", model_file(setup, state.server.weights, origin))
        seal_best(path, origin)
        write_atomically(path / "predictions.csv", picture_predictions(setup, logits).encode())
        write_atomically(path / "predictions.json", dump(predictions(setup, logits)).encode())
    summary: Summary = {
        **summarise(read_lines(path, ROUNDS)),
        "participation": participation(each_line(path, CLIENTS)),
        "sites": sites,
        "rounds": state.round,
        "seconds": seconds,
        "method": experiment.method["name"],
        "dataset": experiment.dataset,
        "model": experiment.model,
        "parameters": parameters(experiment, setup.federation, setup.layout),
        "trained_parameters": setup.layout.trainable,
        "private_parameters": setup.layout.trainable - setup.layout.shared,
        "clients": len(setup.sizes),
        "max_update_ratio": setup.method.max_update_ratio,
        "seed": experiment.seed,
        "version": __version__,
        "environment": environment(),
        "less_is_better": [name for name, one in setup.metrics.items() if one.better == "less"],
        "sha256": exchange.directory.checksums(),
    }
    exchange.directory.write_summary(summary)
    return summary


def model_file(setup: Setup, weights: Tensor, facts: dict[str, str]) -> bytes:
    """A global model as a file that says how to use it, and some facts."""
    return exported(setup.experiment, setup.federation, setup.layout, weights, facts)


def at_sites(exchange: Exchange) -> dict[str, dict[Which, SiteMeasures]]:
    """The final models on every client's own test set, as far as the clients have any and tell."""
    exchange.publish()
    known = exchange.setup.federation.clients
    clients = [client.name for client in known if len(client.test) or client.elsewhere]
    found = exchange.do([SiteTestJob(exchange.incoming(client)) for client in clients])
    return {
        client: {which: cast(SiteMeasures, one.to_json()) for which, one in result.models.items()}
        for client, result in zip(clients, found, strict=True)
        if result.models
    }


def participation(lines: Iterable[ClientLine]) -> dict[str, ParticipationRecord]:
    """Who was drawn how often, took part how often, and why not; `gone_since` if missing to the end."""
    out: dict[str, ParticipationRecord] = {}
    for line in lines:
        own = out.setdefault(line["client"], {"drawn": 0, "took_part": 0, "missing": {}, "gone_since": None})
        own["drawn"] += 1
        if "reason" in line:
            own["missing"][line["reason"]] = own["missing"].get(line["reason"], 0) + 1
            own["gone_since"] = own["gone_since"] or line["round"]
        else:
            own["took_part"] += 1
            own["gone_since"] = None
    return out


def summarise(rounds: Sequence[RoundLine]) -> FinalMeasures:
    """Final, last-five and best accuracy of the global model, and apart, of the personalised ones."""
    last = rounds[-1]
    out: FinalMeasures = {
        "final_auroc": last.get("auroc"),
        "final_balanced_accuracy": last.get("balanced_accuracy"),
        "final_loss": last.get("loss"),
        "final_ece": last.get("ece"),
        "final_metrics": last.get("metrics", {}),
        "bytes_up": sum(line["bytes_up"] for line in rounds),
        "bytes_down": sum(line["bytes_down"] for line in rounds),
    }
    if series := [a for line in rounds if (a := line.get("accuracy")) is not None]:
        out["final_accuracy"], out["best_accuracy"] = series[-1], max(series)
        out["last5_accuracy"] = float(np.mean(series[-5:]))
    losses = {line["round"]: loss for line in rounds if (loss := line.get("validation_loss")) is not None}
    if losses:
        out["validated_round"] = best = min(losses, key=losses.__getitem__)
        out["validated_accuracy"] = next(line.get("accuracy") for line in rounds if line["round"] == best)
    if series := [a for line in rounds if (a := line.get("personal_accuracy")) is not None]:
        out["personal_final_accuracy"], out["personal_best_accuracy"] = series[-1], max(series)
        out["personal_last5_accuracy"] = float(np.mean(series[-5:]))
    return out
