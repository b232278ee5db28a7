"""Shorter waits, so that faults are told quickly in tests."""

import pytest

from evenly.comm import alarm, moves


@pytest.fixture(autouse=True)
def _quick_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm, "INTERVAL_S", 0.05)
    monkeypatch.setattr(moves, "QUIET_S", 0.2)
