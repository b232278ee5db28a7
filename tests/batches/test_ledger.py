"""The ledger of samples: every sample of an epoch is done once, whatever becomes of the nodes."""

import json
import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenly.batches.ledger import MOST_PIECES, SampleLedger
from evenly.batches.ranges import common, decoded, encoded, size_of, split, union, without
from evenly.batches.report import NodeReport
from evenly.errors import DataError, SpecError

SETS = st.sets(st.integers(0, 40))


def ranges_of(positions):
    return union([(p, p + 1) for p in positions])


def positions_of(ranges):
    return {p for start, stop in ranges for p in range(start, stop)}


@given(SETS, SETS, st.integers(0, 50))
def test_ranges_are_sets_of_positions(one, other, count):
    a, b = ranges_of(one), ranges_of(other)
    assert positions_of(a) == one
    assert size_of(a) == len(one)
    assert union(a, b) == ranges_of(one | other)
    assert common(a, b) == ranges_of(one & other)
    assert without(a, b) == ranges_of(one - other)
    assert decoded(json.loads(json.dumps(encoded(a)))) == a
    assert list(map(positions_of, split(a, count))) == [set(sorted(one)[:count]), set(sorted(one)[count:])]


@pytest.mark.parametrize("numbers", [[1], [1, 0], [1, 2, 0, 1], [-1, 2], [1, 2.0], "12", None, [True, 1]])
def test_ranges_that_are_refused(numbers):
    with pytest.raises(ValueError, match=r"pairs|positive"):
        decoded(numbers)


def test_members_hold_a_period_in_proportion_to_their_rates_and_another_one_as_a_reserve():
    reports = {"a": NodeReport(wants=30, rate=100.0, batch=6), "b": NodeReport(wants=15, rate=50.0, batch=3)}
    ledger = SampleLedger(1000).after_round(reports)
    assert ledger.due == {"a": 30, "b": 15}
    assert ledger.held == {"a": ((0, 30), (45, 75)), "b": ((30, 45), (75, 90))}
    slower = {**reports, "b": NodeReport(wants=15, rate=25.0, batch=3)}
    assert SampleLedger(1000).after_round(slower).due == {"a": 36, "b": 9}


def test_nodes_whose_rates_are_not_known_hold_as_much_as_the_mean():
    wants = {"wants": 40, "batch": 2}
    assert SampleLedger(1000).after_round({n: NodeReport(**wants) for n in "abc"}).due == {"a": 40, "b": 40, "c": 40}
    reports = {"a": NodeReport(**wants, rate=3), "b": NodeReport(**wants, rate=1), "c": NodeReport(**wants)}
    assert SampleLedger(1000).after_round(reports).due == {"a": 60, "b": 20, "c": 40}


@pytest.mark.parametrize(
    ("size", "due", "reserves"),
    [
        (100, {"a": 30, "b": 10}, {"a": 30, "b": 10}),
        (64, {"a": 30, "b": 10}, {"a": 18, "b": 6}),
        (56, {"a": 42, "b": 14}, {"a": 0, "b": 0}),
        (9, {"a": 7, "b": 2}, {"a": 0, "b": 0}),
        (1, {"a": 1, "b": 0}, {"a": 0, "b": 0}),
    ],
)
def test_near_the_end_of_an_epoch_all_that_is_left_is_split_so_that_all_finish_together(size, due, reserves):
    reports = {"a": NodeReport(wants=20, rate=30.0, batch=5), "b": NodeReport(wants=20, rate=10.0, batch=5)}
    ledger = SampleLedger(size).after_round(reports)
    assert dict(ledger.due) == due
    assert {node: size_of(ranges) - due[node] for node, ranges in ledger.held.items()} == reserves


def test_done_samples_are_one_range_as_long_as_nodes_train_what_is_due():
    ledger = SampleLedger(None)
    reports = {n: NodeReport(wants=30, rate=r, batch=b) for n, r, b in (("a", 7, 4), ("b", 5, 3), ("c", 1, 2))}
    for _ in range(20):
        ledger = ledger.after_round(reports)
        trained = {n: split(ledger.held[n], ledger.due[n])[0] for n in reports}
        reports = {n: replace(report, trained=trained[n]) for n, report in reports.items()}
        assert len(ledger.done) <= 1


def test_ranges_of_a_lost_node_go_back_and_those_of_an_absent_one_stay():
    wants = NodeReport(wants=4)
    ledger = SampleLedger(100).after_round(dict.fromkeys("abc", wants))
    assert ledger.held["c"] == ((8, 12), (20, 24))
    kept = ledger.after_round({n: replace(wants, trained=ledger.held[n]) for n in "ab"}, absent=["c", "unknown"])
    assert kept.held["c"] == ledger.held["c"]
    assert kept.due["c"] == 4
    assert "unknown" not in kept.held
    lost = ledger.after_round({n: replace(wants, trained=ledger.held[n]) for n in "ab"})
    assert "c" not in lost.held
    assert lost.done == ((0, 8), (12, 20))
    assert lost.held["a"] == ((8, 12), (24, 28))


def test_what_a_returning_node_trained_meanwhile_is_done_if_nobody_else_did_it_and_repeated_otherwise():
    wants = NodeReport(wants=4)
    first = SampleLedger(100).after_round(dict.fromkeys("abc", wants))
    without_c = first.after_round({n: replace(wants, trained=split(first.held[n], 4)[0]) for n in "ab"})
    assert without_c.held == {"a": ((8, 12), (16, 20)), "b": ((12, 16), (20, 24))}
    reports = {n: replace(wants, trained=split(without_c.held[n], 2)[0]) for n in "ab"}
    back = without_c.after_round({**reports, "c": replace(wants, trained=((8, 12),))})
    assert union(back.done, ((8, 12),)) == back.done
    assert back.repeated == {"c": 2}
    assert back.lost == {}


def test_what_a_node_trained_whose_parameters_did_not_count_is_lost_and_dealt_again():
    wants = NodeReport(wants=4)
    first = SampleLedger(100).after_round(dict.fromkeys("ab", wants))
    reports = {"a": replace(wants, trained=((0, 4),)), "b": replace(wants, trained=((4, 8),), counts=False)}
    second = first.after_round(reports)
    assert second.done == ((0, 4),)
    assert second.lost == {"b": 4}
    assert second.held["a"][0] == (4, 8)


def test_a_node_that_trains_during_the_round_keeps_what_it_holds():
    reports = {n: NodeReport(wants=4, overlaps=n == "b") for n in "ab"}
    first = SampleLedger(100).after_round(reports)
    assert first.held == {"a": ((0, 4), (8, 12)), "b": ((4, 8), (12, 16))}
    second = first.after_round({n: replace(r, trained=split(first.held[n], 4)[0]) for n, r in reports.items()})
    assert second.held == {"a": ((8, 12), (16, 20)), "b": ((12, 16), (20, 24))}
    assert second.due == {"a": 4, "b": 4}
    third = second.after_round({"a": reports["a"], "b": replace(reports["b"], trained=((12, 13),), dropped=2)})
    assert third.held["b"] == ((13, 16), (20, 25))
    assert third.lost == {"b": 2}
    slow = {"a": replace(reports["a"], rate=99.0), "b": replace(reports["b"], rate=0.1)}
    ending = replace(third, size=24).after_round(slow)
    assert ending.held["b"] == ((13, 16), (20, 24))
    assert ending.due["b"] == 1


def test_the_end_of_a_stream_is_found_by_whoever_meets_it():
    wants = NodeReport(wants=4)
    first = SampleLedger(None).after_round(dict.fromkeys("ab", wants))
    reports = {"a": replace(wants, trained=((0, 4),)), "b": replace(wants, trained=((4, 6),), size=6)}
    second = first.after_round(reports)
    assert second.is_complete
    assert second.held == {"a": (), "b": ()}
    assert second.next_epoch() == SampleLedger(None, epoch=1, number=2)
    with pytest.raises(DataError, match=r"node b was to read .* its end after 3 samples, but 4 were trained"):
        first.after_round({**reports, "b": replace(wants, size=3)})


def test_the_next_epoch_begins_only_after_all_samples_are_done():
    with pytest.raises(SpecError, match=r"the epoch after epoch 0 .* 0 of its 5 samples are done. Train the others"):
        SampleLedger(5).next_epoch()
    assert SampleLedger(5, done=((0, 5),)).next_epoch(7) == SampleLedger(7, epoch=1)


def test_samples_of_an_older_epoch_are_repeated():
    wants = NodeReport(wants=4)
    ledger = SampleLedger(8, epoch=1).after_round({"a": replace(wants, epoch=0, trained=((0, 4),))})
    assert (ledger.done, ledger.repeated) == ((), {"a": 4})


def test_a_ledger_and_a_report_become_json_and_come_from_it():
    reports = {n: NodeReport(wants=9, rate=1 / 3, batch=2, size=50, trained=((3, 5), (8, 9))) for n in "ab"}
    ledger = SampleLedger(None).after_round(reports)
    assert SampleLedger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger
    assert SampleLedger.from_json(ledger.to_json()).digest == ledger.digest
    for report in (reports["a"], NodeReport(), NodeReport(overlaps=True, dropped=3)):
        assert NodeReport.from_json(json.loads(json.dumps(report.to_json()))) == report


@pytest.mark.parametrize(
    "change",
    [
        {"size": -1},
        {"epoch": None},
        {"done": [1]},
        {"held": []},
        {"due": {"a": -1}},
        {"held": {"a": [0, 3]}, "done": [2, 2]},
    ],
)
def test_a_ledger_that_is_refused(change):
    with pytest.raises(SpecError, match=r"a ledger of samples .* Give what to_json\(\)"):
        SampleLedger.from_json({**SampleLedger(9).to_json(), **change})


@pytest.mark.parametrize(
    "change", [{"wants": -1}, {"rate": "1"}, {"batch": 0}, {"epoch": 1.0}, {"trained": [0]}, {"size": None}]
)
def test_a_report_that_is_refused(change):
    with pytest.raises(SpecError, match=r"a report .* was given"):
        NodeReport.from_json({**NodeReport().to_json(), **change})


@dataclass
class PlayedNode:
    """A node of the simulation: the ledger that it knows, and what it has trained with it."""

    name: str
    ledger: SampleLedger
    batch: int
    speed: float
    trained: tuple = ()
    size: int | None = None
    run: int | None = None  # of its parameters; None if they are of no use
    overlaps: bool = False
    dropped: int = 0
    is_cut: bool = False

    def train(self, count, *, size):
        mine, _ = split(without(self.ledger.held.get(self.name, ()), self.trained), count)
        read = common(mine, ((0, size),))
        self.trained = union(self.trained, read)
        self.size = size if read != mine else self.size

    def report(self, *, counts):
        own = NodeReport(
            self.trained,
            self.ledger.epoch,
            wants=3 * self.batch,
            rate=self.speed,
            batch=self.batch,
            size=self.size,
            overlaps=self.overlaps,
            dropped=self.dropped,
        )
        fields = json.loads(json.dumps(own.to_json()))
        assert len(json.dumps(fields)) < 1500
        return NodeReport.from_json(fields, counts=counts)

    def apply(self, ledger, run, report):
        more = without(self.trained, report.trained)  # trained during the round
        is_effective = report.counts and ledger.epoch == report.epoch
        self.trained, self.dropped = (more, 0) if is_effective else ((), size_of(more))
        self.ledger, self.run, self.size = ledger, run, None


class Simulation:
    """Nodes that die, return, are late, are cut off, become NaN and join; and the rounds that they commit.

    As in a run, a round goes on from the newest state of its members. If all nodes with the newest one are gone, that
    is an older one, and from then on another run.
    """

    def __init__(self, seed, *, size, is_stream):
        self.draw = random.Random(seed)
        self.size, self.is_stream = size, is_stream
        self.nodes, self.names, self.run = {}, 0, 0
        self.events = Counter()
        self.totals = {}  # reported samples and complete epochs, by run and commit
        for _ in range(3):
            self.join()

    @property
    def ledger(self):
        """The newest one of the run."""
        return max((n.ledger for n in self.nodes.values() if n.run == self.run), key=lambda ledger: ledger.number)

    @property
    def total(self):
        return self.totals[self.run, self.ledger.number]

    def join(self):
        self.names += 1
        name, ledger = f"node{self.names}", SampleLedger(None if self.is_stream else self.size)
        self.nodes[name] = PlayedNode(name, ledger, self.draw.randint(1, 6), self.draw.choice([0, 1, 2.5, 9]))
        self.nodes[name].overlaps = self.draw.random() < 0.3

    def happens(self, event, chance):
        is_so = self.draw.random() < chance
        self.events[event] += is_so
        return is_so

    def step(self, *, chaos=True):
        nodes, draw = self.nodes, self.draw
        for name in [*nodes] if chaos else ():
            is_last = [n for n, node in nodes.items() if node.run == self.run] in ([], [name])
            if self.happens("death", 0.02) and not is_last:
                del nodes[name]
            elif self.happens("cut", 0.03):
                nodes[name].is_cut = True
            elif nodes[name].is_cut and self.happens("return", 0.2):
                nodes[name].is_cut = False
            elif self.happens("nan", 0.01) and not is_last:
                nodes[name].run = None
        if chaos and len(nodes) < 7 and self.happens("join", 0.1):
            self.join()
        for node in nodes.values():
            node.is_cut = node.is_cut and chaos
            due = node.ledger.due.get(node.name, 0)
            node.train(due if not chaos or draw.random() < 0.7 else draw.randint(0, 3 * due), size=self.size)
        if chaos and self.happens("postponed", 0.1):
            return
        connected = [node for node in nodes.values() if not node.is_cut]
        late = {node.name for node in connected if chaos and self.happens("late", 0.1)}
        members = [node for node in connected if node.name not in late]
        if any(node.run == self.run for node in members):
            self.commit(members, late)
        elif members and not self.totals:  # the first round of all
            members[0].run = self.run
            self.totals[self.run, 0] = (0, 0)
            self.commit(members, late)

    def commit(self, members, late):
        before = max((node.ledger for node in members if node.run == self.run), key=lambda ledger: ledger.number)
        newest = max(number for run, number in self.totals if run == self.run)
        reported, ended = self.totals[self.run, before.number]
        reports = {node.name: node.report(counts=node.run == self.run) for node in members}
        after = before.after_round(reports, late)
        self.require_exact(before, after, reports)
        for name in late & before.held.keys():
            assert after.held[name] == common(before.held[name], ((0, self.size if after.size else 10**9),))
        if after.is_complete:
            assert after.done == ((0, self.size),)
            assert not any(after.held.values())
            ended += 1
            idle = {name: replace(report, trained=(), dropped=0, size=None) for name, report in reports.items()}
            after = after.next_epoch(None if self.is_stream else self.size).after_round(idle, late)
        assert any(after.due.values())  # somebody has work
        if before.number < newest:
            self.run, self.events["branch"] = self.run + 1, self.events["branch"] + 1
        reported += sum(size_of(report.trained) + report.dropped for report in reports.values())
        self.totals[self.run, after.number] = (reported, ended)
        heard = [node for node in members[1:] if not self.happens("unheard", 0.02)]
        for node in (members[0], *heard):
            if node.overlaps:
                node.train(self.draw.randint(0, 2 * node.batch), size=self.size)
            node.apply(after, self.run, reports[node.name])

    def require_exact(self, before, after, reports):
        held = [after.done, *after.held.values()]
        assert size_of(union(*held)) == sum(map(size_of, held))  # nobody holds what another one holds or has done
        assert all(len(ranges) <= MOST_PIECES for ranges in after.held.values())
        assert union(before.done, after.done) == after.done
        new = without(after.done, before.done)
        counted = [r.trained for r in reports.values() if r.counts and r.epoch == before.epoch]
        assert without(new, union(*counted)) == ()  # only what was trained is done
        reported = sum(size_of(report.trained) + report.dropped for report in reports.values())
        accounts = [sum(ledger.repeated.values()) + sum(ledger.lost.values()) for ledger in (before, after)]
        assert reported == size_of(new) + accounts[1] - accounts[0]  # nothing is unaccounted


@pytest.mark.parametrize("is_stream", [False, True])
def test_thousands_of_rounds_with_faults(is_stream):
    run = Simulation(24, size=200, is_stream=is_stream)
    most_pieces = 0
    for _ in range(3000):
        run.step()
        most_pieces = max(most_pieces, len(run.ledger.done))
    for _ in range(60):
        run.step(chaos=False)
    reported, ended = run.total
    accounted = sum(run.ledger.repeated.values()) + sum(run.ledger.lost.values())
    assert reported == ended * run.size + size_of(run.ledger.done) + accounted
    assert accounted
    assert ended > 300
    assert most_pieces < MOST_PIECES
    assert min(run.events[n] for n in ("death", "return", "nan", "join", "postponed", "late", "unheard")) > 30
    assert run.events["branch"] > 10


@given(st.integers(0, 2**32), st.integers(1, 60), st.booleans())
def test_an_epoch_ends_when_faults_do(seed, size, is_stream):
    run = Simulation(seed, size=size, is_stream=is_stream)
    for _ in range(30):
        run.step()
    run.step(chaos=False)
    _, ended = run.total
    for _ in range(size + 5):
        run.step(chaos=False)
    assert run.total[1] > ended
