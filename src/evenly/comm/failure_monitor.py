"""Tells every rank when one of them fails, without a collective and long before any timeout.

Ranks write notes to the store they share. A thread of each rank polls for new notes twice a second, and for the
heartbeats of the others. Ranks that wait check the monitor meanwhile, and futures of gradients that will never arrive
are completed.
"""

import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch

from evenly import errors
from evenly.comm.heartbeats import ENDED, INTERVAL_S, SILENT_S, AwakeClock, Heartbeats, identity
from evenly.comm.rank_group import RankGroup
from evenly.launch.limits import NoAnswerError, call_within

logger = logging.getLogger(__name__)

REPORT_S = 0.7  # a rank that failed tries so long to say so, before it raises its error
CAUSE_S = 2.0  # a rank that met others who do not fit waits so long for one that can say why
LOST_S = 3.0  # ranks that still wait so long after the host of the store is gone fail


@dataclass(frozen=True)
class FailureNote:
    """A message of one rank to the others: it failed, it has been waiting for a while, or what `post` was given."""

    kind: str  # "failed", "waiting", or one that was subscribed to
    rank: int
    host: str
    text: str
    error: str = "PeerError"
    place: str = ""  # the label of the wait
    step: int = 0
    begun: int = 0  # backwards of that rank
    averages_with: tuple[int, ...] = ()  # ranks that average gradients with the one that waits
    pid: int = 0


class FailureMonitor:
    """The failures of the ranks of a group, as seen by one rank."""

    def __init__(
        self, rank_group: RankGroup, *, averages_with: tuple[int, ...] = (), parent: "FailureMonitor | None" = None
    ) -> None:
        self.rank_group = rank_group
        self.backwards = 0  # backwards whose gradients this rank has started to average
        self.on_tick: list[Callable[[], None]] = []  # called by the watching thread twice a second
        self._callbacks: dict[str, Callable[[FailureNote], None]] = {}  # for notes of other kinds
        self._undelivered: list[FailureNote] = []  # of kinds that have no callback yet
        self._parents = [parent] if parent is not None else []  # their failures fail here too
        self._averages_with = averages_with
        self._host = socket.gethostname()
        self._notes_read = 0
        self._waiting: dict[str, set[int]] = {}
        self._posted: set[str] = set()
        self._passed: set[str] = set()
        self._open_notes: dict[tuple[int, str], FailureNote] = {}  # of ranks that wait where this rank has not passed
        self._error: errors.EvenlyError | None = None
        self._has_reported = False
        self._futures: dict[int, tuple[torch.futures.Future[torch.Tensor], torch.Tensor, float]] = {}
        self._clock = AwakeClock()
        self._heartbeats = Heartbeats(rank_group)
        self._is_root = parent is None  # one monitor of a process sends heartbeats for all that follow it
        self._lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._stop), name="evenly-failure-monitor", daemon=True
        )
        self._end = weakref.finalize(self, _end, self._stop, self._thread, rank_group, self._heartbeats)  # also at exit
        if rank_group.size > 1:
            self._thread.start()

    def report(self, error: BaseException) -> None:
        """Reports to all other ranks that this one failed; only the first call counts, and it never raises."""
        if self._has_reported or self.rank_group.size == 1 or (self._error is not None and error is self._error):
            return
        self._has_reported = True
        kind = type(error).__name__ if isinstance(error, errors.EvenlyError) else "PeerError"
        text = str(error) if isinstance(error, errors.EvenlyError) else f"{type(error).__name__}: {error}"
        note = FailureNote("failed", self.rank_group.rank, self._host, text, error=kind, pid=os.getpid())
        self._post(note, limit_s=REPORT_S)

    @property
    def has_failed(self) -> bool:
        """Whether this rank or another one has failed."""
        return self._has_reported or self._error is not None

    def check(self) -> None:
        """Raises the error that another rank reported, if any."""
        for parent in self._parents:
            parent.check()
        if self._error is not None:
            raise self._error

    def poll(self) -> None:
        """Reads the new notes of other ranks; raises as `check` does."""
        for parent in self._parents:
            parent.poll()
        self._poll()
        self.check()

    def poll_for_cause(self) -> None:
        """Polls for `CAUSE_S`: raises the error of another rank that knows better what is wrong, if there is one."""
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            self.poll()
            time.sleep(0.05)

    def follow(self, parent: "FailureMonitor") -> None:
        """From now on failures seen by `parent` fail here too."""
        self._parents = [*self._parents, parent]

    def leave(self, parent: "FailureMonitor") -> None:
        """Ends what `follow` began."""
        self._parents = [current for current in self._parents if current is not parent]

    def count_backward(self) -> None:
        """Counts a backward; raises later if a waiting rank will never join it."""
        self.backwards += 1
        for note in list(self._open_notes.values()):
            self._require_lockstep(note)

    def fail(self, error: errors.EvenlyError) -> None:
        """Records a failure seen in a background thread, so that the next `check` raises it."""
        with self._lock:
            self._error = self._error or error
            pending, self._futures = list(self._futures.values()), {}
        for future, tensor, _ in pending:
            _complete(future, tensor)

    def wait_for_cause(self, where: str = "") -> None:
        """Waits a moment for a note that explains a broken connection, or until it is clear which rank is gone."""
        deadline = time.monotonic() + SILENT_S + 3 * INTERVAL_S
        while not self.has_error and time.monotonic() < deadline and not self._stop.is_set():
            self._poll()
            if (error := self.missing(where)) is not None:
                self.fail(error)
            time.sleep(0.05)

    @property
    def has_error(self) -> bool:
        """Whether `check` would raise."""
        return self._error is not None or any(parent.has_error for parent in self._parents)

    def missing(self, where: str = "") -> errors.PeerError | None:
        """Returns an error that names the ranks that are gone or stopped, as far as known now."""
        for parent in self._parents:
            if (error := parent.missing(where)) is not None:
                return error
        store = self.rank_group.store
        if store.lost_s > 0 and not self._host_has_ended():
            return store.error
        if store.unanswered_s >= SILENT_S:
            return store.hung(store.unanswered_s)
        silent = self._heartbeats.silent()
        if not silent:
            return None
        who = ", ".join(self._heartbeats.who(rank) for rank in silent)
        return errors.PeerError(
            f"{who} {'have' if len(silent) > 1 else 'has'} given no sign of life for {min(silent.values()):.0f} s"
            f"{where and f', seen by rank {self.rank_group.rank} {where}'}: "
            "the process has ended, is stopped or cannot be reached. Look at its output and its host; if it only needs "
            "longer, give a larger timeout_s."
        )

    def who(self, ranks: Sequence[int]) -> str:
        """Returns ranks with their hosts and process ids, as far as they are known."""
        return ", ".join(self._heartbeats.who(rank) for rank in ranks)

    def announce(self, key: str) -> None:
        """Writes to `key` that this rank has arrived, with its identity."""
        if self._is_root and self.rank_group.size > 1:
            self.rank_group.store.run(self._heartbeats.beat)
        self.rank_group.store.set(key, identity())

    def set_identities(self, identities: list[bytes]) -> None:
        """Stores the identities of the ranks, once all have announced themselves."""
        self._heartbeats.set_identities(identities)

    def require_store(self) -> None:
        """Raises if the host of the store has been gone for a while: failures can no longer be reported."""
        if self.rank_group.store.lost_s > LOST_S and not self._host_has_ended():
            raise self.rank_group.store.error or errors.PeerError("the store is gone.")

    def _host_has_ended(self) -> bool:
        host = self.rank_group.store_rank
        has_ended = host is not None and self._heartbeats.has_ended(host)
        return has_ended or any(parent._host_has_ended() for parent in self._parents)

    def waiting(self, label: str, step: int, *, why: str = "") -> None:
        """Reports to the others that this rank waits at `label` after `step` steps, and `why`."""
        if label not in self._posted and self.rank_group.size > 1:
            self._posted.add(label)
            me = (self.rank_group.rank, self._host, why)
            self._post(
                FailureNote(
                    "waiting",
                    *me,
                    place=label,
                    step=step,
                    begun=self.backwards,
                    averages_with=self._averages_with,
                )
            )

    def post(self, kind: str, text: str, *, step: int, begun: int = 0) -> None:
        """Sends a note to the ranks that have subscribed to its `kind`."""
        if self.rank_group.size > 1:
            self._post(FailureNote(kind, self.rank_group.rank, self._host, text, step=step, begun=begun))

    def subscribe(self, kind: str, callback: Callable[[FailureNote], None]) -> None:
        """Calls `callback` with note of other ranks of this `kind`, also with earlier ones; in its own thread."""
        with self._lock:
            self._callbacks[kind] = callback
            notes = [note for note in self._undelivered if note.kind == kind]
        for note in notes:
            callback(note)

    def remove_callback(self, callback: Callable[[], None]) -> None:
        """Removes a callback from `on_tick`, unless it failed and was removed already."""
        with suppress(ValueError):
            self.on_tick.remove(callback)

    def record_passed(self, label: str) -> None:
        """Records that the collective `label` is complete: no rank waits there any more."""
        self._passed.add(label)
        self._open_notes = {key: note for key, note in self._open_notes.items() if note.place != label}

    def absent(self, label: str) -> list[int]:
        """Returns the ranks that have not reported to wait at `label`."""
        self._poll()
        arrived = self._waiting.get(label, set()) | {self.rank_group.rank}
        return [rank for rank in range(self.rank_group.size) if rank not in arrived]

    def watch_future(self, future: torch.futures.Future[torch.Tensor], tensor: torch.Tensor) -> None:
        """Completes `future` with `tensor` if a rank fails before it is done."""
        with self._lock:
            if self._error is None:
                self._futures[id(future)] = (future, tensor, self._clock.seconds)
                return
        _complete(future, tensor)

    def complete_future(self, future: torch.futures.Future[torch.Tensor], tensor: torch.Tensor) -> None:
        """Completes a watched future with `tensor`."""
        with self._lock:
            self._futures.pop(id(future), None)
        _complete(future, tensor)

    def close(self) -> None:
        """Ends the watching thread and tells the others that this rank has ended normally."""
        self._end()

    def _post(self, note: FailureNote, *, limit_s: float | None = None) -> None:
        store = self.rank_group.store

        def write() -> None:
            number = store.raw.add("notes", 1)
            store.raw.set(f"note/{number}", json.dumps(asdict(note)))

        try:
            if limit_s is None or store.error is not None or not store.is_remote:
                store.run(write)
            else:
                call_within(min(limit_s, store.timeout_s), write)  # a store that is only slow stays in use
        except (errors.PeerError, NoAnswerError, RuntimeError) as error:
            logger.debug("the note %s could not be written: %s", note, error)

    def _tick(self) -> None:
        """Runs in the watching thread at every interval."""
        self._poll()
        for parent in self._parents:
            if parent._error is not None:
                self.fail(parent._error)
        now_s, timeout_s = self._clock.read(), self.rank_group.store.timeout_s
        with self._lock:
            waited_s = now_s - min((since_s for *_, since_s in self._futures.values()), default=now_s)
        if waited_s > min(timeout_s, LOST_S):  # somebody waits: fail if the host of the store is gone
            try:
                self.require_store()
            except errors.PeerError as lost:
                self.fail(lost)
        if waited_s > timeout_s:
            self.fail(self.missing("in a step") or self._unexplained(waited_s))
        if self._heartbeats.silent(least_s=timeout_s) and (error := self.missing()) is not None:
            self.fail(error)
        self._call_back()

    def _call_back(self) -> None:
        if self.rank_group.store.error is not None or self._stop.is_set():
            return
        for callback in list(self.on_tick):
            try:
                callback()
            except errors.PeerError as error:
                logger.debug("the store failed in %s: %s", callback, error)
            except Exception:  # whatever an observer raises must not end this thread
                logger.exception("%s failed in the failure monitor and is not called any more", callback)
                self.remove_callback(callback)

    def _unexplained(self, waited_s: float) -> errors.PeerError:
        return errors.PeerError(
            f"rank {self.rank_group.rank} waited {waited_s:.0f} s in a step for gradients of other ranks, which give "
            "signs of life but did not send them. Look at their output; for a slow step or link give a larger "
            "timeout_s."
        )

    def _poll(self) -> None:
        for note in self._new_notes():
            self._handle(note)

    def _new_notes(self) -> list[FailureNote]:
        store = self.rank_group.store
        if store.error is not None or not self._read_lock.acquire(timeout=2 * INTERVAL_S):  # the thread may hang there
            return []
        try:
            return store.run(self._fetch_notes)
        except errors.PeerError as error:
            if not store.lost_s:  # it hangs; a host that is gone may have ended normally
                self.fail(error)
            logger.debug("the notes could not be read: %s", error)
            return []
        finally:
            self._read_lock.release()

    def _fetch_notes(self) -> list[FailureNote]:
        """Returns the new notes, sends a heartbeat and reads those of the others; direct calls of the store."""
        store = self.rank_group.store.raw
        if self._is_root and not self._stop.is_set():
            self._heartbeats.beat()
        notes: list[FailureNote] = []
        count = store.add("notes", 0)
        while self._notes_read < count and store.check([f"note/{self._notes_read + 1}"]):
            notes.append(_parse_note(store.get(f"note/{self._notes_read + 1}")))
            self._notes_read += 1
        if self._is_root:
            self._heartbeats.sample()
        return notes

    def _handle(self, note: FailureNote) -> None:
        if note.rank == self.rank_group.rank:
            return
        if note.kind not in ("failed", "waiting"):
            self._deliver(note)
        elif note.kind == "waiting":
            self._waiting.setdefault(note.place, set()).add(note.rank)
            if self.rank_group.rank in note.averages_with and note.place not in self._passed:
                self._open_notes[note.rank, note.place] = note
                self._require_lockstep(note)
        else:
            kind = getattr(errors, note.error, errors.PeerError)
            self.fail(kind(f"rank {note.rank} on {note.host} (pid {note.pid}) stopped: {note.text}"))

    def _deliver(self, note: FailureNote) -> None:
        with self._lock:
            callback = self._callbacks.get(note.kind)
            if callback is None:
                self._undelivered.append(note)
                return
        callback(note)

    def require_coming(self, label: str) -> None:
        """Fails if a rank that averages gradients with this one waits elsewhere than at `label`."""
        for note in list(self._open_notes.values()):
            if note.place != label:
                self._require_lockstep(note, backwards=self.backwards + 1)

    def _require_lockstep(self, note: FailureNote, *, backwards: int | None = None) -> None:
        """Fails if this rank is past the point where another one waits; it has begun so many `backwards`."""
        begun = self.backwards if backwards is None else backwards
        if begun <= note.begun or note.place in self._passed:
            return
        error = self._unlike(note) if note.text else self._out_of_step(note, note.step + begun - note.begun)
        self.report(error)
        self.fail(error)

    def _unlike(self, note: FailureNote) -> errors.MismatchError:
        return errors.MismatchError(
            f"on rank {note.rank} on {note.host} {note.text} since step {note.step + 1}, but not on rank "
            f"{self.rank_group.rank}, which averages gradients with it. Freeze, unfreeze and add parameter groups on "
            "all ranks before the same step."
        )

    def _out_of_step(self, note: FailureNote, step: int) -> errors.LockstepError:
        return errors.LockstepError(
            f"rank {self.rank_group.rank} is in its step {step} but rank "
            f"{note.rank} on {note.host} made only {note.step} steps and waits for the exchange: "
            "ranks were given unequal numbers of batches, or one called step() without a backward. "
            "Give every rank the same number of steps (evenly.feed does), or drop the surplus."
        )


def _end(stop: threading.Event, thread: threading.Thread, rank_group: RankGroup, heartbeats: Heartbeats) -> None:
    """Ends a watching thread: a store call during interpreter exit would abort the process."""
    stop.set()
    if not thread.is_alive():
        return
    is_hung = rank_group.store.error is not None or rank_group.store.unanswered_s >= INTERVAL_S
    if thread is not threading.current_thread():
        thread.join(timeout=0.1 if is_hung else 4 * INTERVAL_S)
    if not is_hung:
        with suppress(errors.PeerError):
            rank_group.store.run(lambda: heartbeats.beat(ENDED), limit_s=4 * INTERVAL_S)


def _watch(monitor: "weakref.ref[FailureMonitor]", stop: threading.Event) -> None:
    while not stop.wait(INTERVAL_S):
        strong = monitor()
        if strong is None:
            return
        strong._tick()
        del strong


def _parse_note(text: bytes) -> FailureNote:
    fields = json.loads(text)
    return FailureNote(**{**fields, "averages_with": tuple(fields["averages_with"])})


def _complete(future: torch.futures.Future[torch.Tensor], tensor: torch.Tensor) -> None:
    try:
        future.set_result(tensor)
    except RuntimeError as error:  # two threads may complete it
        logger.debug("the future was completed already: %s", error)
