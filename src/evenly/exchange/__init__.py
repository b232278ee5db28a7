"""Exchanges across nodes: payload, codecs, anchors, buffers, membership, pending exchanges."""

from evenly.exchange.buffers import add_change, finite_part, is_torn, same
from evenly.exchange.codecs import Codec, add_codec
from evenly.exchange.exchange_state import ExchangeState, Progress
from evenly.exchange.exchanger import Exchanger
from evenly.exchange.membership import Membership, StaticMembership
from evenly.exchange.payload import SQUARES, PayloadEntryState
from evenly.exchange.pending import ExchangeSummary, PendingState
from evenly.exchange.tensors.flat import real, travelling_dtype
from evenly.exchange.tensors.ordered import extreme
from evenly.exchange.votes import Quorum, Vote, fractions

__all__ = [
    "SQUARES",
    "Codec",
    "ExchangeState",
    "ExchangeSummary",
    "Exchanger",
    "Membership",
    "PayloadEntryState",
    "PendingState",
    "Progress",
    "Quorum",
    "StaticMembership",
    "Vote",
    "add_change",
    "add_codec",
    "extreme",
    "finite_part",
    "fractions",
    "is_torn",
    "real",
    "same",
    "travelling_dtype",
]
