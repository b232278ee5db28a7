"""What messages of ranks do, and the messages that follow: rounds and shared keys together, without sockets."""

import base64
import binascii
from dataclasses import dataclass

from evenly.coordination.keys import KeysGoneError, KeyTable
from evenly.coordination.rounds import Decided, Ended, Formed, Refused, RoundEvent, Rounds, RoundSettings
from evenly.coordination.values import (
    JSON,
    Ballot,
    MalformedError,
    MemberRank,
    Proposal,
    count_of,
    fields_of,
    text_of,
    texts_of,
    truth_of,
)

MOST_WAITS = 4096  # of one rank, for keys

Message = dict[str, JSON]


@dataclass(frozen=True)
class _KeyWait:
    """A rank waits until somebody sets a key."""

    member: MemberRank
    request: int
    generation: str
    key: str


class RankService:
    """Takes the messages of ranks that have joined; `take_messages` has those that are to be sent."""

    def __init__(self, settings: RoundSettings) -> None:
        self._rounds = Rounds(settings)
        self._keys = KeyTable()
        self._waits: dict[_KeyWait, None] = {}
        self._messages: list[tuple[MemberRank, Message]] = []

    @property
    def is_waiting(self) -> bool:
        """Whether messages may follow because time passes."""
        return self._rounds.is_waiting

    def join(self, member: MemberRank, *, job: str) -> None:
        """Adds a rank; raises `MismatchError` or `NodeTakenError`."""
        self._rounds.join(member, job=job)

    def drop(self, member: MemberRank, *, why: str, now_s: float, is_loss: bool) -> None:
        """Removes a rank."""
        self._waits = {wait: None for wait in self._waits if wait.member != member}
        self._rounds.drop(
            member, why=f"rank {member.local_rank} of node {member.node} was lost: {why}", now_s=now_s, is_loss=is_loss
        )
        self._follow()

    def tick(self, now_s: float) -> None:
        """Does what time brings."""
        self._rounds.tick(now_s)
        self._follow()

    def take_messages(self) -> list[tuple[MemberRank, Message]]:
        """Returns what is to be sent to whom since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def take(self, member: MemberRank, message: Message, now_s: float) -> None:
        """Does what a rank asks for; raises `MalformedError`."""
        match text_of(message, "kind"):
            case "beat":
                pass
            case "propose":
                proposal = Proposal.from_json(fields_of(message, "proposal"))
                self._rounds.propose(member, proposal, ticket=count_of(message, "ticket"), now_s=now_s)
            case "retract":
                self._rounds.retract(member, ticket=count_of(message, "ticket"), now_s=now_s)
            case "vote":
                ballot = Ballot(
                    truth_of(message, "is_ok"), checksum=text_of(message, "checksum"), why=text_of(message, "why")
                )
                self._rounds.vote(member, ballot, round_id=text_of(message, "round"), now_s=now_s)
            case "put" | "get" | "add" | "check" | "forget" as kind:
                self._use_keys(kind, member, message)
            case kind:
                raise MalformedError(f"unknown kind {kind[:40]}")
        self._follow()

    def _use_keys(self, kind: str, member: MemberRank, message: Message) -> None:
        request, generation = count_of(message, "request"), text_of(message, "generation")
        try:
            match kind:
                case "put":
                    self._put(generation, text_of(message, "key"), _decode(message))
                    self._answer(member, request)
                case "get":
                    self._get(_KeyWait(member, request, generation, text_of(message, "key")))
                case "add":
                    total = self._keys.add(generation, text_of(message, "key"), _amount(message))
                    self._put(generation, text_of(message, "key"), str(total).encode())
                    self._answer(member, request, total=total)
                case "check":
                    keys = texts_of(message, "keys")
                    self._answer(member, request, has=all(self._keys.get(generation, key) is not None for key in keys))
                case _:
                    self._waits.pop(_KeyWait(member, request, generation, text_of(message, "key")), None)
        except KeysGoneError as error:
            self._answer(member, request, error=str(error))

    def _put(self, generation: str, key: str, value: bytes) -> None:
        self._keys.put(generation, key, value)
        for wait in [wait for wait in self._waits if wait.generation == generation and wait.key == key]:
            del self._waits[wait]
            self._answer(wait.member, wait.request, value=_encode(value))

    def _get(self, wait: _KeyWait) -> None:
        value = self._keys.get(wait.generation, wait.key)
        if value is not None:
            self._answer(wait.member, wait.request, value=_encode(value))
        elif len(self._waits) >= MOST_WAITS:
            raise KeysGoneError(f"{MOST_WAITS} others wait already")
        else:
            self._waits[wait] = None

    def _answer(self, member: MemberRank, request: int, **fields: JSON) -> None:
        self._messages.append((member, {"kind": "answer", "request": request, **fields}))

    def _follow(self) -> None:
        for event in self._rounds.take_events():
            self._tell(event)

    def _tell(self, event: RoundEvent) -> None:
        match event:
            case Formed(member, ticket, formed):
                for generation in self._keys.begin(formed.generation):
                    self._free_waits(generation, "later rounds have other members")
                self._messages.append((member, {"kind": "round", "ticket": ticket, "round": formed.to_json()}))
            case Refused(member, ticket, kind, why):
                self._messages.append((member, {"kind": "refusal", "ticket": ticket, "of": kind, "why": _shorten(why)}))
            case Decided(member, round_id, None):
                self._messages.append((member, {"kind": "verdict", "round": round_id, "is_known": False}))
            case Decided(member, round_id, verdict) if verdict is not None:
                told: Message = {"is_committed": verdict.is_committed, "why": _shorten(verdict.why)}
                told |= {"round": round_id, "is_known": True, "lost": list(verdict.lost)}
                self._messages.append((member, {"kind": "verdict", **told}))
            case Ended(generation, why):
                self._keys.end(generation, why)
                self._free_waits(generation, why)

    def _free_waits(self, generation: str, why: str) -> None:
        """Answers those who wait for a key that nobody will set any more."""
        for wait in [wait for wait in self._waits if wait.generation == generation]:
            del self._waits[wait]
            self._answer(wait.member, wait.request, error=_shorten(why))


def _shorten(text: str) -> str:
    return text if len(text) <= 900 else f"{text[:900]} ..."


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _decode(message: Message) -> bytes:
    try:
        return base64.b64decode(str(message.get("value")), validate=True)
    except (ValueError, binascii.Error):
        raise MalformedError("value is not base64") from None


def _amount(message: Message) -> int:
    amount = message.get("amount")
    if not isinstance(amount, int) or isinstance(amount, bool) or abs(amount) >= 2**63:
        raise MalformedError("amount is not a whole number")
    return amount
