"""A GradScaler for cut networks: one rank's infinite gradient makes all ranks skip the step."""

import torch

from evenly._torch.scaler import AgreeingScaler
from evenly.comm import ShardGroup
from evenly.shards.parts.local_shards import local_shards_of


class GradScaler(AgreeingScaler):
    """torch's GradScaler, with the flag for infinite gradients shared over the ranks that hold the parameters."""

    def agreed(
        self, optimizer: torch.optim.Optimizer, flags: dict[torch.device, torch.Tensor]
    ) -> dict[torch.device, torch.Tensor]:
        """Returns the flags, true where a gradient is not finite on any rank."""
        local_shards = local_shards_of(p for group in optimizer.param_groups for p in group["params"])
        shard_groups: dict[int, ShardGroup] = {
            id(local_shard.shard_group): local_shard.shard_group for local_shard in local_shards
        }
        if not shard_groups or not flags:
            return flags
        device = next(iter(flags))
        worst = torch.stack([flag.to(device).float() for flag in flags.values()]).amax(0)
        for shard_group in shard_groups.values():
            worst = shard_group.sum(worst, name="scaler", largest=True).wait()
        return {flag_device: worst.to(flag) for flag_device, flag in flags.items()}
