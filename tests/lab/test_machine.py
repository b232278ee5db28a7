"""What a machine lacks is said in one sentence, and a lab refuses with it."""

import pytest

from evenly.errors import LabError
from evenly.lab import Lab, LabCluster, LabNode, clean, missing

ONE = LabCluster(nodes=[LabNode()])


def _is_one_sentence(text: str) -> bool:
    return text.startswith("The lab needs ") and text.endswith(".") and ". " not in text


def test_another_system(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert missing() == "The lab needs Linux, and this is darwin; run it on a Linux machine."


def test_not_root(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert missing() == "The lab needs root, and this is user 1000; run it with sudo."


def test_no_programs(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None if name in ("ip", "tc") else name)
    assert "programs ip, tc; apt-get install iproute2" in missing()


@pytest.mark.lab
def test_a_kernel_without_tbf(monkeypatch):
    monkeypatch.setattr(
        "evenly.lab._machine._PROBES", (("the tbf queueing discipline", "echo no such kind >&2; false"),)
    )
    assert _is_one_sentence(missing())
    assert "tbf" in missing()
    assert "no such kind" in missing()


@pytest.mark.lab
def test_no_controller(monkeypatch):
    monkeypatch.setattr("evenly.lab._machine.find_hierarchy", lambda: None)
    assert _is_one_sentence(missing())
    assert "cgroup cpu controller" in missing()


def test_a_lab_refuses_with_the_sentence(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root"), Lab(ONE):
        pytest.fail("the lab was built")
    with pytest.raises(LabError, match="needs root"):
        clean()


def test_a_lab_that_does_not_stand_says_so():
    with pytest.raises(LabError, match="is not built"):
        Lab(ONE).run(["true"])
