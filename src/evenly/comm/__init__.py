"""The only caller of torch.distributed collectives: ragged groups, waits that name who is missing, the alarm."""

from evenly.comm.alarm import Alarm
from evenly.comm.groups import Groups, Peers, backend_for, open_group, open_groups
from evenly.comm.moves import Assembly, Waiter, all_gather, all_reduce, broadcast, first_line, gather_json
from evenly.comm.party import Party, party_of
from evenly.comm.slices import Segment, refine, slices

__all__ = [
    "Alarm",
    "Assembly",
    "Groups",
    "Party",
    "Peers",
    "Segment",
    "Waiter",
    "all_gather",
    "all_reduce",
    "backend_for",
    "broadcast",
    "first_line",
    "gather_json",
    "open_group",
    "open_groups",
    "party_of",
    "refine",
    "slices",
]
