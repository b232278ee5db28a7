"""How nodes that are started separately meet for exchanges: a coordinator and the ranks' way to it. No torch.

The coordinator keeps nothing on disk: the version that each node has applied is enough to go on after it is lost.
"""

from evenly.coordination.client import CoordinationClient
from evenly.coordination.coordinator import Coordinator
from evenly.coordination.etcd import CoordinatorSeat, SeatKeeper
from evenly.coordination.rounds import RoundSettings
from evenly.coordination.values import ExchangeRound, MemberRank, Proposal, RoundMember, RoundVerdict

__all__ = [
    "CoordinationClient",
    "Coordinator",
    "CoordinatorSeat",
    "ExchangeRound",
    "MemberRank",
    "Proposal",
    "RoundMember",
    "RoundSettings",
    "RoundVerdict",
    "SeatKeeper",
]
