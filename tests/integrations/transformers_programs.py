"""What one rank does under transformers' Trainer; processes call these functions."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.integrations.tokens import BATCH, gpt2, rows, sampled

warnings.simplefilter("ignore")
DATA = 60


def trainer(folder: str, *, every: Any, model: Any = None, exchange: Any = None, **settings: Any) -> Any:
    """Returns a Trainer that keeps the parameters after each step, and in each evaluation."""
    import transformers

    from evenly.integrations.transformers import EvenlyTrainer

    transformers.logging.set_verbosity_error()

    class Recorded(EvenlyTrainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            self.evaluated = sampled(self.model)
            return super().prediction_step(*args, **kwargs)

    class Recorder(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            made.after_steps.append(sampled(made.model))

    wanted = {"learning_rate": 0.01, "lr_scheduler_type": "constant", "optim": "adamw_torch", "report_to": "none"}
    wanted |= {"per_device_train_batch_size": BATCH, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    wanted |= {"train_sampling_strategy": "sequential", "logging_strategy": "no", "dataloader_pin_memory": False}
    args = transformers.TrainingArguments(folder, **{**wanted, **settings})
    datasets = {"train_dataset": rows(DATA), "eval_dataset": rows(10, seed=1)}
    made = Recorded(model or gpt2(), args, every=every, callbacks=[Recorder()], **datasets, **(exchange or {}))
    made.after_steps, made.evaluated = [], []
    return made


def steps_of(folder: str, every: Any, steps: int, **settings: Any) -> dict[str, Any]:
    own = trainer(folder, every=every, max_steps=steps, **settings)
    own.train()
    return {"steps": own.after_steps, "end": sampled(own.model), "is_plain": own.model_wrapped is own.model}


def saved_and_resumed(folder: str, every: Any, **exchange: Any) -> dict[str, Any]:
    """Trains 14 steps with a checkpoint after 7, which is inside a period; a second run goes on from there."""
    from safetensors.torch import load_file

    settings = {"eval_strategy": "steps", "eval_steps": 7, "save_strategy": "steps", "save_steps": 7, "max_steps": 14}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "exchange": exchange}
    whole = trainer(folder, every=every, **settings)
    whole.train()
    first = Path(folder, "checkpoint-7")
    saved = load_file(first / "model.safetensors")
    whole.save_model(f"{folder}/end")
    fresh = gpt2()
    torch.nn.init.zeros_(fresh.transformer.wte.weight)  # what is loaded replaces it
    resumed = trainer(f"{folder}/resumed", every=every, model=fresh, **settings)
    resumed.train(resume_from_checkpoint=str(first))
    plain = gpt2()
    plain.load_state_dict(load_file(first / "model.safetensors"), strict=False)
    best = gpt2()
    best.load_state_dict(load_file(Path(whole.state.best_model_checkpoint, "model.safetensors")), strict=False)
    end = gpt2()
    end.load_state_dict(load_file(f"{folder}/end/model.safetensors"), strict=False)
    return {
        "before": whole.after_steps[6],
        "saved": sampled(plain),
        "has all": "transformer.wte.weight" in saved,
        "whole": whole.after_steps[7:],
        "resumed": resumed.after_steps,
        "ends": [sampled(whole.model), sampled(resumed.model), sampled(best), sampled(end)],
        "losses": [
            [row["eval_loss"] for row in own.state.log_history if "eval_loss" in row] for own in (whole, resumed)
        ],
        "last evaluated": [whole.evaluated, resumed.evaluated],
        "files": sorted(path.name for path in first.iterdir()),
    }


def losses_of(own: Any) -> list[float]:
    return [row["eval_loss"] for row in own.state.log_history if "eval_loss" in row]


def rotated(folder: str) -> list[str]:
    """Saves at every epoch, of which one checkpoint stays."""
    own = trainer(folder, every="epoch", num_train_epochs=2, save_strategy="epoch", save_total_limit=1)
    own.train()
    return [path.name for path in Path(folder).iterdir()]


def trained_again(folder: str) -> list[list[float]]:
    """Trains twice with one Trainer."""
    own = trainer(folder, every=4, max_steps=3)
    own.train()
    own.train()
    return own.after_steps


def refusals(folder: str) -> dict[str, str]:
    import evenly

    def message(**settings: Any) -> str:
        try:
            trainer(folder, **{"every": 2, "max_steps": 2, **settings})
        except evenly.EvenlyError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    uneven = {"split_batches": False, "even_batches": False}
    return {
        "seconds": message(every="30s"),
        "batch size": message(auto_find_batch_size=True),
        "even_batches": message(accelerator_config=uneven),
    }


def failed(folder: str) -> str:
    """Raises on one rank; returns what this rank raises. Comes last."""
    own = trainer(folder, every=2, max_steps=100)
    plain = own.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "2" and own.state.global_step == 1:
            raise ValueError("no such batch")
        return plain(*args, **kwargs)

    own.training_step = training_step
    try:
        own.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def run_all(folder: str) -> dict[str, Any]:
    return {
        "every step": steps_of(folder, 1, 10),
        "every five": steps_of(folder, 5, 50),
        "accumulated": steps_of(folder, 2, 6, gradient_accumulation_steps=2),
        "resumed": saved_and_resumed(f"{folder}/plain", 5),
        "resumed overlapped": saved_and_resumed(f"{folder}/overlapped", 4, overlap=4, codec="int8"),
        "rotated": rotated(f"{folder}/rotated"),
        "again": trained_again(folder),
        "refused": refusals(folder),
        "failed": failed(folder),
    }
