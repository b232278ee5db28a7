"""Nodes of an elastic run as threads of one process, which meet as the exchanges of a run do, without any tensors."""

import json
import threading
from collections import Counter

from evenly.batches.dealt import DealtFeed

PATIENCE_S = 30


class GoneError(Exception):
    """The node is lost."""


class Meeting:
    """Rounds of the nodes that are expected; what the committed ones have trained."""

    def __init__(self, *, postponed=()):
        self.changed = threading.Condition()
        self.nodes = {}  # that are in the run, by name
        self.late = set()  # of those, connected but not waited for
        self.cut = set()  # not connected
        self.rounds = 0  # committed
        self.attempt = 0
        self.merged = Counter()  # (epoch, sample) that the parameters of the run have seen
        self.died = 0  # samples that only lost nodes have seen
        self.ledgers = []  # after each commit
        self._postponed = set(postponed)  # attempts
        self._outcomes = {}
        self._waiting = set()
        self.error = None

    def join(self, node):
        with self.changed:
            self.nodes[node.name] = node

    def leave(self, node):
        with self.changed:
            if self.nodes.pop(node.name, None):
                self.died += len(node.seen)
                self._form()

    def put(self, group, node, *, into):
        """Puts the node into a set of nodes that are not waited for, or takes it out."""
        with self.changed:
            (group.add if into else group.discard)(node.name)
            self._form()

    def fail(self, error):
        with self.changed:
            self.error = self.error or error
            for node in self.nodes.values():
                node.abort()
            self.changed.notify_all()

    def wait(self, is_so):
        with self.changed:
            assert self.changed.wait_for(lambda: self.error or is_so(), PATIENCE_S), "nobody came"
            if self.error:
                raise GoneError

    def meet(self, node, rank):
        node.step_together()
        if rank == 0 and (self.rounds >= node.back_at or not self.nodes.keys() - {node.name}):
            self.put(self.cut, node, into=False)
        node.step_together()
        if node.name in self.cut:
            return
        with self.changed:
            attempt = self.attempt
            self._waiting.add((node.name, rank))
            self._form()
        self.wait(lambda: attempt in self._outcomes)
        if outcome := self._outcomes[attempt]:
            reports, absent, discarded, giver, behind = outcome
            if node.name in behind:
                node.feeds[rank].adopt(giver)
            node.feeds[rank].commit(reports, absent=absent, discarded=discarded)
            node.is_fresh = False
            if rank == 0:
                self.ledgers.append(node.feeds[0].ledger)
        node.step_together()

    def _form(self):
        """Commits a round if all that are waited for are there."""
        members = [n for n in sorted(self.nodes) if n not in self.late | self.cut]
        if not members or {(n, r) for n in members for r in range(len(self.nodes[n].feeds))} - self._waiting:
            return
        nodes = [self.nodes[name] for name in members]
        outcome = None
        if self.attempt not in self._postponed:
            outcome = self._outcome(nodes)
        self._outcomes[self.attempt] = outcome
        self.attempt += 1
        self._waiting.clear()
        self.changed.notify_all()

    def _outcome(self, nodes):
        reports = {}
        for node in nodes:
            rows = [json.dumps({**feed.report(), "rate": node.rate}) for feed in node.feeds]
            assert len(set(rows)) == 1  # the ranks of a node did the same
            assert len(rows[0]) < 1500
            reports[node.name] = json.loads(rows[0])
        trained = [node for node in nodes if not node.is_fresh] or nodes[:1]
        discarded = {node.name for node in nodes} - {node.name for node in trained}
        giver = max(trained, key=lambda node: node.feeds[0].ledger.number)
        newest = giver.feeds[0].ledger.number
        behind = {n.name for n in nodes if n.name in discarded or n.feeds[0].ledger.number < newest}
        for node in nodes:
            if node in trained:
                self.merged.update(node.seen)
            else:
                self.died += len(node.seen)
            node.seen.clear()
        self.rounds += 1
        state = json.loads(json.dumps(giver.feeds[0].state()))
        return reports, sorted(self.late), discarded, state, behind


class DealtNode:
    """One node: its ranks are threads that step together, and follow a story of what happens at which of its steps.

    A story is, for instance, `{4: "die"}`, `{3: ("late", 2), 9: ("cut", 1)}`: late or cut off for so many rounds.
    """

    def __init__(self, name, meeting, dataset, samples, *, epochs, story=None, rate=0.0, joins_after=0, **options):
        self.name, self.meeting, self.epochs, self.rate = name, meeting, epochs, rate
        self.is_fresh = True
        self.epochs_begun, self.epochs_trained = 0, set()
        self.back_at = 0  # rounds
        self.seen = []  # (epoch, sample) since the last commit
        self.steps = [[] for _ in samples]  # real samples of each step, by rank
        self.story = story or {}
        self.joins_after = joins_after
        self._barrier = threading.Barrier(len(samples))
        self.feeds = []
        for rank in range(len(samples)):
            feed = DealtFeed(dataset(), node=name, rank=rank, samples=samples, pause_s=0.001, **options)
            feed.meet = lambda rank=rank: meeting.meet(self, rank)
            self.feeds.append(feed)
        self.threads = [
            threading.Thread(target=self._run, args=(rank,), name=f"{name}-{rank}") for rank in range(len(samples))
        ]

    def step_together(self):
        self._barrier.wait(PATIENCE_S)

    def abort(self):
        self._barrier.abort()

    def begin(self):
        for thread in self.threads:
            thread.start()

    def _run(self, rank):
        try:
            if self.joins_after:
                self.meeting.wait(lambda: self.meeting.rounds >= self.joins_after)
                self.meeting.join(self)
            self._train(rank)
        except GoneError:
            pass
        except BaseException as error:
            self.meeting.fail(error)
        finally:
            self.meeting.leave(self)

    def _train(self, rank):
        feed = self.feeds[rank]
        while feed.epoch < self.epochs:
            self.epochs_begun += rank == 0
            for batch in feed:
                epoch = feed.epoch
                self.epochs_trained.add(epoch)
                self.steps[rank].append(feed.samples)
                if feed.samples:
                    with self.meeting.changed:
                        self.seen += [(epoch, sample) for sample in batch.tolist()]
                self.step_together()
                self._tell(rank)

    def _tell(self, rank):
        event = self.story.get(len(self.steps[rank]))
        if event == "die":
            raise GoneError
        if event == "nan":
            self.is_fresh = True
        elif event:
            self._be_missed(rank, *event)

    def _be_missed(self, rank, kind, rounds):
        """Stops until the others have met so often, if late; goes on without them, if cut off."""
        meeting, others = self.meeting, lambda: self.meeting.nodes.keys() - self.meeting.late - {self.name}
        if rank == 0:
            self.back_at = meeting.rounds + rounds
            meeting.put(meeting.late if kind == "late" else meeting.cut, self, into=True)
        self.step_together()
        if kind == "late":
            meeting.wait(lambda: meeting.rounds >= self.back_at or not others())
            self.step_together()
            if rank == 0:
                meeting.put(meeting.late, self, into=False)
            self.step_together()


def run(nodes):
    """Runs the nodes until all have ended; raises what any of them raised."""
    for node in nodes:
        if not node.joins_after:
            node.meeting.join(node)
    for node in nodes:
        node.begin()
    for node in nodes:
        for thread in node.threads:
            thread.join(2 * PATIENCE_S)
    if nodes[0].meeting.error:
        raise nodes[0].meeting.error
