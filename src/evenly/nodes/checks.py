"""Checks that a module and its optimizer can be synchronized with other ranks."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenly._torch.optimizers import has_step_hooks
from evenly.comm import local_shard_of
from evenly.errors import SpecError
from evenly.spec import AnyPeriod, EveryGradient, EverySeconds, Exchange


def require_plain(module: torch.nn.Module) -> None:
    """Raises `SpecError` for a module that is, or contains, one that is synchronized already."""
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel) or hasattr(type(part), "agreed_buffers"):
            where, advice = (f" inside, as {name!r}", "Put") if name else ("", "Give")
            raise SpecError(
                f"synchronize was given a {type(part).__name__}{where}, which averages gradients already. {advice} the "
                f"plain network{' in its place' if name else ''}: its .module."
            )


def require_dense(module: torch.nn.Module) -> None:
    """Raises `SpecError` for layers with sparse gradients, which ranks cannot average."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise SpecError(
                f"the gradients of {name or 'the model'!r} are sparse, and ranks average dense ones. Make it with "
                "sparse=False."
            )


def require_elastic(module: torch.nn.Module, period: AnyPeriod, exchange: Exchange, *, nodes: int) -> None:
    """Raises `SpecError` for what an elastic run cannot do."""
    case = ""
    if isinstance(period, EveryGradient | EverySeconds):
        case = f"every={period} was given; nodes of an elastic run exchange after a number of steps or epochs"
    elif exchange.fragments > 1:
        case = f"fragments={exchange.fragments} was given; nodes of an elastic run exchange all parameters at once"
    elif exchange.treats_state("average"):
        case = "optimizer_state='average' was given; nodes that join have no state to average"
    elif any(local_shard_of(parameter) is not None for parameter in module.parameters()):
        case = "the network is cut over ranks; every rank of an elastic run holds all of it"
    elif nodes > 1:
        case = f"this launch has {nodes} nodes; an elastic run has one launcher for each node"
    if case:
        raise SpecError(f"synchronize was called in an elastic run, but {case}. Change that, or start one world.")


def require_own_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raises `SpecError` for an object that is not a torch optimizer, or one that communicates with other ranks."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer) or not has_step_hooks(optimizer):
        raise SpecError(
            f"synchronize was given a {name} as optimizer, which has no hooks around its steps. Give the "
            "torch.optim.Optimizer that it wraps."
        )
    if any(base.__module__.startswith("torch.distributed") for base in type(optimizer).__mro__):
        raise SpecError(
            f"synchronize was given a {name}, which shares its work with all ranks of a process group, so nodes could "
            "not train independently between exchanges. Give a plain optimizer."
        )


def require_trainable(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises `SpecError` unless `optimizer` has exactly the parameters of `module` that require gradients."""
    parameters = list(module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise SpecError("synchronize was asked for a model without a trainable parameter. Give it one that trains.")
    parameter_ids = {id(parameter) for parameter in parameters}
    for index, group in enumerate(optimizer.param_groups):
        foreign = [list(p.shape) for p in group["params"] if id(p) not in parameter_ids]
        if foreign:
            more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
            is_cut = any(local_shard_of(parameter) is not None for parameter in parameters)
            advice = (
                "The network is cut over ranks: make the optimizer after evenly.shard, over model.parameters()."
                if is_cut
                else "Put them into the module, or build the optimizer after moving it."
            )
            raise SpecError(
                f"the optimizer's group {index} trains tensors of shapes {', '.join(map(str, foreign[:3]))}{more} "
                f"that are not parameters of the model, so no rank would share them. {advice}"
            )
    optimized_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in optimized_ids]
    if missing:
        raise SpecError(
            f"the optimizer trains no {', '.join(map(repr, missing[:3]))}"
            f"{' and others' if len(missing) > 3 else ''}, though the model says they are trained. "
            "Freeze them by requires_grad_(False), or give all to one optimizer."
        )
