"""`fedld run --engine flower-simulation`: Flower's own simulation, on this machine or on a Ray cluster.

Every client of the dataset becomes a site with a file of its own below the run directory, so that sites,
server and round loop are those of a real deployment. On a cluster all machines must share that directory.
"""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedld.config.experiment import Experiment
from fedld.config.resolve import make_data_spec, make_task
from fedld.data import Federation, load
from fedld.engine import loop
from fedld.engine.backends.flower import site
from fedld.engine.backends.flower.engine import FlowerEngine
from fedld.engine.callbacks import Callback, Function
from fedld.engine.exchange import Progress
from fedld.errors import FedLDError
from fedld.records.schema import Summary

Nodes = Mapping[int, dict[str, bool | float | int | str]]


def export(federation: Federation, folder: Path) -> dict[str, int]:
    """Write one npz file per client and one with the test set; gives the numbers of images."""
    if federation.features:
        raise FedLDError(f"'{federation.name}' is a table: give every site a file with its rows")
    key = "masks" if federation.task == "segmentation" else "labels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedLDError(f"cannot make the folder '{folder}': {error.strerror}") from None
    labels, classes = federation.labels, np.array(federation.classes)
    owner = np.full(len(labels), "", dtype=object)
    for client in federation.clients:
        owner[client.test] = client.name
        rows = np.concatenate([client.train, client.test])
        split = np.repeat(["train", "test"], [len(client.train), len(client.test)])
        arrays = {"images": federation.images[rows], key: labels[rows], "split": split}
        np.savez(folder / f"{client.name}.npz", classes=classes, **arrays)
    test = federation.test
    arrays = {"images": federation.images[test], key: labels[test], "site": owner[test].astype(str)}
    np.savez(folder / "test.npz", classes=classes, **arrays)
    return {client.name: len(client.train) for client in federation.clients} | {"test": len(test)}


def simulate(
    experiment: Experiment,
    out: Path,
    progress: Progress,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback | Function] = (),
) -> Summary:
    """Run (or resume) an experiment in Flower's simulation; returns the summary."""
    if find_spec("ray") is None:
        raise FedLDError("Flower's simulation is not installed here: pip install 'flwr[simulation]'")
    from flwr.simulation import run_simulation

    folder = out.absolute() / "simulation"
    if not resume:
        federation = load(make_data_spec(experiment))
        export(federation, folder)
        changes = {
            "dataset": f"npz:{folder}/test.npz",
            "clients": len(federation.clients),
            "image_size": None,
        }
        experiment = experiment.model_copy(update=changes | {"data_root": None, "split": None, "data": {}})
    files = sorted(path for path in folder.glob("*.npz") if path.name != "test.npz")
    nodes: Nodes = {
        k: {
            "site": path.stem,
            "data": str(path),
            "state": str(folder / "state"),
            "min-images": 2,
            "images-per-feature": 0.0,
            "task": make_task(experiment).name,
        }
        for k, path in enumerate(files)
    }
    server, ended = _server(None if resume else experiment, out, progress, callbacks)
    address = os.environ.get("RAY_ADDRESS")  # of a cluster; else Ray starts here
    config: dict[str, dict[str, Any]] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    config["init_args"] = {"address": address} if address else {}
    run_simulation(server, virtual_sites(nodes), len(nodes), "ray", config)
    last = ended[-1]
    if isinstance(last, Exception):
        raise last
    return last


def virtual_sites(nodes: Nodes) -> ClientApp:
    """The sites' app, with the configuration that a real site would have of its own."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        context.node_config = context.node_config | nodes[int(context.node_config["partition-id"])]
        return site.app(message, context)

    app.query()(answer)
    app.train()(answer)
    return app


def _server(
    experiment: Experiment | None,
    out: Path,
    progress: Progress,
    callbacks: Sequence[Callback | Function],
) -> tuple[ServerApp, list[Summary | Exception]]:
    """A ServerApp that leaves its summary, or the exception, in a list."""
    app, ended = ServerApp(), list[Summary | Exception]([FedLDError("the simulation did not start")])

    @app.main()
    def main(grid: Grid, _: Context) -> None:
        engine = FlowerEngine(grid, out)
        try:
            if experiment is None:
                ended.append(loop.resume(out, progress=progress, engine=engine, callbacks=callbacks))
            else:
                ended.append(loop.run(experiment, out, progress=progress, engine=engine, callbacks=callbacks))
        except Exception as error:
            ended.append(error)

    return app, ended
