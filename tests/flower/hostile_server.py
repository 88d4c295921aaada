"""`python hostile_server.py WORDS...` is `fedld WORDS...`, with a server whose runs send crafted orders.

A run's settings name a file of orders; the answers go to the same name with `.answers`. Both are made by
`torch.save`: lists of (kind of message, JSON of its part, trees of tensors).
"""

from pathlib import Path

import torch
from flwr.app import RecordDict

from fedld.__main__ import main
from fedld.deployment import server_app
from fedld.engine.backends.flower.sites import Patience, exchange, online
from fedld.engine.backends.flower.wire import Answer, pack, tree, tree_names


def crafted(grid, out, config):
    """Send the orders one after the other to the first site."""
    file = Path(str(config["experiment"]))
    answers = []
    for kind, text, trees in torch.load(file, weights_only=True):
        content = pack(Answer(), **trees)
        content.config_records["part"]["json"] = text
        (node,) = list(online(grid))[:1]
        reply = exchange(grid, {node: content}, kind, Patience(120.0), 1 << 30)[node]
        assert isinstance(reply, RecordDict), reply
        found = {name: tree(reply, name) for name in tree_names(reply)}
        answers.append((str(reply.config_records["part"]["json"]), found))
    torch.save(answers, file.with_suffix(".answers"))
    return {}


if __name__ == "__main__":
    server_app._run = crafted
    main()
