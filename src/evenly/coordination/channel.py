"""One connection: messages in and out of a socket that never blocks, and how a client opens it."""

import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator

from evenly.coordination.frames import (
    MOST_COORDINATOR_BYTES,
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
from evenly.coordination.values import JSON, Fields
from evenly.errors import MismatchError

CHUNK_BYTES = 2**16
MOST_UNSENT_BYTES = 2**26  # the other side does not read; it is dropped


class Channel:
    """Messages to and from the other side of a socket. Several threads may send, one receives."""

    def __init__(self, connection: socket.socket, *, reader: FrameReader, writer: FrameWriter) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.reader = reader
        self.writer = writer
        self._unsent = bytearray()
        self._lock = threading.Lock()
        close_when_forked(connection)

    @property
    def has_unsent(self) -> bool:
        """Whether the socket could not take all bytes yet."""
        return bool(self._unsent)

    def send(self, message: Fields) -> None:
        """Sends a message, or as much as the socket takes; raises `OSError` if the connection is gone."""
        with self._lock:
            self._unsent += self.writer.frame(message)
            if len(self._unsent) > MOST_UNSENT_BYTES:
                raise OSError("the other side does not read what is sent to it")
            self._flush()

    def flush(self) -> None:
        """Sends what is left as far as the socket takes it; raises `OSError` if the connection is gone."""
        with self._lock:
            self._flush()

    def receive(self) -> bool:
        """Takes in the bytes that are there; returns whether the other side has closed the connection."""
        try:
            data = self.connection.recv(CHUNK_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        self.reader.feed(data)
        return not data

    def messages(self) -> Iterator[dict[str, JSON]]:
        """Yields the messages that are complete; raises `FrameError`."""
        return self.reader.messages()

    def close(self) -> None:
        """Closes the socket; a second call does nothing."""
        self.connection.close()

    def _flush(self) -> None:
        while self._unsent:
            try:
                num_sent = self.connection.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            del self._unsent[:num_sent]


_opened: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def close_when_forked(opened: socket.socket) -> None:
    """A forked process, such as a worker of a data loader, must not keep the connection of a dead rank open."""
    _opened.add(opened)


def _close_in_child() -> None:
    for opened in list(_opened):
        opened.close()


os.register_at_fork(after_in_child=_close_in_child)


class HandshakeClosedError(Exception):
    """The other side closed the connection before it had said anything valid."""


def open_channel(address: tuple[str, int], *, secret: bytes | None, timeout_s: float) -> Channel:
    """Returns a channel to the coordinator at `address`, which has shown that it has the secret.

    Raises `OSError` if nothing answers, `HandshakeClosedError` if it gives no valid answer, and `MismatchError` if it
    speaks another protocol.
    """
    deadline_s = time.monotonic() + timeout_s
    connection = socket.create_connection(address, timeout=timeout_s)
    try:
        client_nonce = new_nonce()
        connection.sendall(FrameWriter(hello_key(secret)).frame(hello(client_nonce)))
        reader = FrameReader(hello_key(secret, client_nonce=client_nonce), most_bytes=MOST_COORDINATOR_BYTES)
        protocol, coordinator_nonce = parse_hello(_read_one(connection, reader, deadline_s))
        if protocol != PROTOCOL:
            raise MismatchError(
                f"this rank was to join the coordinator at {address[0]}:{address[1]}; that speaks protocol {protocol}, "
                f"this evenly speaks {PROTOCOL}. Install the same version of evenly on all nodes."
            )
        from_client, from_coordinator = session_keys(
            secret, client_nonce=client_nonce, coordinator_nonce=coordinator_nonce
        )
        reader.rekey(from_coordinator, most_bytes=MOST_COORDINATOR_BYTES)
        return Channel(connection, reader=reader, writer=FrameWriter(from_client))
    except BaseException:
        connection.close()
        raise


def _read_one(connection: socket.socket, reader: FrameReader, deadline_s: float) -> dict[str, JSON]:
    while True:
        connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        try:
            data = connection.recv(CHUNK_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise HandshakeClosedError
        reader.feed(data)
        try:
            message = reader.next_message()
        except FrameError:
            raise HandshakeClosedError from None
        if message is not None:
            return message
