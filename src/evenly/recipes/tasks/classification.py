"""Images and their classes."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from evenly.recipes.config import TrainConfig
from evenly.recipes.data import Augmentation, load_images
from evenly.recipes.tasks.objective import Batch, Objective
from evenly.recipes.tasks.parts import make_network


class Classification(Objective):
    """The network tells the class of an image."""

    num_sums = 3

    def __init__(self, config: TrainConfig, folder: Path | None) -> None:
        """Loads the data set that `config` names from `folder`."""
        self._config = config
        self.data = load_images(
            config.data,
            folder,
            train_limit=config.train_limit,
            test_limit=config.test_limit,
            size=config.image_size,
            skip_unreadable=config.skip_unreadable,
        )
        self.train_set, self.test_set = self.data.train, self.data.test
        self.collate = self.data.train.collate
        self._augmentation = Augmentation(self.data, config.augment, seed=config.seed)

    def build(self) -> nn.Module:
        """Returns the network for the size, channels and classes of the data."""
        data = self.data
        network = make_network(self._config, classes=data.classes, channels=data.channels, size=data.size[0])
        return network.to(memory_format=torch.channels_last) if self._config.channels_last else network  # type: ignore[call-overload]  # torch declares it for tensors only

    def example(self, batch_size: int) -> torch.Tensor:
        """Returns the first images, as the network gets them."""
        indices = list(range(min(batch_size, len(self.data.train))))
        images, _, _ = self.data.train.__getitems__(indices)
        return self.normalised(images)

    def normalised(self, images: torch.Tensor) -> torch.Tensor:
        """Returns bytes of images as the network gets them in a test."""
        return self._formatted(self._augmentation.plain(images))

    def loss(self, network: nn.Module, batch: Batch, *, epoch: int) -> torch.Tensor:
        """Returns the cross entropy of augmented images."""
        images, labels, indices = batch
        x, target = self._augmentation(images, labels, indices, epoch=epoch)
        logits = network(self._formatted(x))
        return F.cross_entropy(logits.float(), target, label_smoothing=self._config.label_smoothing)

    def score(self, network: nn.Module, batch: Batch) -> list[float]:
        """Returns how many images were classified right, the sum of their losses, and how many there were."""
        images, labels, _ = batch
        logits = network(self.normalised(images)).float()
        right = (logits.argmax(1) == labels).sum()
        return [*torch.stack([right, F.cross_entropy(logits, labels, reduction="sum")]).tolist(), len(labels)]

    def figures(self, sums: list[float]) -> dict[str, float]:
        """Returns accuracy and mean loss."""
        right, loss, count = sums
        return {"accuracy": right / count, "test_loss": loss / count}

    def _formatted(self, images: torch.Tensor) -> torch.Tensor:
        return images.contiguous(memory_format=torch.channels_last) if self._config.channels_last else images
