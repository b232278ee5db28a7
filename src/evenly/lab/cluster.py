"""The cluster to emulate: nodes, the ranks on each, their share of the CPU and the speed of their link."""

import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from evenly.errors import SpecError
from evenly.spec._text import load_toml
from evenly.spec._value import Document, Value

MOST_RANKS = 1024  # on one emulated node
MOST_CORES = 8192  # what Linux can be built for
MOST_MBIT = 1e7  # 10 Tbit/s

# A quota is at least 1 ms and a period at most 1 s, so a thousandth of a core is the least the kernel can give.
CoresWorth = Annotated[float, Field(ge=0.001, le=MOST_CORES)]

_HOSTNAME = r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$"
_CORE_SET = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*")
_SHIPPED = files("evenly.lab") / "clusters"


class LabNode(Value):
    """One emulated node: its hostname, its ranks, and what each of them may use."""

    name: str = Field(default="", pattern=_HOSTNAME, description="hostname; node0, node1, ... where none is given")
    ranks: int = Field(default=1, ge=1, le=MOST_RANKS)
    rate_mbit: Annotated[float, Field(gt=0, le=MOST_MBIT)] | None = Field(
        default=None, description="each way; None is unshaped"
    )
    cpu: CoresWorth | tuple[CoresWorth, ...] | None = Field(
        default=None, description="cores' worth of CPU time per rank, one number for all ranks or one for each"
    )
    cores: str | None = Field(default=None, description="the cores the ranks may run on, such as 0-1 or 0,2")

    @field_validator("cores")
    @classmethod
    def _is_a_core_set(cls, cores: str | None) -> str | None:
        if cores is not None and (not _CORE_SET.fullmatch(cores) or not core_numbers(cores)):
            raise ValueError(
                f"a core set is numbers below {MOST_CORES} and rising ranges joined by commas, such as 0-1 or 0,2"
            )
        return cores

    @model_validator(mode="after")
    def _one_quota_per_rank(self) -> Self:
        if isinstance(self.cpu, tuple) and len(self.cpu) != self.ranks:
            raise ValueError(f"cpu has {len(self.cpu)} numbers for {self.ranks} ranks; give one, or one per rank")
        return self

    def cpu_of(self, local_rank: int) -> float | None:
        """Returns the cores' worth of CPU time that rank `local_rank` of this node gets, None for no limit."""
        return self.cpu[local_rank] if isinstance(self.cpu, tuple) else self.cpu


class LabCluster(Document):
    """The nodes of an emulated cluster; ranks are numbered through them in order."""

    version: Literal[1] = 1
    # A Linux bridge has at most 1023 ports.
    nodes: tuple[LabNode, ...] = Field(min_length=1, max_length=1000)

    @field_validator("nodes")
    @classmethod
    def _every_node_has_its_own_name(cls, nodes: tuple[LabNode, ...]) -> tuple[LabNode, ...]:
        named = tuple(
            node if node.name else node.model_copy(update={"name": f"node{index}"}) for index, node in enumerate(nodes)
        )
        names = [node.name for node in named]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ValueError(f"two nodes are called {duplicates[0]!r}; give every node a name of its own")
        return named

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return sum(node.ranks for node in self.nodes)


def core_numbers(cores: str) -> frozenset[int]:
    """Returns the cores that a core set names, none for a range that falls or leaves what a machine can have.

    >>> sorted(core_numbers("0-2,5"))
    [0, 1, 2, 5]
    """
    ranges = [[int(end) for end in part.split("-")] for part in cores.split(",")]
    if any(not ends[0] <= ends[-1] < MOST_CORES for ends in ranges):
        return frozenset()
    return frozenset(core for ends in ranges for core in range(ends[0], ends[-1] + 1))


def shipped_clusters() -> tuple[str, ...]:
    """Returns the names of the clusters that come with the library."""
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in _SHIPPED.iterdir()))


def load_cluster(path: str | Path) -> LabCluster:
    """Returns the cluster that a TOML file describes; `path` may also be the bare name of a shipped cluster."""
    values = load_toml(path, _read(path))
    try:
        return LabCluster(**values)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def _read(path: str | Path) -> str:
    try:
        if not Path(path).is_file() and str(path) in shipped_clusters():
            return (_SHIPPED / f"{path}.toml").read_text()
        return Path(path).read_text()
    except (OSError, ValueError) as error:  # also text that is not UTF-8
        shipped = ", ".join(shipped_clusters())
        raise SpecError(
            f"cannot read a cluster from {path}: {error}. Give the path of a TOML file or one of {shipped}."
        ) from None
