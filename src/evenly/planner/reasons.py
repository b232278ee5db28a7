"""Texts that say why ranks are left out of a plan, and why a network is cut."""

from collections.abc import Sequence

from evenly.planner.memory import MemoryNeed
from evenly.spec.profile import Profile

EASED = 0.9  # a rank that needs less than this part of its time while others are idle is the reason to leave them out


def costs_more(with_s: float, without_s: float) -> str:
    """Returns why a node is left out: steps are shorter without it, exchanges included."""
    case = "exchanges with this node cost more than it helps"
    return f"{case}: {_ms(with_s)} a step with all that help, {_ms(without_s)} without"


def why_cut(ranks: Sequence[int], need: MemoryNeed, free: Sequence[int], most: int, batch: int) -> str:
    """Returns why these ranks hold one network together.

    Args:
        ranks: those that do.
        need: the memory of a whole network.
        free: the memory of each rank.
        most: the samples that fit into memory if every rank holds a whole network.
        batch: the samples of a step.
    """
    small = [free[rank] for rank in ranks if need.samples_in(free[rank]) < 1]
    if small:
        return f"{min(small) / 1e9:.3g} GB do not hold a whole network and a sample"
    if most < batch:
        return f"whole networks have memory for {most} of the {batch} samples"
    return "so steps are shorter"


def why_left_out(
    rank: int, step_s: float, node: Sequence[int], profile: Profile, need: MemoryNeed, free: Sequence[int]
) -> str:
    """Returns why a rank is left out of steps that take `step_s`.

    Args:
        rank: the one that is left out.
        step_s: the seconds of a step without it.
        node: the ranks of its node.
        profile: how fast they are.
        need: the memory of a whole network.
        free: the memory of each rank.
    """
    if need.samples_in(free[rank]) < 1:
        return f"its {free[rank] / 1e9:.3g} GB do not hold the network and a sample"
    own_s, averaging_s = profile.devices[rank].step.at(1), profile.devices[rank].averaging_s or 0.0
    if own_s > step_s:
        return f"one sample would take it {_ms(own_s)}, longer than the step"
    others = [other for other in node if other != rank]
    helped = min(others, key=lambda other: profile.devices[other].alone, default=rank)
    if others and (eased := profile.devices[helped].alone) < EASED:
        return f"rank {helped} of its node runs {1 / eased:.1f}x faster while this rank is idle"
    if own_s + averaging_s > step_s:
        return f"a sample takes it {_ms(own_s)} and averaging {_ms(averaging_s)}, longer than the step"
    if not others:
        return "the batch is done as soon without it"
    return "averaging with it takes longer than it can help"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds < 1 else f"{1e3 * seconds:.0f} ms"
