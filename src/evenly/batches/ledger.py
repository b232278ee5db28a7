"""Who may train which samples of an epoch, and which are done: a value that is the same on every node.

After a committed round all members know the reports of all. From the same ledger and the same reports each of them
computes the same next ledger, so that nobody needs to be asked for samples. A sample is done once the parameters of a
node that has trained it were averaged in a committed round.
"""

import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from evenly.batches.ranges import Ranges, common, decoded, encoded, size_of, split, union, without
from evenly.batches.report import NodeReport
from evenly.coordination.values import JSON, Fields
from evenly.errors import DataError, SpecError
from evenly.spec import deal

MOST_PIECES = 32  # ranges that a node holds, so that it can report what it has trained of them in few bytes

Counts = Mapping[str, int]  # samples by node


@dataclass(frozen=True)
class SampleLedger:
    """The samples of an epoch by position in its order: done, held by a node, or free.

    Every sample that a node reports as trained is counted once: it is done now, or `repeated` as another node had done
    it or is about to, or `lost` as the parameters of the node did not count.
    """

    size: int | None  # samples of the epoch; None for a stream whose end nobody has met
    epoch: int = 0
    number: int = 0  # of the commits it has followed
    done: Ranges = ()
    held: Mapping[str, Ranges] = field(default_factory=dict)  # what each node may train now
    due: Counts = field(default_factory=dict)  # of those, the first ones, that it trains before the next round
    repeated: Counts = field(default_factory=dict)  # in the whole run
    lost: Counts = field(default_factory=dict)  # in the whole run

    @property
    def is_complete(self) -> bool:
        """Whether all samples of the epoch are done."""
        return self.size is not None and self.done == union([(0, self.size)])

    @property
    def digest(self) -> str:
        """A short checksum: nodes with the same ledger have the same."""
        return f"{zlib.crc32(json.dumps(self.to_json(), sort_keys=True).encode()):08x}"

    def after_round(self, reports: Mapping[str, NodeReport], absent: Collection[str] = ()) -> "SampleLedger":
        """Returns the ledger after a committed round: what was trained is done, and the members hold new ranges.

        What the members have not trained is dealt anew, unless they go on training it meanwhile. Other nodes lose what
        they hold, unless they are `absent`.

        Args:
            reports: of the members of the round, by node.
            absent: nodes that are connected but late for this round; they keep what they hold.

        Raises:
            DataError: if nodes do not read the same stream.
        """
        kept = {node: self.held[node] for node in sorted(absent) if node in self.held and node not in reports}
        return self._credited(reports, kept)._dealt(reports)

    def next_epoch(self, size: int | None = None) -> "SampleLedger":
        """Returns the ledger of the epoch that follows a complete one; no node holds anything yet.

        Args:
            size: samples of the next epoch; not known if left out.
        """
        if not self.is_complete:
            raise SpecError(
                f"the epoch after epoch {self.epoch} was asked for, but {size_of(self.done)} of its "
                f"{'unknown number of' if self.size is None else self.size} samples are done. Train the others first."
            )
        return replace(self, size=size, epoch=self.epoch + 1, done=(), held={}, due={})

    def to_json(self) -> dict[str, JSON]:
        """Returns the fields as JSON."""
        return {
            "size": self.size,
            "epoch": self.epoch,
            "number": self.number,
            "done": [*encoded(self.done)],
            "held": {node: [*encoded(ranges)] for node, ranges in sorted(self.held.items())},
            **{name: dict(sorted(counts.items())) for name, counts in self._counts().items()},
        }

    @classmethod
    def from_json(cls, fields: Fields) -> "SampleLedger":
        """Returns the ledger that `fields` describe; raises `SpecError`."""
        try:
            ledger = cls(
                size=None if fields["size"] is None else _number(fields["size"]),
                epoch=_number(fields["epoch"]),
                number=_number(fields["number"]),
                done=decoded(fields["done"]),
                held={node: decoded(numbers) for node, numbers in _object(fields["held"]).items()},
                due={node: _number(count) for node, count in _object(fields["due"]).items()},
                repeated={node: _number(count) for node, count in _object(fields["repeated"]).items()},
                lost={node: _number(count) for node, count in _object(fields["lost"]).items()},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError(
                f"a ledger of samples was given that is not one: {type(error).__name__}: {error}. Give what to_json() "
                "of a ledger has returned."
            ) from None
        claimed = [ledger.done, *ledger.held.values()]
        if size_of(union(*claimed)) < sum(map(size_of, claimed)):
            raise SpecError(
                f"a ledger of samples of epoch {ledger.epoch} was given in which a sample is held twice, or held and "
                "done. Give what to_json() of a ledger has returned."
            )
        return ledger

    def _counts(self) -> dict[str, Counts]:
        return {"due": self.due, "repeated": self.repeated, "lost": self.lost}

    def _credited(self, reports: Mapping[str, NodeReport], kept: Mapping[str, Ranges]) -> "SampleLedger":
        """Returns the ledger with what the members have trained; of other nodes only those in `kept` hold anything."""
        trained = {
            node: report.trained
            for node, report in sorted(reports.items())
            if report.counts and report.epoch == self.epoch
        }
        credited = {node: common(ranges, self.held.get(node, ())) for node, ranges in trained.items()}
        overlapping = {node: ranges for node, ranges in trained.items() if reports[node].overlaps}
        kept = {**kept, **{node: without(self.held.get(node, ()), ranges) for node, ranges in overlapping.items()}}
        done, kept_by_others = union(self.done, *credited.values()), union(*kept.values())
        for node, ranges in trained.items():  # it no longer holds them, but nobody else has trained them
            new = without(ranges, union(done, kept_by_others))
            done, credited[node] = union(done, new), union(credited[node], new)
        repeated, lost = dict(self.repeated), dict(self.lost)
        for node, report in sorted(reports.items()):
            account = repeated if report.counts else lost
            uncredited = size_of(report.trained) - size_of(credited.get(node, ()))
            for counts, amount in ((account, uncredited), (lost, report.dropped)):
                if amount:
                    counts[node] = counts.get(node, 0) + amount
        ledger = replace(self, number=self.number + 1, done=done, held=kept, repeated=repeated, lost=lost)
        return ledger._ended(reports)

    def _ended(self, reports: Mapping[str, NodeReport]) -> "SampleLedger":
        """Returns the ledger with the end of the epoch, if a member has met it."""
        ends = {r.size: node for node, r in sorted(reports.items()) if r.size is not None and r.epoch == self.epoch}
        size = min([*ends, *([] if self.size is None else [self.size])], default=None)
        if size is not None and self.done and self.done[-1][1] > size:
            raise DataError(
                f"node {ends.get(size, '?')} was to read epoch {self.epoch} of the stream that all nodes read, and met "
                f"its end after {size} samples, but {self.done[-1][1]} were trained. Give all nodes the same data."
            )
        held = self.held if size is None else {n: common(ranges, ((0, size),)) for n, ranges in self.held.items()}
        return replace(self, size=size, held=held)

    def _dealt(self, reports: Mapping[str, NodeReport]) -> "SampleLedger":
        """Returns the ledger in which the members hold free samples.

        All parts of the next period come before the reserves, so that samples are done nearly in their order.
        """
        members = {node: report for node, report in sorted(reports.items()) if report.wants > 0}
        rates = _rates(members)
        parts = reserves = _period_of(members, rates)
        period = sum(parts.values())
        free, held = self._free(2 * period), {**dict.fromkeys(members, ()), **self.held}
        left = size_of(free) + sum(size_of(held[node]) for node in members)
        if left < 2 * period:
            if 2 * left < 3 * period:  # the last period is up to half longer, instead of a short one after it
                parts = _divided(left, rates)
            reserves = _divided(left - sum(parts.values()), rates)
        for node, count in parts.items():
            held[node], free = _filled(held[node], free, count)
        due = {node: self.due.get(node, 0) for node in self.held}
        for node, report in members.items():  # a node that holds anything has something to train
            due[node] = min(size_of(held[node]), max(parts[node], report.batch))
        for node, count in reserves.items():
            held[node], free = _filled(held[node], free, parts[node] + count)
        return replace(self, held=held, due=due)

    def _free(self, ahead: int) -> Ranges:
        """Returns what is neither done nor held; `ahead` samples at least if the end of the epoch is not known."""
        taken = union(self.done, *self.held.values())
        end = (taken[-1][1] if taken else 0) + ahead if self.size is None else self.size
        return without(union([(0, end)]), taken)


def _filled(held: Ranges, free: Ranges, count: int) -> tuple[Ranges, Ranges]:
    """Returns what is held, filled up to `count` samples, and what is still free."""
    new, free = split(free, count - size_of(held), pieces=max(0, MOST_PIECES - len(held)))
    return union(held, new), free


def _rates(members: Mapping[str, NodeReport]) -> dict[str, float]:
    """Returns the rate of each node; one that is not known is the mean of the others."""
    known = [report.rate for report in members.values() if report.rate > 0]
    mean = sum(known) / len(known) if known else 1.0
    return {node: report.rate if report.rate > 0 else mean for node, report in members.items()}


def _period_of(members: Mapping[str, NodeReport], rates: Mapping[str, float]) -> dict[str, int]:
    """Returns each node's part of what they want together: in proportion to their rates, in whole batches."""
    wanted, speed = sum(report.wants for report in members.values()), sum(rates.values())
    shares = {node: wanted * (rates[node] / speed) for node in members}
    return {node: max(1, round(shares[node] / report.batch)) * report.batch for node, report in members.items()}


def _divided(count: int, rates: Mapping[str, float]) -> dict[str, int]:
    """Returns `count` samples divided in proportion to the rates."""
    return dict(zip(rates, deal(count, list(rates.values())), strict=True)) if rates else {}


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number of at least 0")
    return value


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not an object")
    return value
