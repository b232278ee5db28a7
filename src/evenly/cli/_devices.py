"""The option `--devices`: one device for each rank."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from evenly.errors import LaunchError
from evenly.launch.devices import device_of_rank, parse_devices
from evenly.launch.find import find_place
from evenly.reports.plan_table import named
from evenly.spec import Cluster

OPTION = "--devices"


def device_of_this_rank(text: str) -> str:
    """Returns the device that `--devices TEXT` names for this process, in its place in the world."""
    with as_bad_parameter():
        place = find_place()
        device = device_of_rank(parse_devices(text, source=OPTION), place, source=OPTION)
        require_devices([device], source=f"{OPTION} {text[:200]}")
    return device


@contextmanager
def as_bad_parameter() -> Iterator[None]:
    """Turns an error in the option into one of the command line, which ends with exit code 2."""
    try:
        yield
    except LaunchError as error:
        raise typer.BadParameter(str(error)) from None


def require_devices(devices: Sequence[str], *, source: str) -> None:
    """Raises `LaunchError` for a device that this machine does not have; loads torch only to look for CUDA devices."""
    if all(device in ("auto", "cpu") for device in devices):
        return
    from evenly.launch.device import choose_device, visible_devices

    for device in devices:
        if choose_device(device, local_rank=0) is None:
            raise LaunchError(
                f"{source} was given; torch sees no {device} here, only {', '.join(visible_devices())}. "
                "Name devices that it sees; a GPU needs its driver, a torch built with CUDA, and CUDA_VISIBLE_DEVICES "
                "that shows it."
            )


def shared_in_list(devices: Sequence[str], *, first_rank: int = 0) -> list[str]:
    """Returns a line for each CUDA device that several ranks of one machine were given."""
    ranks: dict[str, list[int]] = {}
    for rank, device in enumerate(devices, start=first_rank):
        if device.startswith("cuda:"):
            ranks.setdefault(device, []).append(rank)
    return [_words(device, members) for device, members in ranks.items() if len(members) > 1]


def shared_in_cluster(cluster: Cluster) -> list[str]:
    """Returns a line for each CUDA device that several ranks of a node use."""
    lines = []
    for node in cluster.nodes:
        ranks: dict[str, list[int]] = {}
        names: dict[str, str] = {}
        for rank, device in zip(node.ranks, node.devices, strict=True):
            if device.kind == "cuda":
                hardware = device.identity or str(device.index)  # each rank may see only its own GPU, as cuda:0
                ranks.setdefault(hardware, []).append(rank)
                names[hardware] = f"cuda:{device.index}{f' of {node.name}' if len(cluster.nodes) > 1 else ''}"
        lines += [_words(names[hardware], members) for hardware, members in ranks.items() if len(members) > 1]
    return lines


def _words(device: str, ranks: Sequence[int]) -> str:
    return f"{named(ranks)} share {device}: its memory and its time, and they communicate by gloo instead of NCCL"
