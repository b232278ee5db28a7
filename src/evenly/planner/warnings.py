"""Reasons not to trust a measurement."""

from evenly.spec.plan import Plan, counted
from evenly.spec.profile import Profile

SHAKY = 0.25  # spread (middle half) of repeated steps above which a measurement is not reliable
FEW_SIZES = 3  # fewer do not make a curve
FAR = 4  # times more samples than were measured
THOROUGHLY = "without --quick, or in a session with profile='thorough'"


def doubts(profile: Profile, plan: Plan | None = None) -> list[str]:
    """Returns the reasons not to trust a measurement and a plan made from it; empty if there are none."""
    if not profile.is_measured:
        return []
    shaky = {device.rank: device.spread for device in profile.devices if device.spread and device.spread > SHAKY}
    few = [device.rank for device in profile.devices if len(device.step.sizes) < FEW_SIZES < profile.batch_size]
    lines = []
    if shaky:
        worst = max(shaky, key=lambda rank: shaky[rank])
        lines.append(
            f"doubtful: repeated steps of {counted(len(shaky), 'rank')} lie up to {shaky[worst]:.0%} apart (rank "
            f"{worst}). Other programs were at work: measure anew when they are not"
        )
    if few:
        lines.append(
            f"doubtful: only {counted(len(profile.devices[few[0]].step.sizes), 'size')} of a step could be timed on "
            f"ranks {few}. Measure {THOROUGHLY}"
        )
    sizes = [max(device.step.sizes) for device in profile.devices]
    far = [role for role in plan.roles if role.samples > FAR * sizes[role.rank]] if plan is not None else []
    if far:
        more = f", and {counted(len(far) - 1, 'other rank')} likewise" if len(far) > 1 else ""
        hint = "with a larger example" if sizes[far[0].rank] >= profile.batch_size else THOROUGHLY
        lines.append(
            f"doubtful: rank {far[0].rank} gets {far[0].samples} samples and was measured with {sizes[far[0].rank]} at "
            f"most{more}{'' if few else f'. Measure {hint}'}"
        )
    return lines
