"""What one rank does under Lightning's Trainer; processes call these functions."""

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.integrations import fabric_programs
from tests.integrations.batches import (
    SIZES,
    Batch,
    batches_of,
    gan_networks,
    judge_loss,
    maker_loss,
    network,
    values,
)

warnings.simplefilter("ignore")


def in_lightning() -> Any:
    import lightning.pytorch

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning.pytorch


def classifier() -> Any:
    """Returns a LightningModule that keeps what it saw: parameters after steps and in validation, logged losses."""

    class Classifier(in_lightning().LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.after_steps: list[list[float]] = []
            self.validated: list[list[float]] = []
            self.validated_with_gradients = False
            self.losses: list[float] = []
            self.vals: list[float] = []

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
            return loss

        def on_train_batch_end(self, *args: object) -> None:
            self.after_steps.append(values(self.net))
            self.losses.append(float(self.trainer.callback_metrics["loss_step"]))

        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            self.validated.append(values(self.net))
            self.validated_with_gradients |= torch.is_grad_enabled()
            self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            self.vals.append(float(self.trainer.callback_metrics["val"]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Classifier()


def gan() -> Any:
    """Returns a LightningModule that optimizes two networks by hand."""

    class Gan(in_lightning().LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.maker, self.judge = gan_networks()
            self.after_steps: list[list[float]] = []

        def training_step(self, batch: Batch, batch_idx: int) -> None:
            maker_optimizer, judge_optimizer = self.optimizers()
            noise, real = batch
            self.toggle_optimizer(judge_optimizer)
            loss = judge_loss(self.judge, self.maker, noise, real)
            judge_optimizer.zero_grad()
            self.manual_backward(loss)
            judge_optimizer.step()
            self.untoggle_optimizer(judge_optimizer)
            self.toggle_optimizer(maker_optimizer)
            loss = maker_loss(self.judge, self.maker, noise)
            maker_optimizer.zero_grad()
            self.manual_backward(loss)
            maker_optimizer.step()
            self.untoggle_optimizer(maker_optimizer)
            self.log("maker_loss", loss, sync_dist=True)

        def on_train_batch_end(self, *args: object) -> None:
            self.after_steps.append(values(self.maker) + values(self.judge))

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in (self.maker, self.judge)]

    return Gan()


def fit(folder: str, *, every: Any, steps: int, module: Any = None, **settings: Any) -> tuple[Any, Any]:
    """Returns the module and the trainer after `steps` batches of this rank in each epoch."""
    from evenly.integrations.lightning import EvenlyStrategy

    exchange = settings.pop("exchange", {})
    checks, path, loader = settings.pop("checks", []), settings.pop("ckpt_path", None), settings.pop("loader", None)
    module = module or classifier()
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    options |= {"enable_checkpointing": False, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    strategy = EvenlyStrategy(every, **exchange)
    trainer = in_lightning().Trainer(strategy=strategy, default_root_dir=folder, **{**options, **settings})
    loader = loader or DataLoader(batches_of(rank(), steps), batch_size=None)
    trainer.fit(module, loader, DataLoader(checks, batch_size=None) if checks else None, ckpt_path=path)
    return module, trainer


def rank() -> int:
    return int(os.environ["RANK"])


def steps_of(folder: str, every: Any, steps: int, **settings: Any) -> dict[str, Any]:
    module, trainer = fit(folder, every=every, steps=steps, **settings)
    return {"steps": module.after_steps, "losses": module.losses, "end": values(module), "world": trainer.world_size}


def accumulated(folder: str) -> dict[str, Any]:
    module, trainer = fit(folder, every=2, steps=12, accumulate_grad_batches=2, gradient_clip_val=0.5, max_epochs=1)
    return {"steps": module.after_steps[1::2], "global_step": trainer.global_step}


def saved_and_resumed(folder: str, every: Any, **exchange: Any) -> dict[str, Any]:
    """Trains two epochs; then resumes from the checkpoint after the first one, which is inside a period."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    def keeper(name: str) -> Any:
        return ModelCheckpoint(Path(folder, name), filename="{epoch}", monitor="val", save_top_k=1, save_last=True)

    checks = batches_of(7, 2)  # the same on all ranks
    settings = {"every": every, "steps": 7, "checks": checks, "enable_checkpointing": True, "exchange": exchange}
    first, trainer = fit(folder, callbacks=[keeper("first")], max_epochs=1, **settings)
    path = Path(folder, "first", "last.ckpt")
    content = torch.load(path, weights_only=False)
    whole, _ = fit(folder, callbacks=[keeper("whole")], max_epochs=2, **settings)
    resumed, trainer = fit(folder, callbacks=[keeper("first")], max_epochs=2, ckpt_path=str(path), **settings)
    return {
        "validated": first.validated,
        "validated_with_gradients": first.validated_with_gradients,
        "before": first.after_steps[-1],
        "saved": torch.cat([v.reshape(-1) for v in content["state_dict"].values()]).tolist(),
        "files": sorted(file.name for file in Path(folder, "first").iterdir()),
        "states": sorted(file.name for file in Path(folder, "first", "last.ckpt.nodes").iterdir()),
        "whole": whole.after_steps[7:],
        "resumed": resumed.after_steps,
        "ends": [values(whole), values(resumed)],
        "vals": [whole.vals[-1], resumed.vals[-1]],
        "step": trainer.global_step,
        "tested": tested(trainer, resumed),
    }


def tested(trainer: Any, module: Any) -> float:
    """Returns the loss that the fitted module has under `trainer.validate`, where nothing is synchronized."""
    return float(trainer.validate(module, DataLoader(batches_of(7, 2), batch_size=None), verbose=False)[0]["val"])


def scaled(folder: str) -> dict[str, Any]:
    """Trains in half precision with a scale so large that the first steps are skipped, on one node more often."""
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (40 if rank() == 2 else 24), growth_interval=1000)
    module = classifier().float()
    counted = []
    module.on_before_zero_grad = lambda *_: counted.append(module.trainer.strategy.synchronized["model"].schedule.step)
    loader = DataLoader([(x.float(), y.float()) for x, y in batches_of(rank(), 40)], batch_size=None)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    fit(folder, every=4, steps=40, module=module, loader=loader, plugins=plugin, gradient_clip_val=1.0)
    return {"end": values(module), "moved": module.after_steps[0] != module.after_steps[-1], "counted": counted[-1]}


def by_hand(folder: str) -> dict[str, Any]:
    module, _ = fit(folder, every=3, steps=10, module=gan())
    return {"steps": module.after_steps, "end": values(module.maker) + values(module.judge)}


def stopped_early(folder: str) -> dict[str, Any]:
    from lightning.pytorch.callbacks import EarlyStopping

    stopper = EarlyStopping("val", mode="max", patience=2)  # the loss falls, so that the first epoch stays the best
    module, trainer = fit(
        folder, every="epoch", steps=4, checks=batches_of(rank(), 1), max_epochs=20, callbacks=[stopper]
    )
    return {"epochs": trainer.current_epoch, "vals": module.vals, "end": values(module)}


def fed(folder: str) -> dict[str, Any]:
    """Trains with the unequal batches of `evenly.feed`, the last of which is empty for some ranks."""
    import evenly
    from evenly.spec import Role

    plan = evenly.Plan(roles=tuple(Role(rank=r, node=r // 2, samples=s) for r, s in enumerate(SIZES)))
    x, y = (torch.cat(parts) for parts in zip(*batches_of(0, 7), strict=True))  # 28 samples: 13 + 13 + 2
    data = torch.utils.data.TensorDataset(x, y)
    loader = evenly.feed(data, plan, rank=rank(), shuffle=False)
    module, _ = fit(folder, every="global", steps=0, loader=loader)
    return {"steps": module.after_steps, "end": values(module)}


def resumed_from_plain(folder: str) -> dict[str, Any]:
    """Goes on from a checkpoint without the states of nodes, as other strategies and ended fits save them."""
    path = Path(folder, "plain", "ended.ckpt")
    first, trainer = fit(folder, every=2, steps=3)
    trainer.save_checkpoint(path)
    second, trainer = fit(folder, every=2, steps=3, max_epochs=2, ckpt_path=str(path))
    state = trainer.strategy.optimizers[0].state_dict()["state"]
    return {"ends": [values(first), values(second)], "steps": float(state[0]["step"]), "global": trainer.global_step}


def refusals(folder: str) -> dict[str, str]:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    import evenly

    def message(**settings: Any) -> str:
        try:
            fit(folder, **{"every": 2, "steps": 2, **settings})
        except evenly.EvenlyError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    class Mixed(type(gan())):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.maker.parameters(), *self.judge[0].parameters()], lr=0.1)

    missing = Path(folder, "plain", "missing.ckpt")
    fit(folder, every=2, steps=1)[1].save_checkpoint(missing)
    if rank() == 0:
        content = torch.load(missing, weights_only=False)
        torch.save({**content, "evenly": {"step": 1}}, missing)
    torch.distributed.barrier()
    return {
        "seconds": message(every="30s"),
        "misfit": message(exchange={"overlap": 5}),
        "sync_batchnorm": message(sync_batchnorm=True),
        "averaging": message(callbacks=[StochasticWeightAveraging(0.1)]),
        "mixed": message(module=Mixed()),
        "missing": message(ckpt_path=str(missing)),
    }


def failed(folder: str) -> str:
    """Raises on one rank; returns what this rank raises. Comes last: the ranks are in different calls afterwards."""

    class Failing(type(classifier())):
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            if rank() == 2 and batch_idx == 1:
                raise ValueError("no such batch")
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, *args: object) -> None:
            pass

    try:
        fit(folder, every=2, steps=400, module=Failing())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def run_all(folder: str) -> dict[str, Any]:
    return {
        "every step": steps_of(folder, 1, 10),
        "every five": steps_of(folder, 5, 50),
        "overlapped": steps_of(folder, 4, 10, exchange={"overlap": 2, "codec": "int8", "outer": "nesterov"}),
        "accumulated": accumulated(folder),
        "resumed": saved_and_resumed(f"{folder}/plain", 5),
        "resumed overlapped": saved_and_resumed(f"{folder}/overlapped", 4, overlap=4, codec="int8"),
        "scaled": scaled(folder),
        "by hand": by_hand(folder),
        "stopped": stopped_early(folder),
        "fed": fed(folder),
        "from plain": resumed_from_plain(folder),
        "refused": refusals(folder),
        "fabric": fabric_programs.run_all(f"{folder}/fabric"),
        "failed": failed(folder),
    }
