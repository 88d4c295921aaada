"""What is refused before a method sees it, and that a run says which bound it had."""

import torch
from torch import nn

from fedld.engine.exchange import refusals
from fedld.engine.loop import run
from fedld.layout import Layout
from fedld.methods import METHODS


def test_a_message_that_is_not_finite_is_refused_with_its_update():
    layout = Layout.of(nn.Linear(2, 3))
    updates = dict.fromkeys("abc", torch.ones(layout.size))
    messages = {"a": {}, "b": {"change": torch.tensor([1.0, float("nan")])}, "c": {"n": torch.tensor(3)}}
    refused = refusals(METHODS["scaffold"], layout, updates, messages)
    assert refused == {"b": "its message 'change' is not finite"}


def test_a_run_says_the_bound_on_updates(small, tmp_path):
    notes = []
    for ratio in (None, 12.0):
        changes = {} if ratio is None else {"max_update_ratio": ratio}
        events = []
        summary = run(small(rounds=1, **changes), tmp_path / str(ratio), progress=events.append)
        assert summary["max_update_ratio"] == ratio
        notes.append([event["text"] for event in events if event["event"] == "note"])
    assert notes == [[], ["updates longer than 12 times the median are refused (max_update_ratio)"]]
