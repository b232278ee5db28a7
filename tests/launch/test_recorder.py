"""The flight recorder of torch, made without any room where it is not safe for two threads."""

import os

import pytest

from evenly.launch import recorder


def sizes_when_made(monkeypatch, version, environ):
    seen = []
    for size in recorder.SIZES:
        monkeypatch.delenv(size, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(recorder.torch, "__version__", version)
    made = lambda: seen.append([os.environ.get(size) for size in recorder.SIZES])  # noqa: E731
    monkeypatch.setattr(recorder, "make_recorder", made)
    before = dict(os.environ)
    recorder.disable_unsafe_recorder.__wrapped__()
    assert dict(os.environ) == before
    return seen


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1"])
def test_it_is_made_off_and_the_environment_stays_as_it_was(monkeypatch, version):
    assert sizes_when_made(monkeypatch, version, {}) == [["0", None]]


@pytest.mark.parametrize("size", recorder.SIZES)
def test_a_size_that_was_chosen_stays(monkeypatch, size):
    assert sizes_when_made(monkeypatch, "2.11.0", {size: "100"}) == []


@pytest.mark.parametrize("version", ["2.13.0a0+git1234", "2.13.0", "3.0", "unknown"])
def test_one_that_has_its_lock_is_left_alone(monkeypatch, version):
    assert sizes_when_made(monkeypatch, version, {}) == []
