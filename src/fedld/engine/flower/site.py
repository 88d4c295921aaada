"""A site's ClientApp: it does what the server asks on the site's own data, with the engine's own `Worker`.

Who the site is and where its data lies is said by its own node configuration (`site`, `data`, `state`,
`device`), never by the server. The server sends the method, the model and the training settings, no path.
"""

import sys
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedld import __version__
from fedld.data.table import Table
from fedld.engine.experiment import Experiment, make_experiment
from fedld.engine.flower.federation import describe, open_site, site_federation
from fedld.engine.flower.wire import (
    Answer,
    Order,
    Outcome,
    Question,
    Task,
    pack,
    set_shared,
    shared_part,
    site_name,
    tree,
    unpack,
)
from fedld.engine.processes import tune_process
from fedld.engine.states import StateStore
from fedld.engine.work import (
    Arena,
    Incoming,
    LossJob,
    Personal,
    PersonalJob,
    Setup,
    Trained,
    TrainJob,
    Worker,
    initial_model,
    make_layout,
)
from fedld.errors import FedLDError
from fedld.layout import Tree

SETTINGS = frozenset(
    {
        *("method", "objective", "rule", "model", "image_size", "augment", "seed", "dtype"),
        *("local_epochs", "batch_size", "lr", "momentum", "weight_decay", "buffers"),
        *("client_losses", "decompose_samples"),
    }
)
"""What a server may set at a site: nothing that names a file, and no device."""

app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Answer the server's first question with a description of the site's data."""

    def answer() -> Message:
        question = unpack(Question, message.content)
        _same_version(question.version)
        table = _open(context, question.image_size)
        return Message(pack(describe(table, _name(context), __version__, question.classes)), reply_to=message)

    return _guarded(answer, message)


@app.train()
def work(message: Message, context: Context) -> Message:
    """Do the tasks of an order and reply with their outcomes."""

    def answer() -> Message:
        order = unpack(Order, message.content)
        _same_version(order.version)
        outcomes, trees = Site(order, context).work(message.content)
        return Message(pack(Answer(outcomes=outcomes), **trees), reply_to=message)

    return _guarded(answer, message)


def _guarded(answer: Callable[[], Message], message: Message) -> Message:
    """What goes wrong at a site becomes an answer that says so; whatever may name a file stays in its log."""
    try:
        return answer()
    except FedLDError as error:
        reason = str(error)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__} at the site, see its log"
    return Message(pack(Answer(error=reason)), reply_to=message)


class Site:
    """One order at work."""

    def __init__(self, order: Order, context: Context) -> None:
        tune_process()
        self.order, self.name = order, _name(context)
        experiment = site_experiment(order.settings).model_copy(
            update={"device": str(context.node_config.get("device", "cpu"))}
        )
        self.folder = _states(context) / order.run
        table = _open(context, experiment.image_size)
        federation = site_federation(table, self.name, order, self.folder / "federation")
        method = experiment.make_method()
        layout = make_layout(experiment, method, initial_model(experiment, method, federation))
        self.setup = Setup(experiment, method, federation, layout, self.folder / "states")

    def work(self, content: Any) -> tuple[list[Outcome], dict[str, Tree]]:
        """Outcomes of all tasks; the update and the message of a training as trees."""
        StateStore(self.setup.states).prune({(self.order.site, round_) for round_ in self.order.kept})
        models = tree(content, "models")
        layout = self.setup.layout
        arena = Arena(
            tree(content, "weights")["weights"],
            torch.zeros(max(1, len(models)), layout.size),
            torch.zeros(len(self.setup.federation.test), len(self.order.classes)),
        )
        for key, part in models.items():
            set_shared(layout, arena.updates[int(key)], part)
        worker = Worker(self.setup, arena)
        worker.common = tree(content, "common")
        outcomes, trees = [], {}
        for task in self.order.tasks:
            message = {} if task.message is None else tree(content, f"message.{task.message}")
            result = self._do(worker, task, message)
            outcomes.append(_outcome(result))
            if isinstance(result, Trained):
                trees = {
                    "update": {"update": shared_part(layout, arena.updates[0])},
                    "message": result.message,
                }
        return outcomes, trees

    def _do(self, worker: Worker, task: Task, message: Tree) -> Any:
        incoming = Incoming(self.order.site, task.state_round, message)
        match task.kind:
            case "train":
                return worker.run(TrainJob(task.round, 0, incoming))
            case "personal" if len(self.setup.federation.test):
                return worker.run(PersonalJob(incoming))
            case "personal":
                return Personal({}, None)
            case "loss" if task.model is None:
                return worker.run(LossJob((self.order.site,)))
            case "loss":
                return worker.run(LossJob((self.order.site,), task.model, incoming))


def _outcome(result: Any) -> Outcome:
    if isinstance(result, Trained):
        return Outcome(
            metrics={**result.metrics},
            before=result.before,
            after=result.after,
            kept=result.kept,
            seconds=result.seconds,
        )
    if isinstance(result, Personal):
        return Outcome(own_accuracy=result.own_accuracy)
    return Outcome(before=result[0])


def site_settings(experiment: Experiment) -> dict[str, Any]:
    """The part of an experiment that a site must know."""
    return experiment.model_dump(mode="json", include=set(SETTINGS), exclude_none=True)


def site_experiment(settings: str) -> Experiment:
    """The experiment as a site runs it; a setting that is not the server's to make is refused."""
    try:
        given = tomllib.loads(settings)
    except tomllib.TOMLDecodeError as error:
        raise FedLDError(f"the server's settings are not TOML: {error}") from None
    for key in given:
        if key not in SETTINGS:
            raise FedLDError(f"a server may not set '{key}' at a site")
    return make_experiment(given)


def _same_version(version: str) -> None:
    if version != __version__:
        raise FedLDError(f"it has fedld {__version__}, the server {version}")


def _name(context: Context) -> str:
    return site_name(str(context.node_config.get("site", "")))


def _open(context: Context, image_size: int | None) -> Table:
    """The data that the site's own configuration names."""
    config = context.node_config
    if not config.get("data"):
        raise FedLDError("its node configuration names no data: start it with `fedld site start --data PATH`")
    try:
        return open_site(str(config["data"]), image_size, skip_bad=bool(config.get("skip-bad", False)))
    except FedLDError as error:
        print(f"fedld: {error}", file=sys.stderr, flush=True)
        raise FedLDError("its data cannot be opened: try `fedld site check` there") from None


def _states(context: Context) -> Path:
    """Where the site keeps its states: a folder of its own, wherever the site says."""
    told = str(context.node_config.get("state") or "~/.local/share/fedld")
    return Path(told).expanduser() / _name(context)
