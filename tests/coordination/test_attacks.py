"""Who does not have the secret is not admitted, and does not hold up those who have it."""

import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import psutil
import pytest

from evenly.coordination import CoordinationClient, Coordinator, ExchangeRound, MemberRank, RoundSettings
from evenly.coordination.frames import (
    MOST_BYTES,
    MOST_STRANGER_BYTES,
    FrameReader,
    FrameWriter,
    hello,
    hello_key,
    new_nonce,
    parse_hello,
    session_keys,
)
from evenly.coordination.values import JSON, Fields
from evenly.errors import MismatchError
from tests.coordination.nodes import FRESH, NodeClients, after, commit, meet

SECRET = b"known to all nodes"
OTHERS = b"not known to any of them"
SERVE = """
import sys
from evenly.coordination import Coordinator, RoundSettings
coordinator = Coordinator(("127.0.0.1", 0), secret=sys.argv[1].encode(), settings=RoundSettings(expected_nodes=2))
print(coordinator.address[1], flush=True)
coordinator.serve()
"""
Address = tuple[str, int]


@pytest.fixture
def served() -> Iterator[tuple[Address, psutil.Process]]:
    """The address of a coordinator that is a process of its own, and the process."""
    command = [sys.executable, "-c", SERVE, SECRET.decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield ("127.0.0.1", int(process.stdout.readline())), psutil.Process(process.pid)
        process.kill()


@pytest.fixture
def members(served: tuple[Address, psutil.Process]) -> Iterator[list[NodeClients]]:
    joined = [NodeClients(served[0], name, secret=SECRET) for name in "ab"]
    yield joined
    for node in joined:
        node.close()


class Conversation:
    """The client's side of a connection, by hand; `sent` is what a listener would have recorded."""

    def __init__(self, address: Address, *, secret: bytes = SECRET) -> None:
        self.sent: list[bytes] = []
        self.socket = socket.create_connection(address, timeout=5.0)
        nonce = new_nonce()
        self.say(FrameWriter(hello_key(secret)).frame(hello(nonce)))
        self.reader = FrameReader(hello_key(secret, client_nonce=nonce), most_bytes=MOST_BYTES)
        answer = self.hear()
        if answer is not None:
            keys = session_keys(secret, client_nonce=nonce, coordinator_nonce=parse_hello(answer)[1])
            self.writer = FrameWriter(keys[0])
            self.reader.rekey(keys[1], most_bytes=MOST_BYTES)

    def say(self, data: bytes) -> None:
        self.sent.append(data)
        self.socket.sendall(data)

    def hear(self) -> Fields | None:
        """Returns the next message; None if the coordinator has closed the connection."""
        with suppress(ConnectionError):
            while (message := self.reader.next_message()) is None:
                data = self.socket.recv(4096)
                if not data:
                    return None
                self.reader.feed(data)
            return message
        return None

    def join(self, name: str = "x", size: int = 1) -> Fields | None:
        self.say(self.writer.frame({**MemberRank(name, "first", 0, size).to_json(), "job": "job"}))
        return self.hear()

    def is_closed(self) -> bool:
        """Whether the coordinator closes the connection, whatever it says before."""
        return all_heard(self.socket) is not None

    def close(self) -> None:
        self.socket.close()


def all_heard(connection: socket.socket) -> bytes | None:
    """Returns what the other side sent before it closed the connection; None if it did not close it."""
    heard = b""
    try:
        while data := connection.recv(4096):
            heard += data
    except ConnectionError:
        return heard
    except TimeoutError:
        return None
    return heard


def fuzzed(rng: random.Random, recorded: list[bytes]) -> bytes:
    """Returns bytes that no client sends: noise, wrong lengths, wrong codes, damaged and repeated frames."""
    kind = rng.randrange(6)
    body = {"protocol": 1, "nonce": new_nonce(), "x": rng.random()}
    if kind == 0:
        return rng.randbytes(rng.randrange(40, 400))
    if kind == 1:
        return rng.choice([2**32 - 1, MOST_BYTES, MOST_STRANGER_BYTES + 1, 31, 0]).to_bytes(4, "big") + rng.randbytes(
            99
        )
    if kind == 2:
        return FrameWriter(hello_key(OTHERS)).frame(body)
    if kind == 3:
        return (32 + 3).to_bytes(4, "big") + bytes(32) + b"{}\n"
    frame = bytearray(recorded[0])
    if kind == 4:
        frame[rng.randrange(4, len(frame))] ^= 1 << rng.randrange(8)
        return bytes(frame)
    return recorded[rng.randrange(1, len(recorded))]  # of another connection


@pytest.mark.alone
@pytest.mark.parametrize("number", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fuzzed_frames_are_not_taken(
    number: int, served: tuple[Address, psutil.Process], members: list[NodeClients]
) -> None:
    address, process = served
    commit(members, formed := meet(members))
    with closing(Conversation(address)) as honest:
        assert honest.join() == {"kind": "welcome"}
        honest.say(honest.writer.frame({"kind": "beat"}))
        honest.say(honest.writer.frame({"kind": "leave"}))
        assert honest.is_closed()
        recorded = honest.sent
    memory_bytes = process.memory_info().rss
    longest_s = [0.0]
    is_over = threading.Event()
    admitted: list[bytes] = []

    def attack() -> None:
        rng = random.Random(24)
        for _ in range(number):
            with closing(socket.create_connection(address, timeout=10.0)) as connection, suppress(ConnectionError):
                connection.sendall(fuzzed(rng, recorded))
                heard = all_heard(connection)
                if heard != b"":
                    admitted.append(heard or b"left open")
        is_over.set()

    attacker = threading.Thread(target=attack)
    attacker.start()
    while not is_over.is_set():
        began = time.monotonic()
        formed = meet(members, after(formed))
        commit(members, formed)
        longest_s.append(time.monotonic() - began)
    attacker.join()
    assert not admitted
    assert max(longest_s) < 1.0
    assert process.memory_info().rss - memory_bytes < 20 * 2**20
    assert meet(members, after(formed)).nodes == ("a", "b")


@pytest.mark.alone
def test_silent_connections_keep_nobody_out(served: tuple[Address, psutil.Process], members: list[NodeClients]) -> None:
    address, process = served
    commit(members, formed := meet(members))
    memory_bytes = process.memory_info().rss
    silent = [socket.create_connection(address, timeout=10.0) for _ in range(200)]
    began = time.monotonic()
    commit(members, formed := meet(members, after(formed)))
    assert time.monotonic() - began < 1.0
    NodeClients(address, "c", secret=SECRET).close()
    assert time.monotonic() - began < 3.0
    assert process.num_fds() < 150
    assert process.memory_info().rss - memory_bytes < 20 * 2**20
    for connection in silent:
        connection.close()


@pytest.mark.slow
def test_a_silent_connection_is_closed_after_a_while(served: tuple[Address, psutil.Process]) -> None:
    with closing(socket.create_connection(served[0], timeout=7.0)) as silent:
        began = time.monotonic()
        assert all_heard(silent) == b""
        assert 4.5 < time.monotonic() - began < 6.5


def test_a_recorded_conversation_is_worth_nothing(served: tuple[Address, psutil.Process]) -> None:
    address, _ = served
    with closing(Conversation(address)) as honest:
        assert honest.join("x") == {"kind": "welcome"}
    with closing(socket.create_connection(address, timeout=5.0)) as again:
        for data in honest.sent:
            again.sendall(data)
        heard = all_heard(again)  # the answer to the recorded hello, with a nonce that the record does not fit
        assert heard is not None
        assert b"welcome" not in heard
        assert b"nonce" in heard


def test_a_repeated_frame_ends_the_connection(served: tuple[Address, psutil.Process]) -> None:
    with closing(Conversation(served[0])) as honest:
        assert honest.join("x") == {"kind": "welcome"}
        frame = honest.writer.frame({"kind": "beat"})
        honest.say(frame)
        assert (honest.hear() or {}).get("kind") == "beat"
        honest.say(frame)
        assert honest.is_closed()


def test_another_secret_and_a_coordinator_that_has_another_one(served: tuple[Address, psutil.Process]) -> None:
    with pytest.raises(MismatchError, match="secret"):
        CoordinationClient(served[0], MemberRank("x", "first", 0, 1), secret=OTHERS)
    with pytest.raises(MismatchError, match="secret"):
        CoordinationClient(served[0], MemberRank("x", "first", 0, 1))
    with closing(Conversation(served[0], secret=OTHERS)) as stranger:
        assert stranger.is_closed()


def test_a_stranger_may_send_little(served: tuple[Address, psutil.Process]) -> None:
    with closing(Conversation(served[0])) as stranger:
        padded = {**MemberRank("x", "first", 0, 1).to_json(), "job": "job", "x": "x" * MOST_STRANGER_BYTES}
        with suppress(ConnectionError):
            stranger.say(stranger.writer.frame(padded))
        assert stranger.is_closed()


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "unknown"},
        {"kind": 3},
        {"no": "kind"},
        {"kind": "propose", "ticket": 1, "proposal": {}},
        {"kind": "propose", "ticket": -1, "proposal": {**FRESH.to_json()}},
        {"kind": "propose", "ticket": 1, "proposal": {**FRESH.to_json(), "samples": 10**400}},
        {"kind": "propose", "ticket": 1, "proposal": {**FRESH.to_json(), "facts": {"x": "x" * 5000}}},
        {"kind": "vote", "round": ["x"], "is_ok": True, "checksum": "", "why": ""},
        {"kind": "put", "request": 1, "generation": "x", "key": "x", "value": "%"},
        {"kind": "add", "request": 1, "generation": "x", "key": "x", "amount": 2**70},
        {"kind": "check", "request": 1, "generation": "x", "keys": [1]},
    ],
)
def test_nonsense_from_a_member_ends_only_its_own_connection(
    message: dict[str, object], served: tuple[Address, psutil.Process]
) -> None:
    with closing(Conversation(served[0])) as member:
        assert member.join("x") == {"kind": "welcome"}
        member.say(member.writer.frame(message))  # type: ignore[arg-type]
        assert member.is_closed()
    with closing(Conversation(served[0])) as member:
        assert member.join("x") == {"kind": "welcome"}


def test_any_message_of_a_member_leaves_the_others_alone(
    served: tuple[Address, psutil.Process], members: list[NodeClients]
) -> None:
    """A rank that has the secret says what no rank says; at worst its own connection ends."""
    address, process = served
    commit(members, formed := meet(members))
    rng = random.Random(24)
    memory_bytes = process.memory_info().rss
    for _ in range(60):
        with closing(Conversation(address)) as member:
            assert member.join("x", size=2) == {"kind": "welcome"}
            with suppress(ConnectionError):
                for _ in range(20):
                    member.say(member.writer.frame(strange(rng, formed.id, formed.generation)))
    commit(members, following := meet(members, after(formed)))
    assert following.nodes == ("a", "b")
    assert process.memory_info().rss - memory_bytes < 20 * 2**20


def strange(rng: random.Random, round_id: str, generation: str) -> Fields:
    """Returns a message some of whose fields are as they should be."""
    values: list[JSON] = [0, 1, -1, 2**60, 1.5, True, None, "", "x" * 900, round_id, generation, [], ["a"], {}]
    values += [FRESH.to_json(), {**FRESH.to_json(), "samples": -1.0}, {"a": [[[[]]]]}]
    message: dict[str, JSON] = {
        "kind": rng.choice(["beat", "propose", "retract", "vote", "put", "get", "add", "check", "forget"]),
        "ticket": 1,
        "request": 1,
        "proposal": FRESH.to_json(),
        "round": round_id,
        "is_ok": True,
        "checksum": "",
        "why": "",
        "generation": generation,
        "key": rng.choice("ab"),
        "keys": ["a"],
        "value": "AAAA",
        "amount": 1,
    }
    if rng.random() < 0.3:
        message[rng.choice(list(message))] = rng.choice(values)
    return message


def test_three_hundred_changes_of_membership_leave_nothing_behind() -> None:
    coordinator = Coordinator(("127.0.0.1", 0), secret=SECRET, settings=RoundSettings(expected_nodes=2)).start()
    stays = NodeClients(coordinator.address, "a", size=1, secret=SECRET)
    process = psutil.Process()
    formed: ExchangeRound | None = None
    before = process.num_fds(), threading.active_count(), process.memory_info().rss
    for number in range(300):
        if number == 30:  # by now all is loaded that is ever loaded
            before = process.num_fds(), threading.active_count(), process.memory_info().rss
        comes = NodeClients(coordinator.address, "b", size=1, start=f"{number}", secret=SECRET)
        waiting = comes.propose(FRESH)
        while not waiting[0].done():  # the first rounds may be formed before it has proposed
            formed = stays.propose(FRESH if formed is None else after(formed))[0].result(timeout=10)
            if formed.nodes == ("a",):
                commit([stays], formed)
            else:
                assert waiting[0].result(timeout=10) == formed
        assert formed is not None
        stays.clients[0].put(formed.generation, "address", bytes(1000))
        if number % 3 != 2:
            commit([stays, comes], formed)
        else:
            comes.close()
            assert stays.vote(formed)[0].result(timeout=10).lost == ("b",)
            again = stays.propose(after(formed, version=formed.number - 1))[0].result(timeout=10)
            commit([stays], again)
            formed = again
        comes.close()
    num_fds, num_threads, memory_bytes = before
    assert process.num_fds() <= num_fds
    assert threading.active_count() <= num_threads
    assert process.memory_info().rss - memory_bytes < 10 * 2**20
    stays.close()
    coordinator.close()
