"""A plan of two nodes to be edited by hand."""

import pytest

from evenly.spec import EverySteps, Plan, Role


@pytest.fixture
def plan_2_1() -> Plan:
    nodes = (0, 0, 1)
    roles = tuple(Role(rank=rank, node=node, samples=4) for rank, node in enumerate(nodes))
    return Plan(roles=roles, period=EverySteps(8))
