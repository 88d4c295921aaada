"""The ServerApp: waits for the sites, then runs the engine's own round loop over Flower's grid."""

import json
import os
import tomllib
from pathlib import Path
from uuid import uuid4

from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp
from pydantic import TypeAdapter

from fedld import __version__
from fedld.data import Federation
from fedld.data.datasets import open_table
from fedld.engine import loop
from fedld.engine.checkpoint import kept_states
from fedld.engine.experiment import Experiment, make_experiment
from fedld.engine.flower.backend import FlowerBackend
from fedld.engine.flower.federation import server_federation
from fedld.engine.flower.sites import Sites
from fedld.engine.flower.wire import Description, Question
from fedld.engine.local import Backend
from fedld.engine.records import Line, dump, write_atomically
from fedld.engine.work import Arena, Setup
from fedld.errors import FedLDError
from fedld.methods import Method

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run or resume the experiment that was submitted; the last event tells how it ended."""
    config = dict(context.run_config)
    out = Path(str(config["out"]))
    try:
        report({"event": "end", **_run(grid, allowed(out), config)})
    except Exception as error:
        text = str(error) if isinstance(error, FedLDError) else f"{type(error).__name__}: {error}"
        report({"event": "error", "error": text, "resumable": (out / "checkpoints").exists()})
        raise


def _run(grid: Grid, out: Path, config: UserConfig) -> Line:
    engine = FlowerEngine(grid, out)
    if config["resume"]:
        return loop.resume(out, progress=report, engine=engine)
    if (out / "config.toml").exists():
        raise FedLDError(f"'{out}' already holds a run: choose another --out, or continue it with --resume")
    experiment = make_experiment(tomllib.loads(str(config["experiment"])))
    return loop.run(experiment, out, progress=report, engine=engine)


def allowed(out: Path) -> Path:
    """The run directory, if it lies where this server lets runs be written."""
    runs = os.environ.get("FEDLD_RUNS")
    if runs and not out.resolve().is_relative_to(Path(runs).resolve()):
        raise FedLDError(f"this server keeps its runs in '{runs}', not in '{out}'")
    return out


def report(line: Line) -> None:
    """One line of Flower's log an event: what `fedld run --engine flower` follows."""
    print(dump(line), flush=True)


def _waiting(sites: list[str]) -> None:
    report({"event": "waiting", "sites": sites})


class FlowerEngine:
    """Where a run's data and workers are: at the sites. The file sites.json fixes who they are."""

    def __init__(self, grid: Grid, out: Path) -> None:
        self.grid, self.file, self.folder = grid, out / "sites.json", out
        self.sites: Sites | None = None

    def federation(self, experiment: Experiment) -> Federation:
        """Wait for the sites and build the federation from what they tell."""
        if type(experiment.make_method()).federation is not Method.federation:
            name = experiment.method["name"]
            raise FedLDError(f"method '{name}' pools the clients' images, which sites do not give away")
        table = open_table(experiment.data_spec())
        shape = Federation("", table.folder, (), (), table.labels, (), ()).images.shape[1:]
        question = Question(
            version=__version__, classes=list(table.classes), image_size=experiment.image_size
        )
        self.sites = Sites(self.grid, question, shape)
        return server_federation(table, self._roster(experiment, self.sites), self.folder / "federation")

    def _roster(self, experiment: Experiment, sites: Sites) -> list[Description]:
        """The sites of the run: those on file, else those that come in time."""
        wait = experiment.wait_for_clients
        if self.file.exists():
            known = json.loads(self.file.read_text())
            sites.fixed = TypeAdapter(list[Description]).validate_python(known["sites"])
            self.run_id = str(known["run"])
            sites.wait(len(sites.fixed), wait, _waiting)
            return sites.fixed
        found = sites.wait(experiment.clients, wait, _waiting)
        for name, why in sites.refused.items():
            report({"event": "refused", "client": name, "why": why})
        if len(found) < max(1, experiment.min_clients):
            refused = "".join(f"; {name}: {why}" for name, why in sites.refused.items())
            raise FedLDError(
                f"{len(found)} sites came within {wait:.0f} s, {experiment.min_clients} are needed{refused}"
            )
        sites.fixed, self.run_id = found, uuid4().hex
        return found

    def backend(self, setup: Setup, arena: Arena) -> Backend:
        """The sites as workers."""
        assert self.sites is not None
        assert self.sites.fixed is not None
        layout = setup.layout
        if setup.experiment.decompose and layout.shared + layout.size != layout.trainable + layout.shared_end:
            raise FedLDError(
                f"method '{setup.experiment.method['name']}' keeps a part of each model at its site, so "
                "other sites cannot measure its loss: set decompose = 0"
            )
        facts = {"run": self.run_id, "sites": [site.model_dump() for site in self.sites.fixed]}
        write_atomically(self.file, dump(facts).encode())
        kept = lambda: kept_states(self.folder / "checkpoints")  # noqa: E731
        return FlowerBackend(setup, arena, self.sites, self.run_id, kept)
