"""The connection of one rank to the coordinator: kept open by a thread, which also receives."""

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from evenly.coordination.channel import Channel, HandshakeClosedError, open_channel
from evenly.coordination.etcd import CoordinatorSeat
from evenly.coordination.frames import BEAT_S, FrameError
from evenly.coordination.values import JSON, Fields, MalformedError, MemberRank, text_of
from evenly.errors import CoordinatorLostError, EvenlyError, MismatchError

ATTEMPT_S = 1.0  # for one attempt to connect
_PAUSE_S = 0.05  # between attempts at first; then it doubles
_MOST_PAUSE_S = 0.25
_CLOSED_LIMIT = 5  # handshakes that the other side has closed: it has another secret

Message = dict[str, JSON]


class _TakenError(Exception):
    """Another start of this node is still connected."""


class CoordinatorLink:
    """Connects, says that this rank is alive, receives, and connects again.

    Args:
        address: of the coordinator, or of the etcd that knows it (`etcd://HOST:PORT,...`).
        member: the rank.
        job: the name of the run.
        secret: what all nodes share.
        silent_s: a coordinator that is not heard for so long is lost.
        on_message: is given what arrives, in the thread of the link.
        on_change: is called in the thread of the link when the connection is there, or is gone.
    """

    def __init__(
        self,
        address: tuple[str, int] | str,
        member: MemberRank,
        *,
        job: str,
        secret: bytes | None,
        silent_s: float,
        on_message: Callable[[Message], None],
        on_change: Callable[[bool], None],
    ) -> None:
        self._where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
        self._find = CoordinatorSeat(address, job=job).find if isinstance(address, str) else lambda: address
        self._join: Message = {**member.to_json(), "job": job}
        self._member = member
        self._secret = secret
        self._silent_s = silent_s
        self._on_message = on_message
        self._on_change = on_change
        self._channel: Channel | None = None
        self._is_closed = False
        self._is_leaving = False
        self._taken_s: float | None = None  # since when another start of this node has its place
        self.refusal: EvenlyError | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        name = f"evenly-coordination-{member.node}-{member.local_rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator is reached."""
        return self._channel is not None

    def open(self, timeout_s: float) -> None:
        """Connects for the first time; raises `CoordinatorLostError` or `MismatchError`."""
        deadline_s, pause_s, num_closed = time.monotonic() + timeout_s, _PAUSE_S, 0
        taken_until_s = time.monotonic() + self._silent_s + 1.0
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                self._channel = self._connect(min(max(left_s, 0.1), ATTEMPT_S))
                break
            except _TakenError:
                if time.monotonic() > taken_until_s:
                    raise self._taken() from None
                reason = "another start of this node is connected"
            except HandshakeClosedError:
                num_closed += 1
                reason = "it closed the connection"
                if num_closed >= _CLOSED_LIMIT:
                    raise self._other_secret() from None
            except (OSError, FrameError, MalformedError) as error:
                reason = getattr(error, "strerror", None) or str(error)
            if time.monotonic() > deadline_s:
                raise self.unreachable(f"nothing answered within {timeout_s:g} s ({reason})")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        self._thread.start()

    def send(self, message: Fields) -> bool:
        """Sends a message; returns False if the coordinator is not reached."""
        channel = self._channel
        if channel is None:
            return False
        try:
            channel.send(message)
        except OSError:
            self._wake()  # the thread finds out the same
            return False
        if channel.has_unsent:
            self._wake()
        return True

    def leave(self, timeout_s: float) -> None:
        """Says that this rank ends; returns when the coordinator has heard it, or after `timeout_s`."""
        self._is_leaving = True
        if self.send({"kind": "leave"}):
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Ends the thread and the connection."""
        self._is_closed = True
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._wake_read.close()
        self._wake_write.close()

    def unreachable(self, case: str) -> CoordinatorLostError:
        """Returns the error of a call that needs the coordinator."""
        return CoordinatorLostError(
            f"rank {self._member.local_rank} of node {self._member.node} was to reach the coordinator at "
            f"{self._where}; {case}. Check that `evenly coordinate` runs there and that the network lets its port "
            "through; training goes on without exchanges until then."
        )

    def _run(self) -> None:
        pause_s = _PAUSE_S
        while not (self._is_closed or (self._is_leaving and self._channel is None)):
            if self._channel is not None:
                self._serve(self._channel)
                pause_s = _PAUSE_S
                continue
            _select([self._wake_read], [], pause_s)
            self._drain()
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
            with suppress(OSError, HandshakeClosedError, FrameError, MalformedError):
                self._reconnect()

    def _reconnect(self) -> None:
        if self._is_closed or self.refusal is not None:
            return
        try:
            channel = self._connect(ATTEMPT_S)
        except _TakenError:
            self._taken_s = self._taken_s or time.monotonic()
            if time.monotonic() - self._taken_s > self._silent_s + 1.0:
                self._give_up(self._taken())
            return
        except MismatchError as error:
            self._give_up(error)
            return
        self._channel, self._taken_s = channel, None
        self._on_change(True)

    def _give_up(self, refusal: EvenlyError) -> None:
        """The coordinator is there, but not for this rank."""
        self.refusal = refusal
        self._on_change(False)

    def _serve(self, channel: Channel) -> None:
        """Receives and says that this rank is alive, until the connection is gone."""
        heard_s = turned_s = time.monotonic()
        beaten_s = 0.0
        try:
            while not self._is_closed:
                now_s = time.monotonic()
                if now_s - turned_s > self._silent_s / 2:  # this process was stopped itself
                    heard_s += now_s - turned_s
                turned_s = now_s
                if now_s - heard_s > self._silent_s:
                    break
                if now_s - beaten_s >= BEAT_S:
                    beaten_s = now_s
                    channel.send({"kind": "beat"})
                writers = [channel.connection] if channel.has_unsent else []
                wait_s = max(0.0, beaten_s + BEAT_S - now_s)
                readable, writable, _ = _select([channel.connection, self._wake_read], writers, wait_s)
                if self._wake_read in readable:
                    self._drain()
                if writable:
                    channel.flush()
                if channel.connection in readable:
                    is_closed = channel.receive()
                    heard_s = time.monotonic()
                    for message in channel.messages():
                        self._on_message(message)
                    if is_closed:
                        break
        except (OSError, FrameError, MalformedError, ValueError):
            pass
        self._channel = None
        channel.close()
        if not (self._is_closed or self._is_leaving):
            self._on_change(False)

    def _connect(self, timeout_s: float) -> Channel:
        """Returns a channel on which the coordinator has welcomed this rank."""
        deadline_s = time.monotonic() + timeout_s
        channel = open_channel(self._find(), secret=self._secret, timeout_s=timeout_s)
        try:
            channel.send(self._join)
            while (message := channel.reader.next_message()) is None:
                left_s = max(0.0, deadline_s - time.monotonic())
                if not _select([channel.connection], [], left_s)[0]:
                    raise TimeoutError("no answer")
                if channel.receive():
                    raise ConnectionResetError("the connection was closed")
            if text_of(message, "kind") == "welcome":
                return channel
            if message.get("is_final") is not True:
                raise _TakenError
            raise MismatchError(text_of(message, "why"))
        except BaseException:
            channel.close()
            raise

    def _other_secret(self) -> MismatchError:
        return MismatchError(
            f"rank {self._member.local_rank} of node {self._member.node} was to join the coordinator at "
            f"{self._where}; it closes the connection at the first message, as it does for another secret. Give the "
            "same --secret-file on all nodes, and an address at which `evenly coordinate` listens."
        )

    def _taken(self) -> MismatchError:
        return MismatchError(
            f"rank {self._member.local_rank} was to join as node {self._member.node}; another start of a node of this "
            "name is connected and alive. Give every node a name of its own with --node."
        )

    def _wake(self) -> None:
        with suppress(OSError):
            self._wake_write.send(b"x", socket.MSG_DONTWAIT)

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            self._wake_read.recv(4096)


Sockets = list[socket.socket]


def _select(readers: Sockets, writers: Sockets, wait_s: float) -> tuple[Sockets, Sockets, Sockets]:
    """Returns the sockets that are ready; descriptors may have any number, which `select.select` does not allow."""
    poll = select.poll()
    for reader in readers:
        poll.register(reader, select.POLLIN)
    for writer in writers:
        poll.register(writer, select.POLLOUT | (select.POLLIN if writer in readers else 0))
    ready = dict(poll.poll(1000 * wait_s))
    failed = select.POLLIN | select.POLLHUP | select.POLLERR
    readable = [reader for reader in readers if ready.get(reader.fileno(), 0) & failed]
    return readable, [writer for writer in writers if ready.get(writer.fileno(), 0) & select.POLLOUT], []
