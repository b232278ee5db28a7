"""Node-based training in one process without any communication: it plays every rank of every node in turn."""

import copy
from collections.abc import Callable, Sequence

import torch

Batch = tuple[torch.Tensor, torch.Tensor]


class Reference:
    """One replica per rank; gradients averaged by samples inside a node, parameters by samples across nodes."""

    def __init__(
        self,
        model: torch.nn.Module,
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        nodes: Sequence[Sequence[int]],
        *,
        average_state: bool = False,
    ) -> None:
        self.nodes = nodes
        self.replicas = [copy.deepcopy(model) for _ in range(sum(map(len, nodes)))]
        self.optimizers = [make_optimizer(replica) for replica in self.replicas]
        self.samples = [0.0] * len(self.replicas)
        self.average_state = average_state
        self.clip: float | None = None

    def step(
        self,
        batches: Sequence[Batch],
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        set_to_none: bool = True,
    ) -> None:
        for replica, (x, y) in zip(self.replicas, batches, strict=True):
            replica.zero_grad(set_to_none=set_to_none)
            loss(replica(x), y).backward()
        for ranks in self.nodes:
            self.average_gradients(ranks, [len(batches[rank][0]) for rank in ranks])
        for rank, optimizer in enumerate(self.optimizers):
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.replicas[rank].parameters(), self.clip)
            optimizer.step()
            self.samples[rank] += len(batches[rank][0])

    def average_gradients(self, ranks: Sequence[int], counts: Sequence[int]) -> None:
        for parameters in zip(*(self.replicas[rank].parameters() for rank in ranks), strict=True):
            if not parameters[0].requires_grad:  # frozen: what it has is averaged already, or None
                continue
            mean = sum(count * p.grad for count, p in zip(counts, parameters, strict=True)) / sum(counts)
            for parameter in parameters:
                parameter.grad = mean.clone()

    @torch.no_grad()
    def exchange(self) -> None:
        of_node = [sum(self.samples[rank] for rank in ranks) for ranks in self.nodes]
        leaders = [ranks[0] for ranks in self.nodes]
        for tensors in zip(*(list(replica.parameters()) for replica in self.replicas), strict=True):
            self._spread(tensors, [tensors[leader] for leader in leaders], of_node)
        if self.average_state:
            self._average_state(leaders, of_node)
        for buffers in zip(*(list(replica.buffers()) for replica in self.replicas), strict=True):
            if buffers[0].is_floating_point():
                self._spread(buffers, buffers, self.samples)
            else:
                largest = torch.stack(buffers).amax(0)
                for buffer in buffers:
                    buffer.copy_(largest)
        self.samples = [0.0] * len(self.samples)

    def _average_state(self, leaders: list[int], weights: list[float]) -> None:
        every = [[p for group in o.param_groups for p in group["params"]] for o in self.optimizers]
        for parameters in zip(*every, strict=True):
            states = [optimizer.state[p] for optimizer, p in zip(self.optimizers, parameters, strict=True)]
            for slot in states[0]:
                tensors = [state[slot] for state in states]
                if isinstance(tensors[0], torch.Tensor) and tensors[0].shape == parameters[0].shape:
                    self._spread(tensors, [tensors[leader] for leader in leaders], weights)

    @staticmethod
    def _spread(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], weights: Sequence[float]) -> None:
        mean = sum(weight * source for weight, source in zip(weights, sources, strict=True)) / sum(weights)
        for target in targets:
            target.copy_(mean)
