"""Tells every rank when one of them fails, without a collective and long before any timeout.

Ranks leave notes in the store they share. A thread of each rank looks for new notes twice a second; whoever waits for
others asks the alarm instead of sleeping on, and a gradient that will never come is let go.
"""

import json
import logging
import socket
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from typing import Any

import torch

from evenly import _errors
from evenly.comm.party import Party

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5


@dataclass(frozen=True)
class Note:
    """What one rank tells the others: it failed, or it has been waiting for a while."""

    kind: str  # "failed" or "waiting"
    rank: int
    host: str
    text: str
    error: str = "PeerError"
    place: str = ""
    step: int = 0
    begun: int = 0
    sharing: tuple[int, ...] = ()  # ranks that average gradients with the one that waits


class Alarm:
    """The notes of a party as one rank sees them."""

    def __init__(self, party: Party, *, sharing: tuple[int, ...] = (), parent: "Alarm | None" = None) -> None:
        self.party = party
        self.begun = 0  # backwards whose gradients this rank has started to average
        self._parents = [parent] if parent is not None else []  # what rings there rings here too
        self._sharing = sharing
        self._host = socket.gethostname()
        self._seen = 0
        self._waiting: dict[str, set[int]] = {}
        self._posted: set[str] = set()
        self._passed: set[str] = set()
        self._open_notes: dict[tuple[int, str], Note] = {}  # of ranks that wait where this rank has not been
        self._error: _errors.EvenlyError | None = None
        self._rung = self._deaf = False
        self._futures: dict[int, tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = {}
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._stop), name="evenly-alarm", daemon=True
        )
        weakref.finalize(self, _end, self._stop, self._thread)  # also at exit
        if party.size > 1:
            self._thread.start()

    def ring(self, error: BaseException) -> None:
        """Tells all other ranks that this one failed; only the first call counts, and it never raises."""
        if self._rung or self.party.size == 1 or (self._error is not None and error is self._error):
            return
        self._rung = True
        kind = type(error).__name__ if isinstance(error, _errors.EvenlyError) else "PeerError"
        text = str(error) if isinstance(error, _errors.EvenlyError) else f"{type(error).__name__}: {error}"
        self._post(Note("failed", self.party.rank, self._host, text, error=kind))

    @property
    def has_rung(self) -> bool:
        """Whether this rank or another one has failed."""
        return self._rung or self._error is not None

    def check(self) -> None:
        """Raises the error that another rank rang the alarm for, if any."""
        for parent in self._parents:
            parent.check()
        if self._error is not None:
            raise self._error

    def hear(self) -> None:
        """Reads what others have told until now; raises as `check` does."""
        for parent in self._parents:
            parent.hear()
        self._poll()
        self.check()

    def follow(self, parent: "Alarm") -> None:
        """From now on what rings at `parent` rings here too."""
        self._parents = [*self._parents, parent]

    def leave(self, parent: "Alarm") -> None:
        """Ends what `follow` began."""
        self._parents = [known for known in self._parents if known is not parent]

    def begin(self) -> None:
        """Counts a backward; a rank that waits and will never join it is found now."""
        self.begun += 1
        for note in list(self._open_notes.values()):
            self._compare(note)

    def fail(self, error: _errors.EvenlyError) -> None:
        """Remembers a failure seen in a background thread, so that the next `check` raises it."""
        with self._lock:
            self._error = self._error or error
            held, self._futures = list(self._futures.values()), {}
        for future, tensor in held:
            _settle(future, tensor)

    def settle_cause(self) -> None:
        """Waits a moment for a note that explains a broken connection."""
        deadline = time.monotonic() + 4 * INTERVAL_S
        while self._error is None and time.monotonic() < deadline and not self._stop.is_set():
            self._poll()
            time.sleep(0.05)

    def waiting(self, place: str, step: int) -> None:
        """Lets the others know that this rank waits at `place` after `step` steps."""
        if place not in self._posted and self.party.size > 1:
            self._posted.add(place)
            me = (self.party.rank, self._host, "")
            self._post(Note("waiting", *me, place=place, step=step, begun=self.begun, sharing=self._sharing))

    def passed(self, place: str) -> None:
        """Notes that this rank has met the others at `place`: whoever waited there waits no more."""
        self._passed.add(place)
        self._open_notes = {key: note for key, note in self._open_notes.items() if note.place != place}

    def absent(self, place: str) -> list[int]:
        """Returns the ranks that have not said that they wait at `place`."""
        self._poll()
        arrived = self._waiting.get(place, set()) | {self.party.rank}
        return [rank for rank in range(self.party.size) if rank not in arrived]

    def hold(self, future: torch.futures.Future[torch.Tensor], tensor: torch.Tensor) -> None:
        """Lets `future` go with `tensor` if the alarm rings before it is done."""
        with self._lock:
            if self._error is None:
                self._futures[id(future)] = (future, tensor)
                return
        _settle(future, tensor)

    def release(self, future: torch.futures.Future[torch.Tensor], tensor: torch.Tensor) -> None:
        """Completes a held future with `tensor`."""
        with self._lock:
            self._futures.pop(id(future), None)
        _settle(future, tensor)

    def close(self) -> None:
        """Ends the watching thread."""
        _end(self._stop, self._thread)

    def _post(self, note: Note) -> None:
        try:
            number = self.party.store.add("notes", 1)
            self.party.store.set(f"note/{number}", json.dumps(asdict(note)))
        except RuntimeError as error:
            logger.debug("the note %s could not be left: %s", note, error)

    def _poll(self) -> None:
        for note in self._fresh():
            self._read(Note(**{**note, "sharing": tuple(note["sharing"])}))

    def _fresh(self) -> list[dict[str, Any]]:
        notes: list[dict[str, Any]] = []
        if self._deaf or not self._reading.acquire(timeout=2 * INTERVAL_S):  # the thread may hang in a dying store
            return notes
        try:
            count = self.party.store.add("notes", 0)
            while self._seen < count and self.party.store.check([f"note/{self._seen + 1}"]):
                notes.append(json.loads(self.party.store.get(f"note/{self._seen + 1}")))
                self._seen += 1
        except RuntimeError as error:
            self._deaf = True  # the host of the store is gone: asking again would only fill the log
            logger.debug("the notes could not be read: %s", error)
        finally:
            self._reading.release()
        return notes

    def _read(self, note: Note) -> None:
        if note.rank == self.party.rank:
            return
        if note.kind == "waiting":
            self._waiting.setdefault(note.place, set()).add(note.rank)
            if self.party.rank in note.sharing and note.place not in self._passed:
                self._open_notes[note.rank, note.place] = note
                self._compare(note)
        else:
            kind = getattr(_errors, note.error, _errors.PeerError)
            self.fail(kind(f"rank {note.rank} on {note.host} stopped: {note.text}"))

    def _compare(self, note: Note) -> None:
        if self.begun <= note.begun or note.place in self._passed:
            return
        error = _errors.LockstepError(
            f"rank {self.party.rank} is in its step {note.step + self.begun - note.begun} but rank {note.rank} on "
            f"{note.host} made only {note.step} steps and waits for the exchange: "
            "ranks were given unequal numbers of batches. "
            "Give every rank the same number of steps (evenly.feed does), or drop the surplus."
        )
        self.ring(error)
        self.fail(error)


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    """Ends a watching thread: one that is inside the store when Python ends would abort the process."""
    stop.set()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(timeout=4 * INTERVAL_S)


def _watch(alarm: "weakref.ref[Alarm]", stop: threading.Event) -> None:
    while not stop.wait(INTERVAL_S):
        watched = alarm()
        if watched is None:
            return
        watched._poll()
        del watched


def _settle(future: torch.futures.Future[torch.Tensor], tensor: torch.Tensor) -> None:
    try:
        future.set_result(tensor)
    except RuntimeError as error:  # two threads may settle it
        logger.debug("the future was settled already: %s", error)
