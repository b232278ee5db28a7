"""transformers' Trainer over nodes: `EvenlyTrainer(model, args, train_dataset=data, every=50)`.

Trainer has no public places for a wrapper, the state of a checkpoint and the end before the best model is loaded, so
these private names of it are overridden or read, in version 5.22: `_wrap_model`, `_save_checkpoint`,
`_load_optimizer_and_scheduler`, `_finalize_training`, `_get_output_dir`, `_loss_shifts_labels`.
"""

import copy
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from evenly.errors import SpecError
from evenly.gradients import leading_dim
from evenly.integrations.joined_models import reporting, require_steps
from evenly.integrations.requirements import require_tool
from evenly.nodes import Synchronized
from evenly.spec import Every, Exchange, ExchangeWishes, period_of

require_tool("transformers")
require_tool("accelerate")

from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402  (it is there)
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402

from evenly.integrations.accelerate import FOLDER, AcceleratedRun, begin_run, require_fit  # noqa: E402

IGNORED = -100  # the label of a token that has no loss


class EvenlyTrainer(Trainer):
    """transformers' Trainer by node-based communications, on nodes with any numbers of ranks.

    Evaluation, checkpoints, the best model and what is saved at the end are the average over all nodes. Losses that are
    means over tokens are weighted by tokens.
    """

    args: TrainingArguments

    def __init__(
        self,
        *args: Any,
        every: Every = "epoch",
        nodes: Sequence[Sequence[int]] | None = None,
        timeout_s: float = 600.0,
        **settings: Any,
    ) -> None:
        """Opens nothing yet.

        Args:
            args: as in `transformers.Trainer`. `average_tokens_across_devices` is turned off in a copy of the training
                arguments: it counts tokens over all nodes at every step, and gradients are weighted by tokens already.
            every: the period K', as in `evenly.synchronize`, but not in seconds.
            nodes: the ranks of each node; discovered if left out.
            timeout_s: how long a rank may wait for the others.
            settings: how exchanges are made, as in `evenly.synchronize` (`overlap`, `codec`, `outer`, ...), and what
                `transformers.Trainer` takes.
        """
        wishes = {name: settings.pop(name) for name in ExchangeWishes.__annotations__ if name in settings}
        self._period, self._exchange = period_of(every), Exchange(**wishes, timeout_s=timeout_s)
        require_steps(self._period, "transformers' Trainer")
        self._requested_nodes, self._timeout_s = nodes, timeout_s
        self._run: AcceleratedRun | None = None  # while `train` runs
        self._num_tokens: int | None = None  # of the current batch that have a loss, if it is a mean over tokens
        super().__init__(*args, **settings)
        self.args = copy.copy(self.args)
        self.args.average_tokens_across_devices = False
        self._require_fit()
        self.callback_handler.callbacks.insert(0, PeriodControl(self))  # before what evaluates, logs and saves

    def _require_fit(self) -> None:
        """Raises `SpecError` for arguments that share the work, or change batches, in another way."""
        require_fit(self.accelerator)
        if self.args.n_gpu > 1:
            raise SpecError(
                f"EvenlyTrainer was made in one process that sees {self.args.n_gpu} GPUs, which it would use by copies "
                "of the network. Start one process for each GPU, with torchrun or evenly launch."
            )
        if self.args.auto_find_batch_size:
            raise SpecError(
                "auto_find_batch_size=True was asked for, but ranks would find unequal sizes and make unequal numbers "
                "of steps. Choose per_device_train_batch_size."
            )

    @property
    def synchronized(self) -> Synchronized | None:
        """The synchronized network while `train` runs."""
        return None if self._run is None else next(iter(self._run.joined.models.values()), None)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as transformers' Trainer does; all ranks end with the same network."""
        try:
            return super().train(*args, **kwargs)
        except BaseException as error:
            if self._run is not None:
                self._run.joined.report(error)
            raise
        finally:
            self._close()

    def _close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self.model_wrapped = self.model
            run.close(may_differ=True)

    def _wrap_model(self, model: torch.nn.Module, training: bool = True, dataloader: Any = None) -> torch.nn.Module:
        """Returns the synchronized network to train with; Trainer has made the optimizer just before."""
        plain = super()._wrap_model(model, training=training, dataloader=dataloader)
        if not training:
            return plain
        self._run = run = begin_run(self.accelerator, nodes=self._requested_nodes, timeout_s=self._timeout_s)
        optimizer = self.optimizer
        if isinstance(optimizer, AcceleratedOptimizer):  # a Trainer that trains again keeps its optimizer
            optimizer = optimizer.optimizer
        with reporting(run.joined):
            return run.joined.join(
                "model",
                self.accelerator.prepare_model(plain, evaluation_mode=True),
                optimizer,
                period=self._period,
                exchange=self._exchange,
                count=self._count,
                scaler=self.accelerator.scaler,
                find_unused_parameters=bool(self.args.ddp_find_unused_parameters),
            )

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Returns the loss; if it is a mean over the tokens of a step, the batch counts by its tokens."""
        self._num_tokens = None if num_items_in_batch is None else self._tokens_in(inputs)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _tokens_in(self, inputs: dict[str, Any]) -> int | None:
        """Returns the tokens that have a loss, as Trainer counts those of a step; None without labels."""
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, torch.Tensor):
            return None
        if "shift_labels" not in inputs and self._loss_shifts_labels:
            labels = labels[..., 1:]
        return int(labels.ne(IGNORED).sum())

    def _count(self, *args: object, **kwargs: object) -> float:
        return leading_dim(*args, **kwargs) if self._num_tokens is None else float(self._num_tokens)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Puts the average over all nodes into the network for the block; outside of `train` it does nothing."""
        if self._run is None:
            yield
            return
        with self._run.joined.agreed():
            yield

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the average over all nodes."""
        with self.agreed():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts with the average over all nodes."""
        with self.agreed():
            return super().predict(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Saves the average over all nodes; all ranks call it together."""
        with self.agreed():
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Saves a checkpoint of the average, and in its folder `nodes` the states of all nodes."""
        run = self._run
        if run is None or self.args.save_only_model:
            with self.agreed():
                super()._save_checkpoint(model, trial)
            return
        folder = Path(self._get_output_dir(trial=trial))
        root = folder / f"checkpoint-{self.state.global_step}" / FOLDER
        step = run.joined.save(root)
        with self.agreed():
            super()._save_checkpoint(model, trial)
        kept = run.joined.gatherer.gather([path.name for path in folder.glob("checkpoint-*")], "the checkpoints")[0]
        run.joined.keep_only(root, step)
        if run.joined.leads:  # rank 0 has removed old ones on its file system
            for path in folder.glob(f"checkpoint-*/{FOLDER}"):
                if path.parent.name not in kept:
                    shutil.rmtree(path, ignore_errors=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the states of all nodes; of a checkpoint of transformers' own Trainer the optimizer's state."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._run is not None:
            root = Path(checkpoint, FOLDER)
            step = self._run.joined.newest(root)
            if step is not None:
                self._run.joined.load(root, step)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the last exchange before the best model is loaded and callbacks see the end."""
        if self._run is not None:
            self._run.joined.finish()
            self._run.close()
            self._run, self.model_wrapped = None, self.model
        return super()._finalize_training(*args, **kwargs)

    def end_epoch(self, epochs: int) -> None:
        """Marks the end of a pass over the data, the number `epochs`; `PeriodControl` calls it."""
        if self._run is not None:
            self._run.joined.end_epoch(epochs)


class PeriodControl(TrainerCallback):
    """Tells an `EvenlyTrainer` when an epoch has ended."""

    def __init__(self, trainer: EvenlyTrainer) -> None:
        self._trainer = trainer

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Exchanges, if the period is one of epochs, before the epoch is evaluated and saved."""
        self._trainer.end_epoch(math.ceil(state.epoch))
