"""Calibration: real steps, with averaged gradients or a network cut over ranks, that correct a profile."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean
from typing import TypeVar

import torch
from pydantic import TypeAdapter

from evenly.calibration.corrections import (
    CUT_NOISE,
    CutResult,
    CutTrial,
    Expectation,
    Joint,
    LargeStep,
    RankSteps,
    SmallStep,
    alone_factor,
    correct_profile,
    large_factor,
    measured_corrections,
    small_factor,
    steps_to_make,
)
from evenly.calibration.timed_steps import Ensemble, joint_step_of
from evenly.comm import FailureMonitor, GroupContext, RankGroup, open_context
from evenly.errors import SpecError
from evenly.graph import Traced
from evenly.layouts import relaid
from evenly.planner import cut_to_try, group_to_try, may_pay
from evenly.planner.costs import GraphCosts
from evenly.planner.replica_options import ReplicaOption, eased
from evenly.shards import join_shards
from evenly.spec import Cluster, CutStep, Graph, Profile
from evenly.survey import LONG_S, fastest_groups, interquartile_mean

QUICK_S, THOROUGH_S = 0.6, 20.0  # for the steps of a kind
MOST_TRIALS = 3  # of cut networks on a node
ROUND_S = 1.5  # least time of a round of joint and single steps

STEPS: TypeAdapter[RankSteps] = TypeAdapter(RankSteps)
TRIAL: TypeAdapter[CutTrial | None] = TypeAdapter(CutTrial | None)
JOINT: TypeAdapter[Joint | None] = TypeAdapter(Joint | None)
T = TypeVar("T")


def calibrate(
    rank_group: RankGroup,
    traced: Traced,
    cluster: Cluster,
    profile: Profile,
    device: torch.device,
    *,
    quick: bool,
    timeout_s: float,
    tell: Callable[[str], None],
    parent: FailureMonitor | None = None,
) -> Profile:
    """Returns the profile corrected by real steps; all ranks call it together.

    The two, three, ... fastest ranks of a node average gradients of few samples: averaging cost = joint step - slowest
    solo step. The group of ranks that looks fastest makes steps with batches by speed: ranks in joint steps slow each
    other down more than independent ones, and the rest of such a step is the averaging cost of batches of that size.
    All nodes do so at the same time and share the batch by speed, so that temporary slowness affects all alike; a
    single rank of a node does so alone. The fastest rank also makes steps in which the others have few samples:
    averaging may be slow because of the others. Where a network cut over ranks of a node may be fast, up to three are
    tried: the next has other shares, by what ranks computed in the one before, or other ranks.
    """
    expected = Expectation(rank_group.rank, cluster, profile, QUICK_S if quick else THOROUGH_S)
    with open_context(
        rank_group.scoped("calibration"), "calibration", label="the calibration", timeout_s=timeout_s, parent=parent
    ) as context:
        calibration_run = _CalibrationRun(rank_group, traced, device, context, expected, tell)
        profile = correct_profile(profile, cluster, _gather(context, calibration_run.measure_averaging(), STEPS))
        results: list[CutResult] = []
        for _ in range(MOST_TRIALS):
            calibration_run = replace(calibration_run, expected=replace(expected, profile=profile))
            trials = _gather(context, calibration_run.choose_cut(results), TRIAL)
            joints = _gather(context, calibration_run.try_cut(trials[calibration_run.expected.fastest]), JOINT)
            for trial in trials:
                if trial is not None:
                    measured = (joints[rank] for rank in trial.ranks)
                    result = CutResult(trial, tuple(joint for joint in measured if joint is not None))
                    profile = _with_cut_step(profile, cluster, traced.graph, result, results)
                    results.append(result)
    return profile


def _gather(context: GroupContext, value: T, form: TypeAdapter[T]) -> list[T]:
    """Returns every rank's value, in the order of ranks."""
    return [form.validate_json(text) for text in context.gather(form.dump_json(value).decode())]


@dataclass(frozen=True)
class _CalibrationRun:
    """The calibration on one rank."""

    rank_group: RankGroup
    traced: Traced
    device: torch.device
    context: GroupContext
    expected: Expectation
    tell: Callable[[str], None]

    @property
    def timeout_s(self) -> float:
        """How long a rank waits for the others."""
        return self.context.waiter.timeout_s

    def measure_averaging(self) -> RankSteps:
        """Returns this rank's measurements of steps with averaged gradients."""
        expected, steps = self.expected, RankSteps()
        likely = group_to_try(expected.node, expected.profile, self.traced.graph)
        for ranks in fastest_groups(expected.node, expected.steps, expected.profile.batch_size):
            if self.rank_group.rank in ranks and ranks != likely:
                with self._ensemble(ranks) as ensemble:
                    steps, _ = self._make_small_steps(ensemble, ranks, steps)
        self.context.meet()
        if self.rank_group.rank not in likely:
            self._skip_large_steps()
            return steps
        with self._ensemble(likely) as ensemble:
            steps, small = self._make_small_steps(ensemble, likely, steps)
            return self._make_large_steps(ensemble, likely, small, steps)

    def _make_small_steps(self, ensemble: Ensemble, ranks: list[int], steps: RankSteps) -> tuple[RankSteps, Joint]:
        """Returns the measurements with a small joint step added, and that step."""
        expected = self.expected
        self.tell(f"ranks {ranks} averaging gradients")
        slowest, rank_samples = max(ranks, key=expected.pace), expected.few[self.rank_group.rank]
        longest_s = expected.own_s(ranks, slowest, expected.few[slowest])
        small = ensemble.together(rank_samples, steps_to_make(longest_s, expected.enough_s / 3), warm=rank_samples)
        small_steps = steps.small
        if self.rank_group.rank == slowest and len(ranks) > 1:
            small_steps = (*small_steps, SmallStep(tuple(ranks), small.seconds))
        factor = small_factor(small, own_s=expected.own_s(ranks, self.rank_group.rank, rank_samples))
        return replace(steps, small=small_steps, factor=factor), small

    @contextmanager
    def _ensemble(self, ranks: Sequence[int]) -> Iterator[Ensemble]:
        ensemble = Ensemble(
            self.rank_group,
            ranks,
            self.traced,
            self.expected.cluster,
            self.device,
            timeout_s=self.timeout_s,
            parent=self.context.monitor,
        )
        try:
            yield ensemble
        finally:
            ensemble.close()

    @property
    def _rounds(self) -> int:
        return max(1, int(self.expected.enough_s / ROUND_S))

    @property
    def _turns(self) -> int:
        return max(len(node.ranks) for node in self.expected.cluster.nodes)

    def _skip_large_steps(self) -> None:
        """Joins the barriers of the ranks that make large steps."""
        for _ in range(self._rounds * (1 + self._turns) + 1):
            self.context.meet()

    def _make_large_steps(self, ensemble: Ensemble, ranks: list[int], small: Joint, steps: RankSteps) -> RankSteps:
        """Returns the measurements with steps of batches by speed added: joint ones, and solo ones.

        All nodes do so at the same time, alternating, as the speed of a machine may vary over time.
        """
        expected, rank = self.expected, self.rank_group.rank
        sizes, least = expected.samples_by_speed(ranks), expected.few[rank]
        rank_samples = sizes[ranks.index(rank)]
        longest_s = max(expected.own_s(ranks, member, samples) for member, samples in zip(ranks, sizes, strict=True))
        own_s, own_small_s = (expected.own_s(ranks, rank, samples) for samples in (rank_samples, least))
        leader = expected.leader(ranks, sizes)
        round_s = expected.enough_s / self._rounds
        large: list[Joint] = []
        alone: list[float] = []
        lean: list[float] = []
        is_long = self._is_long([rank], own_s)
        was_made = self._rounds == 1 and sizes == [expected.few[member] for member in ranks]
        if own_small_s <= expected.enough_s:
            ensemble.alone(least, 1, warm=0)  # warm-up, on all ranks at once
        for _ in range(self._rounds):
            self.context.meet()
            times = steps_to_make(longest_s, round_s)
            large.append(
                small if was_made else ensemble.together(rank_samples, times, warm=least if is_long else rank_samples)
            )
            if leader is not None:
                samples, times = rank_samples if leader == rank else least, steps_to_make(longest_s, round_s / 2)
                lean.append(ensemble.together(samples, times, warm=least if is_long else samples).seconds)
            for turn in range(self._turns):
                self.context.meet()
                if expected.node[turn : turn + 1] == (rank,):
                    times = steps_to_make(own_s, round_s / self._turns)
                    alone.append(ensemble.alone(rank_samples, times, warm=0 if is_long else rank_samples))
        self.context.meet()
        usual_large = Joint(
            interquartile_mean([step.seconds for step in large]),
            interquartile_mean([step.computing_s for step in large]),
        )
        alone_s = interquartile_mean(alone)
        factor = large_factor(
            usual_large, small, own_s=own_s, own_small_s=own_small_s, alone_s=alone_s, ranks=len(ranks)
        )
        return replace(
            steps,
            factor=factor,
            alone=alone_factor(alone_s, factor=factor, own_s=own_s, ranks_of_node=len(expected.node)),
            large=LargeStep(tuple(ranks), rank_samples, usual_large.seconds, usual_large.computing_s),
            lean_s=interquartile_mean(lean) if rank == leader else None,
        )

    def choose_cut(self, results: Sequence[CutResult]) -> CutTrial | None:
        """Returns, on the fastest rank of a node, the cut network to try there; None if there is none left.

        If the fastest so far has the ranks of which most is expected, it is tried again with the shares for which all
        of them would have computed equally long.
        """
        node, profile, graph = self.expected.node, self.expected.profile, self.traced.graph
        if len(node) < 2 or self.rank_group.rank != self.expected.fastest:
            return None
        own = [result for result in results if set(result.trial.ranks) <= set(node)]
        tried = [result.trial.layout for result in own]
        replica_option = cut_to_try(node, profile, graph, tried=tried)
        best = min(own, key=lambda result: result.step_s, default=None)
        if best is not None and (replica_option is None or replica_option.ranks == best.trial.ranks):
            if not may_pay(best.step_s, node, profile, graph):
                return None
            better = _rebalanced(best, profile, graph)
            if better is not None and better.layout not in tried:
                return better
        if replica_option is None or replica_option.layout is None:
            return None
        return CutTrial(tuple(replica_option.ranks), replica_option.layout)

    def try_cut(self, trial: CutTrial | None) -> Joint | None:
        """Returns, on the ranks of the cut network, its step and the part of it in which this rank computes."""
        if trial is None or self.rank_group.rank not in trial.ranks:
            return None
        self.tell(f"ranks {list(trial.ranks)} with a network cut over them")
        sharded = join_shards(
            self.traced,
            trial.layout,
            rank_group=self.rank_group.among(trial.ranks, f"cut {list(trial.ranks)}"),
            devices=[self.expected.cluster.device_of(rank) for rank in trial.ranks],
            timeout_s=self.timeout_s,
            parent=self.context.monitor,
        )
        try:
            parts_s, _ = _parts(trial, self.expected.profile, self.expected.cluster, self.traced.graph)
            times = steps_to_make(parts_s, self.expected.enough_s / MOST_TRIALS)
            batch = self.expected.profile.batch_size
            warm = max(self.expected.few) if self._is_long(trial.ranks, parts_s) else batch
            return joint_step_of(sharded, self.traced, self.device, samples=batch, times=times, warm=warm)
        finally:
            sharded.close()

    def _is_long(self, ranks: Sequence[int], expected_s: float) -> bool:
        """Whether steps of these ranks are so long that few samples suffice for warm-up: see `Stopwatch`."""
        return expected_s > LONG_S and all(self.expected.cluster.device_of(rank).kind == "cpu" for rank in ranks)


def _parts(trial: CutTrial, profile: Profile, cluster: Cluster, graph: Graph) -> tuple[float, list[float]]:
    """Returns the seconds of a cut network's step as the sum of its parts, and those of each rank's layers.

    Other ranks of the node are idle meanwhile.
    """
    node = cluster.nodes[cluster.node_of(trial.ranks[0])].ranks
    option = eased(ReplicaOption(trial.ranks, GraphCosts(graph), profile, trial.layout), trial.ranks, node)
    compute_s = dict(zip(trial.layout.members, option.timeline.compute_s, strict=True))
    each = [option.ease * compute_s.get(position, 0.0) for position in range(len(trial.ranks))]
    return option.ease * option.timeline.step_s, each


def _rebalanced(result: CutResult, profile: Profile, graph: Graph) -> CutTrial | None:
    """Returns the cut network with the shares for which its ranks would have computed equally long.

    None if they did so up to noise, or if it does not fit into memory.
    """
    trial, computing_s = result.trial, [joint.computing_s for joint in result.joints]
    if min(computing_s) <= 0 or max(computing_s) <= (1 + CUT_NOISE) * min(computing_s):
        return None
    unit = max(profile.devices[rank].unit for rank in trial.ranks)
    try:
        layout = relaid(graph, trial.layout, [mean(computing_s) / seconds for seconds in computing_s], unit=unit)
    except SpecError:  # operations between the layers cannot be cut so
        return None
    replica_option = ReplicaOption(trial.ranks, GraphCosts(graph), profile, layout)
    fits = replica_option.most_samples([device.free_bytes for device in profile.devices]) >= profile.batch_size
    return CutTrial(trial.ranks, layout) if fits and layout != trial.layout else None


def _with_cut_step(
    profile: Profile, cluster: Cluster, graph: Graph, result: CutResult, others: Sequence[CutResult]
) -> Profile:
    """Returns the profile with the step of a cut network, which corrects the speed of its ranks.

    Of several with the same ranks the fastest stays.
    """
    trial = result.trial
    same = [other for other in others if other.trial.ranks == trial.ranks]
    cuts = tuple(cut for cut in profile.cuts if cut.ranks != trial.ranks)
    fastest = min([*same, result], key=lambda each: each.step_s)
    slower = tuple(each.trial.layout for each in [*same, result] if each is not fastest)
    if fastest is not result:
        (known,) = (cut for cut in profile.cuts if cut.ranks == trial.ranks)
        return profile.model_copy(update={"cuts": (*cuts, known.model_copy(update={"slower": slower}))})
    _, expected_s = _parts(trial, profile, cluster, graph)
    corrections = measured_corrections(trial.ranks, result.joints, expected_s, profile)

    def with_factor(factor: float) -> Profile:
        cut_step = CutStep(
            ranks=trial.ranks, factor=factor, corrections=corrections, layout=trial.layout, slower=slower
        )
        return profile.model_copy(update={"cuts": (*cuts, cut_step)})

    parts_s, _ = _parts(trial, with_factor(1.0), cluster, graph)
    return with_factor(result.step_s / parts_s)
