"""The emulated links: a namespace per node, and a veth pair from each to a bridge in a namespace of its own.

The bridge has its own namespace too, so that no interface, address or route of the host is touched, and so that
interface names need not differ between labs.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from evenly.errors import LabError
from evenly.lab._tools import call
from evenly.lab.cluster import LabNode

INTERFACE = "eth0"
_NAMESPACES = Path("/var/run/netns")
_BURST_S = 0.005
_MIN_BURST_BYTES = 16_384
_QUEUE_S = 0.05


def address(index: int) -> str:
    """Returns the address of a node inside the lab.

    >>> address(0), address(250)
    ('10.77.0.1', '10.77.1.1')
    """
    return f"10.77.{index // 250}.{index % 250 + 1}"


def namespace_path(lab: str, *, index: int) -> Path:
    """Returns the file of a node's network namespace."""
    return _NAMESPACES / _node(lab, index)


def build(lab: str, *, nodes: Sequence[LabNode]) -> None:
    """Makes the namespaces, the links and the bridge, and shapes the links."""
    names = [_switch(lab), *(_node(lab, index) for index in range(len(nodes)))]
    call("ip", "-batch", "-", lines=[f"netns add {name}" for name in names], what="make the nodes' namespaces")
    commands = ["link add bridge0 type bridge mcast_snooping 0", *_up("bridge0")]
    for index in range(len(nodes)):
        commands.append(f"link add port{index} type veth peer name {INTERFACE} netns {_node(lab, index)}")
        commands += [f"link set port{index} master bridge0", *_up(f"port{index}")]
    call("ip", "-n", _switch(lab), "-batch", "-", lines=commands, what="make the links between the nodes")
    for index, node in enumerate(nodes):
        ends = ["link set lo up", *_up(INTERFACE), f"addr add {address(index)}/16 dev {INTERFACE}"]
        call("ip", "-n", _node(lab, index), "-batch", "-", lines=ends, what=f"give {node.name} its address")
        if node.rate_mbit is not None:
            shape(lab, index=index, rate_mbit=node.rate_mbit)


def shape(lab: str, *, index: int, rate_mbit: float | None) -> None:
    """Sets the rate of a node's link in both directions, None for no limit."""
    ends = ((_node(lab, index), INTERFACE), (_switch(lab), f"port{index}"))
    for namespace, interface in ends:
        command = ("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root")
        call(*command, *_discipline(rate_mbit), what=f"set the rate of node {index} to {rate_mbit} Mbit/s")


def connect(lab: str, *, index: int, is_connected: bool) -> None:
    """Lets packets of a node pass the switch, or none."""
    state = "up" if is_connected else "down"
    call("ip", "-n", _switch(lab), "link", "set", f"port{index}", state, what=f"set the cable of node {index} {state}")


def counters(lab: str, *, num_nodes: int) -> tuple[tuple[int, int], ...]:
    """Returns for each node the bytes it has sent and received over its link since the lab was built."""
    text = call("ip", "-n", _switch(lab), "-j", "-s", "link", what="read the byte counters")
    stats = {link["ifname"]: link["stats64"] for link in json.loads(text)}
    ports = [stats[f"port{index}"] for index in range(num_nodes)]
    return tuple((port["rx"]["bytes"], port["tx"]["bytes"]) for port in ports)  # the port receives what the node sends


def namespaces() -> set[str]:
    """Returns the names of all network namespaces of this machine that have one."""
    return {entry.name for entry in _NAMESPACES.iterdir()} if _NAMESPACES.is_dir() else set()


def remove(names: Sequence[str]) -> None:
    """Removes namespaces and with them their links; what is gone already is no error."""
    for name in names:
        try:
            call("ip", "netns", "delete", name, what="remove a namespace")
        except LabError:
            if name in namespaces():
                raise


def _up(interface: str) -> list[str]:
    # Without a link-local address there is no neighbour discovery among the bytes that are counted.
    quiet = [f"link set {interface} addrgenmode none"] if Path("/proc/net/if_inet6").exists() else []
    return [*quiet, f"link set {interface} up"]


def _discipline(rate_mbit: float | None) -> tuple[str, ...]:
    if rate_mbit is None:
        return ("noqueue",)
    bits_per_s = round(rate_mbit * 1e6)
    burst_bytes = max(_MIN_BURST_BYTES, round(bits_per_s / 8 * _BURST_S))
    limit_bytes = burst_bytes + max(65_536, round(bits_per_s / 8 * _QUEUE_S))
    return ("tbf", "rate", f"{bits_per_s}bit", "burst", f"{burst_bytes}b", "limit", f"{limit_bytes}b")


def _switch(lab: str) -> str:
    return f"{lab}-switch"


def _node(lab: str, index: int) -> str:
    return f"{lab}-node{index}"
