"""The ranks of a lab, and the command line that starts a rank in its namespaces and control groups."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenly.lab._network import INTERFACE, address
from evenly.lab.cluster import LabCluster

_MASTER_PORT = 29500
# The file is in memory, under a mount of this rank only: nothing needs to be removed.
_PUT_HOSTS = (
    "mount -t tmpfs tmpfs /tmp && {{ printf %s {hosts}; cat /etc/hosts; }} > /tmp/hosts"
    " && mount --bind /tmp/hosts /etc/hosts && umount -l /tmp"
)


@dataclass(frozen=True)
class RankSlot:
    """One rank: its number, its node, and its local rank."""

    rank: int
    node: int
    local_rank: int
    label: str


def slots(cluster: LabCluster) -> tuple[RankSlot, ...]:
    """Returns every rank, numbered through the nodes in order."""
    nodes_and_local_ranks = [
        (node, local) for node in range(len(cluster.nodes)) for local in range(cluster.nodes[node].ranks)
    ]
    return tuple(
        RankSlot(rank=rank, node=node, local_rank=local, label=f"{cluster.nodes[node].name}:rank{rank}")
        for rank, (node, local) in enumerate(nodes_and_local_ranks)
    )


def environment(cluster: LabCluster, *, slot: RankSlot) -> dict[str, str]:
    """Returns the variables a rank is given, those of torchrun and a few more."""
    return {
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(cluster.world_size),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(cluster.nodes[slot.node].ranks),
        "GROUP_RANK": str(slot.node),
        "GROUP_WORLD_SIZE": str(len(cluster.nodes)),
        "ROLE_RANK": str(slot.rank),
        "ROLE_WORLD_SIZE": str(cluster.world_size),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(_MASTER_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "EVENLY_LAB": "1",
        "PYTHONUNBUFFERED": "1",
        # torch warns in C++ that addresses of namespaces have no names, which is so and harmless.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def hosts_file(cluster: LabCluster) -> str:
    """Returns the lines by which every node finds every other by its name."""
    return "".join(f"{address(index)} {node.name}\n" for index, node in enumerate(cluster.nodes))


def command_line(
    command: Sequence[str],
    *,
    variables: Mapping[str, str],
    owner: int,
    namespace: Path,
    hostname: str,
    hosts: str,
    groups: Sequence[Path],
) -> list[str]:
    """Returns the arguments that start `command` in its namespaces, under its hostname and in its control groups.

    The programs replace one another in one process, so its id is the rank's and it ends with the lab's owner. The check
    of the parent covers an owner that ended before the death signal was set.
    """
    steps = [f"[ $PPID = {owner} ]", f"echo {shlex.quote(hostname)} > /proc/sys/kernel/hostname"]
    steps += [f"echo $$ > {shlex.quote(str(group))}" for group in groups]
    steps += [_PUT_HOSTS.format(hosts=shlex.quote(hosts))]
    script = " && ".join(steps) + ' || exit 125; export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"; exec env "$@"'
    # The mounts follow those of the host; otherwise a namespace that another lab removes would persist here.
    wrapper = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net={namespace}"]
    wrapper += ["unshare", "--uts", "--mount", "--propagation", "slave"]
    return [*wrapper, "sh", "-c", script, "sh", *(f"{key}={text}" for key, text in variables.items()), *command]
