"""When a round is formed, with whom, and how it ends: the state machine alone, with a clock of the test's own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenly.coordination.rounds import Decided, Ended, Formed, NodeTakenError, Refused, Rounds, RoundSettings
from evenly.coordination.values import Ballot, ExchangeRound, MemberRank, Proposal
from evenly.errors import MismatchError
from tests.coordination.nodes import FRESH, after

SETTINGS = RoundSettings(expected_nodes=2, straggler_wait_s=30.0, regather_s=2.0)


class Story:
    """Rounds, told step by step: nodes of two ranks unless said otherwise."""

    def __init__(self, settings: RoundSettings = SETTINGS, *, size: int = 2) -> None:
        self.rounds = Rounds(settings)
        self.now_s = 0.0
        self.size = size
        self.num_tickets = 0
        self.starts: dict[str, str] = {}
        self.refusals: list[Refused] = []
        self.decisions: list[Decided] = []
        self.ended: list[Ended] = []

    def ranks(self, name: str) -> list[MemberRank]:
        return [MemberRank(name, self.starts[name], rank, self.size) for rank in range(self.size)]

    def join(self, *names: str, start: str = "first") -> None:
        for name in names:
            self.starts[name] = start
            for rank in self.ranks(name):
                self.rounds.join(rank, job="job")

    def propose(self, proposals: Mapping[str, Proposal]) -> ExchangeRound | None:
        for name, proposal in proposals.items():
            for rank in self.ranks(name):
                self.num_tickets += 1
                self.rounds.propose(rank, proposal, ticket=self.num_tickets, now_s=self.now_s)
        return self.formed()

    def wait(self, seconds: float) -> ExchangeRound | None:
        self.now_s += seconds
        self.rounds.tick(self.now_s)
        return self.formed()

    def lose(self, name: str, rank: int = 0) -> ExchangeRound | None:
        self.rounds.drop(self.ranks(name)[rank], why=f"{name} was lost", now_s=self.now_s)
        return self.formed()

    def vote(self, formed: ExchangeRound, names: Sequence[str], checksum: str = "sum") -> ExchangeRound | None:
        for name in names:
            for rank in self.ranks(name):
                self.rounds.vote(rank, Ballot(True, checksum), round_id=formed.id, now_s=self.now_s)
        return self.formed()

    def formed(self) -> ExchangeRound | None:
        """Takes the events; returns the round that all its ranks have been told."""
        found: dict[str, ExchangeRound] = {}
        told: list[MemberRank] = []
        for event in self.rounds.take_events():
            if isinstance(event, Formed):
                found[event.round.id] = event.round
                told.append(event.member)
            elif isinstance(event, Refused):
                self.refusals.append(event)
            elif isinstance(event, Decided):
                self.decisions.append(event)
            else:
                self.ended.append(event)
        assert len(found) <= 1
        formed = next(iter(found.values()), None)
        if formed is not None:
            assert len(told) == sum(member.local_size for member in formed.members)
        return formed


def begun(*names: str) -> tuple[Story, ExchangeRound]:
    """Returns a story in which these nodes, all that are expected, have committed their first round."""
    story = Story(replace(SETTINGS, expected_nodes=len(names)))
    story.join(*names)
    formed = story.propose(dict.fromkeys(names, FRESH))
    assert formed is not None
    story.vote(formed, names)
    assert all(event.verdict is not None and event.verdict.is_committed for event in story.decisions)
    story.decisions.clear()
    return story, formed


def test_a_round_of_all_nodes_in_the_order_of_their_names() -> None:
    story = Story()
    story.join("b", "a")
    assert story.propose({"b": FRESH}) is None
    formed = story.propose({"a": replace(FRESH, facts={"address": "x"})})
    assert formed is not None
    assert formed.nodes == ("a", "b")
    assert (formed.number, formed.healer) == (1, None)
    assert [member.samples for member in formed.members] == [20.0, 20.0]
    assert formed.members[0].facts == ({"address": "x"}, {"address": "x"})


def test_a_node_is_present_when_all_its_ranks_have_proposed() -> None:
    story = Story(RoundSettings())
    story.join("a")
    first, second = story.ranks("a")
    story.rounds.propose(first, FRESH, ticket=1, now_s=0.0)
    assert story.wait(100.0) is None
    story.rounds.propose(second, FRESH, ticket=2, now_s=100.0)
    assert story.formed() is not None


def test_fresh_nodes_alone_wait_for_all_that_are_expected() -> None:
    story = Story()
    story.join("a")
    assert story.propose({"a": FRESH}) is None
    assert story.wait(1000.0) is None
    story.join("b")
    assert story.propose({"b": FRESH}) is not None


def test_a_straggler_is_waited_for_then_left_out_then_behind() -> None:
    story, first = begun("a", "b", "c")
    assert story.propose({"a": after(first), "b": after(first)}) is None
    assert story.wait(29.0) is None
    second = story.wait(1.5)
    assert second is not None
    assert second.nodes == ("a", "b")
    story.vote(second, "ab")
    assert story.propose({"c": after(first, samples=7.0)}) is None
    assert story.wait(60.0) is None  # alone it would begin a second run
    assert story.propose({"a": after(second)}) is None  # b may be about to come
    third = story.propose({"b": after(second)})
    assert third is not None
    assert [member.is_behind for member in third.members] == [False, False, True]
    assert [member.needs_state for member in third.members] == [False, False, False]
    assert third.members[2].samples == 14.0
    assert (third.number, third.lineage) == (3, first.lineage)


def test_a_joiner_is_not_waited_for_and_receives_the_state() -> None:
    story, first = begun("a", "b")
    story.join("c")
    second = story.propose({"a": after(first), "b": after(first)})
    assert second is not None
    assert second.nodes == ("a", "b")
    story.vote(second, "ab")
    third = story.propose({"c": FRESH, "a": after(second), "b": after(second)})
    assert third is not None
    assert third.healer == 0
    joiner = third.members[2]
    assert (joiner.needs_state, joiner.samples, joiner.is_behind) == (True, 0.0, False)


def test_a_node_with_nan_is_healed_by_a_healthy_one() -> None:
    story, first = begun("a", "b")
    formed = story.propose({"a": after(first, is_healthy=False), "b": after(first)})
    assert formed is not None
    assert formed.healer == 1
    assert [member.needs_state for member in formed.members] == [True, False]
    assert [member.samples for member in formed.members] == [0.0, 20.0]


def test_ranks_of_a_node_at_different_versions_receive_the_state() -> None:
    story, first = begun("a", "b")
    story.propose({"b": after(first)})
    one, other = story.ranks("a")
    story.rounds.propose(one, after(first), ticket=101, now_s=0.0)
    story.rounds.propose(other, FRESH, ticket=102, now_s=0.0)
    formed = story.formed()
    assert formed is not None
    assert [member.needs_state for member in formed.members] == [True, False]


def test_no_healthy_node_is_refused() -> None:
    story, first = begun("a", "b")
    assert story.propose(dict.fromkeys("ab", after(first, is_healthy=False))) is None
    assert {event.kind for event in story.refusals} == {"non-finite"}
    assert len(story.refusals) == 4


def test_a_run_with_nan_everywhere_does_not_begin_again() -> None:
    story, first = begun("a", "b")
    story.join("c", "d")
    bad = after(first, is_healthy=False)
    assert story.propose({"c": FRESH, "d": FRESH, "a": bad, "b": bad}) is None
    assert {event.kind for event in story.refusals} == {"non-finite"}


def test_another_model_is_refused_and_both_are_named() -> None:
    story = Story(RoundSettings(expected_nodes=2))
    story.join("a", "b", "c")
    story.propose({"a": FRESH})
    story.propose({"b": replace(FRESH, signature="other")})
    formed = story.propose({"c": FRESH})
    assert {event.member.node for event in story.refusals} == {"b"}
    assert "other" in story.refusals[0].why
    assert "same" in story.refusals[0].why
    assert formed is not None
    assert formed.nodes == ("a", "c")


def test_ranks_of_a_node_with_different_models_are_refused_at_once() -> None:
    story = Story()
    story.join("a")
    one, other = story.ranks("a")
    story.rounds.propose(one, FRESH, ticket=1, now_s=0.0)
    story.rounds.propose(other, replace(FRESH, signature="other"), ticket=2, now_s=0.0)
    assert story.formed() is None
    assert {event.kind for event in story.refusals} == {"mismatch"}


def test_a_death_aborts_and_the_others_go_on_without_waiting() -> None:
    story, first = begun("a", "b", "c")
    formed = story.propose(dict.fromkeys("abc", after(first)))
    assert formed is not None
    assert formed.generation == first.generation
    story.vote(formed, "a")
    assert story.lose("b", rank=1) is None
    verdicts = {event.verdict for event in story.decisions}
    assert [verdict.lost for verdict in verdicts if verdict] == [("b",)]
    assert len(story.decisions) == 6
    assert [event.generation for event in story.ended] == [formed.generation]
    again = story.propose({"a": after(first), "c": after(first)})
    assert again is not None
    assert again.nodes == ("a", "c")
    assert again.number == formed.number
    assert again.generation != formed.generation


def test_the_generation_stays_with_the_members_until_an_abort() -> None:
    story, first = begun("a", "b")
    second = story.propose(dict.fromkeys("ab", after(first)))
    assert second is not None
    assert second.generation == first.generation
    story.rounds.vote(story.ranks("a")[0], Ballot(False, why="a cable"), round_id=second.id, now_s=0.0)
    third = story.propose(dict.fromkeys("ab", after(first)))
    assert third is not None
    assert third.generation != first.generation
    story.vote(third, "ab")
    story.lose("b")
    story.lose("b", rank=1)
    story.join("b", start="second")
    fourth = story.propose({"b": FRESH, "a": after(third)})
    assert fourth is not None
    assert fourth.generation != third.generation


def test_different_checksums_abort_and_are_named() -> None:
    story, first = begun("a", "b")
    formed = story.propose(dict.fromkeys("ab", after(first)))
    assert formed is not None
    story.vote(formed, "a", checksum="one")
    story.vote(formed, "b", checksum="two")
    verdict = story.decisions[0].verdict
    assert verdict is not None
    assert not verdict.is_committed
    assert "one on a/0, a/1" in verdict.why
    assert "two on b/0, b/1" in verdict.why


def test_a_commit_is_final_and_can_be_asked_for_again() -> None:
    story, first = begun("a", "b")
    story.lose("a")
    story.rounds.vote(story.ranks("b")[0], Ballot(False), round_id=first.id, now_s=0.0)
    story.rounds.vote(story.ranks("b")[0], Ballot(True), round_id="unknown", now_s=0.0)
    story.formed()
    known, unknown = (event.verdict for event in story.decisions)
    assert known is not None
    assert known.is_committed
    assert unknown is None


def test_a_restarted_coordinator_gathers_those_of_the_last_round() -> None:
    formed = begun("a", "b", "c")[1]
    story = Story()
    story.join("a")
    assert story.propose({"a": after(formed)}) is None
    story.now_s = 1.0
    story.join("b", "c")
    assert story.propose({"b": after(formed)}) is None
    assert story.wait(10.0) is None  # c is connected: it is waited for like a straggler
    again = story.propose({"c": after(formed)})
    assert again is not None
    assert (again.number, again.lineage) == (2, formed.lineage)


def test_a_restarted_coordinator_goes_on_without_those_that_do_not_come_back() -> None:
    formed = begun("a", "b", "c")[1]
    story = Story()
    story.join("a", "b")
    assert story.propose({"a": after(formed), "b": after(formed)}) is None
    assert story.wait(1.9) is None
    again = story.wait(0.2)
    assert again is not None
    assert again.nodes == ("a", "b")


def test_fresh_nodes_do_not_begin_another_run_while_the_others_train() -> None:
    story, first = begun("a", "b")
    story.join("c", "d")
    assert story.propose({"c": FRESH, "d": FRESH}) is None
    assert story.wait(1000.0) is None
    formed = story.propose(dict.fromkeys("ab", after(first)))
    assert formed is not None
    assert [member.needs_state for member in formed.members] == [False, False, True, True]


def test_a_run_that_lost_its_last_commit_gets_another_lineage() -> None:
    story, first = begun("a", "b", "c")
    story.propose({"a": after(first), "b": after(first)})
    second = story.wait(31.0)
    assert second is not None
    story.vote(second, "ab")
    for name in "ab":
        story.lose(name)
        story.lose(name, rank=1)
    third = story.propose({"c": after(first)})
    assert third is not None
    assert third.number > second.number
    assert third.lineage != first.lineage
    story.vote(third, "c")
    story.join("b")
    fourth = story.propose({"b": after(second), "c": after(third)})
    assert fourth is not None
    assert [member.needs_state for member in fourth.members] == [True, False]


def test_the_run_that_goes_on_wins_over_an_old_checkpoint() -> None:
    story, first = begun("a", "b")
    story.join("c")
    formed = story.propose({"c": replace(FRESH, version=500, lineage="old"), "a": after(first), "b": after(first)})
    assert formed is not None
    assert [member.needs_state for member in formed.members] == [False, False, True]
    assert formed.number == 2


def test_a_rank_that_proposes_anew_gives_up_its_round() -> None:
    story, first = begun("a", "b")
    formed = story.propose(dict.fromkeys("ab", after(first)))
    assert formed is not None
    story.rounds.propose(story.ranks("a")[0], after(first), ticket=1000, now_s=0.0)
    story.formed()
    assert len(story.decisions) == 4
    assert all(event.verdict is not None and not event.verdict.is_committed for event in story.decisions)


def test_a_proposal_that_is_sent_twice_is_one() -> None:
    story, first = begun("a", "b")
    story.propose(dict.fromkeys("ab", after(first)))
    story.rounds.propose(story.ranks("a")[0], after(first), ticket=story.num_tickets - 3, now_s=0.0)
    story.formed()
    assert not story.decisions


def test_who_stops_waiting_is_not_present() -> None:
    story, first = begun("a", "b")
    story.propose({"a": after(first)})
    story.rounds.retract(story.ranks("a")[0], ticket=story.num_tickets - 1, now_s=0.0)
    assert story.propose({"b": after(first)}) is None


def test_another_start_waits_for_the_end_of_the_first_and_another_size_is_refused() -> None:
    story, _ = begun("a", "b")
    with pytest.raises(NodeTakenError):
        story.join("a", start="second")
    story.starts["a"] = "first"
    with pytest.raises(MismatchError, match="local ranks"):
        story.rounds.join(MemberRank("a", "first", 0, 3), job="job")
    with pytest.raises(MismatchError, match="job"):
        story.rounds.join(MemberRank("c", "first", 0, 1), job="other")


def test_a_coordinator_without_nodes_takes_another_job() -> None:
    story, _ = begun("a", "b")
    for name in "ab":
        story.lose(name)
        story.lose(name, rank=1)
    story.rounds.join(MemberRank("c", "first", 0, 1), job="other")
    story.rounds.propose(MemberRank("c", "first", 0, 1), FRESH, ticket=1, now_s=0.0)
    assert story.formed() is None  # two nodes are expected


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["propose", "propose", "sick", "vote", "vote", "against", "lose", "wait", "return", "forget"]),
        st.sampled_from("abc"),
        st.integers(0, 1),
    ),
    max_size=80,
)


class Run:
    """Three nodes that do what the events say, and apply what is committed."""

    def __init__(self) -> None:
        self.story, first = begun("a", "b", "c")
        self.applied = dict.fromkeys("abc", first)
        self.connected = {(name, rank) for name in "abc" for rank in range(2)}
        self.open: ExchangeRound | None = None
        self.rounds = [first]
        self.last = first  # that was committed
        self.may_repeat = False  # a number, if the coordinator has forgotten it and all that have it are gone

    def do(self, kind: str, name: str, rank: int) -> None:
        story = self.story
        if kind in ("propose", "sick") and {(name, 0), (name, 1)} <= self.connected:
            self.hear(story.propose({name: after(self.applied[name], is_healthy=kind == "propose")}))
        elif kind in ("vote", "against") and self.open is not None:
            formed = self.open
            for voter in (voter for each in formed.nodes for voter in story.ranks(each)):
                ballot = Ballot(is_ok=kind == "vote", checksum="sum")
                story.rounds.vote(voter, ballot, round_id=formed.id, now_s=story.now_s)
            self.hear(story.formed())
        elif kind == "lose":
            self.connected.discard((name, rank))
            self.hear(story.lose(name, rank))
        elif kind == "wait":
            self.hear(story.wait(31.0))
        elif kind == "return" and (name, rank) not in self.connected:
            story.rounds.join(story.ranks(name)[rank], job="job")
            self.connected.add((name, rank))
        elif kind == "forget":
            self.restart()

    def restart(self) -> None:
        """The coordinator is another one, without any memory, and all that were connected come back."""
        self.story.rounds, self.open, self.may_repeat = Rounds(SETTINGS), None, True
        for name, rank in sorted(self.connected):
            self.story.rounds.join(self.story.ranks(name)[rank], job="job")

    def hear(self, formed: ExchangeRound | None) -> None:
        """Takes what the ranks were told: first how a round ended, then that another began."""
        own = [event for event in self.story.decisions if self.open is not None and event.round_id == self.open.id]
        self.story.decisions.clear()
        if own and self.open is not None:
            verdicts = {event.verdict for event in own}
            assert len(verdicts) == 1
            if all(verdict is not None and verdict.is_committed for verdict in verdicts):
                self.applied |= dict.fromkeys(self.open.nodes, self.open)
                self.last = self.open
            self.open = None
        if formed is not None:
            assert self.open is None
            self.check(formed)
            self.open = formed

    def check(self, formed: ExchangeRound) -> None:
        assert formed.id not in {each.id for each in self.rounds}
        assert formed.number > self.last.number or self.may_repeat
        assert list(formed.nodes) == sorted(formed.nodes)
        givers = [member for member in formed.members if not member.needs_state and not member.is_behind]
        assert givers
        assert all(self.applied[member.node] == self.applied[givers[0].node] for member in givers)
        if any(member.needs_state for member in formed.members):
            assert formed.healer is not None
            assert formed.members[formed.healer] in givers
        if self.last in (self.applied[member.node] for member in givers):
            assert formed.lineage == self.last.lineage
            assert formed.number == self.last.number + 1 or self.may_repeat
        self.rounds.append(formed)


@given(EVENTS)
def test_any_order_of_events_leaves_one_run(events: list[tuple[str, str, int]]) -> None:
    """One round at a time, whose number is new, from nodes that are in one state."""
    run = Run()
    for event in events:
        run.do(*event)
