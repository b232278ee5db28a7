"""Calls the collectives of torch.distributed: ragged groups, waits that name missing ranks, failure monitor."""

from evenly.comm.callbacks import call_when_done
from evenly.comm.collectives import (
    CollectiveWaiter,
    ObjectGatherer,
    Work,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    first_line,
    gather_json,
    gather_rows,
)
from evenly.comm.consistency import learning_rate, require_same
from evenly.comm.context import GroupContext, open_context, open_temporarily, report_on_error
from evenly.comm.failure_monitor import FailureMonitor, FailureNote
from evenly.comm.groups import (
    Group,
    Groups,
    GroupsAcrossNodes,
    Peers,
    backend_for,
    close_groups,
    open_group,
    open_group_inside,
    open_groups,
    owners_of_slices,
    plain_group,
)
from evenly.comm.host_copies import to_device, to_host
from evenly.comm.indexing.segments import count_of, put, take
from evenly.comm.local_shard import (
    LocalShard,
    full_shape,
    is_retired,
    last_mark,
    local_shard_of,
    local_tensor,
    mark,
    retire,
    set_local_shard,
)
from evenly.comm.memory.group import MemoryGroup, MemoryWork
from evenly.comm.rank_group import RankGroup, rank_group_of
from evenly.comm.redistribute import MOVES, Redistribute, copy_together
from evenly.comm.shard_group import PendingTensor, ShardGroup, Traffic
from evenly.comm.store_gatherer import StoreGatherer

__all__ = [
    "MOVES",
    "CollectiveWaiter",
    "FailureMonitor",
    "FailureNote",
    "Group",
    "GroupContext",
    "Groups",
    "GroupsAcrossNodes",
    "LocalShard",
    "MemoryGroup",
    "MemoryWork",
    "ObjectGatherer",
    "Peers",
    "PendingTensor",
    "RankGroup",
    "Redistribute",
    "ShardGroup",
    "StoreGatherer",
    "Traffic",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "backend_for",
    "broadcast",
    "call_when_done",
    "close_groups",
    "copy_together",
    "count_of",
    "first_line",
    "full_shape",
    "gather_json",
    "gather_rows",
    "is_retired",
    "last_mark",
    "learning_rate",
    "local_shard_of",
    "local_tensor",
    "mark",
    "open_context",
    "open_group",
    "open_group_inside",
    "open_groups",
    "open_temporarily",
    "owners_of_slices",
    "plain_group",
    "put",
    "rank_group_of",
    "report_on_error",
    "require_same",
    "retire",
    "set_local_shard",
    "take",
    "to_device",
    "to_host",
]
