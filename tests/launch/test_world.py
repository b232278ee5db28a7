"""The world opens for those who come, and names those who do not."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from evenly.errors import LaunchError
from evenly.launch import Place, find_place, open_world, pick_device, rendezvous
from evenly.launch.ports import free_port
from evenly.launch.rendezvous import meet
from evenly.launch.serving import listen_at
from tests.launch.greetings import greetings
from tests.processes import Rank

ALONE = find_place({})
MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def place(rank: int, *, of: int, port: int, host: str = "127.0.0.1") -> Place:
    return find_place({}, rank=rank, world_size=of, local_rank=rank, master_addr=host, master_port=port)


def failure(at: Place, *, timeout_s: float) -> str:
    with pytest.raises(LaunchError) as caught:
        open_world(at, timeout_s=timeout_s)
    return str(caught.value)


def test_alone_the_world_opens_without_ports_and_closes_twice() -> None:
    with open_world(ALONE) as world:
        assert world.opened
        assert world.place is ALONE
        world.store.set("key", "value")
        assert world.store.get("key") == b"value"
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1, 1]
    world.close()
    assert not dist.is_initialized()


def test_an_open_group_is_used_and_left_open() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with open_world(ALONE) as world:
            assert not world.opened
            world.store.set("key", "value")
        assert dist.is_initialized()
        assert "rank 0 of 1" in failure(place(1, of=2, port=1), timeout_s=1)
    finally:
        dist.destroy_process_group()


def test_ranks_that_never_arrive_are_named_to_all_who_did() -> None:
    port, began = free_port(), time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        tries = [pool.submit(failure, place(rank, of=4, port=port), timeout_s=2.0) for rank in (0, 1)]
        messages = [each.result() for each in tries]
    assert time.monotonic() - began < 20
    for message in messages:
        assert message.startswith("ranks 2 and 3 of 4 did not arrive within 2 s")
    assert not dist.is_initialized()


def test_a_lone_rank_missing_is_named_in_the_singular() -> None:
    assert failure(place(0, of=2, port=free_port()), timeout_s=0.5).startswith("rank 1 of 2 did not arrive")


def test_a_master_that_does_not_answer_is_named() -> None:
    port, began = free_port(), time.monotonic()
    message = failure(place(1, of=2, port=port), timeout_s=1.0)
    assert f"127.0.0.1:{port}" in message
    assert "nothing answered" in message
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("host", ["no..such.host", "node17.invalid"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_name_that_is_unknown_is_named_long_before_the_time_limit(
    host: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rendezvous.RESOLVE_S < 10
    monkeypatch.setattr(rendezvous, "RESOLVE_S", 0.5)
    began = time.monotonic()
    message = failure(place(rank, of=2, port=free_port(), host=host), timeout_s=600.0)
    assert f"does not know the host {host!r}" in message
    assert "MASTER_ADDR" in message
    assert time.monotonic() - began < 30  # name services may be slow


def test_the_missing_are_named_also_to_those_rank_0_left_behind() -> None:
    port = free_port()
    code = f"from tests.launch.test_world import *\nopen_world(place(0, of=3, port={port}), timeout_s=1.5)"
    first = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    message = failure(place(1, of=3, port=port), timeout_s=12.0)
    assert message.startswith("rank 2 of 3 did not arrive within 12 s, says rank 1")
    assert "rank 2 of 3 did not arrive within 1.5 s, says rank 0" in first.communicate(timeout=30)[1]


def test_a_restart_does_not_take_the_last_start_for_an_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(lambda rank: meet(place(rank, of=2, port=port), timeout_s=30.0), (0, 1)))
    assert len(stores) == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert failure(place(0, of=2, port=port), timeout_s=0.5).startswith("rank 1 of 2 did not arrive")


def test_a_port_in_use_is_named_at_once() -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = int(holder.getsockname()[1])
        message = failure(place(0, of=2, port=port), timeout_s=30.0)
    assert f"port {port}" in message
    assert "MASTER_PORT" in message


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.3"])
def test_the_store_listens_only_where_the_ranks_meet(host: str) -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        meetings = [pool.submit(meet, place(rank, of=2, port=port, host=host), timeout_s=30.0) for rank in (0, 1)]
        stores = [each.result() for each in meetings]
    assert len(stores) == 2
    assert answers(host, port)
    assert not answers("127.0.0.2", port)  # an address of this machine like all of 127.0.0.0/8


def test_a_name_that_is_loopback_only_on_this_machine_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert listen_at("host0", 0, is_local=False) is None
    bound = listen_at("host0", 0, is_local=True)
    assert bound is not None
    bound.close()


def test_keys_of_two_runs_differ() -> None:
    ports, tokens = [free_port(), free_port()], []
    for port in ports:
        with ThreadPoolExecutor(2) as pool:
            stores = list(pool.map(lambda rank: meet(place(rank, of=2, port=port), timeout_s=30.0), (0, 1)))  # noqa: B023
        tokens.append(stores[0].underlying_store.underlying_store.get("evenly/0/0/token"))
    assert len(set(tokens)) == 2


def test_a_stopped_rank_0_is_told_within_the_time_limit() -> None:
    """Its socket still takes connections: the store behind it does not answer."""
    port, began = free_port(), time.monotonic()
    first = Rank("tests.launch.test_world:wait_for_others", {"port": port}, {})
    try:
        while not answers("127.0.0.1", port) and time.monotonic() < began + 30:
            time.sleep(0.05)
        os.kill(first.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert f"127.0.0.1:{port}" in failure(place(1, of=3, port=port), timeout_s=1.5)
        assert time.monotonic() - began < 20
    finally:
        first.kill()


def wait_for_others(port: int) -> None:
    meet(place(0, of=3, port=port), timeout_s=60)


def test_a_place_without_a_master_cannot_meet_others() -> None:
    lost = Place(rank=0, world_size=2, local_rank=0, launcher="arguments")
    assert "no master" in failure(lost, timeout_s=1.0)


def test_the_device_is_the_wish_or_an_error() -> None:
    assert pick_device(ALONE, "cpu") == torch.device("cpu")
    for wish in ("cuda:99", "tpu", "cuda:x"):
        with pytest.raises(LaunchError, match=rf"{wish}.*sees cpu"):
            pick_device(ALONE, wish)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
def test_without_a_gpu_auto_is_the_cpu() -> None:
    assert pick_device(ALONE) == torch.device("cpu")
    with pytest.raises(LaunchError, match="'cuda'"):
        pick_device(ALONE, "cuda")


def test_local_ranks_go_round_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    third = Place(rank=2, world_size=3, local_rank=2, launcher="arguments")
    assert pick_device(third) == torch.device("cuda:0")
    assert pick_device(third, "cuda:1") == torch.device("cuda:1")


@pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun on PATH or beside this Python")
def test_two_ranks_of_a_real_mpirun_open_the_world() -> None:
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environ["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    script = Path(__file__).with_name("greet.py")
    command = [str(MPIRUN), "-n", "2", sys.executable, str(script)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    said = greetings(done.stdout)
    assert [each["place"]["rank"] for each in said] == [0, 1]
    assert {each["place"]["launcher"] for each in said} <= {"openmpi", "mpich"}
    assert len({each["place"]["master_port"] for each in said}) == 1
    assert all(each["totals"] == [1, 1] for each in said)
