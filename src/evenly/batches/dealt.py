"""Dataset + ledger -> this rank's batches in an elastic run, where nodes come and go and meet only for exchanges."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import Any, NoReturn, Unpack, cast, final

import torch
from torch.utils.data import Dataset

from evenly.batches.counting import samples_of_call
from evenly.batches.device import to_device
from evenly.batches.indexed import IndexedSource
from evenly.batches.ledger import SampleLedger
from evenly.batches.loading import LoaderOptions
from evenly.batches.parts import Epoch, Rules, check_samples
from evenly.batches.ranges import Ranges, common, decoded, encoded, size_of, split, union, without
from evenly.batches.report import NodeReport
from evenly.batches.sources import open_source
from evenly.batches.trained_rate import TrainedRate
from evenly.coordination.values import JSON, Fields
from evenly.errors import DataError, MismatchError, SpecError


def _no_meeting() -> NoReturn:
    raise SpecError(
        "batches of an elastic run were asked for, but nothing says how nodes meet. Set meet= to a function that makes "
        "an exchange and calls commit() if it was committed."
    )


@final
class DealtFeed:
    """An iterable over this rank's part of the batches of its node, of the samples that the ledger deals to the node.

    After each period it calls `meet()`, which makes an exchange and, if that was committed, calls `commit` on each rank
    of each member. If it was not, training goes on with the reserve; without any, it meets again after a pause. An
    epoch ends when every sample of it is done, on all nodes with the same commit. The first meeting is before the first
    batch: until then nobody holds samples.

    `samples` is the real size of the batch yielded last: 0 if nothing was left for this rank and it got a borrowed
    batch, to take part in the step. All ranks of a node have the same number of steps.
    """

    def __init__(
        self,
        dataset: Dataset[object] | Iterable[object],
        *,
        node: str,
        rank: int,
        samples: Sequence[int],
        period_samples: int,
        pause_s: float = 0.05,
        seed: int = 0,
        shuffle: bool | None = None,
        sampler: Iterable[object] | None = None,
        drop_last: bool = False,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.monotonic,
        **loading: Unpack[LoaderOptions],
    ) -> None:
        """Holds nothing until the first commit.

        Args:
            dataset: the same on all nodes; map-style, or a stream, which every node reads in the same order.
            node: the name of this node, as in the reports.
            rank: this rank within its node.
            samples: of each rank of this node in a step.
            period_samples: what this node would train between two exchanges.
            pause_s: before it meets again when it has nothing to train.
            seed: for the order, the same on all nodes.
            shuffle: whether samples are shuffled: yes, unless there is a `sampler` or a stream.
            sampler: gives the order of a map-style dataset.
            drop_last: refused, as every sample is trained.
            device: where batches are moved to; they stay where they are if left out.
            clock: returns seconds.
            loading: options of torch's DataLoader.
        """
        self.samples = 0
        self.period_samples = period_samples
        self.meet: Callable[[], object] = _no_meeting
        self.between: list[Callable[[], None]] = []  # called when a step is over and another follows
        self.on_end: list[Callable[[], None]] = []
        self.ends_early = False  # set between two steps: the epoch yields no further batch
        self._node, self._rank, self._shares = node, rank, check_samples(samples)
        self._name, self._device, self._pause_s = type(dataset).__name__, device, pause_s
        self._check(seed, drop_last=drop_last)
        rules = Rules(rank=rank, ranks=len(self._shares), seed=index(seed), drop_last=False, loading=loading)
        self._source = open_source(dataset, rules, shuffle=shuffle, sampler=sampler)
        self._ledger = SampleLedger(self._source.epoch_size(0))
        self._trained: Ranges = ()  # since the last commit
        self._trained_epoch = 0  # in which that was
        self._dropped = 0  # samples trained during a round that gave this node other parameters; not reported yet
        self._due = 0  # samples to train before the next meeting
        self._end: int | None = None  # the epoch has no more samples than this, as was seen
        self._part: Ranges = ()  # what `_steps` are of
        self._taken = 0  # samples of it
        self._steps: Epoch | None = None
        self._is_under_way = False  # a batch was yielded, and its epoch has not ended
        self._rate = TrainedRate(clock)

    @property
    def ledger(self) -> SampleLedger:
        """What is done, and what each node holds."""
        return self._ledger

    @property
    def epoch(self) -> int:
        """The epoch that nodes are in; a node that returns may find that others have begun another one."""
        return self._ledger.epoch

    @property
    def global_batch(self) -> int:
        """The samples of all ranks of this node in one step."""
        return sum(self._shares)

    @property
    def times(self) -> float:
        """The samples of all ranks of this node over those of this rank."""
        return self.global_batch / self._shares[self._rank]

    @property
    def is_at_end(self) -> bool:
        """Whether a meeting follows the batch yielded last."""
        return self._is_under_way and not self._has_next()

    def __len__(self) -> NoReturn:
        """Raises `TypeError`: how many steps this node makes depends on the others."""
        raise TypeError(
            "the number of steps of an epoch was asked for, but in an elastic run it depends on which nodes take part "
            "and how fast they are. Count epochs, or the steps that were made."
        )

    def __iter__(self) -> Iterator[Any]:
        while not self._ledger.number:  # a node that joins learns only then which epoch it is
            self._hold_meeting()
        epoch, steps_follow = self.epoch, False
        while self.epoch == epoch:
            if not self._has_next():
                self._hold_meeting()
            elif steps_follow:
                steps_follow = False
                for tell in self.between:
                    tell()
            else:
                self._rate.begin()
                yield self._take()
                steps_follow = True
                if self.ends_early:
                    self._is_under_way = False
                    return
        self._is_under_way = False
        for tell in self.on_end:
            tell()

    def samples_of(self, module: torch.nn.Module, *args: object, **kwargs: object) -> float:
        """Returns the samples of the batch yielded last, which `module` is about to be called with.

        Raises `SpecError` if none was yielded in this epoch and the module trains. In evaluation it is the leading dim
        of the first tensor.
        """
        return samples_of_call(self.samples if self._is_under_way else None, module, *args, **kwargs)

    def reshare(self, samples: Sequence[int]) -> None:
        """Changes the samples of each rank from the next batch on; all ranks of this node call it at the same step."""
        self._shares = check_samples(samples, ranks=len(self._shares))

    def report(self, *, overlaps: bool = False) -> dict[str, JSON]:
        """Returns what the members of a round must know of this node; the same on all its ranks but for the rate.

        Args:
            overlaps: whether this node trains on until the round is committed; what it holds then stays its own.
        """
        own = NodeReport(
            self._trained,
            self._trained_epoch,
            wants=self.period_samples,
            rate=self._rate.samples_per_s,
            batch=self.global_batch,
            size=self._end,
            overlaps=overlaps,
            dropped=self._dropped,
        )
        return {**own.to_json(), "number": self._ledger.number, "digest": self._ledger.digest}

    def commit(
        self, reports: Mapping[str, Fields], *, absent: Collection[str] = (), discarded: Collection[str] = ()
    ) -> None:
        """Follows a committed round; a node that was behind or fresh has called `adopt` before.

        Args:
            reports: by node, of all members, as `report` has returned them on the first rank of each.
            absent: nodes that are connected but late for this round.
            discarded: members whose parameters did not count.

        Raises:
            SpecError: if this node is no member.
            MismatchError: if the ledgers of the members differ.
            DataError: if the epoch has no samples, or nodes have different data.
        """
        if self._node not in reports:
            raise SpecError(
                f"node {self._node} was to follow a round of the nodes {', '.join(sorted(reports))}, of which it is "
                "none. Give the reports of all members, or call adopt() with the next round that it takes part in."
            )
        self._require_same_ledgers({node: report for node, report in reports.items() if node not in discarded})
        members = {n: NodeReport.from_json(fields, counts=n not in discarded) for n, fields in reports.items()}
        ledger = self._ledger.after_round(members, absent)
        if ledger.is_complete:
            ledger = self._next_epoch(ledger, members, absent)
        own = members[self._node]
        unreported = without(self._trained, own.trained)
        is_effective = own.counts and own.epoch == ledger.epoch
        self._dropped = 0 if is_effective else size_of(unreported)
        self._follow(ledger, unreported if is_effective else ())

    def adopt(self, state: Fields) -> None:
        """Takes over the ledger of another node, from its `state()`; `commit` of the same round must follow."""
        self._ledger, self._steps = self._checked(state), None

    def state(self) -> dict[str, JSON]:
        """Returns the ledger, and what this node has trained since the last commit."""
        return {"ledger": self._ledger.to_json(), "trained": [*encoded(self._trained)]}

    def resume(self, state: Fields) -> None:
        """Resumes from what `state` has returned on this node."""
        ledger = self._checked(state)
        try:
            trained = decoded(state["trained"])
        except (KeyError, ValueError) as error:
            raise SpecError(
                f"the feed of {self._name} was given a position in which what was trained is not valid: "
                f"{type(error).__name__}: {error}. Give what state() has returned."
            ) from None
        self._follow(ledger, trained)

    def _has_next(self) -> bool:
        if self._steps is None:
            self._part, _ = split(self._held(), self._due)
            if not self._part:
                return False
            self._steps, self._taken = self._source.begin_part(self.epoch, self._part), 0
        if self._steps.shares is not self._shares:
            self._steps.load(self._taken, self._shares)
        if self._steps.more():
            return True
        if self._taken < size_of(self._part):  # a stream has ended
            _, missing = split(self._part, self._taken)
            self._end = missing[0][0]
        self._steps, self._due = None, 0
        return False

    def _take(self) -> object:
        steps = cast(Epoch, self._steps)
        before = self._taken
        self._taken, self.samples, batch = steps.take()
        _, following = split(self._part, before)
        trained, _ = split(following, self._taken - before)
        self._trained = union(self._trained, trained)
        self._due -= self._taken - before
        self._rate.count(self._taken - before)
        self._is_under_way = True
        return batch if self._device is None else to_device(batch, self._device)

    def _held(self) -> Ranges:
        """Returns what this node holds and has not trained."""
        held = without(self._ledger.held.get(self._node, ()), self._trained)
        return held if self._end is None else common(held, ((0, self._end),))

    def _hold_meeting(self) -> None:
        """Meets; if nothing was committed, another period of the reserve is due, or a pause is made."""
        self._rate.end()
        ledger = self._ledger
        self.meet()
        if self._ledger is not ledger:
            return
        self._steps = None
        self._due = min(size_of(self._held()), max(ledger.due.get(self._node, 0), self.global_batch))
        if not self._due:
            time.sleep(self._pause_s)

    def _follow(self, ledger: SampleLedger, trained: Ranges) -> None:
        """Goes on with this ledger."""
        if ledger.epoch != self._trained_epoch or ledger.size is not None:
            self._end = None
        self._ledger, self._trained, self._steps = ledger, trained, None
        self._trained_epoch = ledger.epoch
        due, _ = split(ledger.held.get(self._node, ()), ledger.due.get(self._node, 0))
        self._due = size_of(without(due, trained))

    def _next_epoch(
        self, ledger: SampleLedger, members: Mapping[str, NodeReport], absent: Collection[str]
    ) -> SampleLedger:
        """Returns the ledger of the next epoch, dealt to the members already."""
        if not ledger.done:
            raise DataError(
                f"epoch {ledger.epoch} of {self._name} was requested, but it has no samples. Give an iterable whose "
                "__iter__ starts anew."
            )
        idle = {node: replace(report, trained=(), dropped=0, size=None) for node, report in members.items()}
        return ledger.next_epoch(self._source.epoch_size(ledger.epoch + 1)).after_round(idle, absent)

    def _require_same_ledgers(self, reports: Mapping[str, Fields]) -> None:
        """Raises `MismatchError` unless members with the newest ledger have the one of this rank."""
        numbers = {node: fields.get("number") for node, fields in sorted(reports.items())}
        newest = max((number for number in numbers.values() if isinstance(number, int)), default=self._ledger.number)
        holders = [node for node, number in numbers.items() if number == newest]
        if holders and self._ledger.number != newest:
            raise MismatchError(
                f"node {self._node} was to follow a commit with a ledger of commit {self._ledger.number}, but node "
                f"{holders[0]} has that of commit {newest}. Call adopt() with its state first."
            )
        if others := [node for node in holders if reports[node].get("digest") != self._ledger.digest]:
            raise MismatchError(
                f"node {self._node} was to follow a commit with nodes {', '.join(others)}, but their ledgers of commit "
                f"{newest} differ. Give all nodes the same data, and the same seed."
            )

    def _checked(self, state: Fields) -> SampleLedger:
        fields = state.get("ledger") if isinstance(state, dict) else None
        if not isinstance(fields, dict):
            raise SpecError(
                f"the feed of {self._name} was given the position {state}, which has no ledger. Give what state() has "
                "returned."
            )
        ledger = SampleLedger.from_json(fields)
        size = self._source.epoch_size(ledger.epoch)
        is_other = ledger.size != size if isinstance(self._source, IndexedSource) else (ledger.size or 0) > (size or 0)
        if size is not None and is_other:  # a stream may end before its length says
            raise DataError(
                f"the feed of {self._name} was given a ledger of an epoch of {ledger.size} samples, but it has {size}. "
                "Give all nodes the same data, and resume with the data that the position was saved with."
            )
        return ledger

    def _check(self, seed: int, *, drop_last: bool) -> None:
        """Raises an error for arguments that are out of range."""
        if not 0 <= self._rank < len(self._shares):
            raise DataError(
                f"the batches of rank {self._rank} were asked for, but its node has {len(self._shares)} ranks, counted "
                "from 0. Give the samples of each rank of the node."
            )
        if type(self.period_samples) is not int or self.period_samples < 1:
            raise SpecError(
                f"period_samples={self.period_samples!r} was given for node {self._node}. Give a whole number of at "
                "least 1."
            )
        if drop_last:
            raise SpecError(
                "drop_last=True was given for an elastic run, in which every sample of an epoch is trained once. Leave "
                "it out."
            )
        try:
            index(seed)
        except TypeError:
            raise DataError(f"seed={seed!r} was given for the order of samples. Give a whole number.") from None
