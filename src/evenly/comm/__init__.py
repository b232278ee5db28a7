"""The only caller of torch.distributed collectives: ragged groups, waits that name who is missing, the alarm."""

from evenly.comm.agreement import require_same
from evenly.comm.alarm import Alarm
from evenly.comm.context import GroupContext, open_context, open_for_now, ring_on_error
from evenly.comm.groups import Groups, Peers, backend_for, close_groups, open_group, open_groups, owners_of_slices
from evenly.comm.moves import (
    Assembly,
    Waiter,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    first_line,
    gather_json,
)
from evenly.comm.party import Party, party_of
from evenly.comm.placement import Placement, full_shape, is_retired, place, placement_of, retire
from evenly.comm.shifts import MOVES, Shift
from evenly.comm.staging import off_wire, on_wire
from evenly.comm.wire import Pending, Traffic, Wire, count_of, put, take

__all__ = [
    "MOVES",
    "Alarm",
    "Assembly",
    "GroupContext",
    "Groups",
    "Party",
    "Peers",
    "Pending",
    "Placement",
    "Shift",
    "Traffic",
    "Waiter",
    "Wire",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "backend_for",
    "broadcast",
    "close_groups",
    "count_of",
    "first_line",
    "full_shape",
    "gather_json",
    "is_retired",
    "off_wire",
    "on_wire",
    "open_context",
    "open_for_now",
    "open_group",
    "open_groups",
    "owners_of_slices",
    "party_of",
    "place",
    "placement_of",
    "put",
    "require_same",
    "retire",
    "ring_on_error",
    "take",
]
