"""Sequences of tokens of which only some have a loss, and what one process computes with GPT-2 on unequal nodes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.integrations.batches import NODES, values
from tests.reference import Reference

Row = dict[str, torch.Tensor]
LENGTH, IGNORED, BATCH = 8, -100, 2


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=LENGTH, **no_dropout)
    return GPT2LMHeadModel(config).double()


def sampled(model: nn.Module) -> list[float]:
    """Returns every 13th of the parameters' values, of all tensors: they go through files from process to process."""
    return values(model)[::13]


def rows(count: int, seed: int = 0) -> list[Row]:
    """Returns sequences in which 1 to 7 of the 7 tokens that are predicted have a loss."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (count, LENGTH), generator=generator)
    first = torch.randint(1, LENGTH, (count,), generator=generator)
    labels = tokens.masked_fill(torch.arange(LENGTH) < first[:, None], IGNORED)
    return [{"input_ids": own, "labels": wanted} for own, wanted in zip(tokens, labels, strict=True)]


def rank_rows(data: list[Row], step: int, rank: int, *, batches: int = 1) -> list[Row]:
    """Returns what Accelerate gives a rank for a step of so many batches: it divides whole batches, in their order."""
    found: list[Row] = []
    for number in range(batches):
        first = BATCH * (3 * (step * batches + number) + rank)
        found += [data[(first + index) % len(data)] for index in range(BATCH)]
    return found


def reference_steps(every: int, steps: int, data: list[Row], *, batches: int = 1) -> Iterator[list[list[float]]]:
    """Yields the parameters of each rank after each step; ranks and nodes count by their tokens that have a loss.

    GPT-2 computes its loss in float32, so that the reference lets it do so, too.
    """
    expected = Reference(gpt2(), lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0), NODES)
    for step in range(1, steps + 1):
        counts = []
        for rank, model in enumerate(expected.replicas):
            own = rank_rows(data, step - 1, rank, batches=batches)
            tokens, labels = (torch.stack([row[name] for row in own]) for name in ("input_ids", "labels"))
            counts.append(int(labels[:, 1:].ne(IGNORED).sum()))
            model.zero_grad()
            for part, wanted in zip(tokens.split(BATCH), labels.split(BATCH), strict=True):
                model(input_ids=part, labels=wanted, num_items_in_batch=torch.tensor(counts[-1])).loss.backward()
        for members in expected.nodes:
            expected.average_gradients(members, [counts[rank] for rank in members])
        for rank, (model, optimizer) in enumerate(zip(expected.replicas, expected.optimizers, strict=True)):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            expected.samples[rank] += counts[rank]
        if step % every == 0:
            expected.exchange()
        yield [sampled(model) for model in expected.replicas]
