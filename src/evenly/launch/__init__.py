"""Launchers, the place of this process, and the opening of the world. Only this package reads the environment."""

from typing import TYPE_CHECKING

from evenly.errors import LaunchError
from evenly.launch.find import find_place
from evenly.launch.launchers.launcher import Launcher
from evenly.launch.launchers.place import Place
from evenly.launch.settings import environment, overlay

if TYPE_CHECKING:
    from evenly.launch.device import pick_device
    from evenly.launch.host import Identity, identity
    from evenly.launch.world import World, open_world

__all__ = [
    "Identity",
    "LaunchError",
    "Launcher",
    "Place",
    "World",
    "environment",
    "find_place",
    "identity",
    "open_world",
    "overlay",
    "pick_device",
]


def __getattr__(name: str) -> object:
    """Returns the names that need torch or pydantic, which are imported only when one of them is asked for."""
    if name in ("Identity", "identity"):
        from evenly.launch import host

        return getattr(host, name)
    if name == "pick_device":
        from evenly.launch.device import pick_device

        return pick_device
    if name in ("World", "open_world"):
        from evenly.launch import world

        return getattr(world, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
