"""Nodes that are started separately: equal to the reference, and nodes that are lost, come late or return."""

import copy
import time

import pytest
import torch
from torch import nn

from tests.exchange.elastic_nodes import NodeThreads, batch_of, coordinator, network
from tests.ranks import ragged
from tests.reference import Reference


def reference(names, sizes, *, steps, every, lr=0.1):
    """Plays the same nodes in one process, which all go on to the end."""
    plain = Reference(network(), lambda m: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9), ragged(*map(len, sizes)))
    for step in range(1, steps + 1):
        plain.step(
            [batch_of(name, rank, step, size) for name, node in zip(names, sizes, strict=True) for rank, size in enumerate(node)],
            nn.functional.cross_entropy,
        )
        if step % every == 0:
            plain.exchange()
    return plain


@pytest.mark.parametrize("sizes", [[[4], [3]], [[4, 2], [3]], [[2, 3, 4], [5, 2], [3]]])
def test_nodes_train_as_in_one_world(sizes):
    names = [f"node{i}" for i in range(len(sizes))]
    meeting = coordinator(len(sizes))

    def act(rank):
        rank.train(6)
        rank.model.finish()
        return rank.values()

    try:
        nodes = [NodeThreads(n, s, meeting.address, act, seed=i).begin() for i, (n, s) in enumerate(zip(names, sizes, strict=True))]
        results = [values for node in nodes for values in node.join()]
    finally:
        meeting.close()
    expected = reference(names, sizes, steps=6, every=2)
    for values in results:
        for value, wanted in zip(values, expected.replicas[0].state_dict().values(), strict=True):
            assert torch.allclose(value.double(), wanted.double(), rtol=0, atol=1e-12)
    for values in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(values, results[0], strict=True))
