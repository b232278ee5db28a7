"""How the ranks of a process group take part in an elastic run, if `evenly join` has started them."""

from evenly.comm import RankGroup
from evenly.coordination import CoordinationClient, MemberRank
from evenly.errors import SpecError
from evenly.launch.settings import elastic_settings


def open_client(rank_group: RankGroup) -> CoordinationClient | None:
    """Returns this rank's connection to the coordinator; None in a run of one world."""
    settings = elastic_settings()
    if settings is None:
        return None
    member = MemberRank(settings.node, settings.start, rank_group.rank, rank_group.size)
    return CoordinationClient(settings.coordinator, member, job=settings.job, secret=settings.secret())


def require_one_world() -> None:
    """Raises `SpecError` in an elastic run, where a session would take its node for the whole cluster."""
    settings = elastic_settings()
    if settings is not None:
        raise SpecError(
            f"a Session was opened on node {settings.node} of an elastic run, but plans, records and checkpoints of "
            "sessions are those of one world. Use evenly.synchronize and model.deal in a loop of your own, or start "
            "all nodes with one launcher."
        )
