"""transformers' Trainer as usual: gradients averaged over all ranks at every step. Compare with transformers_evenly.py.

Run it on two ranks: torchrun --nproc-per-node 2 examples/tools/transformers_plain.py
"""

import numpy as np
import torch
from transformers import EvalPrediction, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

LENGTH, TOKENS, NO_LOSS = 16, 32, -100


def counting(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Returns sequences that count up from anywhere; the beginning of each, of unequal length, is given."""
    generator = torch.Generator().manual_seed(seed)
    tokens = (torch.randint(TOKENS, (count, 1), generator=generator) + torch.arange(LENGTH)) % TOKENS
    given = torch.randint(1, LENGTH - 1, (count, 1), generator=generator)
    labels = tokens.masked_fill(torch.arange(LENGTH) < given, NO_LOSS)
    return [{"input_ids": own, "labels": wanted} for own, wanted in zip(tokens, labels, strict=True)]


def accuracy(seen: EvalPrediction) -> dict[str, float]:
    found, wanted = seen.predictions.argmax(-1)[:, :-1], seen.label_ids[:, 1:]
    return {"accuracy": float(np.mean((found == wanted)[wanted != NO_LOSS]))}


def main() -> None:
    set_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=TOKENS, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    arguments = TrainingArguments(
        "run",
        use_cpu=True,
        per_device_train_batch_size=8,
        num_train_epochs=4,
        learning_rate=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=counting(600, seed=0),
        eval_dataset=counting(60, seed=1),
        compute_metrics=accuracy,
    )
    trainer.train()
    trainer.save_model("model")
    right = trainer.evaluate()["eval_accuracy"]
    print(f"rank {arguments.process_index} of {arguments.world_size}: {100 * right:.1f} % right")


if __name__ == "__main__":
    main()
