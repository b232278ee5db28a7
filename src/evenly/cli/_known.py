"""Cluster, profile and network from the options that `evenly plan` and `evenly simulate` have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenly.cli._documents import read
from evenly.cli._network import draw_quickly
from evenly.cli._quantities import counts_of, flops_of, numbers_between_commas, rate_of
from evenly.errors import SpecError
from evenly.spec import Cluster, Device, Graph, Node, Profile


@dataclass(frozen=True)
class Options:
    """The options as typed; None if left out."""

    model: str | None
    inputs: Sequence[str]
    dtype: str | None
    cluster: Path | None
    profile: Path | None
    graph: Path | None
    speeds: str | None
    nodes: str | None
    flops: str | None
    inside: str | None
    across: str | None

    def load(self) -> tuple[Cluster, Profile, Graph]:
        """Returns the three values, or raises `SpecError` saying which is missing or given twice."""
        self._require_consistent()
        speeds = None if self.speeds is None else numbers_between_commas(self.speeds, "--speeds")
        cluster = self._cluster(len(speeds or ()))
        graph = self._graph()
        if speeds is None:
            profile = read(Profile, self.profile, "--profile") if self.profile else None
        else:
            profile = self._from_speeds(cluster, graph, speeds)
        if profile is None:
            raise SpecError("neither --profile nor --speeds was given. Add the profile of evenly measure, or --speeds.")
        profile.require_fit(cluster, graph)
        return cluster, profile, graph

    def _require_consistent(self) -> None:
        alternatives = [
            ("--profile", self.profile, "--speeds", self.speeds),
            ("--cluster", self.cluster, "--nodes", self.nodes),
        ]
        alternatives.append(("--graph", self.graph, "MODEL", self.model))
        for option, value, other_option, other_value in alternatives:
            if value is not None and other_value is not None:
                raise SpecError(
                    f"{option} {value} and {other_option} {other_value} were given, but one stands for "
                    "the other. Give one."
                )
        if self.speeds is not None:
            return
        needs = {"--nodes": self.nodes, "--flops": self.flops, "--inside": self.inside, "--across": self.across}
        for option, text in needs.items():
            if text is not None:
                raise SpecError(
                    f"{option} {text} was given without --speeds, but a profile says that itself. Add --speeds "
                    f"70,25,5 or leave {option} out."
                )

    def _cluster(self, ranks: int) -> Cluster:
        if self.cluster is not None:
            return read(Cluster, self.cluster, "--cluster")
        if not ranks:
            raise SpecError("no cluster was given. Add --cluster with a file of evenly discover, or --speeds.")
        sizes = [ranks] if self.nodes is None else counts_of(self.nodes)
        if sum(sizes) != ranks:
            raise SpecError(
                f"--nodes {self.nodes} has {sum(sizes)} ranks, but --speeds {self.speeds} has {ranks}. Give a speed "
                "for each rank."
            )
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        cpu = Device(kind="cpu")
        return Cluster(
            nodes=tuple(
                Node(name=f"node{index}", ranks=tuple(range(start, start + size)), devices=(cpu,) * size)
                for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
            )
        )

    def _graph(self) -> Graph:
        if self.graph is not None:
            return read(Graph, self.graph, "--graph")
        if self.model is None:
            raise SpecError("no network was given. Add --graph with a file of evenly measure, or a MODEL with --input.")
        return draw_quickly(self.model, self.inputs, self.dtype)

    def _from_speeds(self, cluster: Cluster, graph: Graph, speeds: list[float]) -> Profile:
        fields = Profile.model_fields
        inside, across = (
            None if text is None else rate_of(text, f"--{name}", fields[name].default)
            for name, text in (("inside", self.inside), ("across", self.across))
        )
        flops = {} if self.flops is None else {"flops_per_s": flops_of(self.flops)}
        return Profile.from_speeds(cluster, graph, speeds, inside=inside, across=across, **flops)
