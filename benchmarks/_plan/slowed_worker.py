"""What each of two ranks does while the second becomes slow; rank 0 prints the samples per second of every step."""

import json
import os
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenly
from benchmarks._plan.clusters import BATCH_SIZE
from benchmarks._plan.lab import QuotaRequests
from benchmarks._plan.network import INPUT_SHAPE, NUM_CLASSES, network
from benchmarks.common import median
from evenly.layouts import relaid
from evenly.shards import reshard
from evenly.spec import Plan, Role

Rebalanced = Literal["batches", "units"]
SLOW_AT = 30  # the step at which the second device becomes slow
FIXED_AT = SLOW_AT + 50  # the step from which shares are fixed
TRIAL_STEPS = 6  # steps with each fixed share
TRIED_FIFTIETHS = range(4, 17)  # fixed shares of the slow device, in fiftieths of the work
BEST_TRIALS = 4  # more trials with the best of them
NUM_BATCHES = 400  # in the dataset, more than the run has steps


def run_slowed_rank(what: Rebalanced, folder: str) -> None:
    """Trains with rebalancing, then with fixed shares; rank 0 prints the rates. Ends the process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks of a cut network must have the same data
    num_samples = BATCH_SIZE * NUM_BATCHES
    data = TensorDataset(torch.randn(num_samples, *INPUT_SHAPE), torch.randint(NUM_CLASSES, (num_samples,)))
    with evenly.Session(device="cpu") as session:
        model = network()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        plan = _rebalancing_plan(what, session, model)
        model, optimizer, loader = session.prepare(model, optimizer, data, plan=plan)
        rates = _train(what, session, model, optimizer, loader, QuotaRequests(folder))
        if session.rank == 0:
            print(json.dumps({"rates": rates}), flush=True)
        os._exit(0)


def _rebalancing_plan(what: Rebalanced, session: evenly.Session, model: nn.Module) -> Plan:
    """Returns a plan with equal batches, or with a network cut in equal shares, that is rebalanced during the run."""
    plan = Plan(roles=tuple(Role(rank=rank, node=0, samples=BATCH_SIZE // 2) for rank in range(2)))
    if what == "units":
        example = torch.randn(BATCH_SIZE, *INPUT_SHAPE)
        plan = session.plan(model, example, batch_size=BATCH_SIZE, shares=[1, 1], cut_batch=True)
    return plan.model_copy(update={"rebalance": True})


def _train(
    what: Rebalanced,
    session: evenly.Session,
    model: Any,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    quota_requests: QuotaRequests,
) -> list[float]:
    """Returns the samples per second of every step.

    At `SLOW_AT` the second device becomes slow; at `FIXED_AT` rebalancing stops and trials of fixed shares begin.
    """
    last_step = FIXED_AT + TRIAL_STEPS * (len(TRIED_FIFTIETHS) + BEST_TRIALS)
    rates: list[float] = []
    quota_requests.request(session.rank)
    for _ in session.epochs(1):
        began = time.perf_counter()
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            rates.append(BATCH_SIZE / (time.perf_counter() - began))
            step = len(rates)
            if step == SLOW_AT:
                quota_requests.request(session.rank)
            if step >= FIXED_AT and (step - FIXED_AT) % TRIAL_STEPS == 0:
                loader.between[1:] = []  # from here on shares are fixed
                if step == last_step:
                    break
                _set_share(what, _next_share(rates, session), model, optimizer, loader)
            began = time.perf_counter()
        break
    return rates


def _next_share(rates: Sequence[float], session: evenly.Session) -> float:
    """Returns the share of the slow device in the next trial: each in turn, then the best one again."""
    starts = range(FIXED_AT, len(rates), TRIAL_STEPS)
    trial_rates = [median(rates[start + 1 : start + TRIAL_STEPS]) for start in starts][: len(TRIED_FIFTIETHS)]
    if len(trial_rates) < len(TRIED_FIFTIETHS):
        return TRIED_FIFTIETHS[len(trial_rates)] / 50
    # The best of many trials may have been lucky, so it is measured again; all ranks take the best of rank 0.
    best = session.sum(trial_rates.index(max(trial_rates)) if session.rank == 0 else 0)[0]
    return TRIED_FIFTIETHS[int(best)] / 50


def _set_share(what: Rebalanced, share: float, model: Any, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    """Gives the second device this share of the work."""
    if what == "batches":
        samples = max(1, round(BATCH_SIZE * share))
        loader.reshare([BATCH_SIZE - samples, samples])
        return
    layout = model.module.layout
    total = sum(layout.shares)
    factors = [(1 - share) * total / layout.shares[0], share * total / layout.shares[1]]
    reshard(model.module, optimizer, relaid(model.module._program.traced.graph, layout, factors))
    model.after_resharding(dict(model.agreed_buffers))  # the network has no buffers
