"""A supervisor of Flower's daemon: starts tasks quickly, runs only fedld, and bounds the replies of sites.

Flower starts a new program for every message. This process has everything imported. It forks once for
Flower's daemon (SuperLink or SuperNode), asks the daemon through its Unix socket for tasks, and forks for
every task. So a message costs milliseconds instead of an import of PyTorch, and a task's token is in no
command line. The fork loads the installed fedld, whatever app was sent: a server cannot bring its own code to
a site, and an unknown caller cannot bring code to the server.

A reply is a tree of small objects that Flower pulls and puts together. One object may be named many times: a
few kilobytes on the wire can claim gigabytes of memory. `BoundedGrid` counts names and bytes before it
unfolds a reply; an error in a site's reply, or while it is read, is that site's failure.
"""

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any, cast

import httpx
from flwr.app import Message, Metadata
from flwr.app.message import Array, make_message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullAppMessagesRequest
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid import HttpGrid

from fedld.deployment.unix_socket import allow_socket_paths, connect
from fedld.engine.backends.flower import internals
from fedld.engine.backends.flower.internals import runtime_client, set_message_id
from fedld.engine.backends.flower.sites import BadReply
from fedld.engine.backends.processes import tune_process
from fedld.errors import FedLDError
from fedld.models import build

OBJECTS = 10_000
"""Objects of one reply: an array is one, and one for each piece of it."""

Contents = dict[str, bytes]


class BoundedGrid(HttpGrid):
    """Flower's grid, with a largest size of replies."""

    def pull_within(self, message_ids: Iterable[str], largest: int) -> list[Message]:
        """Pull the replies that have come; one that is too large or broken comes as an error."""
        answer = runtime_client(self).PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        pairs = zip(answer.messages_list, answer.message_object_trees, strict=True)
        return [self._read(message, tree, largest) for message, tree in pairs]

    def _read(self, message: Any, tree: ObjectTree, largest: int) -> Message:
        name = message.metadata.message_id
        try:
            contents = self._pull(_names(tree), largest)
            unfolded = unfolded_size(contents)
            if unfolded > largest:
                raise FedLDError(f"its reply has {unfolded} bytes, more than {largest}")
            reply = cast(Message, inflate_object_from_contents(name, contents))
            set_message_id(reply, name)
            if reply.metadata.reply_to_message_id != message.metadata.reply_to_message_id:
                raise FedLDError("its reply is to another message")
            return reply
        except Exception as error:
            text = str(error) if isinstance(error, FedLDError) else f"its reply is malformed: {error!r}"
            return self._failed(message.metadata.reply_to_message_id, text)
        finally:
            confirm = ConfirmMessageReceivedRequest(
                node=self.node, run_id=self.run.run_id, message_object_id=name
            )
            runtime_client(self).ConfirmMessageReceived(confirm)

    def _pull(self, names: list[str], largest: int) -> Contents:
        pull, seen = self._puller(), 0

        def bounded(name: str) -> bytes:
            nonlocal seen
            content: bytes = pull(name)
            seen += len(content)
            if seen > largest:
                raise FedLDError(f"its reply has more than {largest} bytes")
            return content

        return pull_objects(names, pull_object_fn=bounded)

    def _puller(self) -> Any:
        return make_pull_object_fn_protobuf(runtime_client(self).PullObject, self.node, self.run.run_id)

    def _failed(self, reply_to: str, text: str) -> Message:
        here = self.node.node_id
        metadata = Metadata(
            run_id=self.run.run_id,
            message_id="",
            src_node_id=here,
            dst_node_id=here,
            message_type=SYSTEM_MESSAGE_TYPE,
            group_id="",
            ttl=0,
            reply_to_message_id=reply_to,
            created_at=now().timestamp(),
        )
        return make_message(metadata=metadata, error=BadReply(ErrorCode.MESSAGE_UNAVAILABLE, text))


def _names(tree: ObjectTree) -> list[str]:
    """List the objects of a reply, each once."""
    names: dict[str, None] = {}
    for k, node in enumerate(iterate_object_tree(tree)):
        if k == OBJECTS:
            raise FedLDError(f"its reply has more than {OBJECTS} parts")
        names[node.object_id] = None
    return list(names)


def unfolded_size(contents: Contents) -> int:
    """Count the bytes of all arrays in memory: a piece counts as often as it is named."""
    total = sum(map(len, contents.values()))
    for content in contents.values():
        kind, pieces, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            array_header = json.loads(get_object_body(content, Array))
            total += sum(len(contents[pieces[int(k)]]) for k in array_header["arraychunk_ids"])
    return total


PAUSE = 0.2
"""Seconds before the next question for work, where the daemon did not answer the last one."""
ENTRY = {
    "clientapp": (internals.CLIENT_MAIN, "fedld.engine.backends.flower.site"),
    "serverapp": (internals.SERVER_MAIN, "fedld.deployment.server_app"),
}
Main = Callable[[], None]
Daemon = Callable[[Path], None]
Again = Callable[[int], bool]


def serve(app: str, daemon: Daemon, again: Again = lambda _: False) -> int:
    """Run one of Flower's daemons, and fork for every task that it has for `app`; the daemon's exit code.

    A daemon that ends by itself is started again if `again` says so. The exit code is 0 after a stop.
    """
    main = _only_fedld(app)
    _warm_up()
    with tempfile.TemporaryDirectory(prefix="fedld-") as folder:
        return _Supervisor(
            kind=f"flwr-{app}", main=main, daemon=daemon, socket_path=Path(folder) / "socket"
        ).run(again)


@dataclass(kw_only=True)
class _Supervisor:
    """The daemon and the tasks that run for it."""

    kind: str
    main: Main
    daemon: Daemon
    socket_path: Path
    process: int = 0
    stopping: bool = False
    tasks: set[int] = field(default_factory=set)

    def run(self, again: Again) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            while True:
                self.process = self._fork(lambda: self.daemon(self.socket_path), signal.SIGTERM)
                code = self._attend()
                self._end_tasks()
                if self.stopping:
                    return 0
                if not again(code):
                    return code
        finally:
            self._end_tasks()

    def _end_tasks(self) -> None:
        """End a daemon's tasks with it: the next daemon would refuse them."""
        for child in self.tasks:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self.tasks = set()

    def _stop(self, number: int, _: FrameType | None) -> None:
        self.stopping = True
        if self.process:
            os.kill(self.process, signal.SIGTERM)

    def _attend(self) -> int:
        """Fork for every task until the daemon ends; its exit code."""
        client: RuntimeHttpClient | None = None
        request = AcquireTaskRequest(supported_task_types=[self.kind])
        while True:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            if ended:
                self.process = 0
                return os.waitstatus_to_exitcode(status)
            self.tasks = {child for child in self.tasks if os.waitpid(child, os.WNOHANG) == (0, 0)}
            token = None
            try:
                if client is None and self.socket_path.exists():
                    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
                    client = connect(RuntimeHttpClient, self.socket_path, [version])
                if client and not self.stopping:
                    token = client.AcquireTask(request).token  # held by the daemon until there may be a task
            except httpx.HTTPError:  # the daemon is not there yet, or no longer
                pass
            if token:
                words = ["--runtime-api-address", str(self.socket_path), "--token", token, "--insecure"]
                self.tasks.add(self._fork(partial(self._task, words), signal.SIGKILL))
            elif token is None:
                time.sleep(PAUSE)

    def _task(self, words: list[str]) -> None:
        sys.argv[1:] = words
        self.main()

    def _fork(self, main: Main, with_parent: signal.Signals) -> int:
        child = os.fork()
        if child == 0:
            _become(main, with_parent)
        return child


def _warm_up() -> None:
    """Let PyTorch import what it imports on first use; no backward pass, after which it forbids to fork."""
    tune_process()
    build("cnn", classes=2, channels=1, image_size=8, seed=0)


def _end_with_parent(by: signal.Signals) -> None:
    """Let Linux send this process a signal when its parent ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, by)


def _become(main: Main, with_parent: signal.Signals) -> None:
    """Run another program in the fork, and exit.

    A site that is stopped stops at once: Flower's program would wait for a daemon that is gone.
    """
    _end_with_parent(with_parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    code: object = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code
    except FedLDError as error:
        print(f"fedld: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _only_fedld(app: str) -> Main:
    """Give Flower's own entry point of an app, with all ways to load other code replaced."""
    here = Path(str(files("fedld.deployment") / "app"))
    for place in (internals.CLIENT_INSTALL, internals.SERVER_INSTALL):
        place.replace(lambda *_, **__: None)
    for place in (internals.CLIENT_FOLDER, internals.SERVER_FOLDER, internals.LOADER_FOLDER):
        place.replace(lambda *_: here)
    internals.SERVER_GRID.replace(BoundedGrid)
    allow_socket_paths()
    entry, module = ENTRY[app]
    import_module(module)
    main: Main = entry.get()
    return main
