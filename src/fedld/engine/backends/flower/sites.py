"""Who takes part: sites by name. Flower's node ids are random and change when a SuperNode restarts."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from flwr.app import Message, RecordDict
from flwr.app.error import Error
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedld import __version__
from fedld.data.columns import difference
from fedld.data.datasets import natural
from fedld.engine.backends.flower.wire import Answer, Description, Question, pack, unpack
from fedld.engine.jobs import Failure
from fedld.errors import FedLDError, printable
from fedld.tasks import TASKS

Tell = Callable[[list[str]], None]
Registered = Callable[[bytes], str | None]
"""Gives the name under which a key is registered, None for an unknown key."""
POLL = 0.3
PRESENCE = 5.0
DESCRIPTION = 1 << 20
"""Bytes of a site's description."""
WENT = Failure("the site is no longer connected", "", "away")
FLOWER = {
    ErrorCode.NODE_UNAVAILABLE: WENT,
    ErrorCode.MESSAGE_UNAVAILABLE: Failure("its reply did not arrive whole", "", "late"),
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: Failure("its reply did not arrive whole", "", "late"),
}
"""Flower's errors in our words; all others are failures of the site's program."""


class BadReply(Error):  # noqa: N818 (Flower calls its own Error)
    """A reply that was not taken; its reason is ours."""


@runtime_checkable
class Bounded(Protocol):
    """A grid whose replies have a largest size."""

    def pull_within(self, message_ids: Iterable[str], largest: int) -> list[Message]:
        """The replies that have come; one that is too large or broken comes as an error."""
        ...


class Sites:
    """The sites of a run, the nodes they are reached at now, and the nodes that were refused, with reasons.

    Once `fixed`, only these sites may come back, with the data they had.
    """

    def __init__(
        self, grid: Grid, question: Question, shape: tuple[int, ...], registered: Registered | None = None
    ) -> None:
        self.grid, self.question, self.shape, self.registered = grid, question, shape, registered
        self.fixed: list[Description] | None = None
        self.refused: dict[str, str] = {}
        self._known: dict[int, Description | None] = {}
        self._asked: dict[str, int] = {}
        self._online: dict[int, str] = {}  # since when

    @property
    def present(self) -> dict[str, int]:
        """Nodes by site name; the last that came under a name has it.

        Flower believes a killed SuperNode to be online for a minute, in which it may have been started again.
        """
        known = ((node, site) for node, site in self._known.items() if node in self._online)
        return {site.site: node for node, site in known if site is not None}

    def wait(self, wanted: int, seconds: float, tell: Tell = lambda _: None) -> list[Description]:
        """The sites that have come, by name; waits no longer than `seconds` for as many as `wanted`.

        Whenever somebody comes or goes, `tell` gets the names of those who are there.
        """
        end, before = time.monotonic() + seconds, None
        self.refresh()
        while len(self.present) < wanted and time.monotonic() < end:
            if before != (before := sorted(self.present)):
                tell(before)
            time.sleep(1.0)
            self.refresh()
        found = (self._known[node] for node in self.present.values())
        return sorted((d for d in found if d is not None), key=lambda d: natural(d.site))

    def refresh(self) -> None:
        """Look who is connected, ask those who came (back) who they are, and take the answers that are there.

        A round never waits for an answer: a site that comes back takes part as soon as it has answered.
        """
        infos = online(self.grid)
        if self.registered is not None:
            infos = {node: info for node, info in infos.items() if self.registered(info.public_key)}
        since = {node: info.last_activated_at for node, info in infos.items()}
        came = [node for node in infos if self._online.get(node) != since[node]]
        self._online = since
        for node in came:
            self._known.pop(node, None)
        questions = [Message(pack(self.question), node, "query") for node in came]
        asked = zip(self.grid.push_messages(questions), came, strict=True)
        self._asked |= {message: node for message, node in asked if message}
        for reply in pull(self.grid, self._asked, DESCRIPTION) if self._asked else ():
            node = self._asked.pop(reply.metadata.reply_to_message_id)
            if node in infos:
                info = infos[node]
                registered = self.registered(info.public_key) if self.registered else info.name
                self._known[node] = self._accept(content_of(reply), node, registered)

    def _accept(self, reply: RecordDict | Failure, node: int, registered: str | None) -> Description | None:
        """The description of a new node, or None and the reason on record."""
        name = registered or f"node {node}"
        try:
            if isinstance(reply, Failure):
                raise FedLDError(reply.error)
            description = _description(reply)
            name = description.site
            self._check(description, registered)
        except Exception as error:  # whatever goes wrong with a description is its site's failure
            self.refused[name] = printable(str(error) if isinstance(error, FedLDError) else repr(error))
            return None
        self.refused.pop(name, None)
        return description

    def _check(self, site: Description, registered: str | None) -> None:
        if registered and registered != site.site:
            raise FedLDError(f"its key is registered for '{registered}'")
        if site.version != __version__:
            raise FedLDError(f"it has fedld {site.version}, the server {__version__}")
        if tuple(site.shape) != self.shape:
            if not site.shape or not self.shape:
                kinds = ["pictures" if shape else "a table" for shape in (site.shape, self.shape)]
                raise FedLDError("it has {}, the server {}".format(*kinds))
            raise FedLDError(f"its images are {_by(site.shape)}, the server's {_by(self.shape)}")
        task = TASKS[self.question.task]
        if problem := site.problem(len(task.strata_names(self.question.classes))):
            raise FedLDError(problem)
        if site.target_sums.keys() != task.target_sums(np.empty((0, 2))).keys():
            raise FedLDError("its sums of targets are not those of the task")
        own, server = ([one.column() for one in part.columns] for part in (site, self.question))
        if found := difference(own, server):
            raise FedLDError(found)
        if self.fixed is None:
            return
        before = {known.site: known for known in self.fixed}
        if site.site not in before:
            raise FedLDError("it came after the run had begun")
        if site != before[site.site]:
            raise FedLDError("it came back with other data")


def _description(reply: RecordDict) -> Description:
    try:
        answer = unpack(Answer, reply)
    except FedLDError:
        return unpack(Description, reply)
    raise FedLDError(answer.error or "it gave no description")


def content_of(reply: Message) -> RecordDict | Failure:
    """A reply's content, or why there is none, in our words."""
    if reply.has_content():
        return reply.content
    if isinstance(reply.error, BadReply):
        return Failure(reply.error.reason or "", "", "malformed")
    return FLOWER.get(reply.error.code, Failure("its program failed, see the site's log", ""))


def pull(grid: Grid, messages: Iterable[str], largest: int) -> Iterable[Message]:
    """Replies of at most `largest` bytes; in a simulation all is one process, and nobody is a stranger."""
    if isinstance(grid, Bounded):
        return grid.pull_within(list(messages), largest)
    return grid.pull_messages(list(messages))


def _by(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def online(grid: Grid) -> dict[int, Any]:
    """Flower's facts of the nodes that are connected."""
    return {info.node_id: info for info in grid.get_nodes() if info.status in ("", "online")}


def _stayed(node: int, before: dict[int, Any], now: dict[int, Any]) -> bool:
    """Connected then and now, and not started anew in between: an order dies with its process."""
    return node in before and node in now and before[node].last_activated_at == now[node].last_activated_at


@dataclass(frozen=True)
class Patience:
    """How long to wait for replies: `seconds`; once a quorum has replied, `grace` seconds more."""

    seconds: float
    quorum: int = 0
    grace: float | None = None


def exchange(
    grid: Grid,
    contents: Mapping[int, RecordDict],
    kind: str,
    patience: Patience,
    largest: int,
    meanwhile: Any = None,
) -> dict[int, RecordDict | Failure]:
    """Send every node its message; a node's reply of at most `largest` bytes, or why there is none.

    `meanwhile` is called once, while the sites are at work.
    """
    start, limit, before = time.monotonic(), patience.seconds, online(grid)
    messages = [Message(content, node, kind, ttl=max(limit, 1.0)) for node, content in contents.items()]
    pushed = dict(zip(grid.push_messages(messages), contents, strict=True)) if messages else {}
    waiting = {message: node for message, node in pushed.items() if message}
    replies: dict[int, RecordDict | Failure] = {node: WENT for message, node in pushed.items() if not message}
    if meanwhile is not None:
        meanwhile()
    look = time.monotonic() + PRESENCE
    while waiting:
        for reply in pull(grid, waiting, largest):
            replies[waiting.pop(reply.metadata.reply_to_message_id)] = content_of(reply)
        if time.monotonic() > look:
            now, look = online(grid), time.monotonic() + PRESENCE
            for message in [m for m, node in waiting.items() if not _stayed(node, before, now)]:
                replies[waiting.pop(message)] = WENT
        here = sum(not isinstance(reply, Failure) for reply in replies.values())
        if patience.grace is not None and patience.quorum and here >= patience.quorum:
            limit = min(limit, time.monotonic() - start + patience.grace)
            patience = replace(patience, grace=None)
        if time.monotonic() > start + limit:
            break
        time.sleep(POLL if waiting else 0.0)
    return replies | dict.fromkeys(waiting.values(), Failure(f"no reply within {limit:.0f} s", "", "late"))
