"""Random runs of networks cut over ranks with any form of exchange; replicas stand where else ranks do."""

import random
from functools import cache

import torch

from evenly.comm import local_shard_of
from evenly.graph import trace_module
from evenly.layouts import lay_out
from evenly.shards import join_shards, load_full_state_dict
from evenly.shards.optim.optimizers import state_placement
from tests.exchange import exchange_programs
from tests.exchange.exchange_fuzz import Trainer, verdict
from tests.exchange.exchange_programs import RandomRun
from tests.nodes.random_runs import checkpoint_of, make_network
from tests.ranks import ragged, run_ranks

SHARES = (  # of each replica of each node; None is a rank with the whole network
    [[[2, 1]], [[1, 1]]],
    [[[1, 2]], [None]],
    [[[1, 1], None], [[3, 1]]],
    [[[70, 25, 5]], [None]],
)


def make(seed: int) -> tuple[RandomRun, list]:
    """Returns the run of a seed, and the shares of its replicas."""
    shares = random.Random(seed).choice(SHARES)
    sizes = tuple(len(node) for node in shares)
    return exchange_programs.make(seed, sizes=sizes, network="cut"), shares


@cache
def traced(seed: int):
    """Returns the network followed, of which replicas take copies."""
    return trace_module(make_network("cut", seed=seed), torch.zeros(4, 2, 4, 4).double())


class CutTrainer(Trainer):
    """One rank that holds a part of a replica."""

    state_placement = staticmethod(state_placement)

    def __init__(self, run: RandomRun, rank_group, shares) -> None:
        flat = [replica for node in shares for replica in node]
        counts = [len(replica or [1]) for replica in flat]
        replicas, self.shares = ragged(*counts), shares
        self.run, self.rank_group, self.nodes = run, rank_group, ragged(*run.sizes)
        self.place = next(place for place, ranks in enumerate(replicas) if rank_group.rank in ranks)
        own, self.sharded = flat[self.place], None
        if own is None:
            self.model = make_network(run.network, seed=self.place)
        else:
            network = traced(self.place)
            layout = lay_out(network.graph, [float(share) for share in own])
            among = rank_group.among(replicas[self.place], f"replica{self.place}")
            self.model = self.sharded = join_shards(network, layout, rank_group=among, timeout_s=30)
        self.ranks = [[rank for place in node for rank in replicas[place]] for node in self.nodes]
        self.begin()

    @torch.no_grad()
    def parts(self) -> list[tuple[int, torch.Tensor]]:
        """Returns what this rank speaks for at exchanges: fragments, and numbers of elements; ends the run."""
        begin = 0
        for name, full in traced(0).model.named_parameters():
            numbers = torch.arange(begin, begin + full.numel()).view(full.shape).double()
            tensor, begin = self.named()[name], begin + full.numel()
            placement = local_shard_of(tensor)
            tensor.copy_(numbers if placement is None else placement.part(numbers))
        payload = self.synchronized._exchanger._payload_builder.snapshot(range(self.exchange.fragments))
        found = [(int(part.key.split("/")[0]), part.values.long()) for part in payload.parts]
        self.close()
        return found

    def close(self) -> None:
        self.synchronized.close()
        if self.sharded is not None:
            self.sharded.close()
            # Let go of the groups now: a rank may wait there for another.
            self.sharded.shard_group.group = self.sharded._all_ranks_group.group = None

    def named(self) -> dict[str, torch.Tensor]:
        """Returns this rank's tensors by the names they have in the whole network."""
        found = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: found[name] for name in traced(0).model.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        found = [(tensor.detach(), local_shard_of(tensor)) for tensor in self.named().values()]
        return [tensor.clone() if placement is None else placement.full(tensor).clone() for tensor, placement in found]

    def put(self, state) -> None:
        if self.sharded is None:
            super().put(state)
        else:
            load_full_state_dict(self.sharded, state, strict=False)

    @torch.no_grad()
    def copy_by_hand(self, weights) -> None:
        for name, tensor in self.named().items():
            placement = local_shard_of(tensor)
            tensor.copy_(weights[name] if placement is None else placement.part(weights[name]))

    @torch.no_grad()
    def start_again(self) -> None:
        """Goes on in a new object from what a checkpoint holds, with the same cut."""
        checkpoint = checkpoint_of(self.synchronized)
        kept = [(tensor, tensor.detach().clone()) for tensor in self.named().values()]
        self.synchronized.close()
        self.restarts += 1
        self.join()
        for tensor, value in kept:
            tensor.copy_(value)
        self.synchronized.resume(*checkpoint)


def parts_of(run: RandomRun, shares: list) -> list[list[torch.Tensor]]:
    """Returns for each fragment the elements that travel together, as places in the vector of the fragment."""
    found = run_ranks(sum(len(r or [1]) for node in shares for r in node), lambda p: CutTrainer(run, p, shares).parts())
    first = found[: sum(len(replica or [1]) for replica in shares[0])]  # of node 0: each element has one owner there
    fragments = []
    for fragment in range(run.exchange.fragments):
        parts = [elements for rank in first for number, elements in rank if number == fragment]
        order = {element: place for place, element in enumerate(sorted(torch.cat(parts).tolist()))}
        fragments.append([torch.tensor([order[element] for element in part.tolist()]) for part in parts])
    return fragments


def judge(run: RandomRun, shares: list) -> str:
    """Returns how a run ended: 'equal', 'refused', or what is wrong."""
    replicas = [replica for node in shares for replica in node]
    places = [place for place, replica in enumerate(replicas) for _ in replica or [1]]
    for place in range(len(replicas)):
        traced(place)  # here: threads would trace at once

    def train() -> list:
        return run_ranks(len(places), lambda rank_group: CutTrainer(run, rank_group, shares).play(), limit_s=90.0)

    return verdict(run, train, places=places, parts=parts_of(run, shares))
