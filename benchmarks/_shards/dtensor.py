"""The peer DTensor in `shards.py`: torch's own tensor parallelism, whose parts are equal.

DTensor does not cut convolutions by filters, so they are cut along the batch. Linear layers are cut by outputs and by
inputs in turn; a last one that has no partner is computed whole.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class EvenNetwork(nn.Module):
    """A copy of a network over all ranks, in equal parts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._model = copy.deepcopy(model)
        linears = [name for name, module in self._model.named_modules() if isinstance(module, nn.Linear)]
        for pair in zip(linears[::2], linears[1::2], strict=False):
            styles = (ColwiseParallel(use_local_output=False), RowwiseParallel())  # local parts would have to be equal
            parallelize_module(self._model, self._mesh, dict(zip(pair, styles, strict=True)))
        for module in self._model.modules():
            if isinstance(module, nn.Flatten):
                module.register_forward_hook(self._gather)
            elif not list(module.children()) and not isinstance(module, nn.Linear):
                distribute_module(module, self._mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the outputs for the whole batch on every rank."""
        result = self._model(distribute_tensor(x, self._mesh, [Shard(0)], src_data_rank=None))
        return result.full_tensor() if isinstance(result, DTensor) else result

    def finish_gradients(self) -> None:
        """Adds up the gradients of layers that are cut along the batch; an optimizer would not."""
        for parameter in self.parameters():
            if isinstance(parameter.grad, DTensor) and parameter.grad.placements != parameter.placements:
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    def _gather(self, _module: nn.Module, _inputs: object, output: DTensor) -> DTensor:
        return output.redistribute(self._mesh, [Replicate()])
