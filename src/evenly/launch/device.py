"""The device of a rank."""

import torch

from evenly.errors import LaunchError
from evenly.launch.devices import device_name, listed_device
from evenly.launch.launchers.place import Place


def pick_device(place: Place, wish: str = "auto") -> torch.device:
    """Returns the device `wish` names: "auto", "cpu", "cuda" or "cuda:1"; also "cpu:0", "gpu" or "gpu:1".

    "auto" is what `evenly launch --devices` or the variable EVENLY_DEVICES names for this rank; without them "cuda"
    where there is one and "cpu" elsewhere. "cuda" is the GPU of the local rank, modulo their number.
    """
    listed = listed_device(place) if wish == "auto" else None
    device = choose_device(listed or wish, local_rank=place.local_rank)
    if device is None:
        raise LaunchError(
            f"rank {place.rank} was asked to use the device {listed or wish!r}"
            f"{' by EVENLY_DEVICES' if listed else ''}; this process sees {', '.join(visible_devices())}. "
            'Ask for one of these, or for "auto".'
        )
    return device


def choose_device(wish: str, *, local_rank: int) -> torch.device | None:
    """Returns the device `wish` names for a local rank, or None if this process does not see it."""
    name = device_name(wish)
    num_gpus = _num_gpus()
    if name == "cpu" or (name == "auto" and not num_gpus):
        return torch.device("cpu")
    if name in ("auto", "cuda") and num_gpus:
        return torch.device("cuda", local_rank % num_gpus)
    device = None if name in (None, "auto", "cuda") else torch.device(str(name))
    return device if device is not None and device.index < num_gpus else None


def visible_devices() -> list[str]:
    """Returns the names of the devices that this process can use."""
    return ["cpu", *(f"cuda:{gpu}" for gpu in range(_num_gpus()))]


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
