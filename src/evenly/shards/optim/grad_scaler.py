"""A GradScaler for cut networks: one rank's infinite gradient makes all ranks skip the step."""

from typing import Any

import torch

from evenly._torch.scaler import AgreeingScaler
from evenly.comm import ShardGroup
from evenly.shards.parts.local_shards import local_shards_of


class GradScaler(AgreeingScaler):
    """torch's GradScaler, with the flag for infinite gradients shared over the ranks that hold the parameters."""

    def agreed(self, optimizer: torch.optim.Optimizer, flags: dict[torch.device, Any]) -> dict[torch.device, Any]:
        """Returns the flags, true where a gradient is not finite on any rank."""
        found = local_shards_of(p for group in optimizer.param_groups for p in group["params"])
        shard_groups: dict[int, ShardGroup] = {id(placement.shard_group): placement.shard_group for placement in found}
        if not shard_groups or not flags:
            return flags
        device = next(iter(flags))
        worst = torch.stack([flag.to(device).float() for flag in flags.values()]).amax(0)
        for shard_group in shard_groups.values():
            worst = shard_group.sum(worst, name="scaler", largest=True).wait()
        return {place: worst.to(flag) for place, flag in flags.items()}
