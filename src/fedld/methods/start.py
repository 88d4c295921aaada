"""A closed start: before the first round the head is solved from sums over clients, for any method.

The sums and the leave-one-out errors are those of the method `ridge`; they take two exchanges.
"""

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from fedld.layout import Tree
from fedld.local import LocalClient
from fedld.methods.closed import SUMS, leave_one_out_sums, plan_of, planned
from fedld.methods.moments import LinearProblem, added, client_sums, head_inputs, sum_of
from fedld.methods.ridge import Ridge

RIDGE = Ridge()
START_SUMS = SUMS
"""What clients send before the first round, of which only the sum is needed."""


def start_message(client: LocalClient) -> Tree:
    """Answer a client's part of a closed start: its sums, and where the server sent a plan its errors."""
    if plan := plan_of(client.message):
        return leave_one_out_sums(RIDGE, plan, *head_inputs(client))
    return client_sums(client)


class ClosedStart:
    """The server's part of a closed start.

    Args:
        messages: the clients' sums.
    """

    def __init__(self, messages: Sequence[Tree]) -> None:
        self.problem = LinearProblem.of(added({}, messages))

    @cached_property
    def plan(self) -> Tree:
        """What every client gets to compute its leave-one-out errors."""
        return planned(RIDGE.plan(self.problem, RIDGE.candidates(self.problem)))

    def solve(self, messages: Sequence[Tree]) -> tuple[tuple[Tensor, Tensor], dict[str, float]]:
        """Solve for the head.

        Args:
            messages: the clients' leave-one-out errors.

        Returns:
            Weight (C, D) and bias (C,) of the head; the regularisation and the temperature behind them.
        """
        errors, losses = (sum_of([message[key] for message in messages]) for key in ("errors", "losses"))
        lam, temperature = RIDGE.choose(self.problem, plan_of(self.plan), errors, losses)
        weight, bias = self.problem.head(*RIDGE.solve(self.problem, lam))
        head = temperature * weight, temperature * bias
        return head, {"lam": lam, "temperature": temperature}
