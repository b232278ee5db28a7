"""Nodes meet over real sockets: each rank is a client in a thread."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from evenly.coordination import CoordinationClient, Coordinator, MemberRank, RoundSettings
from evenly.errors import CoordinatorLostError, MismatchError, NonFiniteError, PeerError, SpecError
from tests.coordination.etcds import Candidate, etcd_server
from tests.coordination.nodes import FRESH, NodeClients, after, commit, cut, meet

SETTINGS = RoundSettings(expected_nodes=3, straggler_wait_s=0.5)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        yield server.url


@pytest.fixture(params=["at an address", "found by etcd"])
def address(request: pytest.FixtureRequest) -> Iterator[tuple[str, int] | str]:
    """Where the coordinator is, in both forms."""
    if request.param == "at an address":
        started = Coordinator(("127.0.0.1", 0), settings=SETTINGS).start()
        yield started.address
        started.close()
        return
    url = request.getfixturevalue("etcd")
    candidate = Candidate(url, SETTINGS)
    assert candidate.take()
    yield url
    candidate.close()


@pytest.fixture
def nodes(address: tuple[str, int] | str) -> Iterator[list[NodeClients]]:
    joined = [NodeClients(address, name) for name in "abc"]
    yield joined
    for node in joined:
        node.close()


def test_three_nodes_of_two_ranks_make_rounds(nodes: list[NodeClients]) -> None:
    formed = meet(nodes)
    assert formed.nodes == ("a", "b", "c")
    commit(nodes, formed)
    for _ in range(5):
        following = meet(nodes, after(formed))
        assert following.number == formed.number + 1
        assert following.generation == formed.generation
        commit(nodes, following)
        assert nodes[0].clients[0].aborted(following.id) is None
        formed = following


def test_ranks_share_keys_within_a_generation(nodes: list[NodeClients]) -> None:
    formed = meet(nodes)
    here, there = nodes[0].clients[0], nodes[1].clients[0]
    [waiting, _] = nodes[1].begin(lambda client: client.get(formed.generation, "address", timeout_s=5.0))
    here.put(formed.generation, "address", b"\x00\xff")
    assert waiting.result(timeout=5) == b"\x00\xff"
    assert there.get(formed.generation, "address", timeout_s=1.0) == b"\x00\xff"
    assert (here.add(formed.generation, "count", 2), there.add(formed.generation, "count", 3)) == (2, 5)
    assert there.check(formed.generation, ["address", "count"])
    assert not there.check(formed.generation, ["address", "nothing"])
    with pytest.raises(PeerError, match="within"):
        there.get(formed.generation, "nothing", timeout_s=0.05)
    with pytest.raises(PeerError, match="does not know"):
        there.get("unknown", "address", timeout_s=1.0)


@pytest.mark.alone
def test_a_death_is_pushed_to_the_others_at_once(nodes: list[NodeClients]) -> None:
    formed = meet(nodes)
    told: list[float] = []
    survivors = [client for node in nodes[:2] for client in node.clients]
    for client in survivors:
        client.on_abort(lambda round_id, why: told.append(time.monotonic()))
    waiting = nodes[0].begin(lambda client: client.get(formed.generation, "of the dead", timeout_s=5.0))
    voting = nodes[1].vote(formed)
    time.sleep(0.05)
    began = time.monotonic()
    cut(nodes[2].clients[1])
    while len(told) < len(survivors) and time.monotonic() < began + 2.0:
        time.sleep(0.001)
    assert max(told) - began < 0.1
    for client in survivors:
        assert "node c" in (client.aborted(formed.id) or "")
    for future in waiting:
        with pytest.raises(PeerError, match="node c"):
            future.result(timeout=1)
    assert [future.result(timeout=1).lost for future in voting] == [("c",), ("c",)]
    assert nodes[0].vote(formed)[0].result(timeout=1).lost == ("c",)


@pytest.mark.alone
def test_survivors_commit_soon_after_a_death(nodes: list[NodeClients]) -> None:
    commit(nodes, first := meet(nodes))
    formed = meet(nodes, after(first))
    began = time.monotonic()
    nodes[2].close()
    again = meet(nodes[:2], after(first))
    commit(nodes[:2], again)
    assert time.monotonic() - began < 0.5
    assert again.nodes == ("a", "b")
    assert again.generation != formed.generation


@pytest.mark.alone
def test_a_slow_node_is_waited_for_and_then_behind(nodes: list[NodeClients]) -> None:
    commit(nodes, first := meet(nodes))
    began = time.monotonic()
    second = meet(nodes[:2], after(first))
    assert 0.45 < time.monotonic() - began < 2.0
    assert second.nodes == ("a", "b")
    commit(nodes[:2], second)
    late = nodes[2].propose(after(first))
    third = meet(nodes[:2], after(second))
    assert late[0].result(timeout=5) == third
    assert [member.is_behind for member in third.members] == [False, False, True]


FORKS = """
import os, sys, time
from evenly.coordination import CoordinationClient, MemberRank
client = CoordinationClient(("127.0.0.1", int(sys.argv[1])), MemberRank("d", "first", 0, 1), job="job")
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(30)
"""


def test_a_forked_process_does_not_hide_a_death() -> None:
    """As the workers of a data loader, which have all that their parent had open."""
    with closing(Coordinator(("127.0.0.1", 0), settings=SETTINGS).start()) as coordinator:
        command = [sys.executable, "-c", FORKS, str(coordinator.address[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            process.kill()
            process.wait()
            began = time.monotonic()
            CoordinationClient(coordinator.address, MemberRank("d", "second", 0, 1), job="job").close()
            assert time.monotonic() - began < 1.5
            os.kill(child, signal.SIGKILL)


def test_one_proposal_at_a_time(nodes: list[NodeClients]) -> None:
    waiting = nodes[0].propose(timeout_s=1.0)
    time.sleep(0.3)
    with pytest.raises(SpecError, match="one proposal at a time"):
        nodes[0].clients[0].propose(FRESH, timeout_s=1.0)
    for future in waiting:
        assert isinstance(future.exception(timeout=5), PeerError)


def test_a_vote_against_and_different_checksums_abort(nodes: list[NodeClients]) -> None:
    formed = meet(nodes)
    verdicts = [future.result(timeout=5) for future in nodes[0].vote(formed, is_ok=False)]
    assert not verdicts[0].is_committed
    assert "wished so" in verdicts[0].why
    formed = meet(nodes)
    futures = [future for node in nodes for future in node.vote(formed, checksum=node.name)]
    assert "checksums" in futures[0].result(timeout=5).why


def test_another_model_is_refused(nodes: list[NodeClients]) -> None:
    others = [*nodes[0].propose(timeout_s=1.0), *nodes[1].propose(timeout_s=1.0)]
    for future in nodes[2].propose(replace(FRESH, signature="other")):
        with pytest.raises(MismatchError, match="other"):
            future.result(timeout=5)
    for future in others:
        with pytest.raises(PeerError, match="1 s"):
            future.result(timeout=5)


def test_nan_everywhere_is_refused(nodes: list[NodeClients]) -> None:
    for future in [future for node in nodes for future in node.propose(replace(FRESH, is_healthy=False))]:
        with pytest.raises(NonFiniteError, match="checkpoint"):
            future.result(timeout=5)


def test_another_job_or_size_is_refused(address: tuple[str, int] | str, nodes: list[NodeClients]) -> None:
    if isinstance(address, tuple):  # etcd knows the coordinator of each job
        with pytest.raises(MismatchError, match="job"):
            CoordinationClient(address, MemberRank("d", "first", 0, 1), job="other")
    with pytest.raises(MismatchError, match="local ranks"):
        CoordinationClient(address, MemberRank("a", "first", 2, 3), job="job")
    with pytest.raises(MismatchError, match="name"):
        CoordinationClient(address, MemberRank("a", "second", 0, 2), job="job", silent_s=0.1)


def test_who_leaves_is_not_lost(nodes: list[NodeClients]) -> None:
    formed = meet(nodes)
    for client in nodes[2].clients:
        client.leave()
    verdict = nodes[0].vote(formed)[0].result(timeout=5)
    assert (verdict.is_committed, verdict.lost) == (False, ())
    assert "has left" in verdict.why


def test_a_late_vote_is_told_the_verdict_and_a_missing_one_ends_the_round(nodes: list[NodeClients]) -> None:
    formed = meet(nodes)
    verdict = nodes[0].clients[0].vote(formed.id, is_ok=True, checksum="sum", timeout_s=0.1)
    assert "no verdict within 0.1 s" in verdict.why
    assert nodes[1].clients[0].vote(formed.id, is_ok=True, checksum="sum", timeout_s=1.0) == verdict


def test_a_restarted_coordinator() -> None:
    settings = RoundSettings(expected_nodes=2, straggler_wait_s=5.0)
    first = Coordinator(("127.0.0.1", 0), settings=settings).start()
    nodes = [NodeClients(first.address, name) for name in "ab"]
    try:
        commit(nodes, formed := meet(nodes))
        opened = meet(nodes, after(formed))
        first.close()
        began = time.monotonic()
        with pytest.raises(CoordinatorLostError, match="the connection is lost"):
            nodes[0].clients[0].propose(after(formed), timeout_s=5.0)
        assert time.monotonic() - began < 1.0
        assert nodes[0].clients[0].aborted(opened.id) is not None
        second = Coordinator(first.address, settings=settings).start()
        try:
            deadline = time.monotonic() + 5.0
            while not all(client.is_connected for node in nodes for client in node.clients):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with pytest.raises(CoordinatorLostError, match="restarted"):
                nodes[0].clients[0].vote(opened.id, is_ok=True, timeout_s=5.0)
            again = meet(nodes, after(formed))
            assert (again.number, again.lineage, again.nodes) == (2, formed.lineage, ("a", "b"))
            assert not any(member.needs_state for member in again.members)
            commit(nodes, again)
        finally:
            second.close()
    finally:
        for node in nodes:
            node.close()
        first.close()


def test_only_this_machine_without_a_secret() -> None:
    with pytest.raises(SpecError, match="secret"):
        Coordinator(("0.0.0.0", 0))


def test_nobody_there_is_said() -> None:
    taken = Coordinator(("127.0.0.1", 0)).start()
    with pytest.raises(SpecError, match="free"):
        Coordinator(taken.address)
    taken.close()
    began = time.monotonic()
    with pytest.raises(CoordinatorLostError, match="nothing answered"):
        CoordinationClient(taken.address, MemberRank("a", "first", 0, 1), connect_timeout_s=0.3)
    assert time.monotonic() - began < 1.0


def test_the_wrong_secret_is_said_soon() -> None:
    coordinator = Coordinator(("127.0.0.1", 0), secret=b"right").start()
    try:
        began = time.monotonic()
        with pytest.raises(MismatchError, match="secret"):
            CoordinationClient(coordinator.address, MemberRank("a", "first", 0, 1), secret=b"wrong")
        assert time.monotonic() - began < 2.0
        CoordinationClient(coordinator.address, MemberRank("a", "first", 0, 1), secret=b"right").close()
    finally:
        coordinator.close()
