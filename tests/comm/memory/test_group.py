"""Groups over shared memory: what they refuse, when gloo takes their place, and what they leave behind."""

import gc
import os
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from evenly.comm import MemoryGroup, RankGroup, ShardGroup, all_gather, all_reduce, open_group_inside, plain_group
from evenly.comm import memory_groups as memory_groups
from evenly.errors import LockstepError, PeerError, SpecError
from evenly.spec import Device
from tests.comm.memory.groups import open_memory_group, over_memory
from tests.ranks import RankError, run_ranks

CPU, GPU = Device(kind="cpu"), Device(kind="cuda", identity="GPU-0")


def mapped() -> int:
    """Returns how many groups' memory this process has mapped."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:evenly")


def open_inside(rank_group: RankGroup, devices: list[Device]) -> object:
    group = open_group_inside(rank_group, "g", range(rank_group.size), devices, timeout_s=20)
    total = torch.ones(3)
    work = all_reduce(total, group)
    work.finish(lambda absence: None) if isinstance(group, MemoryGroup) else work.wait()
    assert total.tolist() == [rank_group.size] * 3
    kind = type(group)
    group.shutdown()
    return kind


def test_ranks_of_one_machine_share_memory() -> None:
    assert run_ranks(3, open_inside, [CPU] * 3) == [MemoryGroup] * 3


def test_nothing_stays_mapped_or_open() -> None:
    before, files = mapped(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(5):
        run_ranks(2, open_inside, [CPU] * 2)
    assert mapped() == before
    assert len(os.listdir("/proc/self/fd")) <= files  # noqa: PTH208


def test_the_user_may_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENLY_SHARED_MEMORY", "0")
    assert run_ranks(2, open_inside, [CPU] * 2) == [dist.ProcessGroup] * 2


def test_machines_that_are_not_the_same_use_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_groups, "machine_id", lambda: f"machine of {threading.current_thread().name}")
    assert run_ranks(2, open_inside, [CPU] * 2) == [dist.ProcessGroup] * 2


def test_one_rank_on_a_gpu_is_enough_to_use_the_network() -> None:
    def act(rank_group: RankGroup) -> object:
        device = torch.device("cuda", 0) if rank_group.rank else None  # each knows only its own
        group = open_group_inside(rank_group, "g", range(2), None, timeout_s=20, device=device)
        all_reduce(torch.ones(1), group).wait()  # whoever is still connecting needs the other
        group.shutdown()
        return type(group)

    assert run_ranks(2, act) == [dist.ProcessGroup] * 2


def test_a_rank_that_cannot_map_the_memory_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str, size_bytes: int) -> int:
        raise PermissionError(f"[Errno 13] Permission denied: '{path}'")

    monkeypatch.setattr(memory_groups, "open_shared", refuse)
    assert run_ranks(3, open_inside, [CPU] * 3) == [dist.ProcessGroup] * 3
    (line,) = caplog.messages
    assert "ranks [0, 1, 2] are on one machine but do not share its fastest memory, because of rank 1" in line
    assert "Permission denied" in line


def test_a_system_that_gives_no_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert run_ranks(2, open_inside, [CPU] * 2) == [dist.ProcessGroup] * 2
    assert "Cannot allocate memory" in caplog.messages[0]


@pytest.mark.parametrize("number", [1, 2])
def test_a_rank_that_fails_to_map_lets_all_use_the_network(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = []

    def refuse(*arguments: object, **options: object) -> object:
        made.append(arguments)
        if len(made) == number:  # the first is made by rank 0
            raise OSError(12, "Cannot allocate memory")
        return real(*arguments, **options)

    real = memory_groups.MappedMemory
    monkeypatch.setattr(memory_groups, "MappedMemory", refuse)
    assert run_ranks(3, open_inside, [CPU] * 3) == [dist.ProcessGroup] * 3
    assert "Cannot allocate memory" in caplog.messages[0]


def test_a_file_of_others_is_not_mapped(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    file.write_bytes(b"x" * 100)
    with pytest.raises(OSError, match="not 200 of"):
        memory_groups.open_shared(str(file), 200)


def test_the_memory_is_readable_by_its_owner_only() -> None:
    file = memory_groups.SharedFile(1 << 16)
    try:
        assert os.fstat(file.descriptor).st_mode & 0o777 == 0o600
        with pytest.raises(PermissionError):
            os.ftruncate(file.descriptor, 0)  # a rank cannot take it away under the others
    finally:
        file.close()


def test_a_rank_that_does_not_come_is_named() -> None:
    def act(rank_group: RankGroup) -> None:
        if rank_group.rank == 0:
            open_group_inside(rank_group, "g", range(2), [CPU] * 2, timeout_s=0.3)

    with pytest.raises(RankError) as raised:
        run_ranks(2, act)
    assert isinstance(raised.value.errors[0], PeerError)
    assert "[1] did not come within 0.3 s" in str(raised.value.errors[0])


def test_different_collectives_are_an_error_and_no_wrong_number() -> None:
    def act(shard_group: ShardGroup) -> None:
        if shard_group.rank == 0:
            shard_group.sum(torch.ones(4)).wait()
        else:
            shard_group.sum(torch.ones(5)).wait()

    with pytest.raises(RankError) as raised:
        over_memory(2, act)
    assert any(isinstance(error, LockstepError) for error in raised.value.errors)
    assert "came to different collectives" in str(raised.value)


def test_other_types_are_an_error() -> None:
    def act(shard_group: ShardGroup) -> None:
        shard_group.sum(torch.ones(4, dtype=(torch.float32, torch.int32)[shard_group.rank])).wait()

    with pytest.raises(RankError, match="came to different collectives"):
        over_memory(2, act)


@pytest.mark.parametrize("case", ["length", "segments", "source"])
def test_what_differs_only_in_later_rounds_or_parts_is_an_error(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_groups, "SLOT_BYTES", 64)

    def act(shard_group: ShardGroup) -> None:
        other = shard_group.rank == 1
        match case:
            case "length":  # the first round is the same
                shard_group.sum(torch.ones(32 if other else 16)).wait()
            case "segments":
                cut = [((1, 3),), ((0, 1),)] if other else [((0, 2),), ((2, 3),)]
                shard_group.gather(torch.ones(2 - shard_group.rank), 0, cut).wait()
            case "source":
                shard_group.broadcast(torch.ones(3), int(other))

    with pytest.raises(RankError, match="sizes or parts differ"):
        over_memory(2, act)


def test_errors_name_ranks_and_not_members() -> None:
    def act(rank_group: RankGroup) -> None:
        if rank_group.rank == 0:
            return
        group = open_group_inside(rank_group, "g", [1, 2], [CPU] * 2, timeout_s=20)
        all_reduce(torch.ones(rank_group.rank), group).finish(lambda absence: None)

    with pytest.raises(RankError, match=r"ranks 1 and 2 came to different collectives: a sum \(float32\) of 1 values"):
        run_ranks(3, act)


def test_a_rank_that_closes_while_another_waits_is_named() -> None:
    def act(shard_group: ShardGroup) -> None:
        if shard_group.rank == 0:
            shard_group.sum(torch.ones(4)).wait()

    with pytest.raises(RankError, match="or closed what it waits with") as raised:
        over_memory(2, act)
    assert raised.value.errors[1] is None


def test_a_wait_that_is_interrupted_by_a_handler_that_sends() -> None:
    def act(shard_group: ShardGroup) -> None:
        group = shard_group.group
        if shard_group.rank == 1:
            time.sleep(0.4)
        work = all_reduce(torch.ones(2), group)
        if shard_group.rank == 0:
            with pytest.raises(SpecError, match="from inside of a wait"):
                work.finish(lambda absence: group.all_reduce(torch.ones(2)))

    over_memory(2, act)


def test_a_forked_process_cannot_send() -> None:
    def act(shard_group: ShardGroup) -> int:
        if shard_group.rank == 1:
            return 0
        child = os.fork()
        if child == 0:
            try:
                shard_group.sum(torch.ones(2))
            except SpecError:
                os._exit(3)
            os._exit(4)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks with threads
        assert over_memory(2, act) == [3, 0]


def test_what_cannot_be_sent_is_refused() -> None:
    def act(shard_group: ShardGroup) -> None:
        with pytest.raises(SpecError, match="EVENLY_SHARED_MEMORY=0"):
            shard_group.sum(torch.ones(4, device="meta"))
        with pytest.raises(SpecError, match="which have no order"):
            shard_group.sum(torch.ones(4, dtype=torch.complex64), largest=True)

    over_memory(2, act)


def test_a_closed_group_is_not_used() -> None:
    def act(rank_group: RankGroup) -> None:
        group = open_memory_group(rank_group)
        group.shutdown()
        group.shutdown()
        with pytest.raises(PeerError, match="group was closed"):
            group.all_reduce(torch.ones(2))
        with pytest.raises(SpecError, match="without a process group of torch"):
            plain_group(group)

    run_ranks(2, act)


def test_several_groups_at_a_time_and_some_rounds_ahead() -> None:
    def act(rank_group: RankGroup) -> list[list[float]]:
        groups = [open_memory_group(rank_group, f"g{number}") for number in range(3)]
        rank, large = rank_group.rank, torch.arange(2_500_000.0)  # several rounds each
        started = []
        for number, group in enumerate(groups):
            for count in range(3):
                values = large * (rank + 1) + number + count
                started.append((values, all_reduce(values, group)))
        rows, work = all_gather(torch.tensor([rank, 7]), groups[0])
        for index in (8, 0, 4, 2, 6, 1, 3, 5, 7):
            started[index][1].finish(lambda absence: None)
        work.finish(lambda absence: None)
        for group in groups:
            group.shutdown()
        assert rows.tolist() == [[other, 7] for other in range(rank_group.size)]
        return [[values[1].item(), values[-1].item()] for values, _ in started]

    for found in run_ranks(3, act):
        for index, (first, last) in enumerate(found):
            added = 3 * (index // 3 + index % 3)
            assert [first, last] == [6 + added, 6 * 2_499_999.0 + added]
