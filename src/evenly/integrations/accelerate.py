"""Node-based communications in a loop with Accelerate: `prepare(accelerator, model, optimizer, loader, every=50)`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from evenly.batches import Feed
from evenly.checkpoints.full_state import changed_state
from evenly.errors import LaunchError, SpecError
from evenly.integrations.joined_models import JoinedModels, require_steps
from evenly.integrations.requirements import require_tool
from evenly.launch import find_place, open_world
from evenly.nodes import Synchronized
from evenly.spec import Every, Exchange, ExchangeWishes, period_of

require_tool("accelerate")

from accelerate import Accelerator, DistributedType  # noqa: E402  (it is there)
from accelerate.utils import DDPCommunicationHookType  # noqa: E402

FOLDER = "nodes"  # in the folder of a checkpoint
METHODS = ("save_state", "load_state", "get_state_dict", "unwrap_model", "end_training")
TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def prepare(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *others: Any,
    every: Every = "epoch",
    nodes: Sequence[Sequence[int]] | None = None,
    count: Callable[..., float] | None = None,
    find_unused_parameters: bool = False,
    timeout_s: float = 600.0,
    **exchange: Unpack[ExchangeWishes],
) -> tuple[Any, ...]:
    """Returns the synchronized model, the optimizer and the `others`, in place of `accelerator.prepare`.

    From here on `save_state`, `load_state`, `get_state_dict` and `unwrap_model` of this accelerator know the model:
    what they save is the average over all nodes, and all ranks call them together. As with `evenly.synchronize`, call
    `model.end_epoch()` after each pass over the data, `model.finish()` at the end, and evaluate in `model.agreed()`.
    `accelerator.end_training()` closes the connections.

    Args:
        accelerator: with the default or `cpu=True`; not with FSDP, DeepSpeed or Megatron.
        model: the network. Call `prepare` once for each model that has an optimizer.
        optimizer: any torch optimizer over the parameters of `model`.
        others: loaders (a DataLoader is divided over all ranks; what `evenly.feed` returns stays as it is, and says the
            samples of each batch) and learning-rate schedulers, which step once for each step of the optimizer.
        every: the period K', as in `evenly.synchronize`, but not in seconds.
        nodes: the ranks of each node; discovered if left out.
        count: a function of the arguments of `forward` that returns the samples of a batch; the leading dim of the
            first tensor if left out.
        find_unused_parameters: for networks that do not use all parameters in every step.
        timeout_s: how long a rank may wait for the others.
        exchange: how exchanges are made, as in `evenly.synchronize`: `overlap`, `codec`, `outer`, ...

    Example:
        ```python
        model, optimizer, loader, schedule = prepare(accelerator, model, optimizer, loader, schedule, every=50)
        ```
    """
    period, settings = period_of(every), Exchange(**exchange, timeout_s=timeout_s)
    require_steps(period, "Accelerate")
    require_fit(accelerator, others)
    run = getattr(accelerator.save_state, "__self__", None)
    if not isinstance(run, AcceleratedRun):
        run = begin_run(accelerator, nodes=nodes, timeout_s=timeout_s)
    feeds = [other for other in others if isinstance(other, Feed)]
    network = accelerator.prepare_model(model, evaluation_mode=True)  # on its device, with autocast, but without DDP
    accelerated = accelerator.prepare_optimizer(optimizer)
    unused = find_unused_parameters or getattr(accelerator.ddp_handler, "find_unused_parameters", False)
    synchronized = run.joined.join(
        f"model_{len(run.joined.models)}",
        network,
        accelerated.optimizer,
        period=period,
        exchange=settings,
        count=count or (_counted_by(feeds[0], network) if feeds else None),
        scaler=accelerator.scaler,
        find_unused_parameters=unused,
    )
    return synchronized, accelerated, *(_prepared(accelerator, other) for other in others)


def _counted_by(feed: Feed, network: torch.nn.Module) -> Callable[..., float]:
    return lambda *args, **kwargs: feed.samples_of(network, *args, **kwargs)


def _prepared(accelerator: Accelerator, other: Any) -> Any:
    """Returns a loader of this rank's batches, or a scheduler that steps as often as the optimizer."""
    if isinstance(other, Feed):
        return other
    if isinstance(other, DataLoader):
        return accelerator.prepare_data_loader(other)
    scheduler = accelerator.prepare_scheduler(other)
    scheduler.split_batches = True  # otherwise it would step once for each rank
    return scheduler


def require_fit(accelerator: Accelerator, others: Sequence[object] = ()) -> None:
    """Raises `SpecError` for other ways to train on several ranks, and for loaders of unequal lengths."""
    for other in others:
        if not isinstance(other, Feed | DataLoader | LRScheduler):
            raise SpecError(
                f"prepare was given a {type(other).__name__} beside model and optimizer. Give DataLoaders, what "
                "evenly.feed returns, and learning-rate schedulers; call prepare once for each model."
            )
    kind, handler = accelerator.distributed_type, accelerator.ddp_handler
    if kind not in TYPES:
        raise SpecError(
            f"prepare was given an Accelerator of the type {kind.value}, which shares the work in its own way. Give "
            "one for several CPUs or GPUs without a plugin."
        )
    hook = DDPCommunicationHookType.NO if handler is None else DDPCommunicationHookType(handler.comm_hook)
    if hook != DDPCommunicationHookType.NO:
        raise SpecError(
            f"the Accelerator has the communication hook {hook.value!r} for DDP, which is not used here. "
            "Leave it out, and ask for codec='bf16' or 'int8' between nodes."
        )
    if not accelerator.even_batches:
        raise SpecError(
            "the Accelerator has even_batches=False, so that ranks would make unequal numbers of steps. Use "
            "evenly.feed, which gives every sample once and all ranks as many steps."
        )


def begin_run(accelerator: Accelerator, *, nodes: Sequence[Sequence[int]] | None, timeout_s: float) -> "AcceleratedRun":
    """Returns a run of all ranks that the accelerator has found; a single process gets a group of its own."""
    place = find_place()
    if place.world_size != accelerator.num_processes:
        raise LaunchError(
            f"prepare was called in a run of {place.world_size} ranks ({place.launcher}), but the Accelerator found "
            f"{accelerator.num_processes}. Start it with torchrun or evenly launch, on CPUs with Accelerator(cpu=True)."
        )
    if not dist.is_initialized():
        open_world(place, timeout_s=timeout_s)
    return AcceleratedRun(accelerator, JoinedModels(accelerator.device, nodes=nodes, timeout_s=timeout_s))


class AcceleratedRun:
    """What `prepare` puts in place of five methods of one accelerator; they call these after all."""

    def __init__(self, accelerator: Accelerator, joined: JoinedModels) -> None:
        self.joined = joined
        self._accelerator = accelerator
        self._save_state, self._load_state = accelerator.save_state, accelerator.load_state
        self._get_state_dict, self._unwrap_model = accelerator.get_state_dict, accelerator.unwrap_model
        self._end_training = accelerator.end_training
        self._saved: tuple[Path, int] | None = None
        self._loaded: Path | None = None
        self._hooks = [
            accelerator.register_save_state_pre_hook(self._note_saved),
            accelerator.register_load_state_pre_hook(self._note_loaded),
        ]
        for name in METHODS:
            setattr(accelerator, name, getattr(self, name))

    def close(self, *, may_differ: bool = False) -> None:
        """Closes the models and gives the accelerator its own methods back."""
        for hook in self._hooks:
            hook.remove()
        for name in METHODS:
            if vars(self._accelerator).get(name) == getattr(self, name):
                delattr(self._accelerator, name)
        self.joined.close(may_differ=may_differ)

    def end_training(self) -> None:
        """Closes the models before Accelerate ends trackers and the process group."""
        self.close()
        self._end_training()

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Saves the average over all nodes as Accelerate does, and the states of all nodes in the folder `nodes`."""
        with self.joined.agreed():
            location = self._save_state(*args, **kwargs)
        self._accelerator.wait_for_everyone()
        if self._saved is not None:
            self.joined.keep_only(*self._saved)
        return location

    def _note_saved(self, models: list[torch.nn.Module], weights: list[Any], output_dir: str) -> None:
        root = Path(output_dir, FOLDER)
        self._saved = root, self.joined.save(root)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Loads what `save_state` has saved; each node goes on from its own state, or all from the average."""
        self._loaded = None
        self._load_state(*args, **kwargs)
        if self._loaded is not None and (step := self.joined.newest(self._loaded)) is not None:
            self.joined.load(self._loaded, step)

    def _note_loaded(self, models: list[torch.nn.Module], input_dir: str) -> None:
        self._loaded = Path(input_dir, FOLDER)

    def get_state_dict(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Returns the state of the plain network with the average over all nodes; all ranks call it together."""
        with self.joined.agreed():
            state = self._get_state_dict(self._plain(model), *args, **kwargs)
            return changed_state(state, lambda tensor: tensor.detach().clone())

    def unwrap_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Returns the plain network."""
        unwrapped: torch.nn.Module = self._unwrap_model(self._plain(model), *args, **kwargs)
        return unwrapped

    @staticmethod
    def _plain(model: torch.nn.Module) -> torch.nn.Module:
        return model.module if isinstance(model, Synchronized) else model
