"""Steps as they will be: gradients averaged inside a node, a network cut over ranks; a profile is corrected by them."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch

from evenly.comm import Alarm, Party, Waiter, gather_json, open_group
from evenly.graph import Traced
from evenly.nodes import join_nodes
from evenly.planner import cut_to_try
from evenly.shards import join_shards
from evenly.spec import Cluster, Curve, CutStep, DeviceProfile, EverySteps, Exchange, Layout, Profile, deal
from evenly.survey import fastest_groups, inputs_of, train_step

FEW = 2  # samples of each rank: little to compute
LEAST, MOST = 3, 40  # steps of a kind
QUICK_S, THOROUGH_S = 1.5, 6.0  # for the steps of a kind
TELLING = 2.0  # a large step must be so many times a small one to say how fast ranks are in step


def rehearse(
    party: Party,
    traced: Traced,
    cluster: Cluster,
    profile: Profile,
    device: torch.device,
    *,
    quick: bool,
    timeout_s: float,
    tell: Callable[[str], None],
) -> Profile:
    """Returns the profile corrected by real steps; all ranks call it together.

    The two, three, ... fastest ranks of a node average gradients of few samples: what such a step takes more than the
    slowest of them needs by itself is what averaging adds there. All ranks of a node make steps with batches by their
    speed: ranks in step with each other disturb each other more than ranks that run freely. And if a network cut over
    the ranks of a node may be fast, one is tried.
    """
    alarm = Alarm(party.chapter("rehearsal"))
    try:
        waiter = Waiter(alarm, place="the rehearsal", timeout_s=timeout_s)
        group = open_group(alarm.party, "rehearsal", range(party.size), backend="gloo", timeout_s=timeout_s)
        enough_s = QUICK_S if quick else THOROUGH_S
        scene = _Scene(party, traced, cluster, profile, device, enough_s, timeout_s, tell)
        rows = gather_json(scene.averaged(), group, waiter)
        profile = _corrected(profile, cluster, rows)
        scene = _Scene(party, traced, cluster, profile, device, enough_s, timeout_s, tell)
        crews = gather_json(scene.cut_found(), group, waiter)
        tried = gather_json(scene.cut_tried(crews[scene.fastest]), group, waiter)
        cuts = tuple(CutStep(**cut) for cut in tried if cut is not None)
        return profile.model_copy(update={"cuts": cuts})
    finally:
        alarm.close()


@dataclass(frozen=True)
class _Scene:
    """One rank at the rehearsal."""

    party: Party
    traced: Traced
    cluster: Cluster
    profile: Profile
    device: torch.device
    enough_s: float
    timeout_s: float
    tell: Callable[[str], None]

    @property
    def node(self) -> Sequence[int]:
        """The ranks of this rank's node."""
        return self.cluster.nodes[self.cluster.node_of(self.party.rank)].ranks

    @property
    def steps(self) -> list[Curve]:
        """The seconds of a step by samples, of every rank."""
        return [device.step for device in self.profile.devices]

    @property
    def fastest(self) -> int:
        """The fastest rank of this node: it plans for all."""
        return min(self.node, key=lambda rank: (self.steps[rank].at(self.profile.batch_size), rank))

    def averaged(self) -> dict[str, Any]:
        """Returns what averaging adds to the steps of the slowest of each group, and how much longer own steps take."""
        added, factor = {}, 1.0
        for ranks in fastest_groups(self.node, self.steps, self.profile.batch_size) if len(self.node) > 1 else []:
            if self.party.rank not in ranks:
                continue
            self.tell(f"ranks {ranks} averaging gradients")
            sizes = [[FEW] * len(ranks)]
            if len(ranks) == len(self.node):
                sizes.append(self._by_speed(ranks))
            seconds, computing = self._joint_s(ranks, sizes)
            own = [self._own_s(ranks, self.party.rank, few[ranks.index(self.party.rank)]) for few in sizes]
            if len(own) > 1 and own[1] > TELLING * own[0]:
                factor = min(3.0, max(0.7, (computing[1] - computing[0]) / (own[1] - own[0])))
            slowest = max(ranks, key=lambda rank: (self.steps[rank].at(self.profile.batch_size), rank))
            if self.party.rank == slowest:
                added[str(slowest)] = max(0.0, seconds[0] - factor * own[0])
        return {"added": added, "factor": factor}

    def cut_found(self) -> dict[str, Any] | None:
        """Returns, on the fastest rank of a node, the cut network to try there."""
        if len(self.node) < 2 or self.party.rank != self.fastest:
            return None
        crew = cut_to_try(self.node, self.profile, self.traced.graph)
        if crew is None or crew.layout is None:
            return None
        parts_s = crew.ease * crew.timeline.step_s
        return {"ranks": list(crew.ranks), "layout": crew.layout.model_dump_json(), "parts_s": parts_s}

    def cut_tried(self, found: dict[str, Any] | None) -> dict[str, Any] | None:
        """Returns, on the first rank of the cut network, what a step of it takes over its parts."""
        if found is None or self.party.rank not in found["ranks"]:
            return None
        self.tell(f"ranks {found['ranks']} with a network cut over them")
        sharded = join_shards(
            self.traced,
            Layout.model_validate_json(found["layout"]),
            party=self.party.among(found["ranks"], f"cut {found['ranks']}"),
            devices=[self.cluster.device_of(rank) for rank in found["ranks"]],
            timeout_s=self.timeout_s,
        )
        trial = _Trial(sharded.train(), self.traced, self.device)
        seconds = trial.step_s(self.profile.batch_size, self._times(found["parts_s"]))
        sharded.close()
        is_first = self.party.rank == found["ranks"][0]
        return {"ranks": found["ranks"], "factor": seconds / found["parts_s"]} if is_first else None

    def _by_speed(self, ranks: Sequence[int]) -> list[int]:
        """Returns batches with which ranks should finish together, not longer than there is time for."""
        batch = self.profile.batch_size
        speeds = [1 / self.steps[rank].at(batch) for rank in ranks]
        expected_s = 1 / sum(speeds)
        samples = batch * min(1.0, self.enough_s / LEAST / expected_s)
        return [max(1, count) for count in deal(max(len(ranks), round(samples)), speeds)]

    def _own_s(self, ranks: Sequence[int], rank: int, samples: int) -> float:
        return self.profile.ease(rank, ranks, self.node) * self.steps[rank].at(samples)

    def _times(self, expected_s: float) -> int:
        return min(MOST, max(LEAST, round(self.enough_s / expected_s)))

    def _joint_s(self, ranks: Sequence[int], sizes: Sequence[Sequence[int]]) -> tuple[list[float], list[float]]:
        """Returns, for each of the batches, the seconds of a step in which these ranks average gradients, and those in
        which this rank computes."""
        model = copy.deepcopy(self.traced.model).to(self.device).train()
        joined = join_nodes(
            model,
            optimizer := _optimizer(model),
            party=self.party.among(ranks, f"rehearsal {ranks}"),
            cluster=self.cluster.among(ranks),
            period=EverySteps(10**9),
            exchange=Exchange(timeout_s=self.timeout_s),
        )
        trial = _Trial(joined, self.traced, self.device, optimizer)
        seconds, computing = [], []
        for samples in sizes:
            expected_s = max(self._own_s(ranks, rank, count) for rank, count in zip(ranks, samples, strict=True))
            seconds.append(trial.step_s(samples[list(ranks).index(self.party.rank)], self._times(expected_s)))
            computing.append(median(joined.clock.take()))
        joined.close()
        return seconds, computing


class _Trial:
    """A network that makes steps which change nothing."""

    def __init__(
        self,
        model: torch.nn.Module,
        traced: Traced,
        device: torch.device,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._model, self._traced, self._device = model, traced, device
        self._optimizer = optimizer or _optimizer(model)

    def step_s(self, samples: int, times: int) -> float:
        """Returns the seconds of a step with so many samples; the first one warms up."""
        given = inputs_of(self._traced.graph, samples, self._device)
        seconds = []
        for _ in range(times + 1):
            began = time.perf_counter()
            train_step(self._model, self._optimizer, given)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - began)
        return median(seconds[1:])


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0, momentum=0.9)


def _corrected(profile: Profile, cluster: Cluster, rows: Sequence[dict[str, Any]]) -> Profile:
    """Returns the profile with what was found; the fastest rank of a node has that of the next, scaled."""
    batch = profile.batch_size
    added = {int(rank): seconds for row in rows for rank, seconds in row["added"].items()}
    devices, steps = list(profile.devices), [device.step for device in profile.devices]
    for node in cluster.nodes:
        if len(node.ranks) < 2:
            continue
        factors = {rank: rows[rank]["factor"] for rank in node.ranks}
        order = sorted(node.ranks, key=lambda rank: (steps[rank].at(batch), rank))
        for place, rank in enumerate(order):
            other = order[1] if place == 0 else rank
            averaging_s = added[other] * steps[rank].at(batch) / steps[other].at(batch)
            alike = [factors[peer] for peer in order if steps[peer] == steps[rank]]
            devices[rank] = _slowed(devices[rank], mean(alike)).model_copy(update={"averaging_s": averaging_s})
    return profile.model_copy(update={"devices": tuple(devices)})


def _slowed(device: DeviceProfile, factor: float) -> DeviceProfile:
    """Returns a device that takes `factor` times as long while others work, and alone as long as before."""
    layers = {form: own.scaled(factor) for form, own in device.layers.items()}
    alone = min(1.0, device.alone / factor)
    return device.model_copy(update={"step": device.step.scaled(factor), "layers": layers, "alone": alone})
