"""The optimizers and schedules that have a name, with their options. No torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from evenly.errors import SpecError
from evenly.recipes.names import did_you_mean


@dataclass(frozen=True)
class OptimizerInfo:
    """An optimizer that `build_optimizer` makes.

    `momentum` is the option that `momentum=` sets: "momentum", "betas" (the first of them), or None if there is none.
    `decay` says what weight decay is: "L2" (added to the gradient) or "decoupled" (taken off the parameter).
    """

    module: str
    callable: str
    lr: float
    momentum: str | None
    decay: str
    options: tuple[str, ...]
    fixed: Mapping[str, object] = field(default_factory=dict)
    extra: str | None = None  # of this package, which installs the module
    summary: str = ""


@dataclass(frozen=True)
class ScheduleInfo:
    """A schedule that `build_schedule` makes: its options with their defaults."""

    options: Mapping[str, object]
    summary: str


_ADAM = ("betas", "eps", "amsgrad", "foreach", "fused")
_PYTORCH_OPTIMIZER = ("betas", "eps", "weight_decouple", "fixed_decay", "rectify", "ams_bound", "foreach")
_ANGULAR_GRAD = ("betas", "eps", "lambdas")
_ANGULAR_GRAD_MODULE = "evenly.recipes.optim.angulargrad"

OPTIMIZERS: Mapping[str, OptimizerInfo] = MappingProxyType(
    {
        "sgd": OptimizerInfo(
            "torch.optim", "SGD", 0.1, "momentum", "L2", ("nesterov", "dampening", "foreach", "fused"),
            summary="stochastic gradient descent; momentum 0.9 unless another is given",
        ),
        "rmsprop": OptimizerInfo(
            "torch.optim", "RMSprop", 1e-3, "momentum", "L2", ("alpha", "eps", "centered", "foreach"),
            summary="gradients divided by their root mean square; no momentum unless one is given",
        ),
        "adam": OptimizerInfo("torch.optim", "Adam", 1e-3, "betas", "L2", _ADAM, summary="adaptive moments"),
        "adamw": OptimizerInfo(
            "torch.optim", "AdamW", 1e-3, "betas", "decoupled", _ADAM, summary="Adam with decoupled weight decay"
        ),
        "adafactor": OptimizerInfo(
            "evenly.shards", "Adafactor", 1e-2, None, "decoupled", ("beta2_decay", "eps", "d"),
            summary="factored second moments; the results of torch.optim.Adafactor, also on cut networks",
        ),
        "diffgrad": OptimizerInfo(
            "pytorch_optimizer", "DiffGrad", 1e-3, "betas", "decoupled", _PYTORCH_OPTIMIZER, extra="optim",
            summary="Adam, scaled by the change of consecutive gradients",
        ),
        "adabelief": OptimizerInfo(
            "pytorch_optimizer", "AdaBelief", 1e-3, "betas", "decoupled", _PYTORCH_OPTIMIZER, extra="optim",
            summary="Adam, with the deviation of gradients from their mean",
        ),
        "angulargrad-cos": OptimizerInfo(
            _ANGULAR_GRAD_MODULE, "AngularGrad", 1e-3, "betas", "L2", _ANGULAR_GRAD, {"angle": "cos"},
            summary="Adam, scaled by the cosine of the angle between consecutive gradients",
        ),
        "angulargrad-tan": OptimizerInfo(
            _ANGULAR_GRAD_MODULE, "AngularGrad", 1e-3, "betas", "L2", _ANGULAR_GRAD, {"angle": "tan"},
            summary="Adam, scaled by the tangent of the angle between consecutive gradients",
        ),
    }
)  # fmt: skip

SCHEDULES: Mapping[str, ScheduleInfo] = MappingProxyType(
    {
        "none": ScheduleInfo({}, "the learning rate stays"),
        "step": ScheduleInfo({"epochs": 30, "gamma": 0.1}, "times gamma after every so many epochs"),
        "multistep": ScheduleInfo(
            {"milestones": None, "gamma": 0.1},
            "times gamma at each milestone, in epochs; none: after half and three quarters of the run",
        ),
        "cosine": ScheduleInfo(
            {"warmup": 0.05, "final": 0.0}, "up linearly for a share of the run, and along a cosine to a share of lr"
        ),
        "one-cycle": ScheduleInfo(
            {"shape": "cosine", "peak": 0.3, "start": 0.04, "final": 4e-6, "cycle_momentum": None,
             "momenta": (0.85, 0.95)},
            "from start x lr up to lr at a share of the run, down to final x lr; momentum the other way",
        ),
    }
)  # fmt: skip


def require_known(kind: str, name: str, known: Collection[str], *, of: str = "") -> None:
    """Raises `SpecError` with the nearest name for one that is not known; `kind` says what it would be."""
    if name in known:
        return
    advice = did_you_mean(name, known) or f" Choose one of: {', '.join(known)}."
    case = f"it has {', '.join(known) or 'none'}" if of else f"known are {', '.join(known)}"
    raise SpecError(f"the {kind} {name!r} was asked for{of and f' of {of}'}; {case}.{advice}")
