"""Trains one network for an objective, and tests it."""

import torch
from torch import nn

from evenly.batches.evaluation import EvaluationFeed
from evenly.nodes import Synchronized
from evenly.recipes.config import TrainConfig
from evenly.recipes.optim import build_schedule
from evenly.recipes.tasks.objective import Objective
from evenly.recipes.tasks.parts import autocast, describe, load_pretrained, make_optimizer, rank_batch
from evenly.recipes.tasks.results_file import ResultsFile
from evenly.session import Session
from evenly.spec import Plan

TEST_BATCH = 256  # most samples of a rank in a batch of a test


def train_supervised(
    objective: Objective, config: TrainConfig, session: Session, *, plan: Plan | None, results: ResultsFile
) -> dict[str, float]:
    """Returns the figures of the trained network on the test set."""
    torch.manual_seed(config.seed)
    network = objective.build()
    if config.pretrained is not None:
        load_pretrained(network, config.pretrained)
    plan = plan or make_plan(config, session, network, objective)
    steps = session.steps_per_epoch(objective.train_set, plan)
    optimizer = make_optimizer(config, network)
    schedule = build_schedule(
        config.schedule,
        optimizer,
        steps=config.epochs * steps,
        steps_per_epoch=steps,
        **config.schedule_options,
    )
    describe(session, config, network, total_steps=config.epochs * steps)
    if config.compiled:
        network.compile()
    model, _, loader = session.prepare(network, optimizer, objective.train_set, plan=plan, collate_fn=objective.collate)
    session.track(schedule=schedule)
    tests = session.feed(objective.test_set, batch_size=TEST_BATCH, collate_fn=objective.collate)
    for epoch in session.epochs(config.epochs):
        losses: list[torch.Tensor] = []
        for batch in loader:
            with autocast(config, session):
                loss = objective.loss(model, batch, epoch=epoch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.detach())
        figures = {"loss": float(torch.stack(losses).mean())} if losses else {}
        if config.evaluate_every and (epoch + 1) % config.evaluate_every == 0 and epoch + 1 < config.epochs:
            with model.agreed():
                figures |= evaluate(objective, model, tests, config, session)
        session.log(**figures, epoch=epoch + 1)
        results.add(epoch=epoch + 1, lr=float(schedule.get_last_lr()[0]), **figures)
    figures = evaluate(objective, model, tests, config, session)
    session.log(**figures)
    results.add(epoch=config.epochs, **figures)
    return figures


def make_plan(config: TrainConfig, session: Session, network: nn.Module, objective: Objective) -> Plan:
    """Returns the plan that the settings ask for: equal batches, or a network cut in shares."""
    wishes = config.model_dump(include={"overlap", "fragments", "codec", "outer", "optimizer_state"})
    batch_size = rank_batch(config, session)
    if not config.shares:
        return session.plan(batch_size=batch_size, every=config.every, **wishes)
    return session.plan(
        network,
        objective.example(batch_size),
        batch_size=batch_size,
        shares=config.shares,
        cut_batch=config.cut_batch,
        every=config.every,
        **wishes,
    )


@torch.no_grad()
def evaluate(
    objective: Objective, model: Synchronized, tests: EvaluationFeed, config: TrainConfig, session: Session
) -> dict[str, float]:
    """Returns the figures over the whole test set; each rank tests its part."""
    was_training = model.training
    model.eval()
    sums = [0.0] * objective.num_sums
    for batch in tests:
        with autocast(config, session):
            scores = objective.score(model, batch)
        if tests.samples:  # other ranks that hold the same network count it
            sums = [total + score for total, score in zip(sums, scores, strict=True)]
    model.train(was_training)
    return objective.figures(session.sum(*sums))
