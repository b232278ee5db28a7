"""The flight recorder of torch, which importing evenly turns off where it is not safe for two threads."""

import pytest

from evenly.launch.recorder import prepare_recorder, spare_recorder


@pytest.mark.parametrize(
    ("found", "before", "after"),
    [
        ("2.11.0+cu130", {}, {"TORCH_FR_BUFFER_SIZE": "0"}),
        ("2.12.1", {"HOME": "/"}, {"HOME": "/", "TORCH_FR_BUFFER_SIZE": "0"}),
        ("2.11.0", {"TORCH_FR_BUFFER_SIZE": "100"}, {"TORCH_FR_BUFFER_SIZE": "100"}),
        ("2.11.0", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "100"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "100"}),
        ("2.13.0a0+git1234", {}, {}),
        ("2.13.0", {}, {}),
        ("3.0", {}, {}),
        ("unknown", {}, {}),
    ],
)
def test_the_recorder_that_is_not_safe_for_two_threads_is_off(found, before, after):
    spare_recorder(found, before)
    assert before == after


def test_an_installed_torch_is_looked_at(monkeypatch):
    monkeypatch.setattr("evenly.launch.recorder.version", lambda _: "2.11.0")
    monkeypatch.setattr("evenly.launch.recorder.os.environ", environ := {})
    prepare_recorder()
    assert environ == {"TORCH_FR_BUFFER_SIZE": "0"}
