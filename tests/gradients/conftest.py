"""Shorter waits, so that faults are told quickly in tests."""

import pytest

from evenly.comm import collectives, failure_monitor


@pytest.fixture(autouse=True)
def _quick_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_monitor, "INTERVAL_S", 0.05)
    monkeypatch.setattr(collectives, "SHORT_WAIT_S", 0.2)
