"""A network that is trained with little memory, by a rank alone or by several; in processes of their own."""

import resource
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import evenly
from evenly.shards import full_state_dict

STEPS, BATCH = 3, 6


def network() -> nn.Module:
    """Returns 8.4 million parameters, 67 MB."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024)]
    return nn.Sequential(*layers).double()


def train(allowance: int | None, shares: list[float] | None, file: str) -> str:
    """Trains with at most `allowance` more bytes than now; rank 0 writes the state. Returns the error, if any."""
    if shares is not None:
        dist.init_process_group("gloo")
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if allowance is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + allowance, hard))
    try:
        state = _train(shares, hard)
    except (RuntimeError, MemoryError) as error:
        return str(error)
    if shares is None or dist.get_rank() == 0:
        torch.save(state, file)
    if shares is not None:
        dist.barrier()
        dist.destroy_process_group()
    return ""


def _train(shares: list[float] | None, hard: int) -> dict[str, torch.Tensor]:
    model = network()
    x = torch.randn(BATCH, 1024, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if shares is not None:
        model = evenly.shard(model, x, shares=shares)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # the whole state is gathered for the test only
    return dict(model.state_dict() if shares is None else full_state_dict(model)["model"])


def _data_bytes() -> int:
    """Returns the private memory that this process has mapped for writing."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmData"))
