"""Control groups as both versions of the kernel's interface want them, on a make-believe file tree."""

from pathlib import Path

import pytest

from evenly.errors import LabError
from evenly.lab import _cgroups
from evenly.lab._names import new_name, parse_name


def _version_2(root: Path, *, controllers: str = "cpuset cpu io memory") -> _cgroups.Hierarchy:
    (root / "cgroup.controllers").write_text(controllers)
    (root / "cgroup.subtree_control").write_text("memory")
    (root / "mounts").write_text(f"proc /proc proc rw 0 0\ncgroup2 {root} cgroup2 rw,nosuid 0 0\n")
    found = _cgroups.find_hierarchy(root / "mounts")
    assert found is not None
    return found


def _version_1(root: Path) -> _cgroups.Hierarchy:
    for name in ("cpu", "cpuset", "unified"):
        (root / name).mkdir()
    (root / "cpuset/cpuset.cpus").write_text("0-1\n")
    (root / "cpuset/cpuset.mems").write_text("0\n")
    (root / "unified/cgroup.controllers").write_text("")
    lines = [f"cgroup2 {root}/unified cgroup2 rw 0 0", f"cgroup {root}/cpu cgroup rw,cpu,cpuacct 0 0"]
    (root / "mounts").write_text("\n".join([*lines, f"cgroup {root}/cpuset cgroup rw,cpuset 0 0"]))
    found = _cgroups.find_hierarchy(root / "mounts")
    assert found is not None
    return found


def test_version_2(tmp_path):
    found = _version_2(tmp_path)
    assert (found.version, found.roots) == (2, (tmp_path,))
    _cgroups.open_lab(found, lab="lab", num_ranks=4)
    joins = _cgroups.open_rank(found, lab="lab", rank=0, cores="0-1")
    assert joins == (tmp_path / "lab/rank0/cgroup.procs",)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +cpuset"
    assert (tmp_path / "lab/cgroup.subtree_control").read_text() == "+cpu +cpuset"
    assert (tmp_path / "lab/cpu.weight").read_text() == "400"
    assert (tmp_path / "lab/rank0/cpuset.cpus").read_text() == "0-1"
    _cgroups.set_quota(found, lab="lab", rank=0, cores_worth=0.35)
    assert (tmp_path / "lab/rank0/cpu.max").read_text() == "1400 4000"
    _cgroups.set_quota(found, lab="lab", rank=0, cores_worth=None)
    assert (tmp_path / "lab/rank0/cpu.max").read_text() == "max 4000"


def test_version_1(tmp_path):
    found = _version_1(tmp_path)
    assert (found.version, found.roots) == (1, (tmp_path / "cpu", tmp_path / "cpuset"))
    _cgroups.open_lab(found, lab="lab", num_ranks=4)
    assert (tmp_path / "cpuset/lab/cpuset.mems").read_text() == "0"
    assert (tmp_path / "cpu/lab/cpu.shares").read_text() == "4096"
    joins = _cgroups.open_rank(found, lab="lab", rank=3, cores="1")
    assert joins == (tmp_path / "cpu/lab/rank3/cgroup.procs", tmp_path / "cpuset/lab/rank3/cgroup.procs")
    assert (tmp_path / "cpuset/lab/rank3/cpuset.cpus").read_text() == "1"
    _cgroups.set_quota(found, lab="lab", rank=3, cores_worth=0.1)
    assert (tmp_path / "cpu/lab/rank3/cpu.cfs_quota_us").read_text() == "1000"
    assert (tmp_path / "cpu/lab/rank3/cpu.cfs_period_us").read_text() == "10000"


def test_a_rank_without_cores_is_left_where_it_is(tmp_path):
    found = _version_1(tmp_path)
    _cgroups.open_lab(found, lab="lab", num_ranks=4)
    assert len(_cgroups.open_rank(found, lab="lab", rank=0, cores=None)) == 1


def test_cores_without_a_controller_are_refused(tmp_path):
    found = _version_2(tmp_path, controllers="cpu io")
    _cgroups.open_lab(found, lab="lab", num_ranks=4)
    with pytest.raises(LabError, match="rank 0 is to run on cores 0, but there is no cpuset controller"):
        _cgroups.open_rank(found, lab="lab", rank=0, cores="0")


def test_no_controller_at_all(tmp_path):
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\n")
    assert _cgroups.find_hierarchy(tmp_path / "mounts") is None


def test_what_the_kernel_refuses_is_said(tmp_path):
    with pytest.raises(LabError, match=r"cannot set cpu\.max .* '1 2': No such file"):
        _cgroups.write(tmp_path / "gone/cpu.max", "1 2")


@pytest.mark.parametrize("cores_worth", [0.001, 0.0333, 0.25, 0.251, 1.0, 7.5])
def test_quotas_are_within_what_the_kernel_takes(cores_worth):
    quota, period = _cgroups.quota_us(cores_worth)
    assert quota >= 1000
    assert 4000 <= period <= 1_000_000
    assert quota / period == pytest.approx(cores_worth, rel=0.001)


def test_a_name_tells_its_owner():
    name = new_name()
    assert parse_name(f"{name}-node12") == name
    assert not name.abandoned
    assert parse_name(f"evn{name.pid}-{name.start + 1}-0-switch").abandoned
    assert parse_name("evnX-1-2") is None
