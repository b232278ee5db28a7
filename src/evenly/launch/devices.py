"""A list of devices, one for each rank: from `--devices` or the variable EVENLY_DEVICES. No torch."""

import re
from collections.abc import Sequence

from evenly.errors import LaunchError
from evenly.launch.launchers.place import Place
from evenly.launch.settings import environment

VARIABLE = "EVENLY_DEVICES"
_NAME = re.compile(r"auto|(?P<cpu>cpu)(:0)?|(?P<cuda>cuda|gpu)(?P<index>:[0-9]{1,4})?")


def device_name(text: str) -> str | None:
    """Returns a device as torch writes it, or None for an unknown one.

    >>> device_name("gpu:1"), device_name("cpu:0"), device_name("auto"), device_name("tpu")
    ('cuda:1', 'cpu', 'auto', None)
    """
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    if match["cuda"]:
        return "cuda" if match["index"] is None else f"cuda:{int(match['index'][1:])}"
    return "cpu" if match["cpu"] else "auto"


def parse_devices(text: str, *, source: str) -> tuple[str, ...]:
    """Returns the devices in a text such as `cuda:0,cuda:1,cpu`; `source` names where it was given.

    >>> parse_devices("gpu:0, cpu:0", source="--devices")
    ('cuda:0', 'cpu')
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if device_name(word) is None:
            raise LaunchError(
                f"{source} {text[:200]} was given; {word[:40]!r} is not a device. Write cpu, cuda:0, cuda:1, ... "
                "(or cpu:0, gpu:0, ...), with commas between them."
            )
    return tuple(device_name(word) or "" for word in words)


def device_of_rank(devices: Sequence[str], place: Place, *, source: str) -> str:
    """Returns the device of the process at `place`: its rank's if all ranks are listed, else its local rank's."""
    if len(devices) == place.world_size:
        return devices[place.rank]
    fits = len(devices) == place.local_size
    if place.local_size is None:  # a launcher that does not tell it
        fits = place.local_rank < len(devices) < place.world_size
    if not fits:
        raise LaunchError(wrong_count(devices, local_size=place.local_size, world_size=place.world_size, source=source))
    return devices[place.local_rank]


def wrong_count(devices: Sequence[str], *, local_size: int | None, world_size: int, source: str) -> str:
    """Returns the message for a list that fits neither the ranks of this node nor all ranks."""
    here = "" if local_size in (None, world_size) else f", {local_size} of them on this node"
    if world_size == 1:
        start = f"evenly launch --nodes {len(devices)} --devices {','.join(devices)}"
        advice = f"Write one device, or start one process for each: {start} ..."
    else:
        advice = f"Write one device for each rank{' of this node, or for each of all ranks' if here else ''}."
    was_given = f"{source} {','.join(devices)} has {len(devices)} device{'s' if len(devices) != 1 else ''}"
    return f"{was_given}; there {'is 1 rank' if world_size == 1 else f'are {world_size} ranks'}{here}. {advice}"


def listed_device(place: Place) -> str | None:
    """Returns the device that EVENLY_DEVICES names for the process at `place`; None if the variable is not set."""
    text = environment(VARIABLE)
    if not text:
        return None
    return device_of_rank(parse_devices(text, source=VARIABLE), place, source=VARIABLE)
