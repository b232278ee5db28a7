"""Who is the coordinator, when etcd says it: one at a time, and another one after it fails."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenly.coordination import CoordinationClient, CoordinatorSeat, MemberRank, RoundSettings
from evenly.coordination.etcd import parse_servers
from evenly.errors import CoordinatorLostError, SpecError
from tests.coordination.etcds import Candidate, EtcdServer, etcd_server
from tests.coordination.nodes import NodeClients, after, commit, meet

SETTINGS = RoundSettings(expected_nodes=2)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with etcd_server(tmp_path) as server:
        yield server


def test_one_candidate_has_the_seat_and_may_give_it_up(etcd: EtcdServer) -> None:
    one, other = CoordinatorSeat(etcd.url, job="job"), CoordinatorSeat(etcd.url, job="job")
    with pytest.raises(OSError, match="no coordinator"):
        one.find()
    assert one.take(("10.0.0.1", 5))
    assert not other.take(("10.0.0.2", 6))
    assert CoordinatorSeat(etcd.url, job="another").take(("10.0.0.3", 7))
    assert other.find() == ("10.0.0.1", 5)
    one.give_up()
    assert not one.is_held
    assert other.take(("::1", 6))
    assert one.find() == ("::1", 6)


def test_a_seat_that_is_not_renewed_is_lost_before_another_one_has_it(etcd: EtcdServer) -> None:
    one, other = CoordinatorSeat(etcd.url, job="job"), CoordinatorSeat(etcd.url, job="job")
    assert one.take(("10.0.0.1", 5))
    deadline = time.monotonic() + 10.0
    while not other.take(("10.0.0.2", 6)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not one.is_held
    one.renew()
    assert not one.is_held


def test_nodes_find_the_next_coordinator_and_go_on(etcd: EtcdServer) -> None:
    first, second = Candidate(etcd.url, SETTINGS), Candidate(etcd.url, SETTINGS)
    assert first.take()
    nodes = [NodeClients(etcd.url, name) for name in "ab"]
    try:
        commit(nodes, formed := meet(nodes))
        first.close()
        assert second.take()
        deadline = time.monotonic() + 10.0
        while not all(client.is_connected for node in nodes for client in node.clients):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        following = meet(nodes, after(formed))
        assert (following.number, following.lineage) == (formed.number + 1, formed.lineage)
        commit(nodes, following)
    finally:
        for node in nodes:
            node.close()
        second.close()


def test_a_coordinator_stops_when_etcd_is_gone_for_long_and_comes_back_with_it(etcd: EtcdServer) -> None:
    first, second = Candidate(etcd.url, SETTINGS), Candidate(etcd.url, SETTINGS)
    assert first.take()
    client = CoordinationClient(etcd.url, MemberRank("a", "first", 0, 1), job="job")
    etcd.kill()
    first.thread.join(timeout=10)
    assert not first.thread.is_alive()
    first.close()
    with pytest.raises(CoordinatorLostError, match="no server of etcd answers"):
        CoordinationClient(etcd.url, MemberRank("b", "first", 0, 1), job="job", connect_timeout_s=0.5)
    etcd.start()
    deadline = time.monotonic() + 20.0
    taken = False
    while not (taken and client.is_connected):
        assert time.monotonic() < deadline
        taken = taken or second.take()
        time.sleep(0.1)
    client.close()
    second.close()


@pytest.mark.parametrize(
    "url", ["etcd://", "etcd://host", "etcd://host:0", "etcd://a:1,", "http://a:1", "etcd://a:1/x"]
)
def test_odd_servers_are_refused(url: str) -> None:
    with pytest.raises(SpecError, match="etcd"):
        parse_servers(url)
