"""Plans inside a session: from equal batches, given shares, or measurements."""

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from evenly import planner
from evenly.errors import SpecError
from evenly.graph import Example, trace_module
from evenly.session.active_ranks import ActiveRanks
from evenly.session.by_hand import measure_rank_group
from evenly.session.sharding import plan_replicas
from evenly.spec import Every, EverySeconds, Exchange, ExchangeWishes, Plan, Profile, period_of

logger = logging.getLogger(__name__)
TIMEOUT_S = 600.0  # for measuring on a slow rank


def plan_run(
    active_ranks: ActiveRanks,
    device: torch.device,
    model: torch.nn.Module | None,
    example: Example | None,
    every: Every | None,
    profile: Profile | Literal["quick", "thorough"],
    exchange: Exchange,
    *,
    batch_size: int | None,
    global_batch: int | None,
    shares: Sequence[float] | None,
    cut_batch: bool,
    tell: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Returns the plan of a run; all ranks call it together and get the same."""
    if (batch_size is None) == (global_batch is None):
        raise SpecError(
            f"batch_size={batch_size} and global_batch={global_batch} were given. Give one of them: the samples of "
            "every rank, or those of all ranks together, dealt out by what is measured."
        )
    if batch_size is not None:
        if batch_size < 1:
            raise SpecError(f"batch_size={batch_size} was asked for; a rank takes at least 1 sample a step.")
        period = period_of("epoch" if every is None else every)
        plan = Plan.even(active_ranks.cluster, batch_size=batch_size, period=period, exchange=exchange)
        replicas = plan_replicas(model, example, active_ranks.cluster, shares, cut_batch=cut_batch)
        return Plan(**{**dict(plan), "replicas": replicas})
    if model is None or example is None:
        raise SpecError(
            "global_batch was given without a network. Give the model and an example too: plan(model, example)."
        )
    if shares is not None or cut_batch:
        raise SpecError(
            f"{'cut_batch' if shares is None else 'shares'} and global_batch were given, but a plan from measurements "
            "finds shares and cuts itself. Give batch_size instead, or leave it out."
        )
    return plan_measured(
        active_ranks,
        device,
        model,
        example,
        profile=profile,
        tell=tell,
        batch_size=global_batch,
        every=every,
        exchange=exchange,
    )


def exchange_of(wishes: ExchangeWishes, *, timeout_s: float) -> Exchange:
    """Returns the exchange settings; raises `SpecError` for unknown ones."""
    fields = ExchangeWishes.__annotations__
    if unknown := sorted(wishes.keys() - fields.keys()):
        raise SpecError(
            f"plan was given {unknown[0]}=, which it does not know. Besides model, example, batch_size, global_batch, "
            f"shares, cut_batch, every and profile it takes what says how nodes exchange: {', '.join(fields)}."
        )
    return Exchange(**wishes, timeout_s=timeout_s)


def plan_measured(
    active_ranks: ActiveRanks,
    device: torch.device,
    model: torch.nn.Module,
    example: Example,
    *,
    profile: Profile | Literal["quick", "thorough"],
    tell: Callable[[str], None],
    batch_size: int | None,
    every: Every | None,
    exchange: Exchange,
) -> Plan:
    """Returns the plan with the shortest step, from a given profile or one measured now."""
    if not isinstance(profile, Profile) and profile not in ("quick", "thorough"):
        raise SpecError(
            f"profile={profile!r} was given to plan. Give a Profile, such as Profile.load('profile.json'), or 'quick' "
            "or 'thorough' to measure now."
        )
    traced = trace_module(model.to(device), example)
    if not isinstance(profile, Profile):
        if active_ranks.rank_group.rank == 0:
            logger.info("measuring %s on %d ranks for a plan", type(model).__name__, active_ranks.rank_group.size)
        profile = measure_rank_group(
            active_ranks.rank_group,
            traced,
            active_ranks.cluster,
            device,
            quick=profile == "quick",
            tell=tell,
            timeout_s=TIMEOUT_S,
            parent=active_ranks.monitor,
        )
    plan = planner.plan(
        active_ranks.cluster, profile, traced.graph, batch_size=batch_size, every=every, exchange=exchange
    )
    for doubt in planner.doubts(profile, plan) if active_ranks.rank_group.rank == 0 else ():
        logger.warning("the plan is %s", doubt)
    return Plan.from_json(
        active_ranks.gatherer.gather(plan.to_json() if active_ranks.rank_group.rank == 0 else "", "the plan")[0]
    )


def require_count(name: str, value: object, *, least: int) -> None:
    """Raises `SpecError` unless the value is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(f"{name} was given {str(value)[:40]}. Give a whole number of at least {least}.")


def require_numbers(*, seed: int, checkpoint_every: int | str | None = None, keep: int = 1) -> None:
    """Raises `SpecError` for numbers that a session cannot work with."""
    is_steps = isinstance(checkpoint_every, int) and not isinstance(checkpoint_every, bool) and checkpoint_every > 0
    if not is_steps and checkpoint_every not in ("epoch", None):
        raise SpecError(
            f"checkpoint_every={checkpoint_every!r} was asked for. Give a number of steps, 'epoch' or None."
        )
    require_count("keep", keep, least=1)
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise SpecError(f"seed={str(seed)[:40]} was asked for. Give a whole number between -2^63 and 2^63.")


def require_epochs(plan: Plan, checkpoint_every: int | str | None, *, models: int) -> None:
    """Raises `SpecError` for checkpoints by steps, or a second model, if nodes make unequal numbers of steps."""
    if isinstance(plan.period, EverySeconds) and models:
        raise SpecError(
            f"a period of {plan.period.seconds:g} s was asked for a second model, but nodes would exchange the two in "
            "different orders and wait for each other. Count the periods of both in steps."
        )
    if isinstance(plan.period, EverySeconds) and isinstance(checkpoint_every, int):
        raise SpecError(
            f"checkpoint_every={checkpoint_every} steps was asked for, but with a period of {plan.period.seconds:g} s "
            "nodes make unequal numbers of them. Save every 'epoch', or count the period in steps."
        )


def require_evaluation(*, train: bool) -> None:
    """Raises `SpecError` for batches to train with, which only `prepare` makes."""
    if train:
        raise SpecError(
            "feed(train=True) was called, but batches to train with come from prepare(), which counts their samples. "
            "Give the dataset to prepare(); feed(train=False) is for evaluation."
        )
