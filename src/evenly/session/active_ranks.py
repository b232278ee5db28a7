"""The ranks that take part in a run, and what they share: collectives, a record, checkpoints."""

import logging
import time
from contextlib import ExitStack
from pathlib import Path

from evenly.checkpoints.ownership import FolderOwner, hold_together
from evenly.checkpoints.saving import Checkpoints
from evenly.checkpoints.states import Restored
from evenly.comm import CollectiveWaiter, FailureMonitor, ObjectGatherer, RankGroup, close_groups, open_group
from evenly.errors import PeerError, SpecError
from evenly.session.counters import Counters
from evenly.session.rank_recorder import RankIdentity, RankRecorder
from evenly.session.recorder import Recorder
from evenly.session.straggler_watch import StragglerWatch
from evenly.spec import Cluster, Plan

logger = logging.getLogger(__name__)

RUN_OVER_KEY = "over"  # in the store, set by active ranks for those that are left out
LINGER_S = 1.5  # a failing rank 0 keeps the store open so that the others learn why
ACKNOWLEDGE_S = 5.0  # the rank that hosts the store waits this long for the idle ranks to read the key


class LeftOut(BaseException):
    """Unwinds a rank that the plan leaves out to the end of the session, which suppresses it."""


class ActiveRanks:
    """The active ranks as seen by one of them; `rank_group` and `cluster` count them from 0."""

    def __init__(
        self,
        rank_group: RankGroup,
        cluster: Cluster,
        monitor: FailureMonitor,
        *,
        folder: Path | None,
        resume: bool,
        timeout_s: float,
        holding: ExitStack | None = None,
        owner: FolderOwner | None = None,
    ) -> None:
        """Opens process group, record and checkpoints; with `holding` also locks the run folder until that closes."""
        self.rank_group = rank_group
        self.cluster = cluster
        self.monitor = monitor
        self._active: list[int] = []  # their ranks in the world that they are part of
        self._left_out: dict[int, str] = {}  # the other ranks of that world, and why
        self._folder = folder
        self._resume = resume
        self._timeout_s = timeout_s
        self.checkpoints: Checkpoints | None = None
        self.owner = owner
        self._restored: list[Restored | None] = []  # the checkpoint, once it was looked for
        self._waiting_group = rank_group.scoped("left_out")  # store keys for ranks that are left out
        with ExitStack() as opened:  # closed again if something goes wrong before the end
            self._open(opened, folder, resume, timeout_s, holding)
            self._closing = opened.pop_all()

    def _open(
        self, opened: ExitStack, folder: Path | None, resume: bool, timeout_s: float, holding: ExitStack | None
    ) -> None:
        rank_group, scoped = self.rank_group, self.rank_group.scoped("active")
        CollectiveWaiter(self.monitor, label=f"the session of {rank_group.size} ranks", timeout_s=timeout_s).barrier()
        group = open_group(scoped, "world", range(rank_group.size), backend="gloo", timeout_s=timeout_s)
        self.gatherer = ObjectGatherer(self.monitor, group, timeout_s=timeout_s)
        opened.callback(lambda: close_groups([group], failed=self.monitor.has_failed))
        nodes = self.cluster.rank_lists()
        if folder is not None and holding is not None:
            leads = any(ranks[0] == rank_group.rank for ranks in nodes)
            self.owner = hold_together(folder, self.gatherer, rank=rank_group.rank, leads=leads)
            if self.owner is not None:
                holding.callback(self.owner.release)
        self.recorder = Recorder(folder, rank=rank_group.rank)
        opened.callback(self.recorder.close)
        self.counters = Counters(self.recorder)
        if rank_group.size > 1:
            self._watch_stragglers(opened)
        if folder is not None:
            self.counters.rank_recorder = self._rank_recorder(folder)
            opened.callback(self.counters.rank_recorder.close)
            self.checkpoints = Checkpoints(
                folder / "checkpoints", self.gatherer, rank=rank_group.rank, nodes=nodes, owner=self.owner
            )
            if not resume:
                self.checkpoints.set_aside()

    def _watch_stragglers(self, opened: ExitStack) -> None:
        counters = self.counters
        watch = StragglerWatch(self.rank_group, self.cluster, lambda: (counters.step, counters.rank_totals()))
        hosts = {rank: node.name for node in self.cluster.nodes for rank in node.ranks}
        counters.watch_stragglers(watch, [hosts[rank] for rank in range(self.rank_group.size)])
        self.monitor.on_tick.append(watch.tick)
        opened.callback(self.monitor.remove_callback, watch.tick)

    def _rank_recorder(self, folder: Path) -> RankRecorder:
        rank, nodes = self.rank_group.rank, self.cluster.rank_lists()
        node = next(number for number, ranks in enumerate(nodes) if rank in ranks)
        device = self.cluster.device_of(rank)
        identity = RankIdentity(
            rank, node, host=self.cluster.nodes[node].name, device=device.name or f"{device.kind}:{device.index}"
        )
        link_bytes = self.counters.link_bytes if nodes[node][0] == rank else None
        return RankRecorder(folder, identity, self.counters.rank_totals, link_bytes, self.recorder.run_clock)

    @property
    def launched_ranks(self) -> tuple[int, ...]:
        """The numbers that the active ranks had when they were started."""
        return tuple(self._active)

    @property
    def participation(self) -> dict[str, object]:
        """Who takes part, for the record of a run."""
        return {"cluster": self.cluster, "ranks": tuple(self._active), "left_out": self._left_out}

    def restored(self) -> Restored | None:
        """Returns the newest checkpoint, if the run resumes from one; all active ranks call it together.

        It is looked for only once the active ranks are known: those that are left out have none.
        """
        if not self._restored:
            self._restored = [self.checkpoints.load_newest() if self.checkpoints is not None and self._resume else None]
        return self._restored[0]

    def begin(self, epoch: int, epochs: int, *, has_ended: bool = False) -> None:
        """Releases the checkpoint: the run has resumed from it at `epoch`, or has ended there already."""
        self._restored = [None]
        if (epoch >= epochs or has_ended) and self.rank_group.rank == 0:
            logger.warning(
                "nothing is left to train: the run in this folder has made %d of %d epochs%s. Session(folder, "
                "resume=False) starts afresh, and another folder a new run",
                epoch,
                epochs,
                " and was stopped early; more epochs than these continue it" if epoch < epochs else "",
            )

    def take_part(self, plan: Plan) -> tuple["ActiveRanks", Plan]:
        """Returns the active ranks and their plan; the other ranks wait here until the run is over.

        Raises:
            LeftOut: on a rank that is left out, when the run is over.
        """
        active_ranks, own = self, plan
        if len(plan.active) < len(plan.roles):
            if self._active != plan.active:
                active_ranks = self._with_active_ranks(fitting(plan, self.cluster))
            own = plan.among_active()
        own = fitting(own, active_ranks.cluster)
        if active_ranks.counters.stragglers is not None:
            active_ranks.counters.stragglers.expect(own)
        return active_ranks, own

    def _with_active_ranks(self, plan: Plan) -> "ActiveRanks":
        left_out = {role.rank: role.left_out for role in plan.roles if role.left_out}
        if why := left_out.get(self.rank_group.rank):
            logger.warning("rank %d is left out and waits until the run is over: %s", self.rank_group.rank, why)
            self._wait_until_over()
        listeners = self.recorder.listeners
        self._closing.close()
        rank_group = self.rank_group.among(plan.active, f"active {plan.active}")
        monitor = FailureMonitor(rank_group.scoped("monitor"), parent=self.monitor)
        active_ranks = ActiveRanks(
            rank_group,
            self.cluster.among(plan.active),
            monitor,
            folder=self._folder,
            resume=True,  # earlier checkpoints are set aside already
            timeout_s=self._timeout_s,
            owner=self.owner,
        )
        active_ranks._resume = self._resume
        active_ranks.recorder.listeners = listeners
        active_ranks.recorder.run_clock.continue_from(self.recorder.run_clock)
        active_ranks._active = plan.active
        active_ranks._left_out = left_out
        active_ranks._closing.callback(monitor.close)
        active_ranks._closing.callback(_release, self._waiting_group, list(left_out))
        return active_ranks

    def _wait_until_over(self) -> None:
        self._closing.close()
        store = self._waiting_group.store
        while not store.check([RUN_OVER_KEY]):
            self.monitor.check()
            time.sleep(0.2)
        store.set(f"gone/{self.rank_group.rank}", "1")
        time.sleep(0.5)  # this rank may host the store, which the others still read
        raise LeftOut

    def close(self) -> None:
        """Closes process group, record and connections."""
        self._closing.close()


def _release(rank_group: RankGroup, idle: list[int]) -> None:
    """Tells the ranks that are left out that the run is over, and waits a little for their acknowledgement."""
    until = time.monotonic() + ACKNOWLEDGE_S
    try:
        rank_group.store.set(RUN_OVER_KEY, "1")
        while not rank_group.store.check([f"gone/{rank}" for rank in idle]) and time.monotonic() < until:
            time.sleep(0.05)
    except PeerError as error:  # one of them hosted the store and has ended
        logger.debug("the store of the session is gone: %s", error)


def fitting(plan: Plan, cluster: Cluster) -> Plan:
    """Returns the plan, or raises `SpecError` unless it is for the ranks and nodes of `cluster`."""
    if len(plan.roles) != cluster.world_size:
        raise SpecError(
            f"the plan is for {len(plan.roles)} ranks, but {cluster.world_size} are running. "
            "Start that many ranks, or make a plan for these."
        )
    if plan.nodes != cluster.rank_lists():
        raise SpecError(
            f"the plan has the nodes {plan.nodes}, but the session found {cluster.rank_lists()}. "
            "Make the session with nodes=plan.nodes, or make a plan for the nodes found."
        )
    return plan
