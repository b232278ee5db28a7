"""The device of a rank."""

import torch

from evenly.errors import LaunchError
from evenly.launch.launchers.place import Place


def pick_device(place: Place, wish: str = "auto") -> torch.device:
    """Returns the device `wish` names: "auto", "cpu", "cuda" or "cuda:1".

    "auto" is "cuda" where there is one and "cpu" elsewhere; "cuda" is the GPU of the local rank, modulo their number.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wish == "cpu" or (wish == "auto" and not num_gpus):
        return torch.device("cpu")
    if wish in ("auto", "cuda") and num_gpus:
        return torch.device("cuda", place.local_rank % num_gpus)
    kind, _, index = wish.partition(":")
    if kind == "cuda" and index.isdecimal() and int(index) < num_gpus:
        return torch.device("cuda", int(index))
    available = ", ".join(["cpu", *(f"cuda:{gpu}" for gpu in range(num_gpus))])
    raise LaunchError(
        f"rank {place.rank} was asked to use the device {wish!r}; this process sees {available}. "
        'Ask for one of these, or for "auto".'
    )
