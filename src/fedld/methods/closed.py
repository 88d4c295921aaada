"""What the methods in closed form share: one exchange of sums, one of leave-one-out errors, one solution.

Round 1 is the whole method. Clients send sums (`moments`); the server sends back a basis in which every
image's leave-one-out prediction is a few products; clients send errors and losses summed over their images
for all candidate regularisations and temperatures; the server takes the best of both and solves. A
regularisation that is far from the best by the sums alone is not taken, whatever errors clients tell. Where
clients are sampled, later rounds add the sums of those that were not counted before.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedld.aggregation import Aggregate
from fedld.errors import FedLDError
from fedld.layout import Layout, Tree
from fedld.local import LocalClient, Reply
from fedld.local.base import TaskObjective
from fedld.methods.base import Messages, MessageSum, Method, Replies, Server
from fedld.methods.moments import (
    Codes,
    LinearProblem,
    added,
    client_sums,
    codes_for,
    head_inputs,
    head_of,
    set_head,
    sum_of,
)
from fedld.methods.sum_bounds import generalised_errors, mean_length, sums_problem
from fedld.models import as_model, head_names
from fedld.models.standardise import randomise_head

TEMPERATURES = 2.0 ** (torch.arange(-20, 33, dtype=torch.float64) / 4)
"""Factors of the logits that are tried: fixed ones, so that the choice does not depend on the partition."""
SAFE = 1e-10
"""The smallest regularisation, as a share of the sum of eigenvalues, that float64 solves with."""
MOST_UNITS = 16384
IMAGES = 1024
"""How many images are left out at a time: what is computed for them stays in the processor's cache."""
SUMS = {
    "moments": MessageSum(2.0**16, weighted=False, per_sample=True),
    "targets": MessageSum(2.0**16, weighted=False, per_sample=True),
    "errors": MessageSum(2.0**30, weighted=False, per_sample=True),
    "losses": MessageSum(2.0**30, weighted=False, per_sample=True),
}
"""What clients send of which only the sum is needed; inputs of the head have mean squares of at most 2^16."""
PLAN = "plan."
"""With what the names of a plan begin in messages and in the server's state."""


@dataclass(frozen=True)
class SumsMethod(Method):
    """Base of the methods that need sums X'X of the head's inputs, which a client sends once.

    `precision` is that of the sums on their way: with float64 the result does not depend on the partition,
    with float32 it does so in the last digits, at half the traffic.
    """

    precision: Literal["float64", "float32"] = "float64"

    second_moments: ClassVar[bool] = True
    sums_suffice: ClassVar[bool] = True
    message_sums: ClassVar[Mapping[str, MessageSum]] = SUMS

    def check(self, model: nn.Module) -> None:
        """Refuse a network in which more than a linear head is trained."""
        names = [name for name, _ in model.named_parameters()]
        if head_names(as_model(model)) != names:
            raise FedLDError(
                f"{self.card.title} needs a frozen trunk and a linear head: "
                "set train to 'head' and head to 'linear'"
            )

    @property
    def prepares(self) -> bool:
        """Sums come before anything else."""
        return True

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Store that no client's sums are known."""
        return Server(weights, {"counted": torch.zeros(len(sizes))})

    def personal(self, server: Server, row: int) -> Tree:
        """Send whether the server has the client's sums."""
        return {"counted": server.extra["counted"][row]}

    def prepare(self, client: LocalClient) -> Tree:
        """Compute the client's sums, unless the server has them."""
        if client.message.get("counted", torch.zeros(())).item():
            return {}
        return self.sums(client)

    def sums(self, client: LocalClient) -> Tree:
        """Compute the sums that this method needs."""
        return client_sums(client, dtype=getattr(torch, self.precision))

    def prepared_lengths(self, message: Tree) -> dict[str, float]:
        """Measure the mean length of the head's inputs."""
        length = mean_length(message)
        return {} if length is None else {"mean of inputs": length}

    def message_problem(self, message: Tree, samples: int) -> str | None:
        """Refuse sums that no samples have, negative errors and losses."""
        negative = [key for key in ("errors", "losses") if key in message and bool((message[key] < 0).any())]
        if negative:
            return f"its {negative[0]} are negative"
        return sums_problem(message, samples, classes=not isinstance(self.objective, TaskObjective))

    def message_bytes(self, layout: Layout) -> int:
        """Those of the sums, by class."""
        classes, width = layout.entries[0].shape
        return 8 * classes * (width + 2) ** 2

    def gather(self, server: Server, messages: Messages) -> Server:
        """Add the new clients' sums to those of all clients."""
        new = messages.rows_with("moments")
        if not new:
            return server
        counted = server.extra["counted"].clone()
        counted[new] = 1
        extra = {**server.extra, **added(server.extra, messages.messages), "counted": counted}
        return replace(server, extra=extra)


@dataclass(frozen=True)
class ClosedForm(SumsMethod):
    """A head that is solved from sums. Subclasses say in which basis, what a choice costs, and the solution.

    `features` is "linear" or "random:N", N fixed ReLU units drawn from the run's seed; `balanced` weighs all
    classes alike; `lam` is the regularisation, 0 to choose it by the exact leave-one-out error; `temperature`
    is the factor of the logits, 0 to choose it by the leave-one-out losses.
    """

    tolerance: ClassVar[float] = 1.1
    """A regularisation may have so many times the smallest generalised error (`sum_bounds`)."""

    features: str = "linear"
    balanced: bool = False
    lam: float = 0.0
    temperature: float = 0.0

    def __post_init__(self) -> None:
        random_units(self.features)
        for option in ("lam", "temperature"):
            if not getattr(self, option) >= 0:
                raise FedLDError(f"{option} is a positive number, or 0 to have it chosen")

    def adapt(self, model: nn.Module) -> nn.Module:
        """Add random units to the network, if it is to have any."""
        units = random_units(self.features)
        return randomise_head(as_model(model), units) if units else model

    def broadcast(self, server: Server) -> Tree:
        """What leave-one-out predictions are made with, once new sums are known."""
        return {key: value for key, value in server.extra.items() if key.startswith(PLAN)}

    def gather(self, server: Server, messages: Messages) -> Server:
        """Add new sums; for them leave-one-out errors will be asked for."""
        before = server.extra["counted"].sum()
        server = super().gather(server, messages)
        if server.extra["counted"].sum() == before:
            return server
        problem = self.problem(server.extra)
        plan = planned(self.plan(problem, self.candidates(problem)))
        return replace(server, extra={**server.extra, **plan})

    def client_update(self, client: LocalClient) -> Reply:
        """Leave-one-out errors, summed over the client's images; the model stays as it is."""
        plan = plan_of(client.message)
        inputs, labels = head_inputs(client, self.codes.task)
        head = as_model(client.model).head
        logits = F.linear(inputs, head.weight.to(inputs), head.bias.to(inputs)).detach()
        if self.codes.classes:
            client.loss_sum = F.cross_entropy(logits, labels, reduction="sum").item()
        else:
            client.loss_sum = self.codes.task.losses(logits, labels).sum().item()
        client.loss_count = len(labels)
        message = leave_one_out_sums(self, plan, inputs, labels) if plan else {}
        return client.reply(message=message)

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Choose by the summed errors, and solve."""
        combined = self.aggregate(replies)
        messages = [m for m in replies.messages if "errors" in m]
        if not messages or "moments" not in server.extra:
            return server, combined
        problem = self.problem(server.extra)
        errors, losses = (sum_of([message[key] for message in messages]) for key in ("errors", "losses"))
        plan = plan_of(server.extra)
        bound = self.codes.scaled or bool(server.extra["counted"].all())  # numbers: over all clients
        lam, temperature = self.choose(problem, plan if bound else {}, errors, losses)
        weight, bias = problem.head(*self.solve(problem, lam))
        names = head_of(replies.layout)
        weights = set_head(server.weights, replies.layout, names, temperature * weight, temperature * bias)
        step = replies.layout.shared_parameters(weights - server.weights)
        extra = {key: value for key, value in server.extra.items() if not key.startswith(PLAN)}
        extra["chosen"] = torch.tensor([lam, temperature], dtype=torch.float64)
        return Server(weights, extra), replace(combined, update=step)

    def choices(self, server: Server) -> dict[str, float]:
        """Choose regularisation and temperature."""
        if "chosen" not in server.extra:
            return {}
        lam, temperature = server.extra["chosen"].tolist()
        return {"lam": lam, "temperature": temperature}

    @property
    def codes(self) -> Codes:
        """What is regressed on."""
        return codes_for(self.objective)

    def problem(self, sums: Tree) -> LinearProblem:
        """Set up the linear problem of the sums."""
        return LinearProblem.of(sums)

    def candidates(self, problem: LinearProblem) -> Tensor:
        """Regularisations to try: the one that was given, at least a safe one, or a grid around n."""
        if not self.lam:
            return problem.n * 2.0 ** torch.arange(-12, 4, dtype=torch.float64)
        safe = SAFE * problem.scatter.diagonal().sum().item()
        if self.lam < safe:
            warnings.warn(
                f"{self.card.title}: lam = {self.lam:g} leaves the sums singular; {safe:.3g} is used",
                stacklevel=2,
            )
        return torch.tensor([max(self.lam, safe)], dtype=torch.float64)

    def choose(
        self, problem: LinearProblem, plan: Tree, errors: Tensor, losses: Tensor
    ) -> tuple[float, float]:
        """Choose the regularisation of the least error, and for it the temperature of the least loss.

        With a plan only of the regularisations that are nearly the best by the sums.
        """
        k, lams = int(errors.argmin()), self.candidates(problem)
        if plan and len(lams) > 1:
            bounds = self.generalised_errors(problem, plan)
            allowed = bounds <= self.tolerance * bounds.min()
            if not allowed[k]:
                told, k = lams[k].item(), int(torch.where(allowed, errors, torch.inf).argmin())
                warnings.warn(
                    f"{self.card.title}: leave-one-out errors choose lam = {told:g}, which the sums say is "
                    f"far from the best; {lams[k].item():g} is taken",
                    stacklevel=2,
                )
        best = self.temperature or TEMPERATURES[losses[k].argmin()].item()
        return lams[k].item(), best if self.codes.scaled else 1.0

    def generalised_errors(self, problem: LinearProblem, plan: Tree) -> Tensor:
        """Give the generalised cross-validation error of least squares for every candidate."""
        values, factor, targets = self.decomposed(plan)
        total = problem.counts.square().sum() / problem.n  # what centring takes from the sum of squares
        return generalised_errors(
            values,
            factor,
            targets,
            squares=self.codes.sum_of_squares(problem.counts, problem.n) - total,
            n=problem.n,
            candidates=plan["candidates"],
        )

    def decomposed(self, plan: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """Give A = diag(values) + factor factor' and B of least squares in the plan's basis."""
        raise NotImplementedError

    def plan(self, problem: LinearProblem, candidates: Tensor) -> Tree:
        """What clients need for `leave_one_out`: at least `basis`, `mean` and `weights`."""
        raise NotImplementedError

    def leave_one_out(self, plan: Tree, z: Tensor, labels: Tensor) -> Tensor:
        """Compute logits (L, N, C) of images by every candidate, fitted without the image itself."""
        raise NotImplementedError

    def error(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the error of every image by which a candidate is chosen."""
        raise NotImplementedError

    def solve(self, problem: LinearProblem, lam: float) -> tuple[Tensor, Tensor]:
        """Compute weight (D, C) and bias (C,) for standardised inputs."""
        raise NotImplementedError


def planned(plan: Tree) -> Tree:
    """Give a plan under the names it has in messages."""
    return {f"{PLAN}{key}": value for key, value in plan.items()}


def plan_of(message: Tree) -> Tree:
    """Give the plan in a message, empty if there is none."""
    return {key.removeprefix(PLAN): value for key, value in message.items() if key.startswith(PLAN)}


def leave_one_out_sums(method: ClosedForm, plan: Tree, inputs: Tensor, labels: Tensor) -> Tree:
    """Sum errors (L,) and losses (L, T) of a client's images over candidates and temperatures."""
    codes, basis = method.codes, plan["basis"].to(inputs)
    errors = inputs.new_zeros(len(plan["candidates"]))
    losses = inputs.new_zeros(len(errors), len(TEMPERATURES))
    for x, y in zip(torch.split(inputs, IMAGES), torch.split(labels, IMAGES), strict=True):
        weights = plan["weights"][y] if codes.classes else torch.ones(len(y)).to(x)
        for k, logits in enumerate(method.leave_one_out(plan, (x - plan["mean"]) @ basis, y)):
            errors[k] += weights @ method.error(logits, y)
            losses[k] += codes.losses(logits, y, TEMPERATURES) @ weights
    return {"errors": errors, "losses": losses}


def random_units(features: str) -> int:
    """Give the number of random units, 0 where the features are taken as they are.

    >>> random_units("linear"), random_units("random:4096")
    (0, 4096)
    """
    kind, _, units = features.partition(":")
    if features == "linear":
        return 0
    if kind == "random" and units.isdecimal() and 1 <= int(units) <= MOST_UNITS:
        return int(units)
    raise FedLDError(
        "features are 'linear' or 'random:N', N units such as 'random:4096', "
        f"at most {MOST_UNITS}, not '{features}'"
    )


def cholesky_solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve a positive definite system."""
    solution: Tensor = torch.cholesky_solve(right, torch.linalg.cholesky(matrix))
    return solution
