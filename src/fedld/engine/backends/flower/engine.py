"""A run across sites, as an engine: waits for the sites, then its workers are theirs."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from uuid import uuid4

import torch
from flwr.serverapp import Grid
from pydantic import TypeAdapter

from fedld import __version__
from fedld.config.experiment import Experiment
from fedld.config.resolve import make_data_spec, make_method, make_task, with_outputs
from fedld.data import Federation
from fedld.data.datasets import open_table
from fedld.engine.backends.base import Backend
from fedld.engine.backends.flower.backend import FlowerBackend
from fedld.engine.backends.flower.federation import server_columns, server_federation
from fedld.engine.backends.flower.sites import Registered, Sites
from fedld.engine.backends.flower.wire import Description, Question, TableColumn
from fedld.engine.checkpoint import kept_states
from fedld.engine.jobs import Setup, SharedMemory
from fedld.errors import FedLDError
from fedld.methods import Method
from fedld.records.ledger import Ledger
from fedld.records.schema import Event
from fedld.records.writer import dump, write_atomically


def again(runs: Path, out: Path) -> str:
    """The command that continues a run of a server."""
    return f"fedld run --engine flower --server {runs} --resume {out}"


def report(line: Event) -> None:
    """One line of Flower's log per event: what `fedld run --engine flower` follows."""
    print(dump(line), flush=True)


def _waiting(sites: list[str]) -> None:
    report({"event": "waiting", "sites": sites})


class FlowerEngine:
    """Where a run's data and workers are: at the sites. The file sites.json fixes who they are.

    Args:
        grid: Flower's grid, which carries the messages.
        out: the run directory.
        runs: the server's folder of runs, which has its ledger; None for the run directory itself.
        registered: gives the name under which a key is registered; None where every key is admitted.
    """

    keeps_states: bool = False

    def __init__(
        self,
        grid: Grid,
        out: Path,
        *,
        runs: Path | None = None,
        registered: Registered | None = None,
    ) -> None:
        self.grid, self.file, self.folder = grid, out / "sites.json", out
        self.runs, self.registered = runs, registered
        self.sites: Sites | None = None
        self.ledger = Ledger((runs or out) / "ledger.jsonl")

    def federation(self, experiment: Experiment) -> Federation:
        """Wait for the sites and build the federation from what they tell."""
        if type(make_method(experiment)).federation is not Method.federation:
            name = experiment.method["name"]
            raise FedLDError(f"method '{name}' pools the clients' images, which sites do not give away")
        task, table = make_task(experiment), open_table(make_data_spec(experiment))
        if table.task != task.data:
            raise FedLDError(
                f"task '{task.name}' does not fit '{experiment.dataset}', which is for {table.task}"
            )
        shape = Federation(
            name="", folder=table.folder, classes=(), clients=(), test=table.labels, mean=(), std=()
        ).images.shape[1:]
        question = Question(
            version=__version__,
            classes=list(table.classes),
            image_size=experiment.image_size,
            task=task.name,
            columns=[TableColumn.of(column) for column in server_columns(table)],
        )
        shape = () if table.features else shape
        self.sites = Sites(self.grid, question, shape, self.registered)
        return with_outputs(server_federation(table, self._roster(experiment, self.sites)), task)

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
        needed = experiment.quorum(experiment.clients)
        if len(found) < needed:
            refused = "".join(f"; {name}: {why}" for name, why in sites.refused.items())
            raise FedLDError(f"{len(found)} sites came within {wait:.0f} s, {needed} are needed{refused}")
        sites.fixed, self.run_id = found, uuid4().hex
        return found

    def shares_memory(self, setup: Setup) -> bool:
        """The server tests the model itself; nobody else needs its memory."""
        return False

    def check(self, setup: Setup, rows: int) -> None:
        """The sites train, each within its own memory; secure rounds need a key of every site."""
        if setup.experiment.secure is None or self.sites is None:
            return
        lacking = [site.site for site in self.sites.fixed or () if site.identity is None]
        if lacking:
            raise FedLDError(
                f"secure = '{setup.experiment.secure}' needs pinned keys at every site: start "
                f"'{lacking[0]}' with --peers peers.toml"
            )

    def backend(self, setup: Setup, memory: SharedMemory) -> Backend:
        """The sites as workers."""
        assert self.sites is not None
        assert self.sites.fixed is not None
        if setup.experiment.decompose and setup.layout.private_size:
            raise FedLDError(
                f"method '{setup.experiment.method['name']}' keeps a part of each model at its site, so "
                "other sites cannot measure its loss: set decompose = 0"
            )
        facts = {"run": self.run_id, "sites": [site.model_dump() for site in self.sites.fixed]}
        write_atomically(self.file, dump(facts).encode())
        kept = lambda: kept_states(self.folder / "checkpoints")  # noqa: E731
        self.ledger.append(
            "run",
            run=self.run_id,
            folder=self.folder.name,
            settings=hashlib.sha256(setup.experiment.to_toml().encode()).hexdigest(),
            sites=[site.site for site in self.sites.fixed],
            refused=self.sites.refused,
            versions={"fedld": __version__, "flwr": version("flwr"), "torch": torch.__version__},
        )
        return FlowerBackend(setup, memory, self.sites, self.run_id, kept, self.ledger, report, self.folder)

    def provenance(self) -> dict[str, str]:
        """The head of the server's ledger at the run's end."""
        return {"ledger": self.ledger.append("finish", run=self.run_id, folder=self.folder.name)}

    def resuming(self, out: Path) -> str:
        """Typed where the server runs."""
        return again(self.runs or out.parent, out)
