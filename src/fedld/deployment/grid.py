"""Replies, bounded before they are unfolded.

A reply is a tree of small objects that Flower pulls and puts together. One object may be named many times
over: a few kilobytes on the wire can claim gigabytes of memory. Here names and bytes are counted first, and
whatever is wrong with a site's reply, or goes wrong while it is read, is that site's failure.
"""

import json
from collections.abc import Iterable
from typing import Any, cast

from flwr.app import Message, Metadata
from flwr.app.message import Array, make_message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.superlink.grid import HttpGrid

from fedld.engine.backends.flower.internals import runtime_client, set_message_id
from fedld.engine.backends.flower.sites import BadReply
from fedld.errors import FedLDError

OBJECTS = 10_000
"""Objects of one reply: an array is one, and one for each piece of it."""

Contents = dict[str, bytes]


class BoundedGrid(HttpGrid):
    """Flower's grid, whose replies have a largest size."""

    def pull_within(self, message_ids: Iterable[str], largest: int) -> list[Message]:
        """The replies that have come; one that is too large or broken comes as an error."""
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
    """The objects of a reply, each once."""
    names: dict[str, None] = {}
    for k, node in enumerate(iterate_object_tree(tree)):
        if k == OBJECTS:
            raise FedLDError(f"its reply has more than {OBJECTS} parts")
        names[node.object_id] = None
    return list(names)


def unfolded_size(contents: Contents) -> int:
    """Bytes of all arrays as they will lie in memory: a piece counts as often as it is named."""
    total = sum(map(len, contents.values()))
    for content in contents.values():
        kind, pieces, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            facts = json.loads(get_object_body(content, Array))
            total += sum(len(contents[pieces[int(k)]]) for k in facts["arraychunk_ids"])
    return total
