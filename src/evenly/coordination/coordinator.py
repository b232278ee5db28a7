"""The coordinator: it listens, authenticates, and tells each rank what follows from what all say. Soft state only."""

import ipaddress
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from evenly.coordination.channel import Channel, close_when_forked
from evenly.coordination.frames import (
    BEAT_S,
    MOST_BYTES,
    MOST_STRANGER_BYTES,
    PROTOCOL,
    FrameError,
    FrameReader,
    FrameWriter,
    hello,
    hello_key,
    new_nonce,
    parse_hello,
    session_keys,
)
from evenly.coordination.rounds import NodeTakenError, RoundSettings
from evenly.coordination.service import RankService
from evenly.coordination.values import JSON, MalformedError, MemberRank, is_name, text_of
from evenly.errors import MismatchError, SpecError

logger = logging.getLogger(__name__)

MOST_STRANGERS = 64  # connections that are not authenticated yet
STRANGER_S = 5.0  # for which one may stay so
BUSY_STRANGER_S = 0.25  # for which one may stay so when all places are taken
RETURN_S = 10.0  # for which a coordinator that retires waits for lost ranks
BACKLOG = 256
_WAITING_S = 0.02  # a round may be formed when time has passed


class _Caller:
    """A connection, from a rank once it is authenticated and has joined."""

    def __init__(self, channel: Channel, now_s: float) -> None:
        self.channel = channel
        self.opened_s = now_s
        self.heard_s = now_s
        self.has_greeted = False
        self.member: MemberRank | None = None
        self.wants_write = False


class Coordinator:
    """Listens at an address; `serve` or `start` runs it.

    Args:
        bind: address and port; port 0 takes a free one.
        secret: what all nodes share; without one only addresses of this machine are allowed.
        settings: how long rounds wait for whom.
        silent_s: a rank that is not heard for so long is lost.
    """

    def __init__(
        self,
        bind: tuple[str, int],
        *,
        secret: bytes | None = None,
        settings: RoundSettings | None = None,
        silent_s: float = 2.0,
    ) -> None:
        if silent_s < 2 * BEAT_S:
            raise SpecError(f"silent_s={silent_s} was given; ranks are heard every {BEAT_S} s. Give at least 1.")
        if secret is not None and not secret:
            raise SpecError("an empty secret was given; anybody has it. Give at least 16 random bytes, or None.")
        self._secret = secret
        self._silent_s = silent_s
        self._service = RankService(settings or RoundSettings())
        self._listener = _listen(bind, has_secret=secret is not None)
        host, port = self._listener.getsockname()[:2]
        self.address = str(host), int(port)  # where it listens
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._strangers: dict[_Caller, None] = {}  # the oldest first
        self._ranks: dict[MemberRank, _Caller] = {}
        self._listens = True
        self._is_stopped = False
        self.is_retiring = False  # it ends when nobody uses it
        self._lost_s = -RETURN_S  # when a rank was last lost, that may come back
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Runs in a thread until `close`."""
        self._thread = threading.Thread(target=self.serve, name="evenly-coordinator", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Lets `serve` return; may be called from a signal handler and from any thread."""
        self._is_stopped = True
        with suppress(OSError):
            self._wake_write.send(b"x")

    def retire(self) -> None:
        """Lets `serve` return once all ranks have left; those that were lost have some time to come back."""
        self.is_retiring = True

    def close(self) -> None:
        """Ends the thread, if `start` has made one, and all connections."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._release()

    def serve(self, *, is_allowed: Callable[[], bool] = lambda: True) -> None:
        """Serves until `stop`, or until it is not allowed any more."""
        try:
            last_s = beaten_s = time.monotonic()
            while not self._is_stopped:
                ready = self._selector.select(_WAITING_S if self._service.is_waiting else BEAT_S / 2)
                if not is_allowed():  # this process may have been stopped, and another one be the coordinator now
                    break
                now_s = time.monotonic()
                self._forgive(now_s - last_s)
                last_s = now_s
                for key, mask in ready:
                    self._handle(key, mask, now_s)
                self._drop_silent(now_s)
                self._listen_again(now_s)
                if now_s - beaten_s >= BEAT_S:
                    beaten_s = now_s
                    self._beat()
                self._service.tick(now_s)
                self._deliver(now_s)
                if self.is_retiring and not self._ranks and now_s - self._lost_s > RETURN_S:
                    break
        finally:
            self._release()

    def _handle(self, key: selectors.SelectorKey, mask: int, now_s: float) -> None:
        if key.fileobj is self._listener:
            self._accept(now_s)
        elif key.fileobj is self._wake_read:
            with suppress(BlockingIOError):
                self._wake_read.recv(4096)
        elif isinstance(key.data, _Caller):
            if mask & selectors.EVENT_WRITE:
                self._flush(key.data, now_s)
            if mask & selectors.EVENT_READ:
                self._read(key.data, now_s)
            self._deliver(now_s)

    def _accept(self, now_s: float) -> None:
        if not self._make_room(now_s):
            self._listens = False
            self._selector.unregister(self._listener)
            return
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # the caller is gone again, or there are too many open files
            logger.debug("a connection was not accepted: %s", error)
            self._listens = False
            self._selector.unregister(self._listener)
            return
        reader = FrameReader(hello_key(self._secret), most_bytes=MOST_STRANGER_BYTES)
        caller = _Caller(Channel(connection, reader=reader, writer=FrameWriter(b"")), now_s)
        self._strangers[caller] = None
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _make_room(self, now_s: float) -> bool:
        """Returns whether another stranger may connect; an old one gives way to it, first one that has said nothing."""
        if len(self._strangers) < MOST_STRANGERS:
            return True
        oldest = min(self._strangers, key=lambda caller: (caller.has_greeted, caller.opened_s))
        if now_s - oldest.opened_s < BUSY_STRANGER_S:
            return False
        self._close(oldest, "", now_s)
        return True

    def _listen_again(self, now_s: float) -> None:
        if not self._listens and self._make_room(now_s):
            self._listens = True
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _read(self, caller: _Caller, now_s: float) -> None:
        if caller.channel.connection.fileno() < 0:
            return  # closed by an earlier event of this turn
        try:
            is_closed = caller.channel.receive()
            for message in caller.channel.messages():
                caller.heard_s = now_s
                self._take(caller, message, now_s)
                if caller.channel.connection.fileno() < 0:
                    return
            if is_closed:
                self._close(caller, "its connection was closed", now_s)
        except ConnectionError:
            self._close(caller, "its connection was closed", now_s)
        except (OSError, FrameError, MalformedError) as error:
            if caller.member is not None:
                logger.warning("rank %s is dropped: %s", caller.member, error)
            self._close(caller, f"its connection failed ({error})", now_s)
        except Exception as error:  # one rank never ends the coordinator of the others
            logger.exception("rank %s is dropped", caller.member)
            self._close(caller, f"its message failed ({type(error).__name__})", now_s)

    def _take(self, caller: _Caller, message: dict[str, JSON], now_s: float) -> None:
        if not caller.has_greeted:
            self._greet(caller, message)
        elif caller.member is None:
            self._join(caller, message, now_s)
        elif message.get("kind") == "leave":
            self._close(caller, "it has left", now_s, is_loss=False)
        else:
            self._service.take(caller.member, message, now_s)

    def _greet(self, caller: _Caller, message: dict[str, JSON]) -> None:
        protocol, client_nonce = parse_hello(message)
        nonce = new_nonce()
        caller.channel.writer = FrameWriter(hello_key(self._secret, client_nonce=client_nonce))
        caller.channel.send(hello(nonce))
        if protocol != PROTOCOL:
            raise FrameError(f"protocol {protocol}")
        from_client, from_coordinator = session_keys(self._secret, client_nonce=client_nonce, coordinator_nonce=nonce)
        caller.channel.reader.rekey(from_client, most_bytes=MOST_STRANGER_BYTES)
        caller.channel.writer = FrameWriter(from_coordinator)
        caller.has_greeted = True

    def _join(self, caller: _Caller, message: dict[str, JSON], now_s: float) -> None:
        """Adds the rank that the first authenticated frame names."""
        member, job = MemberRank.from_json(message), text_of(message, "job")
        if not is_name(job):
            raise MalformedError("job is not a name")
        before = self._ranks.get(member)
        if before is not None:
            self._close(before, "it has connected again", now_s)
        try:
            self._service.join(member, job=job)
        except MismatchError as error:
            caller.channel.send({"kind": "refused", "why": str(error), "is_final": True})
            self._close(caller, "", now_s)
        except NodeTakenError:
            caller.channel.send({"kind": "refused", "why": "another start is connected", "is_final": False})
            self._close(caller, "", now_s)
        else:
            caller.member = member
            caller.channel.reader.allow(MOST_BYTES)
            self._strangers.pop(caller, None)
            self._ranks[member] = caller
            caller.channel.send({"kind": "welcome"})

    def _flush(self, caller: _Caller, now_s: float) -> None:
        if caller.channel.connection.fileno() < 0:
            return
        try:
            caller.channel.flush()
        except OSError:
            self._close(caller, "its connection was closed", now_s)
        else:
            self._watch(caller)

    def _watch(self, caller: _Caller) -> None:
        """Asks for a turn when the socket takes bytes again, as long as some are left."""
        if caller.channel.has_unsent != caller.wants_write:
            caller.wants_write = caller.channel.has_unsent
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.wants_write else 0)
            self._selector.modify(caller.channel.connection, mask, caller)

    def _deliver(self, now_s: float) -> None:
        """Sends what the service has for the ranks; a rank that cannot be reached is lost, with what follows."""
        while messages := self._service.take_messages():
            for member, message in messages:
                self._send(member, message, now_s)

    def _beat(self) -> None:
        for member in list(self._ranks):
            self._send(member, {"kind": "beat"}, time.monotonic())

    def _send(self, member: MemberRank, message: dict[str, JSON], now_s: float) -> None:
        caller = self._ranks.get(member)
        if caller is None:
            return
        try:
            caller.channel.send(message)
        except OSError:
            self._close(caller, "its connection was closed", now_s)
        else:
            self._watch(caller)

    def _forgive(self, pause_s: float) -> None:
        """Time in which this process was stopped itself does not count as silence of others."""
        if pause_s > self._silent_s / 2:
            for caller in self._ranks.values():
                caller.heard_s += pause_s

    def _drop_silent(self, now_s: float) -> None:
        for caller in [caller for caller in self._strangers if now_s - caller.opened_s > STRANGER_S]:
            self._close(caller, "", now_s)
        for caller in [caller for caller in self._ranks.values() if now_s - caller.heard_s > self._silent_s]:
            self._close(caller, f"it was silent for {self._silent_s:g} s", now_s)

    def _close(self, caller: _Caller, why: str, now_s: float, *, is_loss: bool = True) -> None:
        if caller.channel.connection.fileno() >= 0:
            self._selector.unregister(caller.channel.connection)
            caller.channel.close()
        self._strangers.pop(caller, None)
        member = caller.member
        if member is not None and self._ranks.get(member) is caller:
            del self._ranks[member]
            if is_loss:
                self._lost_s = now_s
            self._service.drop(member, why=why, now_s=now_s, is_loss=is_loss)

    def _release(self) -> None:
        for caller in [*self._strangers, *self._ranks.values()]:
            caller.channel.close()
        self._strangers.clear()
        self._ranks.clear()
        for each in (self._listener, self._wake_read, self._wake_write):
            each.close()
        self._selector.close()


def _listen(bind: tuple[str, int], *, has_secret: bool) -> socket.socket:
    host, port = bind
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise SpecError(
            f"the coordinator was to listen at {host}:{port}; {error}. Give an address of this machine and a port."
        ) from None
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    if not has_secret and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise SpecError(
            f"the coordinator was to listen at {host}:{port}, where other machines reach it, and there is no secret. "
            "Give --secret-file, the same on all nodes, or listen at 127.0.0.1."
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SpecError(
            f"the coordinator was to listen at {host}:{port}; {error.strerror or error}. Give an address of this "
            "machine and a port that is free."
        ) from None
    listener.setblocking(False)
    close_when_forked(listener)
    return listener
