"""How long the way of an update is: `python benchmarks/trace.py`.

Traces one round of FedAvg with two clients in this process, from the publishing of a round's weights to the
publishing of the next ones, and counts functions of the package (comprehensions are no functions):

functions   distinct functions that are called during the round; "later" counts those of the next round,
            in which nothing is computed for the first time (round 2 evaluates the model of round 1)
hops        distinct functions that an update passes from `LocalClient.train` to the new server state: those
            that are active when the second client trains, and later ones that get or give a tensor of a
            model's size, by itself or as a field of an object, a dictionary or a list other than `self`.
            Some of them give such a tensor on; the others only look at it (screening, Gram matrices)
"""

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import fedld
from fedld.engine import rounds
from fedld.engine.exchange import Exchange
from fedld.local import LocalClient

PACKAGE = str(Path(fedld.__file__).parent)
CLIENTS = 2
ROUND = 2  # the first one makes caches


class Trace:
    """Counts what is called in a round, between two calls of `Exchange.publish`."""

    def __init__(self, round_: int) -> None:
        self.round = round_
        self.functions: set[CodeType] = set()
        self.hops: list[CodeType] = []
        self.giving: set[CodeType] = set()  # hops that pass a tensor on
        self.sizes: set[int] = set()
        self.active, self.applied = False, False
        self.trained = 0

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """See a call or a return."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        if code is Exchange.publish.__code__:
            self._publish(frame, event)
        if not self.active or code.co_name in ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"):
            return
        self.functions.add(code)
        if event == "return" and code is LocalClient.train.__code__:
            self.trained += 1
            if self.trained == CLIENTS:
                self._stack(frame)
        elif event == "return" and code is rounds.apply.__code__:
            self.applied = True
        elif self.trained == CLIENTS and not self.applied:
            self._see(frame, event, value)

    def _see(self, frame: FrameType, event: str, value: Any) -> None:
        """Note a function that gets or gives a tensor of a model's size."""
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [frame.f_locals.get(name) for name in names if name != "self"]
        seen = [value] if event == "return" else given
        if any(self._holds(one) for one in seen):
            if code not in self.hops:
                self.hops.append(code)
            if event == "return":
                self.giving.add(code)

    def _publish(self, frame: FrameType, event: str) -> None:
        """Begin with the publishing for the traced round; end when the next one is done."""
        exchange = frame.f_locals["self"]
        self.sizes = {exchange.setup.layout.size, exchange.setup.layout.shared}
        if event == "return" and exchange.state.round == self.round - 1:
            self.active = True
        elif event == "return" and exchange.state.round == self.round:
            self.active = False

    def _stack(self, frame: FrameType) -> None:
        """Functions of the package between the round and the training."""
        at: FrameType | None = frame
        while at is not None and at.f_code.co_name != "_advance":
            if at.f_code.co_filename.startswith(PACKAGE) and not at.f_code.co_name.startswith("<"):
                self.hops.append(at.f_code)
                self.giving.add(at.f_code)
            at = at.f_back

    def _holds(self, value: Any, depth: int = 1) -> bool:
        if isinstance(value, torch.Tensor):
            return value.ndim > 0 and value.shape[-1] in self.sizes
        if depth == 0 or isinstance(value, str | int | float | bool | None | type):
            return False
        if isinstance(value, dict):
            return any(self._holds(one, depth - 1) for one in value.values())
        if isinstance(value, list | tuple):
            return any(self._holds(one, depth - 1) for one in value)
        return any(self._holds(one, depth - 1) for one in getattr(value, "__dict__", {}).values())


def name(code: CodeType) -> str:
    """File and function."""
    return f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}"


def traced(round_: int) -> Trace:
    """Run FedAvg and trace one round."""
    trace = Trace(round_)
    sys.setprofile(trace)
    try:
        fedld.run("fedavg", "digits", clients=CLIENTS, rounds=round_ + 1, workers=0, progress=False)
    finally:
        sys.setprofile(None)
    return trace


def main() -> None:
    """Trace a round and print both counts; with --all also the names."""
    trace = traced(ROUND)
    if "--all" in sys.argv:
        print("\n".join(["hops:", *map(name, trace.hops)]))
        print("\n".join(["functions:", *sorted(map(name, trace.functions))]))
    files = {code.co_filename for code in trace.functions}
    print(f"functions: {len(trace.functions)} distinct, in {len(files)} files")
    rooms = Counter(name(code).split("/")[0].split(":")[0] for code in trace.functions)
    print("  of them " + ", ".join(f"{room} {count}" for room, count in rooms.most_common()))
    print(f"  later {len(traced(ROUND + 1).functions)}")
    looking = len(trace.hops) - len(trace.giving)
    print(f"hops: {len(trace.hops)}; {len(trace.giving)} give the update on, {looking} only look at it")


if __name__ == "__main__":
    main()
