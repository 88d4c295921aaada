"""A site's ClientApp: it does what the server asks on the site's own data, with the engine's own `Worker`.

Who the site is and where its data lies is said by its own node configuration (`site`, `data`, `state`,
`device`), never by the server. The server sends the method, the model and the training settings, no path.
"""

import hashlib
import secrets
import shutil
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedld import __version__
from fedld.aggregation import Vote
from fedld.config.experiment import SETTINGS, Experiment, make_experiment
from fedld.config.resolve import make_method, make_task
from fedld.data import Client, Federation
from fedld.data.table import Table
from fedld.engine.backends.flower.budget import RunBudget
from fedld.engine.backends.flower.disclosure import (
    SiteDraws,
    SiteWorker,
    rounded_metrics,
    rounded_tally,
    rounded_vote,
)
from fedld.engine.backends.flower.federation import (
    FileFacts,
    describe,
    open_site,
    site_federation,
    training_rows,
)
from fedld.engine.backends.flower.limits import Limits, QuotaError
from fedld.engine.backends.flower.secure_site import (
    SecureSite,
    held_form,
    held_result,
    job_entries,
    round_job,
)
from fedld.engine.backends.flower.site_privacy import SitePrivacy, check_jobs, measures_records
from fedld.engine.backends.flower.wire import (
    Answer,
    DryRun,
    Held,
    Order,
    Question,
    SecureStep,
    carried,
    carried_bytes,
    listed,
    pack,
    site_name,
    tree,
    tree_names,
    unpack,
)
from fedld.engine.backends.processes import tune_process
from fedld.engine.client_data import StateStore
from fedld.engine.hardware import peak_memory
from fedld.engine.jobs import (
    ClientJob,
    ClientResult,
    HeldVote,
    Incoming,
    JobResult,
    LossJob,
    Parts,
    Personal,
    PersonalJob,
    Prepared,
    PrepareJob,
    RoundJob,
    Setup,
    SharedMemory,
    SiteTest,
    SiteTestJob,
    Trained,
    TrainJob,
)
from fedld.engine.network import divided, make_layout
from fedld.engine.private import private_steps
from fedld.engine.setup import features_for, for_task, weighted
from fedld.engine.summing import update_message, vote_message, weight_of
from fedld.errors import FedLDError
from fedld.layout import Layout, Tree
from fedld.methods import Method
from fedld.models import as_model
from fedld.privacy.context import public_key
from fedld.privacy.peers import PEERS, Peers, open_peers
from fedld.privacy.policy import POLICY, Policy, Request, read_policy
from fedld.records.ledger import Ledger
from fedld.records.writer import write_atomically
from fedld.seeds import derive
from fedld.tasks import TASKS, Tally

TRAVELS = {name for name, setting in SETTINGS.items() if setting.sent_to_sites}
"""What a server may set at a site: nothing that names a file, and no device."""

app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Answer the server's first question with a description of the site's data."""

    def answer() -> tuple[RecordDict, dict[str, Any]]:
        question = unpack(Question, message.content)
        _same_version(question.version)
        policy = _policy(context)
        task = FileFacts.from_node(context.node_config).task
        asked = TASKS.find(question.task)
        if asked.data != task:
            raise FedLDError(f"its data is for {task}, not for {asked.name} (--task)")
        table, limits = _open(context, question.image_size), Limits.from_node(context.node_config)
        if policy is not None:
            limits = replace(limits, min_images=max(limits.min_images, policy.smallest_count))
        limits.check_data(len(training_rows(table)))
        description = describe(
            table,
            _name(context),
            __version__,
            question.classes,
            limits.min_images,
            [column.column() for column in question.columns],
            asked,
        )
        if context.node_config.get("peer-key"):
            identity = public_key(_peers(context).identity)
            description = description.model_copy(update={"identity": identity})
        return pack(description), {"description": description.model_dump()}

    return _guarded("description", answer, message, context)


@app.train()
def work(message: Message, context: Context) -> Message:
    """Do the jobs of an order and reply with their results."""

    def answer() -> tuple[RecordDict, dict[str, Any]]:
        order = unpack(Order, message.content)
        _same_version(order.version)
        said, trees = Site(order, context).work(message.content)
        facts = {
            "run": order.run,
            "rounds": sorted({job.round for job in order.jobs if isinstance(job, RoundJob) and job.round}),
            "jobs": dict(Counter("dry_run" if order.dry_run else job.kind for job in order.jobs)),
            "settings": hashlib.sha256(order.settings.encode()).hexdigest(),
        }
        return pack(said, **trees), facts

    return _guarded("order", answer, message, context)


@app.train("secure")
def secure_step(message: Message, context: Context) -> Message:
    """Answer a numbered message of a secure computation over a result that the site keeps."""

    def answer() -> tuple[RecordDict, dict[str, Any]]:
        step = unpack(SecureStep, message.content)
        _same_version(step.version)
        content = _secure_site(context, step.run).answer(step, carried_bytes(message.content))
        facts = {"run": step.run, "context": step.context, "message": step.number}
        return pack(Answer(), secure=carried(content)), facts

    return _guarded("secure", answer, message, context)


def _guarded(
    kind: str, answer: Callable[[], tuple[RecordDict, dict[str, Any]]], message: Message, context: Context
) -> Message:
    """What goes wrong at a site becomes an answer that says so; whatever may name a file stays in its log.

    Nothing leaves before the site's ledger tells of it.
    """
    try:
        content, facts = answer()
    except FedLDError as error:
        content, facts = _refusal(str(error))
    except Exception as error:
        traceback.print_exc()
        content, facts = _refusal(f"{type(error).__name__} at the site, see its log")
    try:
        folder = _states(context)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        Ledger(folder / "ledger.jsonl").append(kind, **facts, left=listed(content), version=__version__)
    except FedLDError as error:
        content, _ = _refusal(str(error))
    except OSError as error:
        print(f"fedld: the ledger cannot be written: {error}", file=sys.stderr, flush=True)
        content, _ = _refusal("its ledger cannot be written, so nothing leaves")
    return Message(content, reply_to=message)


def _refusal(reason: str) -> tuple[RecordDict, dict[str, Any]]:
    return pack(Answer(error=reason)), {"refused": reason}


class Site:
    """One order at work."""

    def __init__(self, order: Order, context: Context) -> None:
        tune_process()
        self.order, self.name, self.limits = order, _name(context), Limits.from_node(context.node_config)
        experiment = site_experiment(order.settings).model_copy(
            update={"device": str(context.node_config.get("device", "cpu"))}
        )
        if experiment.train != "all":
            experiment = experiment.model_copy(update={"weights": _weights(context)})
        self.folder = _states(context) / order.run
        method, parts = make_method(experiment), Parts.of(experiment)
        self._check_policy(context, experiment, method)
        self.secure = self._secure(context, experiment)
        table = _open(context, experiment.image_size)
        if parts.task.data != table.task:
            raise FedLDError(f"its data is for {table.task}, not for {parts.task.name} (--task)")
        self.samples = len(training_rows(table))
        self.limits.check_order(experiment, method, order.jobs, self.samples)
        self.seed = _own_seed(_states(context))
        federation = site_federation(table, self.name, order, self.folder / "federation")
        self.limits.check_memory(
            experiment, federation.input_shape, len(order.classes), len(training_rows(table))
        )
        if experiment.validation is not None:
            federation = self._set_aside(federation, experiment.validation)
        self.budget = RunBudget(folder=self.folder, experiment=experiment, method=method, limits=self.limits)
        task = parts.task.fitted([order.target_sums], federation.output_names)
        method = for_task(experiment, method, task)
        trunk, model = divided(experiment, method, federation)
        if method.second_moments or any(isinstance(j, PrepareJob) and j.what == "closed" for j in order.jobs):
            features = as_model(model).head.in_features
            self.limits.check_moments(len(federation.client(self.name).train), features)
        layout = make_layout(experiment, method, model)
        if trunk is not None and trunk.digest != order.trunk:
            raise FedLDError("its frozen trunk is another one: start it with the server's `--weights FILE`")
        parts = weighted(replace(parts, task=task), experiment, method, order.classes)
        states = self.folder / "states"
        setup = Setup(
            experiment=experiment,
            method=method,
            federation=federation,
            layout=layout,
            states=states,
            parts=parts,
        )
        self.setup = replace(
            setup, features=features_for(setup, trunk, print, quota=self.limits.cache_gb * 1e9)
        )
        self.privacy = self._privacy(context, model)
        if order.dry_run:
            few = federation.client(self.name).train[: 2 * experiment.batch_size]
            clients = (Client(name=self.name, train=few, test=few[:0]),)
            self.setup = replace(self.setup, federation=replace(federation, clients=clients))

    def _check_policy(self, context: Context, experiment: Experiment, method: Method) -> None:
        """Refuse an order that the site's policy does not allow; its smallest count becomes a limit."""
        policy = _policy(context)
        if policy is None:
            return
        self.limits = replace(self.limits, min_images=max(self.limits.min_images, policy.smallest_count))
        policy.check(
            Request(
                method=str(experiment.method["name"]),
                rule=method.rule.name,
                task=make_task(experiment).name,
                sites=self.order.sites,
                rounds=experiment.rounds,
                trains=any(isinstance(job, RoundJob) for job in self.order.jobs),
                decomposes=experiment.decompose > 0,
                measures=measures_records(self.order.jobs),
                tells=measures_singly(self.order.jobs),
                private=bool(experiment.dp),
                secure=experiment.secure if self.order.secure is not None else None,
            )
        )

    def _privacy(self, context: Context, model: nn.Module) -> SitePrivacy | None:
        """The site's noise and budget, where the run has an epsilon that is proved for this order."""
        setup = self.setup
        if not setup.experiment.dp:
            return None
        check_jobs(self.order.jobs)
        steps = private_steps(setup.experiment, setup.method, model, setup.federation)
        self.setup = replace(setup, private=steps)
        return SitePrivacy(steps=steps[self.name], folder=_states(context), policy=_policy(context))

    def _secure(self, context: Context, experiment: Experiment) -> SecureSite | None:
        """The site in the run's secure rounds; what would leave in another way is refused."""
        asked, job = self.order.secure, round_job(self.order.jobs) if experiment.secure else None
        if asked is not None and job is None:
            raise FedLDError("the order has no result of which a secure sum could be made")
        if job is not None and asked is None:
            raise FedLDError("results of this run leave in secure sums only, and the order asks for none")
        if experiment.secure and measures_singly(self.order.jobs):
            raise FedLDError("in a run of secure sums nothing that it measures leaves by itself")
        if asked is None:
            return None
        gram = experiment.secure == "gram" and isinstance(job, TrainJob)
        if asked.computation != ("gram" if gram else "sum"):
            raise FedLDError(f"the order asks for a secure {asked.computation}, which its settings do not")
        found = _secure_site(context, self.order.run)
        found.peers.participants(asked.participants)
        return found

    def _set_aside(self, federation: Federation, fraction: float) -> Federation:
        """Validation images, drawn by the site itself; one with few images trains on all and has no say.

        A server that chose them could tell single images from what two choices differ in. So the draw also
        depends on the share: a larger part does not contain a smaller one.
        """
        if fraction * len(federation.client(self.name).train) < self.limits.min_images:
            return federation
        parted = federation.set_aside(fraction, derive(self.seed, repr(fraction)))
        client = parted.client(self.name)
        enough = min(len(client.train), len(client.validation)) >= self.limits.min_images
        return parted if enough else federation

    def work(self, content: Any) -> tuple[Answer, dict[str, Tree]]:
        """Results of all jobs; the update and the message of a training as trees."""
        if self.order.dry_run:
            return Answer(dry_run=self._dry_run(content)), {}
        self.budget.spend(self.order, {name: tree(content, name) for name in tree_names(content)})
        if self.privacy is not None:
            self.privacy.spend(self.order.run, self.order.jobs)
        results, trees = self._work(content)
        told = [asdict(self._leaving(result)) for result in results]
        if self.secure is None:
            return Answer(results=told), trees
        held, first = self._hold(self.secure, content, trees["summed"])
        return Answer(results=told, held=held), {"secure": carried(first)} if first else {}

    def _hold(self, secure: SecureSite, content: Any, message: Tree) -> tuple[Held, bytes]:
        """Keep the result of the round's job; gives its form and message 1 of its sum."""
        order, method = self.order, self.setup.method
        job = round_job(order.jobs)
        assert order.secure is not None
        assert job is not None
        entries = job_entries(job, method, order.secure.largest)
        form = held_form(message, entries)
        if not form.entries:
            return form, b""  # the server has this client's sums already
        held = held_result(
            order,
            {name: tree(content, name) for name in tree_names(content)},
            job,
            method,
            message,
            largest=order.secure.largest,
            samples=self.samples,
            with_message=bool(tree(content, f"message.{order.jobs.index(job)}")),
        )
        secure.hold(held, message, entries)
        if order.secure.computation == "gram":
            return form.model_copy(update={"exponent": secure.length_exponent()}), b""
        return form, secure.begin(order.secure)

    def _dry_run(self, content: Any) -> DryRun:
        """The order on a few images; nothing is kept, and only time and memory are told."""
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            states = Path(folder) / "states"
            if self.setup.states.exists():  # a run that is resumed
                shutil.copytree(self.setup.states, states)
            self.setup = replace(self.setup, states=states)
            self._work(content)
        return DryRun(seconds=time.perf_counter() - start, memory=peak_memory())

    def _work(self, content: Any) -> tuple[list[JobResult], dict[str, Tree]]:
        if any(isinstance(job, TrainJob) for job in self.order.jobs):
            # Other orders come before the checkpoint that refers to this round's state.
            StateStore(self.setup.states).prune({(self.name, round_) for round_ in self.order.kept})
        models = tree(content, "models")
        layout = self.setup.layout
        memory = SharedMemory(
            weights=tree(content, "weights")["weights"],
            updates=torch.zeros(max(1, len(models)), layout.size),
            logits=torch.zeros(len(self.setup.federation.test), *self.setup.federation.output_shape),
            basis=_basis(layout, tree(content, "candidates")),
        )
        for key, part in models.items():
            layout.set_shared(memory.updates[int(key)], part)
        worker = SiteWorker(self.setup, memory, SiteDraws(self.setup, self.seed, self.limits))
        worker.common = tree(content, "common")
        results: list[JobResult] = []
        trees: dict[str, Tree] = {}
        for k, job in enumerate(self.order.jobs):
            result = self._do(worker, self._own(job, tree(content, f"message.{k}")))
            results.append(result)
            if self.secure is not None:
                trees |= self._summed(result, memory)
                continue
            if isinstance(result, Trained):
                plain = {"update": layout.shared_part(memory.updates[0])}
                trees["update"] = worker.sent if self.setup.transforms else plain
            if isinstance(result, Prepared | Trained):
                trees["message"] = result.message
        return results, trees

    def _summed(self, result: JobResult, memory: SharedMemory) -> dict[str, Tree]:
        """What is summed of a result, where it is one of the round's job."""
        match result:
            case Trained():
                return {"summed": update_message(self.setup, memory.updates[0], result.message)}
            case Prepared():
                return {"summed": result.message}
            case Vote():
                if problem := result.problem(len(result.losses)):
                    raise FedLDError(problem)
                weight = weight_of(self.setup.method, self.samples)
                return {"summed": vote_message(rounded_vote(result), weight)}
        return {}

    def _own(self, job: ClientJob, message: Tree) -> ClientJob:
        """A job with the message that came for it; there is one row for an update here."""
        for name in job.clients if isinstance(job, LossJob) else (job.incoming.client,):
            if name != self.name:
                raise FedLDError(f"it is '{self.name}', the order is for '{name}'")
        if isinstance(job, LossJob):
            return job if job.incoming is None else replace(job, incoming=Incoming(self.name, 0, message))
        job = replace(job, incoming=replace(job.incoming, message=message))
        return replace(job, slot=0) if isinstance(job, TrainJob) else job

    def _do(self, worker: SiteWorker, job: ClientJob) -> JobResult:
        """A job's result; of few test images nothing is told."""
        few = len(self.setup.federation.test) < self.limits.min_images
        if isinstance(job, SiteTestJob):
            return SiteTest({}) if few else worker.site_test(job)
        if isinstance(job, PersonalJob) and few:
            return Personal(None, None)
        return worker.run(job)

    def _leaving(self, result: JobResult) -> ClientResult:
        """A result as it leaves the site: rounded, without tensors and measurements of few images."""
        match result:
            case Prepared():
                return replace(result, message={})
            case Trained():
                return replace(
                    result,
                    message={},
                    metrics=rounded_metrics(result.metrics, small_classes=self._has_small_classes()),
                    before=result.before and self._tally(result.before),
                    after=result.after and self._tally(result.after),
                )
            case Personal():
                return Personal(None, self._tally(result.own) if result.own and result.own.count else None)
            case [Tally() as tally]:
                return self._tally(tally)
            case Vote():
                return rounded_vote(result) if self.secure is None else HeldVote()
            case SiteTest():
                return result
        raise TypeError(result)

    def _has_small_classes(self) -> bool:
        """Whether some images that are trained on are of a class of which nothing is told."""
        federation = self.setup.federation
        labels = np.array(federation.labels[federation.client(self.name).train])
        return not self.limits.large_classes(self.setup.task.strata(labels)).all()

    def _tally(self, tally: Tally) -> Tally:
        return rounded_tally(self.limits.leaves(tally))


def measures_singly(jobs: Iterable[ClientJob]) -> bool:
    """Say whether an order has jobs of which the result is a measurement of this site alone."""
    return any(isinstance(job, LossJob | PersonalJob | SiteTestJob) for job in jobs)


def _own_seed(folder: Path) -> int:
    """A number that only this site knows, drawn once."""
    file = folder / "seed"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(file, str(secrets.randbits(63)).encode())
    return int(file.read_text())


def _basis(layout: Layout, candidates: Tree) -> Tensor:
    """Room for the directions and buffers of candidate steps, filled with those that came."""
    directions = candidates.get("directions", torch.zeros(0, layout.shared))
    basis = torch.zeros(len(directions) + 1, layout.size)
    layout.shared_parameters(basis[:-1]).copy_(directions)
    if "buffers" in candidates:
        layout.shared_buffers(basis[-1]).copy_(candidates["buffers"])
    return basis


def site_settings(experiment: Experiment) -> dict[str, Any]:
    """The part of an experiment that a site must know."""
    return experiment.model_dump(mode="json", include=TRAVELS, exclude_none=True)


def site_experiment(settings: str) -> Experiment:
    """The experiment as a site runs it; a setting that is not the server's to make is refused."""
    try:
        given = tomllib.loads(settings)
    except tomllib.TOMLDecodeError as error:
        raise FedLDError(f"the server's settings are not TOML: {error}") from None
    for key in given:
        if key not in TRAVELS:
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
    Limits.from_node(config).check_size(image_size)
    if not config.get("data"):
        raise FedLDError("its node configuration names no data: start it with `fedld site start --data PATH`")
    try:
        data, facts = str(config["data"]), FileFacts.from_node(config)
        if image_size is not None:
            images = len(open_site(data, None, facts).labels)
            Limits.from_node(config).reserve(_states(context), image_size, images)
        return open_site(data, image_size, facts)
    except QuotaError:
        raise
    except FedLDError as error:
        print(f"fedld: {error}", file=sys.stderr, flush=True)
        raise FedLDError("its data cannot be opened: try `fedld site check` there") from None


def _policy(context: Context) -> Policy | None:
    """The policy that the site was started with, from its own copy; one that is gone refuses everything."""
    return read_policy(_states(context) / POLICY) if context.node_config.get("policy") else None


def _peers(context: Context) -> Peers:
    """The site's key for secure rounds and its pinned keys, from its own copy."""
    key = context.node_config.get("peer-key")
    if not key:
        raise FedLDError("it has no pinned keys of its peers (`site start --peers`), so no secure round")
    try:
        return open_peers(_name(context), Path(str(key)), _states(context) / PEERS)
    except FedLDError as error:
        print(f"fedld: {error}", file=sys.stderr, flush=True)
        raise FedLDError("its keys for secure rounds cannot be read, so there is no secure round") from None


def _secure_site(context: Context, run: str) -> SecureSite:
    """The site in the secure rounds of a run, within its policy."""
    policy, folder = _policy(context), _states(context) / run / "secure"
    least = policy.min_sites if policy else 0
    return SecureSite(folder=folder, peers=_peers(context), method=_settings_method, least=least)


def _settings_method(settings: str) -> Method:
    """The method that a server's settings name."""
    return make_method(site_experiment(settings))


def _weights(context: Context) -> Path | None:
    """Weights of a frozen trunk: a file of the site's own, since only what is trained travels."""
    told = str(context.node_config.get("weights") or "")
    return Path(told).expanduser() if told else None


def _states(context: Context) -> Path:
    """Where the site keeps its states: a folder of its own, wherever the site says."""
    told = str(context.node_config.get("state") or "~/.local/share/fedld")
    return Path(told).expanduser() / _name(context)
