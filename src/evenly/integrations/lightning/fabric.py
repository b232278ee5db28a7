"""Lightning Fabric over nodes: gradients averaged inside a node, parameters across nodes every period.

Private names of its strategies, in version 2.6, that have no public form: `_configure_launcher`, which would start
ranks; `_setup_distributed` and `_set_world_ranks`, which open the group; `_backward_sync_control`, which pauses it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Unpack

import torch
from lightning.fabric.strategies import DDPStrategy

from evenly.checkpoints.full_state import changed_state
from evenly.errors import SpecError
from evenly.integrations.closures import run_closures_first
from evenly.integrations.joined_models import JoinedModels, nodes_folder, reporting, require_steps
from evenly.integrations.lightning.environment import EvenlyEnvironment
from evenly.launch import open_world, pick_device
from evenly.nodes import Synchronized
from evenly.spec import Every, Exchange, ExchangeWishes, period_of

KEY = "evenly"  # in a checkpoint: the step whose states of all nodes are beside it


class EvenlyFabricStrategy(DDPStrategy):
    """Node-based communications for `Fabric(strategy=...)`, on nodes with any numbers of ranks.

    Set up each model together with its optimizer: `fabric.setup(model, optimizer)`. Call `fabric.strategy.end_epoch()`
    after each pass over the data, `fabric.strategy.finish()` at the end, and evaluate in `fabric.strategy.agreed()`.
    """

    def __init__(
        self,
        every: Every = "epoch",
        *,
        nodes: Sequence[Sequence[int]] | None = None,
        count: Callable[..., float] | None = None,
        find_unused_parameters: bool = False,
        device: str = "auto",
        timeout_s: float = 600.0,
        checkpoint_io: Any = None,
        precision: Any = None,
        **exchange: Unpack[ExchangeWishes],
    ) -> None:
        """Opens nothing yet.

        Args:
            every: the period K', as in `evenly.synchronize`, but not in seconds.
            nodes: the ranks of each node; discovered if left out.
            count: a function of the arguments of `forward` that returns the samples of a batch; the leading dim of the
                first tensor if left out.
            find_unused_parameters: for networks that do not use all parameters in every step.
            device: what this rank computes on: `"auto"`, `"cpu"`, `"cuda"` or `"cuda:1"`.
            timeout_s: how long a rank may wait for the others.
            checkpoint_io: as in Fabric's strategies.
            precision: as in Fabric's strategies.
            exchange: how exchanges are made, as in `evenly.synchronize`: `overlap`, `codec`, `outer`, ...
        """
        self._environment = EvenlyEnvironment()
        place = self._environment.place
        self._device = pick_device(place, device)
        super().__init__(
            parallel_devices=[self._device] * (place.local_size or place.world_size),
            cluster_environment=self._environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend="gloo",
            timeout=timedelta(seconds=timeout_s),
        )
        self._period = period_of(every)
        require_steps(self._period, "Fabric")
        self._exchange = Exchange(**exchange, timeout_s=timeout_s)
        self._requested_nodes, self._count, self._timeout_s = nodes, count, timeout_s
        self._find_unused_parameters = find_unused_parameters
        self._joined: JoinedModels | None = None
        self._backward_sync_control = PausedAverages()

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The ranks that divide the samples: all of them, however many each node has."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        self._launcher = None  # the ranks are started already

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        open_world(self._environment.place, timeout_s=self._timeout_s)

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer], Any]:
        """Synchronizes a network and its optimizer with the other ranks."""
        if len(optimizers) != 1:
            raise SpecError(
                f"fabric.setup was called with {len(optimizers)} optimizers for one network. Set up each network with "
                "its own optimizer."
            )
        if self._joined is None:
            self._joined = JoinedModels(self._device, nodes=self._requested_nodes, timeout_s=self._timeout_s)
        with reporting(self._joined):
            run_closures_first(optimizers[0])
            model = self._joined.join(
                f"model_{len(self._joined.models)}",
                module,
                optimizers[0],
                period=self._period,
                exchange=self._exchange,
                count=self._count,
                scaler=getattr(self.precision, "scaler", None),
                find_unused_parameters=self._find_unused_parameters,
            )
        return model, optimizers, scheduler

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Returns a network that is not trained as it is; others are set up with their optimizer."""
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise SpecError(
                "fabric.setup was called with a network that trains and no optimizer, but the two are synchronized "
                "together. Call fabric.setup(model, optimizer), or freeze the network by requires_grad_(False)."
            )
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Raises `SpecError`: an optimizer is set up with its network."""
        raise SpecError(
            f"fabric.setup_optimizers was called with a {type(optimizer).__name__} alone. Call fabric.setup(model, "
            "optimizer)."
        )

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Puts the averages over all nodes into the networks for the block; all ranks call it together."""
        with nullcontext() if self._joined is None else self._joined.agreed():
            yield

    def end_epoch(self) -> None:
        """Marks the end of a pass over the data; exchanges if the period is one of epochs."""
        if self._joined is not None:
            self._joined.end_epoch()

    def finish(self) -> None:
        """Makes the last exchange, so that all ranks end with the same networks."""
        if self._joined is not None:
            self._joined.finish()

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Returns the state of the plain network, with the average over all nodes; all ranks call it together."""
        if not isinstance(module, Synchronized):
            return super().get_module_state_dict(module)
        with self.agreed():
            return changed_state(module.module.state_dict(), lambda tensor: tensor.detach().clone())

    def load_module_state_dict(self, module: torch.nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads the state of the plain network."""
        plain = module.module if isinstance(module, Synchronized) else module
        super().load_module_state_dict(module=plain, state_dict=state_dict, strict=strict)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Writes a checkpoint of the averages and, if it has an optimizer, the states of all nodes beside it."""
        joined = self._joined
        if joined is None or not any(isinstance(value, torch.optim.Optimizer) for value in state.values()):
            super().save_checkpoint(path, state, storage_options, filter)
            return
        root = nodes_folder(path)
        step = joined.save(root)
        with self.agreed():
            super().save_checkpoint(path, {**state, KEY: {"step": step}}, storage_options, filter)
        self.barrier("the checkpoint is written")
        joined.keep_only(root, step)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint; into networks and optimizers that are set up, the states of all nodes."""
        rest: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
        loads_all = isinstance(state, dict) and any(
            isinstance(value, torch.optim.Optimizer) for value in state.values()
        )
        if self._joined is not None and loads_all and KEY in rest:
            self._joined.load(nodes_folder(path), rest.pop(KEY)["step"])
        return rest

    def teardown(self) -> None:
        """Closes the connections of the networks; the process group stays open."""
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.close()
        super().teardown()


def _has_optimizer(state: object) -> bool:
    return isinstance(state, dict) and any(isinstance(value, torch.optim.Optimizer) for value in state.values())


class PausedAverages:
    """What `fabric.no_backward_sync` asks for."""

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Returns a block in which gradients are accumulated and not averaged, if `enabled`."""
        return module.no_sync() if enabled and isinstance(module, Synchronized) else nullcontext()
