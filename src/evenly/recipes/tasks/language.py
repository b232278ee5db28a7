"""Text, character by character."""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from evenly.recipes.config import TrainConfig
from evenly.recipes.data import load_text
from evenly.recipes.tasks.objective import Batch, Objective
from evenly.recipes.tasks.parts import make_network


class Language(Objective):
    """The network tells the next character."""

    num_sums = 2

    def __init__(self, config: TrainConfig, folder: Path | None) -> None:
        """Loads the text that `config` names from `folder`."""
        self._config = config
        self.data = load_text(
            config.data,
            folder,
            context=config.context,
            train_limit=config.train_limit,
            test_limit=config.test_limit,
        )
        self.train_set, self.test_set = self.data.train, self.data.test
        self.collate = self.data.train.collate

    def build(self) -> nn.Module:
        """Returns the network for the characters and the context of the data."""
        return make_network(self._config, vocabulary=len(self.data.vocabulary), context=self._config.context)

    def example(self, batch_size: int) -> torch.Tensor:
        """Returns the first contexts [n, t]."""
        indices = list(range(min(batch_size, len(self.data.train))))
        tokens, _, _ = self.data.train.__getitems__(indices)
        return tokens

    def loss(self, network: nn.Module, batch: Batch, *, epoch: int) -> torch.Tensor:
        """Returns the cross entropy of the next characters."""
        tokens, following, _ = batch
        return F.cross_entropy(network(tokens).float().flatten(0, 1), following.flatten())

    def score(self, network: nn.Module, batch: Batch) -> list[float]:
        """Returns the sum of the losses of all characters, and how many there were."""
        tokens, following, _ = batch
        logits = network(tokens).float().flatten(0, 1)
        return [float(F.cross_entropy(logits, following.flatten(), reduction="sum")), following.numel()]

    def figures(self, sums: list[float]) -> dict[str, float]:
        """Returns the mean loss of a character in nats, and in bits."""
        loss, count = sums
        return {"validation_loss": loss / count, "bits_per_character": loss / count / math.log(2)}
