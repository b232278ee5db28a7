"""What a rank asks of the coordinator: a round, the keys of its generation, a verdict."""

import base64
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from evenly.coordination.frames import MOST_BYTES
from evenly.coordination.link import CoordinatorLink, Message
from evenly.coordination.values import (
    ExchangeRound,
    MemberRank,
    Proposal,
    RoundVerdict,
    count_of,
    fields_of,
    text_of,
    texts_of,
    truth_of,
)
from evenly.errors import EvenlyError, MismatchError, NonFiniteError, PeerError, SpecError

logger = logging.getLogger(__name__)

MOST_VALUE_BYTES = MOST_BYTES // 2  # of one key; it travels as text
KEPT_ROUNDS = 16
CHECK_S = 0.1  # how often a rank that waits for a round looks whether its node has failed

AbortCallback = Callable[[str, str], None]


class CoordinationClient:
    """One rank's way to the coordinator; any thread may use it. The connection comes back by itself.

    Args:
        address: of the coordinator, or of the etcd that knows it (`etcd://HOST:PORT,...`).
        member: this rank.
        job: the name of the run, the same on all nodes.
        secret: what all nodes share, or None.
        connect_timeout_s: for the first connection.
        silent_s: a coordinator that is not heard for so long is lost.
        reconnect_s: calls wait for so long until a connection that is lost is back.
    """

    def __init__(
        self,
        address: tuple[str, int] | str,
        member: MemberRank,
        *,
        job: str = "",
        secret: bytes | None = None,
        connect_timeout_s: float = 10.0,
        silent_s: float = 2.0,
        reconnect_s: float = 0.5,
    ) -> None:
        self.member = member
        self._reconnect_s = reconnect_s
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._is_closed = False
        self._lost_s: float | None = None  # since when the coordinator is not reached
        self._connection = 0  # counts connections
        self._asked: tuple[int, Message] | None = None  # the proposal that waits for a round
        self._offer: ExchangeRound | EvenlyError | None = None
        self._rounds: dict[str, int] = {}  # the connection that each came by
        self._votes: dict[str, Message] = {}  # sent again after a reconnection
        self._verdicts: dict[str, RoundVerdict | None] = {}
        self._answers: dict[int, Message | None] = {}
        self._callbacks: list[AbortCallback] = []
        self._link = CoordinatorLink(
            address,
            member,
            job=job,
            secret=secret,
            silent_s=silent_s,
            on_message=self._take,
            on_change=self._change,
        )
        try:
            self._link.open(connect_timeout_s)
        except BaseException:
            self._link.close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether `close` or `leave` was called."""
        return self._is_closed

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator is reached."""
        return self._link.is_connected

    def propose(
        self, proposal: Proposal, *, timeout_s: float, check: Callable[[], None] | None = None
    ) -> ExchangeRound:
        """Returns the round that this rank takes part in, once it is formed; what `check` raises ends the wait.

        Raises `PeerError` if none is formed in time, `CoordinatorLostError` if the coordinator is gone,
        `MismatchError` if this node does not fit the others, and `NonFiniteError` if no node has usable parameters.
        """
        with self._changed:
            if self._asked is not None:
                raise SpecError(
                    f"rank {self.member.local_rank} of node {self.member.node} was to propose a round; another thread "
                    "of it waits for one already. Make one proposal at a time."
                )
            ticket = next(self._numbers)
            message: Message = {"kind": "propose", "ticket": ticket, "proposal": proposal.to_json()}
            self._asked, self._offer = (ticket, message), None
            try:
                self._link.send(message)
                self._wait(lambda: self._offer is not None, timeout_s, "a round was formed", check=check)
            finally:
                offer, self._asked, self._offer = self._offer, None, None
                if offer is None:
                    self._link.send({"kind": "retract", "ticket": ticket})
        if isinstance(offer, ExchangeRound):
            return offer
        raise offer if offer is not None else PeerError("no round")

    def put(self, generation: str, key: str, value: bytes) -> None:
        """Sets the value of a key for all members of a generation."""
        if len(value) > MOST_VALUE_BYTES:
            raise SpecError(
                f"{len(value)} bytes were to be shared as {key}; at most {MOST_VALUE_BYTES} are allowed. Send them "
                "over a process group."
            )
        self._ask({"kind": "put", "generation": generation, "key": key, "value": base64.b64encode(value).decode()})

    def get(self, generation: str, key: str, *, timeout_s: float) -> bytes:
        """Returns the value of a key as soon as anybody has set it; raises `PeerError` if the generation ends first."""
        answer = self._ask({"kind": "get", "generation": generation, "key": key}, timeout_s=timeout_s)
        return base64.b64decode(str(answer.get("value")))

    def add(self, generation: str, key: str, amount: int) -> int:
        """Returns the number at `key`, 0 at first, after `amount` was added to it."""
        answer = self._ask({"kind": "add", "generation": generation, "key": key, "amount": amount})
        return int(str(answer.get("total")))

    def check(self, generation: str, keys: Sequence[str]) -> bool:
        """Returns whether all `keys` have a value."""
        return self._ask({"kind": "check", "generation": generation, "keys": list(keys)}).get("has") is True

    def vote(self, round_id: str, *, is_ok: bool, checksum: str = "", why: str = "", timeout_s: float) -> RoundVerdict:
        """Returns how the round ended, once all have voted; at once if it has been aborted.

        A rank that finds no verdict in time votes against the round, so that it is known how it ended.
        """
        message: Message = {"kind": "vote", "round": round_id, "is_ok": is_ok, "checksum": checksum, "why": why[:900]}
        with self._changed:
            try:
                if round_id not in self._verdicts:
                    self._votes[round_id] = message
                    self._link.send(message)
                try:
                    self._wait(lambda: round_id in self._verdicts, timeout_s, "all had voted")
                except PeerError:
                    if not self.is_connected:
                        raise
                    self._votes[round_id] = {**message, "is_ok": False, "why": f"no verdict within {timeout_s:g} s"}
                    self._link.send(self._votes[round_id])
                    self._wait(lambda: round_id in self._verdicts, self._reconnect_s, "all had voted")
            finally:
                self._votes.pop(round_id, None)
            verdict = self._verdicts[round_id]
        if verdict is None:
            raise self._link.unreachable(f"it has no memory of the round {round_id[:8]}, as it was restarted")
        return verdict

    def aborted(self, round_id: str) -> str | None:
        """Returns why the round cannot be committed any more as far as this rank knows; None if it may be."""
        verdict = self._verdicts.get(round_id)
        if verdict is not None:
            return None if verdict.is_committed else verdict.why
        if not self._link.is_connected:
            return "the coordinator is not reached"
        if self._rounds.get(round_id) != self._connection:
            return "the connection to the coordinator was lost in between"
        return None

    def on_abort(self, callback: AbortCallback) -> None:
        """Calls `callback(round_id, why)` from the receiving thread when an open round of this rank is aborted."""
        self._callbacks.append(callback)

    def leave(self) -> None:
        """Says that this rank ends in an orderly way, and closes."""
        self._link.leave(self._reconnect_s)
        self.close()

    def close(self) -> None:
        """Ends the connection; the coordinator takes this rank for lost if it has not left before."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._link.close()

    def _ask(self, message: Message, *, timeout_s: float = 10.0) -> Message:
        """Returns the answer to a request about keys."""
        key = str(message.get("key", ""))
        with self._changed:
            number, connection = next(self._numbers), self._connection
            if not self._link.send({**message, "request": number}):
                raise self._link.unreachable("the connection is lost")
            self._answers[number] = None
            try:
                self._wait(
                    lambda: self._answers[number] is not None or self._connection != connection or self._is_lost(),
                    timeout_s,
                    f"the value of {key} was there",
                )
                answer = self._answers[number]
            finally:
                del self._answers[number]
                if message["kind"] == "get":
                    self._link.send({**message, "kind": "forget", "request": number})
        if answer is None:
            raise self._link.unreachable("the connection is lost")
        if "error" in answer:
            raise PeerError(
                f"rank {self.member.local_rank} of node {self.member.node} was to share {key} with the other members; "
                f"their generation has ended: {answer['error']}. Propose another round."
            )
        return answer

    def _wait(
        self, is_done: Callable[[], bool], timeout_s: float, what: str, *, check: Callable[[], None] | None = None
    ) -> None:
        """Waits, with the lock held, until `is_done`; raises what prevents it."""
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            now_s = time.monotonic()
            if self._is_closed:
                raise self._link.unreachable("this rank has closed its connection")
            if self._link.refusal is not None:
                raise self._link.refusal
            limit_s = deadline_s
            if self._lost_s is not None:
                limit_s = min(deadline_s, self._lost_s + self._reconnect_s)
                if now_s >= limit_s:
                    raise self._link.unreachable("the connection is lost")
            elif now_s >= deadline_s:
                self._raise_late(what, timeout_s)
            if check is not None:
                check()
                limit_s = min(limit_s, now_s + CHECK_S)
            self._changed.wait(limit_s - now_s)

    def _raise_late(self, what: str, timeout_s: float) -> NoReturn:
        raise PeerError(
            f"rank {self.member.local_rank} of node {self.member.node} was to wait until {what}; that did not happen "
            f"within {timeout_s:g} s. Look at the output of the other nodes, or allow more time."
        )

    def _is_lost(self) -> bool:
        return self._lost_s is not None

    def _change(self, is_connected: bool) -> None:
        """Is called by the link's thread when the connection is back or gone."""
        with self._changed:
            if is_connected:
                self._connection += 1
                self._lost_s = None
                for message in (*([self._asked[1]] if self._asked else []), *self._votes.values()):
                    self._link.send(message)
            elif self._lost_s is None:
                self._lost_s = time.monotonic()
            open_rounds = [id for id, came_by in self._rounds.items() if id not in self._verdicts]
            self._changed.notify_all()
        if not is_connected:
            for round_id in open_rounds[-1:]:
                self._call_back(round_id, "the connection to the coordinator is lost")

    def _take(self, message: Message) -> None:
        """Is called by the link's thread with what arrives; raises `MalformedError`."""
        kind = text_of(message, "kind")
        if kind == "verdict":
            self._take_verdict(message)
            return
        with self._changed:
            if kind == "round" and self._is_asked(message):
                self._offer = ExchangeRound.from_json(fields_of(message, "round"))
                self._rounds[self._offer.id] = self._connection
                _forget_oldest(self._rounds)
            elif kind == "refusal" and self._is_asked(message):
                error = NonFiniteError if text_of(message, "of") == "non-finite" else MismatchError
                self._offer = error(text_of(message, "why"))
            elif kind == "answer" and count_of(message, "request") in self._answers:
                self._answers[count_of(message, "request")] = message
            self._changed.notify_all()

    def _is_asked(self, message: Message) -> bool:
        return self._asked is not None and self._asked[0] == count_of(message, "ticket")

    def _take_verdict(self, message: Message) -> None:
        round_id, verdict = text_of(message, "round"), None
        if truth_of(message, "is_known"):
            verdict = RoundVerdict(
                is_committed=truth_of(message, "is_committed"),
                why=text_of(message, "why"),
                lost=texts_of(message, "lost"),
            )
        with self._changed:
            is_new = round_id not in self._verdicts
            self._verdicts[round_id] = verdict
            _forget_oldest(self._verdicts)
            self._changed.notify_all()
        if is_new and verdict is not None and not verdict.is_committed:
            self._call_back(round_id, verdict.why)

    def _call_back(self, round_id: str, why: str) -> None:
        for callback in self._callbacks:
            try:
                callback(round_id, why)
            except Exception:
                logger.exception("a callback for the abort of a round failed")


def _forget_oldest(kept: dict[str, int] | dict[str, RoundVerdict | None]) -> None:
    while len(kept) > KEPT_ROUNDS:
        del kept[next(iter(kept))]
