"""Steps as they will be: gradients averaged inside a node, a network cut over ranks; a profile is corrected by them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch

from evenly.comm import Alarm, Party, Waiter, gather_json, open_group
from evenly.graph import Traced
from evenly.planner import cut_to_try
from evenly.session.trials import Ensemble, Trial
from evenly.shards import join_shards
from evenly.spec import Cluster, Curve, CutStep, DeviceProfile, Layout, Profile, deal
from evenly.survey import fastest_groups

FEW = 2  # samples of each rank: little to compute
LEAST, MOST = 2, 40  # steps of a kind
QUICK_S, THOROUGH_S = 1.5, 8.0  # for the steps of a kind
ROUND_S = 1.5  # of them together and alone, at least
LEAST_FACTOR, MOST_FACTOR = 0.5, 3.0  # what steps in step take over those that run freely; beyond that it is chance
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
        """Returns what averaging adds to the steps of the slowest of each group, how much longer own steps take while
        all ranks are in step, and how long while the others rest."""
        told: dict[str, Any] = {"added": {}, "factor": 1.0, "alone": 1.0}
        for ranks in fastest_groups(self.node, self.steps, self.profile.batch_size) if len(self.node) > 1 else []:
            if self.party.rank not in ranks:
                continue
            self.tell(f"ranks {ranks} averaging gradients")
            ensemble = Ensemble(self.party, ranks, self.traced, self.cluster, self.device, timeout_s=self.timeout_s)
            slowest = max(ranks, key=lambda rank: (self.steps[rank].at(self.profile.batch_size), rank))
            few = ensemble.together(FEW, self._times(self._own_s(ranks, slowest, FEW), self.enough_s / 3))
            if len(ranks) == len(self.node):
                told |= self._in_step(ensemble, ranks, few.computing_s)
                told["added"] |= self._on_fastest(ensemble, ranks, told["factor"])
            if self.party.rank == slowest:
                told["added"][str(slowest)] = max(0.0, few.seconds - told["factor"] * self._own_s(ranks, slowest, FEW))
            ensemble.close()
        return told

    def _in_step(self, ensemble: Ensemble, ranks: list[int], few_s: float) -> dict[str, float]:
        """Returns how much longer than by itself a step takes with all others in step, and with all others at rest.

        Both are read in turns, as a machine may be faster now and slower then.
        """
        sizes = self._by_speed(ranks)
        mine = sizes[ranks.index(self.party.rank)]
        longest_s = max(self._own_s(ranks, rank, samples) for rank, samples in zip(ranks, sizes, strict=True))
        own_s, own_few_s = (self._own_s(ranks, self.party.rank, samples) for samples in (mine, FEW))
        computing, alone = [], []
        rounds = max(1, int(self.enough_s / ROUND_S))
        for _ in range(rounds):
            computing.append(ensemble.together(mine, self._times(longest_s, self.enough_s / rounds)).computing_s)
            alone.append(ensemble.alone(mine, self._times(own_s, self.enough_s / rounds / len(ranks))))
        factor = median(computing) / own_s
        if own_s > TELLING * own_few_s:  # what is fixed in a step falls out
            factor = (median(computing) - few_s) / (own_s - own_few_s)
        factor = min(MOST_FACTOR, max(LEAST_FACTOR, factor))
        return {"factor": factor, "alone": min(1.0, median(alone) / (factor * own_s))}

    def _on_fastest(self, ensemble: Ensemble, ranks: list[int], factor: float) -> dict[str, float]:
        """Returns, on the fastest rank, what averaging adds to its steps while the others have little to do.

        It is not told where the others would still be the last to finish.
        """
        sizes = dict(zip(ranks, self._by_speed(ranks), strict=True))
        own_s = self._own_s(ranks, self.fastest, sizes[self.fastest])
        longest_s = max(self._own_s(ranks, rank, FEW) for rank in ranks if rank != self.fastest)
        if own_s < TELLING * longest_s:
            return {}
        samples = sizes[self.fastest] if self.party.rank == self.fastest else FEW
        joint = ensemble.together(samples, self._times(own_s, self.enough_s / 3))
        is_mine = self.party.rank == self.fastest
        return {str(self.fastest): max(0.0, joint.seconds - factor * own_s)} if is_mine else {}

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
        trial = Trial(sharded.train(), self.traced, self.device)
        seconds = trial.step_s(self.profile.batch_size, self._times(found["parts_s"], self.enough_s))
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
        """Returns what a rank needs for a step by itself, while these ranks work."""
        return self.profile.ease(rank, ranks, self.node) * self.steps[rank].at(samples)

    def _times(self, expected_s: float, enough_s: float) -> int:
        """Returns how many steps to make."""
        return min(MOST, max(LEAST, round(enough_s / expected_s)))


def _corrected(profile: Profile, cluster: Cluster, rows: Sequence[dict[str, Any]]) -> Profile:
    """Returns the profile with what was found; where it is not known of the fastest, that of the next, scaled."""
    batch = profile.batch_size
    added = {int(rank): seconds for row in rows for rank, seconds in row["added"].items()}
    devices, steps = list(profile.devices), [device.step for device in profile.devices]
    for node in cluster.nodes:
        if len(node.ranks) < 2:
            continue
        order = sorted(node.ranks, key=lambda rank: (steps[rank].at(batch), rank))
        for rank in order:
            alike = [peer for peer in order if steps[peer] == steps[rank]]
            known = [added[peer] for peer in alike if peer in added]
            next_s = added[order[1]] * steps[rank].at(batch) / steps[order[1]].at(batch)
            averaging_s = mean(known) if known else next_s
            alone = mean(rows[peer]["alone"] for peer in alike)
            slowed = _slowed(devices[rank], mean(rows[peer]["factor"] for peer in alike))
            devices[rank] = slowed.model_copy(update={"averaging_s": averaging_s, "alone": alone})
    return profile.model_copy(update={"devices": tuple(devices)})


def _slowed(device: DeviceProfile, factor: float) -> DeviceProfile:
    """Returns a device that takes `factor` times as long."""
    layers = {form: own.scaled(factor) for form, own in device.layers.items()}
    return device.model_copy(update={"step": device.step.scaled(factor), "layers": layers})
