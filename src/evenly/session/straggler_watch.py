"""Publishes how long this rank computes, and lets rank 0 see which rank takes longer than the others.

No rank waits for another: each writes its latest times to the store every few seconds, in the thread of the failure
monitor, and rank 0 reads what is there.
"""

import json
import time
from collections import deque
from collections.abc import Callable

from evenly.comm import RankGroup
from evenly.session.rank_recorder import RankTotals
from evenly.session.straggler_rule import RankPace, StragglerRule, StragglerVerdict, compared_ranks, planned_work
from evenly.spec import Cluster, Plan

LOOK_S = 3.0  # seconds between two looks


class StragglerWatch:
    """The times of one rank, and on rank 0 the judgement of all."""

    def __init__(
        self,
        rank_group: RankGroup,
        cluster: Cluster,
        totals: Callable[[], tuple[int, RankTotals]],
    ) -> None:
        """Publishes nothing yet.

        Args:
            rank_group: the ranks of the run; all make their watch in the same order.
            cluster: their nodes and devices.
            totals: returns the last step and the sums of this rank so far.
        """
        self.verdicts: deque[StragglerVerdict] = deque()  # on rank 0: not recorded yet
        self._rank, self._size = rank_group.rank, rank_group.size
        self._store = rank_group.scoped("stragglers").store
        self._keys = [str(rank) for rank in range(self._size)]
        self._totals = totals
        self._rule = StragglerRule(compared_ranks(cluster)) if self._rank == 0 else None
        self._number = 0
        self._looked_at = time.monotonic()
        self._before = totals()
        self._store.set(self._keys[self._rank], "null")

    def expect(self, plan: Plan) -> None:
        """Allows each rank the time that its work in `plan` explains; plans of further models add to it."""
        if self._rule is not None:
            self._rule.expect(planned_work(plan))

    def tick(self) -> None:
        """Publishes and looks, if it is time; called by a thread that is not the training's."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        first_step, before = self._before
        last_step, totals = current = self._totals()
        steps = totals.steps - before.steps
        if steps > 0:
            self._number += 1
            seconds, computing_s = now - self._looked_at, totals.compute_s - before.compute_s
            pace = RankPace(self._number, first_step, last_step, computing_s / steps, seconds / steps)
            self._store.set(self._keys[self._rank], json.dumps(pace))
            self._before, self._looked_at = current, now
        if self._rule is not None and steps > 0:
            self.verdicts.extend(self._rule.look(self._read()))

    def _read(self) -> list[RankPace | None]:
        """Returns the latest pace of each rank, as far as there is one."""
        if not self._store.check(self._keys):
            return [None] * self._size
        rows = [json.loads(text) for text in self._store.get_all(self._keys)]
        return [None if row is None else RankPace(*row) for row in rows]
