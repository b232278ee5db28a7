"""Lightning's Trainer over nodes: gradients averaged inside a node, parameters across nodes every period.

Two private names of its strategies, in version 2.6, have no public form: `_configure_launcher`, which would start
ranks, and `_layer_sync`, which `sync_batchnorm=True` sets.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from evenly._torch.calls import redirect_calls
from evenly.batches import Feed
from evenly.checkpoints.full_state import changed_state
from evenly.errors import SpecError
from evenly.gradients import counted_samples, leading_dim
from evenly.integrations.closures import run_closures_first
from evenly.integrations.joined_models import JoinedModels, nodes_folder, reporting, require_steps
from evenly.integrations.lightning.environment import EvenlyEnvironment
from evenly.integrations.networks import networks_of
from evenly.launch import open_world, pick_device
from evenly.nodes import Synchronized
from evenly.spec import Every, EveryGradient, Exchange, ExchangeWishes, period_of

KEY = "evenly"  # in a checkpoint: the step whose states of all nodes are beside it
MEANS = (None, "mean", "avg")


class EvenlyStrategy(DDPStrategy):
    """Node-based communications for `Trainer(strategy=...)`, on nodes with any numbers of ranks.

    Validation and checkpoints see the average over all nodes. A LightningModule that optimizes by hand may have several
    optimizers, each for one network in it.
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
        precision_plugin: Any = None,
        **exchange: Unpack[ExchangeWishes],
    ) -> None:
        """Opens nothing yet.

        Args:
            every: the period K', as in `evenly.synchronize`, but not in seconds.
            nodes: the ranks of each node; discovered if left out.
            count: a function of the arguments of `training_step` that returns the samples of a batch; the leading dim
                of the first tensor in the batch if left out. With manual optimization it gets what the networks get.
            find_unused_parameters: for networks that do not use all parameters in every step.
            device: what this rank computes on: `"auto"`, `"cpu"`, `"cuda"` or `"cuda:1"`.
            timeout_s: how long a rank may wait for the others.
            checkpoint_io: as in Lightning's strategies.
            precision_plugin: as in Lightning's strategies.
            exchange: how exchanges are made, as in `evenly.synchronize`: `overlap`, `codec`, `outer`, ...
        """
        self._environment = EvenlyEnvironment()
        place = self._environment.place
        self._device = pick_device(place, device)
        super().__init__(
            parallel_devices=[self._device] * (place.local_size or place.world_size),
            cluster_environment=self._environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend="gloo",
            timeout=timedelta(seconds=timeout_s),
        )
        self._period = period_of(every)
        require_steps(self._period, "Lightning's Trainer")
        self._exchange = Exchange(**exchange, timeout_s=timeout_s)
        self._requested_nodes, self._count, self._timeout_s = nodes, count, timeout_s
        self._find_unused_parameters = find_unused_parameters
        self._joined: JoinedModels | None = None  # while a fit runs
        self._fitting, self._evaluating = ExitStack(), ExitStack()
        self._step_samples: Callable[[], float] | None = None  # of this rank's batch, while a step runs
        self._restored_path: str | Path = ""

    @property
    def synchronized(self) -> dict[str, Synchronized]:
        """The synchronized networks while `fit` runs, by name: `"model"`, or those of manual optimization."""
        return {} if self._joined is None else dict(self._joined.models)

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

    def setup_distributed(self) -> None:
        """Opens the world of the launcher, unless the script has opened a group."""
        reset_seed()
        self.set_world_ranks()
        open_world(self._environment.place, timeout_s=self._timeout_s)

    def configure_ddp(self) -> None:
        """Does nothing: networks are synchronized together with their optimizers, which are made later."""

    def setup(self, trainer: Trainer) -> None:
        """Moves the network, makes its optimizers and, to fit, synchronizes them with the other ranks."""
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self._require_fit(trainer)
        super().setup(trainer)
        if is_fitting:
            self._join(trainer, self.lightning_module)

    def _require_fit(self, trainer: Trainer) -> None:
        """Raises `SpecError` for what would make nodes differ at the end, or wait for each other in every forward."""
        if self._layer_sync is not None:
            raise SpecError(
                "Trainer(sync_batchnorm=True) was asked for, which sends the statistics of every layer to all nodes in "
                "every forward. Leave it out: exchanges average the running statistics (buffers='average')."
            )
        for callback in trainer.callbacks:
            is_local = isinstance(callback, StochasticWeightAveraging | WeightAveraging)
            if is_local and not isinstance(self._period, EveryGradient):
                raise SpecError(
                    f"the callback {type(callback).__name__} averages the weights that one node has at each step, so "
                    "nodes would end with different ones. Use every='global', or outer= for an average over time."
                )

    def _join(self, trainer: Trainer, module: LightningModule) -> None:
        joined = JoinedModels(self._device, nodes=self._requested_nodes, timeout_s=self._timeout_s)
        self._fitting.callback(self._leave)
        self._joined = joined
        with reporting(joined):
            if module.automatic_optimization:
                networks = {"model": (module, self.optimizers[0])}  # Lightning refuses several here
            else:
                networks = networks_of(module, self.optimizers)
            for name, (network, optimizer) in networks.items():
                self._fitting.callback(run_closures_first(optimizer))
                model = joined.join(
                    name,
                    network,
                    optimizer,
                    period=self._period,
                    exchange=self._exchange,
                    count=self._count or (partial(self._samples, trainer) if module.automatic_optimization else None),
                    scaler=getattr(self.precision_plugin, "scaler", None),
                    find_unused_parameters=self._find_unused_parameters,
                )
                if module.automatic_optimization:
                    self.model = model
                else:
                    self._fitting.callback(redirect_calls(network, partial(_call, network, model)))
        callback = PeriodCallback(joined, self._begin_validation)
        trainer.callbacks.insert(0, callback)
        self._fitting.callback(trainer.callbacks.remove, callback)

    def _leave(self) -> None:
        joined, self._joined = self._joined, None
        self.model = self.lightning_module
        if joined is not None:
            joined.close(may_differ=True)

    @staticmethod
    def _samples(trainer: Trainer, *args: object, **kwargs: object) -> float:
        """Returns the samples of a batch, as a loader of `evenly.feed` says them."""
        loader = trainer.train_dataloader if trainer.training else None
        return float(loader.samples) if isinstance(loader, Feed) else leading_dim(*args, **kwargs)

    def _begin_validation(self) -> None:
        if self._joined is not None:
            self._evaluating.enter_context(self._joined.agreed())

    def on_validation_end(self) -> None:
        """Gives each node its own values back, after all callbacks have seen the average."""
        super().on_validation_end()
        self._evaluating.close()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulates gradients in the block without averaging them."""
        with nullcontext() if self._joined is None else self._joined.no_sync():
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `training_step` through the synchronized network."""
        with self._in_step(args, kwargs):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `validation_step`, in `fit` on the average over all nodes."""
        with self._in_step(args, kwargs):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `test_step`."""
        with self._in_step(args, kwargs):
            return super().test_step(*args, **kwargs)

    @contextmanager
    def _in_step(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[None]:
        """Lets means over ranks be weighted by the samples of this rank's batch."""
        automatic = self.lightning_module.automatic_optimization
        count = (self._count if automatic else None) or partial(self._samples, self.lightning_module.trainer)
        self._step_samples = partial(counted_samples, count, args, kwargs)
        try:
            yield
        finally:
            self._step_samples = None

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the tensor summed or averaged over ranks; means inside of a step are weighted by samples."""
        is_mean = reduce_op in MEANS or (isinstance(reduce_op, str) and reduce_op.lower() in MEANS)
        if self._step_samples is None or not is_mean or not isinstance(tensor, torch.Tensor):
            return super().reduce(tensor, group, reduce_op=reduce_op)
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        samples = tensor.new_tensor([self._step_samples()], dtype=dtype)
        sums = super().reduce(torch.cat([tensor.reshape(-1) * samples, samples]), group, reduce_op="sum")
        return (sums[:-1] / sums[-1]).reshape(tensor.shape)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state of the LightningModule with the average over all nodes; all ranks call it together."""
        if self._joined is None or not self._joined.models:
            return super().lightning_module_state_dict()
        with self._joined.agreed():
            return changed_state(self.lightning_module.state_dict(), lambda tensor: tensor.detach().clone())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint of the average and, unless only weights are asked for, the states of all nodes beside it.

        Rank 0 writes the file, the first rank of each node the state of the node; all ranks call it together.
        """
        joined = self._joined
        if joined is None or not joined.models or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        root = nodes_folder(filepath)
        step = joined.save(root)
        super().save_checkpoint({**checkpoint, KEY: {"step": step}}, filepath, storage_options)
        self.barrier("the checkpoint is written")
        joined.keep_only(root, step)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint and the states of the nodes beside it."""
        super().remove_checkpoint(filepath)
        if self.local_rank == 0 and "://" not in str(filepath):
            shutil.rmtree(nodes_folder(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Returns the content of a checkpoint, on all ranks."""
        self._restored_path = checkpoint_path
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Loads the states of all nodes; of a checkpoint of another strategy the optimizers' states."""
        saved = checkpoint.get(KEY)
        if self._joined is None or saved is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        self._joined.load(nodes_folder(self._restored_path), saved["step"])

    def on_exception(self, exception: BaseException) -> None:
        """Reports the error to the other ranks, which raise it too."""
        super().on_exception(exception)
        if self._joined is not None:
            self._joined.report(exception)

    def teardown(self) -> None:
        """Closes what `fit` had opened; the process group stays open."""
        self._evaluating.close()
        self._fitting.close()
        super().teardown()


class PeriodCallback(Callback):
    """Tells the models of a fit when epochs, validations and the fit itself end; it comes before other callbacks."""

    def __init__(self, joined: JoinedModels, begin_validation: Callable[[], None]) -> None:
        self._joined, self._begin_validation = joined, begin_validation

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        """Ends an epoch before it is validated."""
        if trainer.is_last_batch:
            self._joined.end_epoch(trainer.current_epoch + 1)

    def on_train_epoch_end(self, trainer: Trainer, *args: object) -> None:
        """Ends an epoch that was left early."""
        self._joined.end_epoch(trainer.current_epoch + 1)

    def on_validation_start(self, *args: object) -> None:
        """Shows the average to everything that looks at the network from here on."""
        self._begin_validation()

    def on_train_end(self, *args: object) -> None:
        """Makes the last exchange, so that what other callbacks save at the end is the final network."""
        self._joined.finish()


def _call(network: torch.nn.Module, model: Synchronized, *args: object, **kwargs: object) -> Any:
    """Calls a network of manual optimization: synchronized while it trains, else as it is."""
    trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in network.parameters())
    return model(*args, **kwargs) if trains else network(*args, **kwargs)
