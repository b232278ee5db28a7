import os

from evenly.launch.threads import thread_variables


def test_cores_are_shared_by_the_processes(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert thread_variables(3) == {"OMP_NUM_THREADS": "5"}
    assert thread_variables(40) == {"OMP_NUM_THREADS": "1"}


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert thread_variables(3) == {}
