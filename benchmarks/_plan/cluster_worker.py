"""What each rank of an emulated cluster does: measure devices and links, make plans, run them side by side.

Rank 0 prints one JSON object with three fields, each by the name of a plan:
    samples: the samples of every rank.
    predicted_s: the seconds of a step as `simulate` predicts them; a list with one entry for each measured profile,
        before, in the middle of and after the run.
    measured: a list with one entry for each rank: `step_s` and `cpu_use` of every round, and `exchange_s` of every
        exchange.
"""

import json
import os
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._plan.by_hand import MemoryLimits, PlanningInputs, plans_by_hand
from benchmarks._plan.clusters import BATCH_SIZE, BATCHES_BY_SPEED, CASES, EQUAL_BATCHES, UNEVEN
from benchmarks._plan.lab import QuotaRequests
from benchmarks._plan.network import INPUT_SHAPE, network
from benchmarks._plan.runner import PlanRunner
from benchmarks._plan.turns import STEPS_PER_ROUND, run_in_turns
from evenly.comm import rank_group_of
from evenly.graph import Traced, trace_module
from evenly.planner import plan as make_plan
from evenly.planner import simulate
from evenly.session import discover
from evenly.session.by_hand import measure_rank_group
from evenly.spec import Plan, Profile
from evenly.survey.devices import DeviceSurvey

ENOUGH_SAMPLES = 10**6
ENOUGH_BYTES = 10**12
WARM_UP_STEPS = 2
CPU = torch.device("cpu")


def run_cluster_rank(name: str, rounds: int, folder: str) -> None:
    """Runs one rank of the cluster `name`; rank 0 prints what was measured and predicted. Ends the process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, case, quota_requests = dist.get_rank(), CASES[name], QuotaRequests(folder)
    example = torch.randn(BATCH_SIZE, *INPUT_SHAPE)
    network()(example[:2]).sum().backward()  # loads the libraries of a first step
    traced = trace_module(network(), example)
    cluster = discover()
    memory = _memory_limits(traced, case.memory_samples)

    def measure() -> Profile:
        """Returns the profile of all ranks as they are now."""
        memory_bytes = memory.size_bytes[rank] if memory else None
        quick = rounds < 2
        return measure_rank_group(
            rank_group_of(), traced, cluster, CPU, quick=quick, memory_bytes=memory_bytes, timeout_s=600.0
        )

    quota_requests.request(rank)  # quotas of the cluster
    profiles = [measure()]
    quota_requests.request(rank)  # no limits while plans are made, or a slow device would take minutes
    inputs = PlanningInputs(cluster, profiles[0], traced.graph, memory)
    plans = _same_on_all_ranks(_make_plans(inputs))
    runners = {key: PlanRunner(plan, cluster, rank_group_of(), number=i) for i, (key, plan) in enumerate(plans.items())}
    for runner in runners.values():
        runner.run(WARM_UP_STEPS, 1.0)
    quota_requests.request(rank)  # quotas of the cluster
    always_run = [runner for key, runner in runners.items() if key in _always_run(name)]
    run_in_turns(
        list(runners.values()),
        always_run=always_run,
        rounds=rounds,
        quota=case.quotas[rank],
        halfway=lambda: profiles.append(measure()),
    )
    for runner in runners.values():
        runner.close()
    measured = _gather_figures(runners)
    profiles.append(measure())
    quota_requests.request(rank)  # no limits
    if rank == 0:
        samples = {key: [role.samples for role in plan.roles] for key, plan in plans.items()}
        predicted_s = [_predict(plans, inputs, profile) for profile in profiles]
        print(json.dumps({"samples": samples, "predicted_s": predicted_s, "measured": measured}), flush=True)
    dist.barrier()
    os._exit(0)


def _memory_limits(traced: Traced, num_samples: int | None) -> MemoryLimits | None:
    """Returns limits with which rank 0 holds so many samples and rank 1 any number; None without a limit."""
    if num_samples is None:
        return None
    survey = DeviceSurvey(traced, CPU, budget_s=0.0, tell=lambda _: None)
    limit_bytes = 4 * traced.graph.parameter_bytes + num_samples * survey.sample_bytes()
    return MemoryLimits(samples=[num_samples, ENOUGH_SAMPLES], size_bytes=[limit_bytes, ENOUGH_BYTES])


def _make_plans(inputs: PlanningInputs) -> dict[str, Plan]:
    """Returns the chosen plan, then those by hand."""
    memory_bytes = inputs.memory.size_bytes if inputs.memory else None
    chosen = make_plan(inputs.cluster, inputs.profile, inputs.graph, batch_size=BATCH_SIZE, memory_bytes=memory_bytes)
    return {"chosen": chosen, **plans_by_hand(chosen, inputs)}


def _same_on_all_ranks(plans: dict[str, Plan]) -> dict[str, Plan]:
    """Returns the plans of rank 0 on every rank."""
    objects = [{key: plan.to_json() for key, plan in plans.items()}]
    dist.broadcast_object_list(objects, src=0)
    return {key: Plan.from_json(text) for key, text in objects[0].items()}


def _always_run(name: str) -> tuple[str, ...]:
    """Returns the plans of a cluster that run to the end however slow they are."""
    return ("chosen", EQUAL_BATCHES, BATCHES_BY_SPEED) if name == UNEVEN else ("chosen",)


def _gather_figures(runners: dict[str, PlanRunner]) -> list[dict[str, Any]]:
    """Returns the figures of every rank, without those of the rounds that warm up."""
    figures = {
        key: {
            "step_s": runner.step_seconds[1:],
            "cpu_use": runner.cpu_use[1:],
            "exchange_s": runner.exchange_seconds,
        }
        for key, runner in runners.items()
    }
    figures_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(figures_of_ranks, figures)
    return figures_of_ranks


def _predict(plans: dict[str, Plan], inputs: PlanningInputs, profile: Profile) -> dict[str, float]:
    """Returns the predicted seconds of a step of every plan, over four periods of the chosen one."""
    steps = 4 * getattr(plans["chosen"].period, "steps", STEPS_PER_ROUND)
    return {
        key: simulate(plan, inputs.cluster, profile, inputs.graph, steps=steps).step_s for key, plan in plans.items()
    }
