"""What tests of the lab share: the reason to skip, and a look at what a lab has left behind."""

import os
from collections.abc import Iterator

import pytest

from evenly.lab import missing
from tests.lab.traces import traces


@pytest.fixture(scope="session")
def lack() -> str | None:
    return missing()


@pytest.fixture(autouse=True)
def _skip_with_the_reason(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("lab") is None:
        yield
        return
    lack = request.getfixturevalue("lack")
    if lack is not None:
        pytest.skip(lack)
    yield
    assert traces(os.getpid()) == set()
