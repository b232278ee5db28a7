"""Shares of a cut network where memory, not speed, is the limit."""

from collections.abc import Callable, Sequence

TRIES = 8  # layouts until one fits
SLACK = 0.97  # of a device's memory, as units are whole

Needs = Callable[[list[float]], list[float]]  # the bytes that each rank needs with these shares


def fitting_shares(speeds: Sequence[float], free: Sequence[float], needs: Needs) -> list[float] | None:
    """Returns shares in proportion to speed, reduced for ranks with too little memory; None if none were found.

    The memory of a rank grows with its share, but only `needs` knows how. A rank that needs too much is capped at the
    share for which its memory should suffice; the others take the rest in proportion to their speed.

    Args:
        speeds: of each rank.
        free: the bytes that each may use; infinite if unknown.
        needs: returns the bytes that each rank needs with given shares.

    >>> fitting_shares([1.0, 1.0], [10.0, 100.0], lambda shares: [20 + 60 * share for share in shares]) is None
    True
    >>> fitting_shares([1.0, 1.0], [32.0, 99.0], lambda shares: [20 + 60 * share for share in shares])
    [0.1..., 0.8...]
    """
    caps = [1.0] * len(speeds)
    for _ in range(TRIES):
        shares = capped(speeds, caps)
        if shares is None:
            return None
        needed_bytes = needs(shares)
        over = [rank for rank, size in enumerate(needed_bytes) if size > free[rank]]
        if not over:
            return shares
        if len(over) == len(speeds):
            return None
        least_bytes = needs([1.0 if rank not in over else 1e-4 for rank in range(len(speeds))])
        for rank in over:
            free_for_share, share_bytes = free[rank] - least_bytes[rank], needed_bytes[rank] - least_bytes[rank]
            if free_for_share <= 0 or share_bytes <= 0:
                return None
            caps[rank] = min(caps[rank] * SLACK, SLACK * shares[rank] * free_for_share / share_bytes)
    return None


def capped(speeds: Sequence[float], caps: Sequence[float]) -> list[float] | None:
    """Returns shares that add up to 1 in proportion to speed, none above its cap; None if the caps add up to less.

    >>> capped([1.0, 1.0, 2.0], [0.1, 1.0, 1.0]), capped([1.0, 1.0], [0.2, 0.3])
    ([0.1, 0.3, 0.6], None)
    """
    if sum(caps) < 1:
        return None
    fixed_shares: dict[int, float] = {}
    while True:
        rest = 1 - sum(fixed_shares.values())
        total = sum(speed for rank, speed in enumerate(speeds) if rank not in fixed_shares)
        proportional = {
            rank: rest * speed / total for rank, speed in enumerate(speeds) if rank not in fixed_shares and total
        }
        over_cap = {rank: caps[rank] for rank, share in proportional.items() if share > caps[rank]}
        if not over_cap:
            return [fixed_shares.get(rank, proportional.get(rank, 0.0)) for rank in range(len(speeds))]
        fixed_shares |= over_cap
