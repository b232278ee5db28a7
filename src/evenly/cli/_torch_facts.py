"""What torch can do on this machine, as one JSON object on standard output.

`evenly doctor` runs it as a process of its own: a torch that cannot be loaded, or a driver that hangs, must not take
the doctor with it.
"""

import json
import sys


def torch_facts() -> dict[str, object]:
    """Returns version, build, backends and GPUs of torch."""
    import torch
    import torch.distributed as dist

    is_built = dist.is_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "backends": {
            "gloo": is_built and dist.is_gloo_available(),
            "nccl": is_built and dist.is_nccl_available(),
            "mpi": is_built and dist.is_mpi_available(),
        },
        "gpus": _gpus(),
    }


def _gpus() -> list[dict[str, object]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [{"name": properties.name, "memory_bytes": properties.total_memory} for properties in found]


def train_a_step() -> None:
    """Trains one step as a session does, on the CPU, in a process group of one rank; raises where that fails."""
    import torch
    from torch.utils.data import TensorDataset

    from evenly.launch import find_place
    from evenly.session import Session

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(device="cpu", place=find_place({}), progress=False) as session:
        plan = session.plan(batch_size=2, every=1)
        network, _, loader = session.prepare(model, optimizer, TensorDataset(torch.ones(2, 4)), plan=plan)
        for _ in session.epochs(1):
            for (x,) in loader:
                network(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()


def main() -> None:
    """Prints the facts, then whether a step trains."""
    facts = torch_facts()
    try:
        train_a_step()
    except Exception as error:  # whatever stops training is what the doctor looks for
        facts["problem"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    json.dump(facts, sys.stdout)


if __name__ == "__main__":
    main()
