"""Messages as bytes: JSON with a length and an authentication code that holds for one place in one connection.

    frame = length (4 bytes) | code (32 bytes) | body        code = HMAC-SHA256(key, number of the frame | body)

Each direction has a key, made of the secret and a nonce from either side, so a recorded frame is valid neither again,
nor in the other direction, nor in another connection. Without a secret the codes only show damage.
"""

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Iterator
from typing import NoReturn

from evenly.coordination.values import JSON, Fields, MalformedError, count_of, text_of

PROTOCOL = 1
MOST_BYTES = 2**20  # of a frame from a rank
MOST_STRANGER_BYTES = 4096  # of a frame from a connection that is not authenticated yet
MOST_COORDINATOR_BYTES = 2**24  # of a frame from the coordinator: it passes on what many ranks have said
BEAT_S = 0.25  # both sides say so often that they are alive
CODE_BYTES = 32
NONCE_BYTES = 32

_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class FrameError(Exception):
    """Received bytes are not what the other side of this connection sends next."""


class FrameWriter:
    """Makes frames, one after the other."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def frame(self, message: Fields) -> bytes:
        """Returns the next frame."""
        body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
        code = _code(self._key, self._number, body)
        self._number += 1
        return _LENGTH.pack(CODE_BYTES + len(body)) + code + body


class FrameReader:
    """Collects received bytes and takes frames out of them."""

    def __init__(self, key: bytes, *, most_bytes: int) -> None:
        self._key = key
        self._number = 0
        self._received = bytearray()
        self._most_bytes = most_bytes

    def rekey(self, key: bytes, *, most_bytes: int) -> None:
        """From now on frames have codes of `key`, counted from 0."""
        self._key, self._number, self._most_bytes = key, 0, most_bytes

    def allow(self, most_bytes: int) -> None:
        """Frames may have so many bytes from now on."""
        self._most_bytes = most_bytes

    def feed(self, data: bytes) -> None:
        """Adds received bytes."""
        self._received += data

    def messages(self) -> Iterator[dict[str, JSON]]:
        """Yields the messages that are complete; raises `FrameError` at the first that is not valid."""
        while (message := self.next_message()) is not None:
            yield message

    def next_message(self) -> dict[str, JSON] | None:
        """Returns the next message if it is complete; raises `FrameError` if it is not valid."""
        if len(self._received) < _LENGTH.size:
            return None
        length = _LENGTH.unpack_from(self._received)[0]
        if not CODE_BYTES <= length <= self._most_bytes:
            raise FrameError(f"a frame of {length} bytes; {CODE_BYTES} to {self._most_bytes} are allowed")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        code = bytes(self._received[_LENGTH.size : _LENGTH.size + CODE_BYTES])
        body = bytes(self._received[_LENGTH.size + CODE_BYTES : end])
        del self._received[:end]
        if not hmac.compare_digest(code, _code(self._key, self._number, body)):
            raise FrameError("a frame without the right code")
        self._number += 1
        return _parse(body)


def hello_key(secret: bytes | None, *, client_nonce: str = "") -> bytes:
    """Returns the key of the first frame: of a client, or of the coordinator that answers the client's nonce."""
    return _derive(secret, "coordinator hello" if client_nonce else "client hello", client_nonce, "")


def session_keys(secret: bytes | None, *, client_nonce: str, coordinator_nonce: str) -> tuple[bytes, bytes]:
    """Returns the keys of all later frames: from the client, and from the coordinator."""
    return (
        _derive(secret, "from client", client_nonce, coordinator_nonce),
        _derive(secret, "from coordinator", client_nonce, coordinator_nonce),
    )


def hello(nonce: str) -> dict[str, JSON]:
    """Returns the first message of either side."""
    return {"protocol": PROTOCOL, "nonce": nonce}


def parse_hello(message: Fields) -> tuple[int, str]:
    """Returns the protocol and the nonce of the other side; raises `FrameError`."""
    try:
        protocol, nonce = count_of(message, "protocol"), text_of(message, "nonce")
    except MalformedError as error:
        raise FrameError(str(error)) from None
    if len(nonce) != 2 * NONCE_BYTES or not nonce.isascii():
        raise FrameError("a nonce of another length")
    return protocol, nonce


def new_nonce() -> str:
    """Returns a number that nobody has used before."""
    return secrets.token_hex(NONCE_BYTES)


def _derive(secret: bytes | None, use: str, client_nonce: str, coordinator_nonce: str) -> bytes:
    text = f"evenly {PROTOCOL} {use}\n{client_nonce}\n{coordinator_nonce}"
    return hmac.new(secret or b"", text.encode(), hashlib.sha256).digest()


def _code(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.new(key, _NUMBER.pack(number) + body, hashlib.sha256).digest()


def _parse(body: bytes) -> dict[str, JSON]:
    try:
        message = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame that is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise FrameError("a frame that is not a JSON object")
    return message


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
