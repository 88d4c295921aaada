"""The clients' optimisers on the flat vector, and their learning rate over the rounds of a run.

There is one fused kernel for all parameters of one learning rate. Optimisers go through torch's functions,
since making a `torch.optim` object imports the compiler: 1.5 s in every process.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedld.errors import FedLDError
from fedld.layout import FlatModel, Layout, Tree
from fedld.registry import Registry, require_callable

Kind = Literal["sgd", "nesterov", "adam", "adamw"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class OptimiserSettings:
    """What every client's optimiser has in common.

    sgd       v <- momentum v + g + weight_decay w;  w <- w - lr v
    nesterov  the same v;  w <- w - lr (g + weight_decay w + momentum v)
    adam      Kingma and Ba 2015, weight decay as a part of the gradient
    adamw     Loshchilov and Hutter 2019, weight decay apart: w <- (1 - lr weight_decay) w

    `keeps_moments`: a client goes on in its next round with the moments that it had. `clip` bounds the length
    of a batch's gradient, before weight decay and a method's correction. `head_lr` is the learning rate of
    the head's parameters. `centred` steps are those of `fedld.models.centring`.
    """

    kind: Kind = "sgd"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    keeps_moments: bool = False
    clip: float | None = None
    head_lr: float | None = None
    centred: bool = False

    @cached_property
    def adaptive(self) -> bool:
        """Whether a step is no linear combination of gradients."""
        return self.kind in ("adam", "adamw")

    @property
    def linear(self) -> bool:
        """Whether the way that a round went is one rate times a weighted sum of its gradients."""
        return not (self.adaptive or self.keeps_moments or self.head_lr is not None or self.centred)


@dataclass(frozen=True)
class ParameterGroup:
    """Parts of the flat vector that move at one learning rate."""

    lr: float
    spans: tuple[slice, ...]


def parameter_groups(
    layout: Layout, lr: float, only: Collection[str] | None, special: Mapping[str, float]
) -> list[ParameterGroup]:
    """Group parameters by learning rate.

    Args:
        layout: where the parameters lie.
        lr: learning rate of all parameters that `special` does not name.
        only: names of the parameters that move; None: all.
        special: learning rates of single parameters, by name.

    Returns:
        One group per learning rate; one span for everything where nothing is special.
    """
    if only is None and not special:
        return [ParameterGroup(lr, (slice(None),))]
    spans: dict[float, list[slice]] = {}
    for entry in layout.entries:
        if entry.kind == "parameter" and (only is None or entry.name in only):
            rate = special.get(entry.name, lr)
            spans.setdefault(rate, []).append(slice(entry.start, entry.start + entry.size))
    return [ParameterGroup(rate, tuple(parts)) for rate, parts in spans.items()]


class Optimiser:
    """Steps of one call of `LocalClient.train`.

    Args:
        flat: the model.
        groups: which parameters move, and how fast.
        settings: kind and constants.
        momentum: of sgd and nesterov.
        weight_decay: of every kind.
        corrected: whether a correction follows the gradient. Weight decay that is a part of the gradient is
            then added before it, by `decay`.
        moments: what `moments` gave at the end of the client's last round.
    """

    def __init__(
        self,
        flat: FlatModel,
        groups: Sequence[ParameterGroup],
        settings: OptimiserSettings,
        *,
        momentum: float,
        weight_decay: float,
        corrected: bool = False,
        moments: Tree | None = None,
    ) -> None:
        self.settings, self.momentum, self.full_decay = settings, momentum, weight_decay
        self.decoupled = settings.kind == "adamw"
        self.weight_decay = 0.0 if corrected and not self.decoupled else weight_decay
        self.parts = [_Part(flat, group, settings.adaptive) for group in groups]
        if moments:
            self._load(moments)

    def decay(self) -> None:
        """Compute g <- g + weight_decay w, before a correction: `step` then adds none."""
        if self.full_decay and not self.decoupled:
            for part in self.parts:
                for weights, gradient in zip(part.weights, part.gradients, strict=True):
                    gradient.add_(weights, alpha=self.full_decay)

    def step(self) -> None:
        """Move the weights by the gradient as it is."""
        for part in self.parts:
            if self.settings.adaptive:
                self._adam(part)
            else:
                self._sgd(part)

    def moments(self) -> Tree:
        """Give the moments as flat tensors, for a client that keeps them."""
        moments: Tree = {}
        for name in ("mean", "square"):
            pieces = [t for part in self.parts for t in getattr(part, name) if t is not None]
            moments |= {name: torch.cat(pieces)} if pieces else {}
        if self.settings.adaptive:
            moments["steps"] = torch.stack([step for part in self.parts for step in part.steps])
        return moments

    def _load(self, moments: Tree) -> None:
        sizes = [len(weights) for part in self.parts for weights in part.weights]
        for name in ("mean", "square"):
            if name in moments:
                pieces = iter(torch.split(moments[name].clone(), sizes))
                for part in self.parts:
                    setattr(part, name, [next(pieces) for _ in part.weights])
        if "steps" in moments:
            steps = iter(moments["steps"].clone())
            for part in self.parts:
                part.steps = [next(steps) for _ in part.weights]

    def _sgd(self, part: "_Part") -> None:
        sgd(
            part.weights,
            part.gradients,
            part.mean,
            fused=True,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=part.lr,
            dampening=0.0,
            nesterov=self.settings.kind == "nesterov",
            maximize=False,
        )

    def _adam(self, part: "_Part") -> None:
        adam(
            part.weights,
            part.gradients,
            [mean for mean in part.mean if mean is not None],
            part.square,
            [],
            part.steps,
            fused=True,
            decoupled_weight_decay=self.decoupled,
            amsgrad=False,
            beta1=self.settings.beta1,
            beta2=self.settings.beta2,
            lr=part.lr,
            weight_decay=self.weight_decay,
            eps=self.settings.epsilon,
            maximize=False,
        )


class _Part:
    """A parameter group's views and moments; `mean` is SGD's momentum, or Adam's first moment."""

    def __init__(self, flat: FlatModel, group: ParameterGroup, adaptive: bool) -> None:
        self.lr = group.lr
        self.weights = [flat.weights[span].detach() for span in group.spans]
        self.gradients = [flat.gradient[span] for span in group.spans]
        self.mean: list[Tensor | None] = [torch.zeros_like(w) if adaptive else None for w in self.weights]
        self.square = [torch.zeros_like(w) for w in self.weights] if adaptive else []
        self.steps = [torch.zeros((), device=w.device) for w in self.weights] if adaptive else []


ScheduleKind = Literal["constant", "cosine", "step", "own"]
SCHEDULES: Registry[ScheduleKind] = Registry(
    "lr_schedule",
    {"constant": "constant", "cosine": "cosine", "step": "step"},
    accept=require_callable("lr_schedule", "or a function from the round (1, 2, ...) to a factor of lr"),
)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What the learning rate is multiplied by in a round.

    warmup: rounds in which the factor grows by equal steps, to reach 1 in the round after them.
    constant: 1.
    cosine: (1 + cos(pi t / T)) / 2 in round t = 0 .. T - 1 after the warm-up, so that the last still moves.
    step: `decay` once more after every `every` rounds.
    own: what the user's `function` of the round says, without a warm-up of ours.

    >>> [Schedule(kind="step", rounds=7, warmup=1, every=2, decay=0.5).factor(r) for r in range(1, 8)]
    [0.5, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """

    kind: ScheduleKind = "constant"
    rounds: int = 1
    warmup: int = 0
    every: int = 1
    decay: float = 0.1
    function: Callable[[int], float] | None = None

    def factor(self, round_: int) -> float:
        """Give the factor in a round, the first being 1.

        Raises:
            FedLDError: the user's function fails, or gives no positive number.
        """
        if self.function is not None:
            return _own_factor(self.function, round_)
        after = round_ - 1 - self.warmup
        if after < 0:
            return round_ / (self.warmup + 1)
        match self.kind:
            case "constant":
                return 1.0
            case "cosine":
                return (1 + math.cos(math.pi * after / max(1, self.rounds - self.warmup))) / 2
            case "step":
                return float(self.decay ** (after // self.every))
            case "own":
                raise FedLDError("a schedule of one's own needs its function")


def _own_factor(function: Callable[[int], float], round_: int) -> float:
    try:
        factor = float(function(round_))
    except Exception as error:  # whatever the user's function raises
        text = f"lr_schedule failed in round {round_}: {type(error).__name__}: {error}"
        raise FedLDError(text) from error
    if not 0 < factor < math.inf:
        raise FedLDError(f"lr_schedule gave {factor} in round {round_}: a factor of lr must be positive")
    return factor
