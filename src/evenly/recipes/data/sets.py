"""Sets of images as torch's Dataset: bytes with labels; what is done to them happens on the device."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

Batch = tuple[Tensor, Tensor, Tensor]  # images, labels, indices


class ImageSet(Dataset[Batch]):
    """Images in memory with their labels. A sample is its image, its label and its index.

    Batches are read whole (`__getitems__`), so give the loader `collate_fn=ImageSet.collate`.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images = images  # uint8 [n, c, h, w]
        self.labels = labels  # int64 [n]

    @property
    def images(self) -> Tensor:
        """All images, uint8 [n, c, h, w]."""
        return self._images

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self._images.shape[1:]
        return channels, height, width

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        images, labels, indices = self.__getitems__([range(len(self))[index]])
        return images[0], labels[0], indices[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Returns images [n, c, h, w], labels [n] and indices [n] of these samples."""
        picked = torch.as_tensor(indices, dtype=torch.int64)
        return self.read(picked), self.labels[picked], picked

    def read(self, indices: Tensor) -> Tensor:
        """Returns the images uint8 [n, c, h, w] of these indices."""
        return self._images.index_select(0, indices)  # ten times as fast as [indices]

    @staticmethod
    def collate(batch: Batch) -> Batch:
        """Returns a batch as `__getitems__` made it."""
        return batch


@dataclass(frozen=True)
class ImageData:
    """A training and a test set, and what is known of both. `skipped` are the unreadable files that were left out."""

    name: str
    train: ImageSet
    test: ImageSet
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    skipped: tuple[Path, ...] = ()

    @property
    def channels(self) -> int:
        """Of an image."""
        return self.train.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an image."""
        return self.train.shape[1:]

    def normalise(self, images: Tensor) -> Tensor:
        """Returns images of bytes as float32 of mean 0 and deviation 1 in each channel, on the same device.

        (x / 255 - mean) / std, written as one product and one difference: each is rounded alike on every device, while
        a GPU multiplies by 1 / 255 where a CPU divides.
        """
        scale = _of_channels(tuple(1 / (255 * std) for std in self.std), images.device)
        offset = _of_channels(tuple(mean / std for mean, std in zip(self.mean, self.std, strict=True)), images.device)
        return images.float().mul_(scale).sub_(offset)

    def normalised(self) -> tuple[TensorDataset, TensorDataset]:
        """Returns the training and the test set as tensors of normalised images and labels, all in memory."""
        train, test = (TensorDataset(self.normalise(part.images), part.labels) for part in (self.train, self.test))
        return train, test


@functools.cache  # a copy to a GPU in every step would be waited for
def _of_channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(-1, 1, 1)  # [c, 1, 1]
