"""Who takes part: sites by name. Flower's node ids are random and change when a SuperNode restarts."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedld import __version__
from fedld.data.datasets import natural
from fedld.engine.flower.wire import Answer, Description, Question, pack, unpack
from fedld.errors import FedLDError

Tell = Callable[[list[str]], None]
POLL = 0.3
PRESENCE = 5.0


class Sites:
    """The sites of a run, the nodes they are reached at now, and the nodes that were refused, with reasons.

    A site keeps its number (its place in the order of names) for the whole run. Once `fixed`, only these
    sites may come back, with the data they had.
    """

    def __init__(self, grid: Grid, question: Question, shape: tuple[int, ...]) -> None:
        self.grid, self.question, self.shape = grid, question, shape
        self.fixed: list[Description] | None = None
        self.refused: dict[str, str] = {}
        self._known: dict[int, Description | None] = {}
        self._asked: dict[str, int] = {}
        self._online: set[int] = set()

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
        infos = {info.node_id: info for info in self.grid.get_nodes() if info.status in ("", "online")}
        came = [node for node in infos if node not in self._online]
        self._online = set(infos)
        for node in came:
            self._known.pop(node, None)
        questions = [Message(pack(self.question), node, "query") for node in came]
        asked = zip(self.grid.push_messages(questions), came, strict=True)
        self._asked |= {message: node for message, node in asked if message}
        for reply in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            node = self._asked.pop(reply.metadata.reply_to_message_id)
            if node in infos:
                self._known[node] = self._accept(content_of(reply), node, infos[node].name)

    def _accept(self, reply: RecordDict | str, node: int, registered: str) -> Description | None:
        """The description of a new node, or None and the reason on record."""
        name = registered or f"node {node}"
        try:
            if isinstance(reply, str):
                raise FedLDError(reply)
            description = _description(reply)
            name = description.site
            self._check(description, registered)
        except FedLDError as error:
            self.refused[name] = str(error)
            return None
        self.refused.pop(name, None)
        return description

    def _check(self, site: Description, registered: str) -> None:
        if registered and registered != site.site:
            raise FedLDError(f"its key is registered for '{registered}'")
        if site.version != __version__:
            raise FedLDError(f"it has fedld {site.version}, the server {__version__}")
        if tuple(site.shape) != self.shape:
            raise FedLDError(f"its images are {_by(site.shape)}, the server's {_by(self.shape)}")
        if len(site.label_counts) != len(self.question.classes) or sum(site.label_counts) != site.train:
            raise FedLDError("its label counts do not add up")
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


def content_of(reply: Message) -> RecordDict | str:
    """A reply's content, or what Flower says instead."""
    return reply.content if reply.has_content() else f"Flower: {reply.error.reason}"


def _by(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def exchange(
    grid: Grid, contents: Mapping[int, RecordDict], kind: str, limit: float, meanwhile: Any = None
) -> dict[int, RecordDict | str]:
    """Send every node its message; a node's reply, or why there is none. Never longer than `limit` seconds.

    `meanwhile` is called once, while the sites are at work.
    """
    if not contents:
        if meanwhile is not None:
            meanwhile()
        return {}
    end = time.monotonic() + limit
    messages = [Message(content, node, kind, ttl=max(limit, 1.0)) for node, content in contents.items()]
    pushed = dict(zip(grid.push_messages(messages), contents, strict=True))
    waiting = {message: node for message, node in pushed.items() if message}
    replies: dict[int, RecordDict | str] = {}
    if meanwhile is not None:
        meanwhile()
    look = time.monotonic() + PRESENCE
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            replies[waiting.pop(reply.metadata.reply_to_message_id)] = content_of(reply)
        if time.monotonic() > look:
            online, look = set(grid.get_node_ids()), time.monotonic() + PRESENCE
            for message in [m for m, node in waiting.items() if node not in online]:
                replies[waiting.pop(message)] = "the site is no longer connected"
        if time.monotonic() > end:
            break
        time.sleep(POLL if waiting else 0.0)
    return replies | dict.fromkeys(waiting.values(), f"no reply within {limit:.0f} s")
