"""Steps as they will be: gradients averaged inside a node, a network cut over ranks; a profile is corrected by them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

import torch

from evenly.comm import Alarm, Party, Waiter, close_groups, gather_json, open_group
from evenly.graph import Traced
from evenly.planner import cut_to_try, group_to_try
from evenly.planner.replica import eased
from evenly.session.trials import Ensemble, Joint, Trial
from evenly.shards import join_shards
from evenly.spec import Cluster, Curve, CutStep, Layout, Profile, deal
from evenly.survey import LONG_S, fastest_groups, usual

LEAST, MOST = 2, 40  # steps of a kind
QUICK_S, THOROUGH_S = 0.6, 20.0  # for the steps of a kind
ROUND_S = 1.5  # of them together and alone, at least
LEAST_FACTOR, MOST_FACTOR = 0.5, 3.0  # what steps in step take over those that run freely; beyond that it is chance
ENOUGH = 8  # samples of a rank: less tells little of many
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
    parent: Alarm | None = None,
) -> Profile:
    """Returns the profile corrected by real steps; all ranks call it together.

    The two, three, ... fastest ranks of a node average gradients of few samples: what such a step takes more than the
    slowest of them needs by itself is what averaging adds there. The ranks that seem to do best together make steps
    with batches by their speed: ranks in step with each other disturb each other more than ranks that run freely, and
    what such a step takes besides is what averaging adds to batches of that size. All nodes do so at the same time and
    share the batch by speed, as what is slow for a while, or with such batches, should be so for all; a rank that is
    alone in its node does so by itself. The fastest rank also makes steps in which the others have little to do:
    averaging may be long because it is so on the others. And if a network cut over the ranks of a node may be fast, one
    is tried.
    """
    alarm = Alarm(party.chapter("rehearsal"), parent=parent)
    group = None
    try:
        waiter = Waiter(alarm, place="the rehearsal", timeout_s=timeout_s)
        waiter.roll_call()
        group = open_group(alarm.party, "rehearsal", range(party.size), backend="gloo", timeout_s=timeout_s)
        enough_s = QUICK_S if quick else THOROUGH_S
        meet = partial(gather_json, None, group, waiter)
        scene = _Scene(party, traced, cluster, profile, device, alarm, meet, enough_s, timeout_s, tell)
        profile = _corrected(profile, cluster, gather_json(scene.averaged(), group, waiter))
        scene = replace(scene, profile=profile)
        crews = gather_json(scene.cut_found(), group, waiter)
        tried = gather_json(scene.cut_tried(crews[scene.fastest]), group, waiter)
        return profile.model_copy(update={"cuts": tuple(CutStep(**cut) for cut in tried if cut is not None)})
    except BaseException as error:
        alarm.ring(error)
        raise
    finally:
        alarm.close()
        if group is not None:
            close_groups([group], failed=alarm.has_rung)


@dataclass(frozen=True)
class _Scene:
    """One rank at the rehearsal."""

    party: Party
    traced: Traced
    cluster: Cluster
    profile: Profile
    device: torch.device
    alarm: Alarm
    meet: Callable[[], object]
    enough_s: float
    timeout_s: float
    tell: Callable[[str], None]

    @property
    def node(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return self.cluster.nodes[self.cluster.node_of(self.party.rank)].ranks

    @property
    def steps(self) -> list[Curve]:
        """The seconds of a step by samples, of every rank."""
        return [device.step for device in self.profile.devices]

    @property
    def few(self) -> list[int]:
        """The samples of every rank with which it has little to compute."""
        return [step.sizes[0] for step in self.steps]

    @property
    def fastest(self) -> int:
        """The fastest rank of this node: it plans for all."""
        return min(self.node, key=self._pace)

    def _pace(self, rank: int) -> tuple[float, int]:
        """Returns what ranks are ordered by, the fastest first."""
        return self.steps[rank].at(self.profile.batch_size), rank

    def averaged(self) -> dict[str, Any]:
        """Returns the seconds of steps with little to compute, by the slowest of each group; how much longer own steps
        take in step with others, and how long while the others rest; a step with batches by speed; one in which only
        the fastest has much to do."""
        told: dict[str, Any] = {"few": [], "factor": 1.0, "alone": 1.0, "joint": None, "lean": None}
        likely = group_to_try(self.node, self.profile, self.traced.graph)
        for ranks in fastest_groups(self.node, self.steps, self.profile.batch_size):
            if self.party.rank in ranks and ranks != likely:
                with self._ensemble(ranks) as ensemble:
                    self._with_few(ensemble, ranks, told)
        self.meet()
        if self.party.rank not in likely:
            self._in_step(None, likely, None)
            return told
        with self._ensemble(likely) as ensemble:
            few = self._with_few(ensemble, likely, told)
            told |= self._in_step(ensemble, likely, few)
        return told

    def _with_few(self, ensemble: Ensemble, ranks: list[int], told: dict[str, Any]) -> Joint:
        """Notes a step with little to compute, and returns it."""
        self.tell(f"ranks {ranks} averaging gradients")
        slowest, mine = max(ranks, key=self._pace), self.few[self.party.rank]
        times = self._times(self._own_s(ranks, slowest, self.few[slowest]), self.enough_s / 3)
        few = ensemble.together(mine, times, warm=mine)
        if self.party.rank == slowest and len(ranks) > 1:
            told["few"].append([ranks, few.seconds])
        told["factor"] = _bounded(max(1.0, few.computing_s / self._own_s(ranks, self.party.rank, mine)))
        return few

    @contextmanager
    def _ensemble(self, ranks: Sequence[int]) -> Iterator[Ensemble]:
        limits: Any = {"timeout_s": self.timeout_s, "parent": self.alarm}
        ensemble = Ensemble(self.party, ranks, self.traced, self.cluster, self.device, **limits)
        try:
            yield ensemble
        finally:
            ensemble.close()

    def _in_step(self, ensemble: Ensemble | None, ranks: list[int], few: Joint | None) -> dict[str, Any]:
        """Returns how much longer than by itself a step takes with all others in step, and with all others at rest;
        the step itself: its ranks, the samples of this one, its seconds, and those in which this rank computes; and,
        on the fastest rank, the seconds of a step in which the others have little to do.

        All nodes do so at the same time, and in turns, as a machine may be faster now and slower then. Without an
        ensemble a rank only waits for the others.
        """
        sizes, least = self._by_speed(ranks), self.few[self.party.rank]
        mine = sizes[ranks.index(self.party.rank)] if ensemble is not None else least
        longest_s = max(self._own_s(ranks, rank, samples) for rank, samples in zip(ranks, sizes, strict=True))
        own_s, own_few_s = (self._own_s(ranks, self.party.rank, samples) for samples in (mine, least))
        leads = self._led_by(ranks, sizes)
        joint: list[Joint] = []
        alone, lean = [], []
        rounds, turns = max(1, int(self.enough_s / ROUND_S)), max(len(node.ranks) for node in self.cluster.nodes)
        is_long = self._is_long([self.party.rank], own_s)
        is_small = rounds == 1 and sizes == [self.few[rank] for rank in ranks]  # then they were made already
        if ensemble is not None and own_few_s <= self.enough_s:
            ensemble.alone(least, 1, warm=0)  # warms up, while the others do so too
        for _ in range(rounds):
            self.meet()
            if ensemble is not None:
                times, warm = self._times(longest_s, self.enough_s / rounds), least if is_long else mine
                joint.append(few if few is not None and is_small else ensemble.together(mine, times, warm=warm))
                if leads is not None:
                    times = self._times(longest_s, self.enough_s / rounds / 2)
                    samples = mine if leads == self.party.rank else least
                    lean.append(ensemble.together(samples, times, warm=least if is_long else samples).seconds)
            for turn in range(turns):
                self.meet()
                if ensemble is not None and self.node[turn : turn + 1] == (self.party.rank,):
                    times = self._times(own_s, self.enough_s / rounds / turns)
                    alone.append(ensemble.alone(mine, times, warm=0 if is_long else mine))
        self.meet()
        if ensemble is None or few is None:
            return {}
        computing_s, whole_s = usual([j.computing_s for j in joint]), usual([j.seconds for j in joint])
        factor = whole_s / own_s  # of a rank alone nothing of a step is averaging or waiting
        if len(ranks) > 1:
            factor = computing_s / own_s
            if own_s > TELLING * own_few_s:  # what is fixed in a step falls out
                factor = (computing_s - few.computing_s) / (own_s - own_few_s)
            factor = max(factor, usual(alone) / own_s)  # a quota recovers while a rank averages: that is fixed too
        factor = _bounded(factor)
        found: dict[str, Any] = {"factor": factor, "joint": [ranks, mine, whole_s, computing_s]}
        found["lean"] = usual(lean) if self.party.rank == leads else None
        return {**found, "alone": 1.0 if len(self.node) == 1 else min(1.0, usual(alone) / (factor * own_s))}

    def _led_by(self, ranks: Sequence[int], sizes: Sequence[int]) -> int | None:
        """Returns the fastest rank, if it is faster than all others and would be the last to finish if they had little
        to do."""
        order = sorted(ranks, key=self._pace)
        if len(order) < 2 or self.steps[order[0]] == self.steps[order[1]]:
            return None
        own_s = self._own_s(ranks, order[0], sizes[list(ranks).index(order[0])])
        others_s = max(self._own_s(ranks, rank, self.few[rank]) for rank in order[1:])
        return order[0] if own_s > TELLING * others_s else None

    def cut_found(self) -> dict[str, Any] | None:
        """Returns, on the fastest rank of a node, the cut network to try there."""
        if len(self.node) < 2 or self.party.rank != self.fastest:
            return None
        crew = cut_to_try(self.node, self.profile, self.traced.graph)
        if crew is None or crew.layout is None:
            return None
        parts_s = eased(crew, crew.ranks, self.node).ease * crew.timeline.step_s  # others rest meanwhile
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
            parent=self.alarm,
        )
        try:
            trial = Trial(sharded.train(), self.traced, self.device)
            times, batch = self._times(found["parts_s"], self.enough_s), self.profile.batch_size
            warm = max(self.few) if self._is_long(found["ranks"], found["parts_s"]) else batch
            seconds = trial.step_s(batch, times, warm=warm)
        finally:
            sharded.close()
        is_first = self.party.rank == found["ranks"][0]
        return {"ranks": found["ranks"], "factor": seconds / found["parts_s"]} if is_first else None

    def _by_speed(self, ranks: Sequence[int]) -> list[int]:
        """Returns batches with which these ranks should finish together, and all nodes too if they share the batch of
        the example by speed; not longer than there is time for, and not too short to tell anything."""
        batch = self.profile.batch_size
        pace = [1 / step.at(batch) for step in self.steps]
        part = sum(pace[rank] for rank in self.node) / sum(pace)
        samples = max(batch * part, min(batch, ENOUGH * len(ranks)))
        speeds = [pace[rank] for rank in ranks]
        expected_s = samples / batch / sum(speeds)
        samples *= min(1.0, self.enough_s / LEAST / expected_s)
        counts = deal(max(len(ranks), round(samples)), speeds)
        most = [max(self.steps[rank].sizes) for rank in ranks]  # so many were seen to fit into its memory
        return [min(top, max(self.few[rank], count)) for rank, top, count in zip(ranks, most, counts, strict=True)]

    def _own_s(self, ranks: Sequence[int], rank: int, samples: int) -> float:
        """Returns what a rank needs for a step by itself, while these ranks work."""
        return self.profile.ease(rank, ranks, self.node) * self.steps[rank].at(samples)

    def _times(self, expected_s: float, enough_s: float) -> int:
        """Returns how many steps to make; of those that are longer than there is time for, one."""
        return min(MOST, max(LEAST if expected_s <= enough_s else 1, round(enough_s / expected_s)))

    def _is_long(self, ranks: Sequence[int], expected_s: float) -> bool:
        """Whether steps of these ranks are so long that few samples warm up for them: see `Stopwatch`."""
        return expected_s > LONG_S and all(self.cluster.device_of(rank).kind == "cpu" for rank in ranks)


def _bounded(factor: float) -> float:
    return min(MOST_FACTOR, max(LEAST_FACTOR, factor))


def _corrected(profile: Profile, cluster: Cluster, rows: Sequence[dict[str, Any]]) -> Profile:
    """Returns the profile with what was found: first how fast ranks are in step, then what averaging adds to that."""
    steps = [device.step for device in profile.devices]
    devices = list(profile.devices)
    for node in cluster.nodes:
        for rank in node.ranks:
            peers = [rows[peer] for peer in node.ranks if steps[peer] == steps[rank]]
            factor, alone = (mean(row[word] for row in peers) for word in ("factor", "alone"))
            devices[rank] = devices[rank].scaled(factor).model_copy(update={"alone": alone})
    profile = profile.model_copy(update={"devices": tuple(devices)})
    for node in cluster.nodes:
        added = _added(profile, node.ranks, rows)
        order = sorted(node.ranks, key=lambda rank: (steps[rank].at(profile.batch_size), rank))
        for place, rank in enumerate(order if len(order) > 1 else ()):
            alike = [added[peer] for peer in node.ranks if steps[peer] == steps[rank] and peer in added]
            other = next(peer for peer in (*order[place:], *order[::-1]) if peer in added)  # or of a slower one, scaled
            ratio = steps[rank].at(profile.batch_size) / steps[other].at(profile.batch_size)
            averaging_s = mean(alike) if alike else added[other] * ratio
            devices[rank] = devices[rank].model_copy(update={"averaging_s": averaging_s})
    return profile.model_copy(update={"devices": tuple(devices)})


def _added(profile: Profile, node: Sequence[int], rows: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Returns, where it was seen, what averaging adds to the steps of a rank of a node."""
    found: dict[int, float] = {}
    for rank in node:
        for ranks, seconds in rows[rank]["few"]:
            own_s = profile.ease(rank, ranks, node) * profile.devices[rank].step.seconds[0]
            found[rank] = max(0.0, seconds - own_s)
    joint = {rank: rows[rank]["joint"] for rank in node if rows[rank]["joint"] is not None}
    longest_s = max((computing_s for *_, computing_s in joint.values()), default=0.0)
    for rank, (ranks, samples, whole_s, computing_s) in joint.items():
        if len(ranks) > 1:  # with batches as they will be: what is neither its own step nor waiting for a slower one
            own_s = profile.ease(rank, ranks, node) * profile.devices[rank].step.at(samples)
            found[rank] = max(0.0, whole_s - own_s - (longest_s - computing_s))
            if rows[rank]["lean"] is not None:  # the others will have less to do than by speed, but not next to nothing
                found[rank] = (found[rank] + min(found[rank], max(0.0, rows[rank]["lean"] - own_s))) / 2
    return found
