"""The ranks that take part in a run, and what they keep together: meetings, a record, checkpoints."""

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
from evenly.session.recorder import Recorder
from evenly.spec import Cluster, Plan

logger = logging.getLogger(__name__)

OVER = "over"  # told by those who take part to those who are left out
LINGER_S = 1.5  # a failing rank 0 keeps the meeting point open so that the others learn why
HEARD_S = 5.0  # the one who keeps the store waits so long for them to hear it


class LeftOut(BaseException):
    """Leads a rank that the plan leaves out to the end of the session; the session swallows it."""


class ActiveRanks:
    """One rank among those that take part; `rank_group` has their ranks counted from 0, and so has `cluster`."""

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
        """Opens the meetings; with `holding`, which lasts as long as the run, the folder is taken from other runs."""
        self.rank_group = rank_group
        self.cluster = cluster
        self.monitor = monitor
        self._active: list[int] = []  # ranks of a larger stage that this one was made of
        self._left_out: dict[int, str] = {}  # the others of them, and why
        self._folder = folder
        self._resume = resume
        self._timeout_s = timeout_s
        self.checkpoints: Checkpoints | None = None
        self.owner = owner
        self._restored: list[Restored | None] = []  # what was found, once it was looked for
        self._room = rank_group.scoped("room")  # for those that are left out
        with ExitStack() as opened:  # closed again if something goes wrong before the end
            self._open(opened, folder, resume, timeout_s, holding)
            self._closing = opened.pop_all()

    def _open(
        self, opened: ExitStack, folder: Path | None, resume: bool, timeout_s: float, holding: ExitStack | None
    ) -> None:
        rank_group, scoped = self.rank_group, self.rank_group.scoped("stage")
        CollectiveWaiter(self.monitor, place=f"the session of {rank_group.size} ranks", timeout_s=timeout_s).barrier()
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
        if folder is not None:
            self.checkpoints = Checkpoints(
                folder / "checkpoints", self.gatherer, rank=rank_group.rank, nodes=nodes, owner=self.owner
            )
            if not resume:
                self.checkpoints.set_aside()

    @property
    def attendance(self) -> dict[str, object]:
        """Who takes part, for the record of a run."""
        return {"cluster": self.cluster, "ranks": tuple(self._active), "left_out": self._left_out}

    def restored(self) -> Restored | None:
        """Returns the newest checkpoint, if the run is to go on from one; all ranks of the stage call it together.

        It is looked for only when it is known who takes part: those that were left out have none.
        """
        if not self._restored:
            latest = self.checkpoints.latest() if self.checkpoints is not None and self._resume else None
            found = self.checkpoints.load(latest) if self.checkpoints is not None and latest is not None else None
            self._restored = [found]
        return self._restored[0]

    def begin(self, epoch: int, epochs: int) -> None:
        """Lets go of the checkpoint: the run has gone on from it, after so many of its epochs."""
        self._restored = [None]
        if epoch >= epochs and self.rank_group.rank == 0:
            logger.warning(
                "nothing is left to train: the run in this folder has made %d of %d epochs. Session(folder, "
                "resume=False) starts afresh, and another folder a new run",
                epoch,
                epochs,
            )

    def take_part(self, plan: Plan) -> tuple["ActiveRanks", Plan]:
        """Returns the stage and plan of the ranks that take part; the others wait here until the run is over.

        Raises:
            LeftOut: on a rank that is left out, when the run is over.
        """
        if len(plan.active) == len(plan.roles):
            return self, fitting(plan, self.cluster)
        stage = self if self._active == plan.active else self._among(fitting(plan, self.cluster))
        return stage, fitting(plan.among_active(), stage.cluster)

    def _among(self, plan: Plan) -> "ActiveRanks":
        left_out = {role.rank: role.left_out for role in plan.roles if role.left_out}
        if why := left_out.get(self.rank_group.rank):
            logger.warning("rank %d is left out and waits until the run is over: %s", self.rank_group.rank, why)
            self._sit_out()
        listeners = self.recorder.listeners
        self._closing.close()
        rank_group = self.rank_group.among(plan.active, f"active {plan.active}")
        monitor = FailureMonitor(rank_group.scoped("alarm"), parent=self.monitor)
        stage = ActiveRanks(
            rank_group,
            self.cluster.among(plan.active),
            monitor,
            folder=self._folder,
            resume=True,  # what was there before is set aside already
            timeout_s=self._timeout_s,
            owner=self.owner,
        )
        stage._resume = self._resume
        stage.recorder.listeners = listeners
        stage._active = plan.active
        stage._left_out = left_out
        stage._closing.callback(monitor.close)
        stage._closing.callback(_release, self._room, list(left_out))
        return stage

    def _sit_out(self) -> None:
        self._closing.close()
        store = self._room.store
        while not store.check([OVER]):
            self.monitor.check()
            time.sleep(0.2)
        store.set(f"gone/{self.rank_group.rank}", "1")
        time.sleep(0.5)  # this rank may keep the store, which the others still ask
        raise LeftOut

    def close(self) -> None:
        """Ends meetings, record and connections."""
        self._closing.close()


def _release(rank_group: RankGroup, idle: list[int]) -> None:
    """Tells the ranks that were left out that the run is over, and waits a little until they have heard it."""
    until = time.monotonic() + HEARD_S
    try:
        rank_group.store.set(OVER, "1")
        while not rank_group.store.check([f"gone/{rank}" for rank in idle]) and time.monotonic() < until:
            time.sleep(0.05)
    except PeerError as error:  # one of them kept the store, and has gone
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
