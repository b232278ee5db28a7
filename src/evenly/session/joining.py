"""How the ranks of a process group take part in an elastic run, if `evenly join` has started them."""

from weakref import WeakSet

from evenly.comm import RankGroup
from evenly.coordination import CoordinationClient, MemberRank
from evenly.errors import SpecError
from evenly.launch.settings import elastic_settings

_clients: "WeakSet[CoordinationClient]" = WeakSet()  # of this process


def open_client(rank_group: RankGroup) -> CoordinationClient | None:
    """Returns this rank's connection to the coordinator; None in a run of one world."""
    settings = elastic_settings()
    if settings is None:
        return None
    if any(not client.is_closed for client in _clients):
        raise SpecError(
            "a second model was to be synchronized in an elastic run, in which a process takes part with one. Put both "
            "networks into one module with one optimizer, or close() the first model before."
        )
    member = MemberRank(settings.node, settings.start, rank_group.rank, rank_group.size)
    client = CoordinationClient(settings.coordinator, member, job=settings.job, secret=settings.secret())
    _clients.add(client)
    return client


def require_one_world() -> None:
    """Raises `SpecError` in an elastic run, where a session would take its node for the whole cluster."""
    settings = elastic_settings()
    if settings is not None:
        raise SpecError(
            f"a Session was opened on node {settings.node} of an elastic run, but plans, records and checkpoints of "
            "sessions are those of one world. Use evenly.synchronize and model.deal in a loop of your own, or start "
            "all nodes with one launcher."
        )
