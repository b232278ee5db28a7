"""What tests of the lab share: a look at what a lab has left behind."""

import os
from collections.abc import Iterator

import pytest

from tests.lab.traces import traces


@pytest.fixture(autouse=True)
def _leave_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.node.get_closest_marker("lab") is not None:
        assert traces(os.getpid()) == set()
