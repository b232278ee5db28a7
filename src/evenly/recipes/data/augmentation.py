"""Augmentation of batches on their device, the same for a sample whatever batch, split or rank it is in."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import one_hot

from evenly.errors import SpecError
from evenly.recipes.data.image_files import FileImageSet
from evenly.recipes.data.sets import ImageData
from evenly.recipes.data.transforms.geometry import crop_and_flip
from evenly.recipes.data.transforms.policies import autoaugment, randaugment
from evenly.recipes.data.transforms.random_numbers import SampleRandom
from evenly.recipes.names import did_you_mean

AUGMENTATIONS = {
    "crop": "a window of the image padded with black by an eighth of its size",
    "flip": "mirrored left to right, every second time",
    "autoaugment": "one of the 25 sub-policies found for CIFAR-10",
    "randaugment": "two of fourteen operations, at strength 9 of 30",
    "mixup": "mixed with another training image, labels too, by a part that is uniform in 0 to 1",
}
# Which random numbers each part uses: another augmentation beside it changes none of them.
_CROP_NUMBER, _FLIP_NUMBER, _MIXUP_NUMBER, _AUTOAUGMENT_NUMBER, _RANDAUGMENT_NUMBER = 0, 2, 4, 8, 16


class Augmentation:
    """What is done to training images before they reach the network, by name.

    Every random number of a sample depends on (seed, epoch, index of the sample, which number) alone, and no operation
    looks at other samples of the batch: the same sample gets the same bits whatever the batch. Parts come in the order
    of `AUGMENTATIONS`. References: Zhang et al., *mixup*, ICLR 2018 (alpha = 1, as for CIFAR); `transforms.policies`.

    Args:
        data: The data set; mixup draws the other image from `data.train`.
        names: Of `AUGMENTATIONS`; none: images are only normalised.
        seed: Other seeds give other numbers.
    """

    def __init__(self, data: ImageData, names: Sequence[str], *, seed: int) -> None:
        for name in names:
            _check_name(name, names)
        self.names = tuple(name for name in AUGMENTATIONS if name in names)
        self._data = data
        self._seed = seed
        self._margin = max(1, round(max(data.size) / 8))
        self._train_images: Tensor | None = None  # those of mixup, on the device of the batches
        self._train_labels: Tensor | None = None

    def __call__(self, images: Tensor, labels: Tensor, indices: Tensor, *, epoch: int) -> tuple[Tensor, Tensor]:
        """Returns normalised images float32 [n, c, h, w] and the labels: classes int64 [n], or with mixup
        probabilities float32 [n, classes].

        Args:
            images: uint8 [n, c, h, w], on any device.
            labels: int64 [n].
            indices: int64 [n], of the samples in the training set.
            epoch: From 0; other epochs give other numbers.
        """
        indices = indices.to(images.device)
        random = SampleRandom(indices, seed=self._seed, epoch=epoch)
        changed = self._data.normalise(self._changed(images, random))
        if "mixup" not in self.names:
            return changed, labels
        return self._mixed(changed, labels.to(images.device), random, epoch)

    def plain(self, images: Tensor) -> Tensor:
        """Returns normalised images float32 [n, c, h, w], for evaluation."""
        return self._data.normalise(images)

    def _changed(self, images: Tensor, random: SampleRandom) -> Tensor:
        if "crop" in self.names or "flip" in self.names:
            margin = self._margin if "crop" in self.names else 0
            top, left = (random.below(2 * margin + 1, _CROP_NUMBER + axis) for axis in (0, 1))
            is_flipped = random.below(2, _FLIP_NUMBER) == 1 if "flip" in self.names else None
            images = crop_and_flip(images, top, left, margin=margin, is_flipped=is_flipped)
        if "autoaugment" in self.names:
            images = autoaugment(images, random, first_number=_AUTOAUGMENT_NUMBER)
        if "randaugment" in self.names:
            images = randaugment(images, random, first_number=_RANDAUGMENT_NUMBER)
        return images

    def _mixed(self, images: Tensor, labels: Tensor, random: SampleRandom, epoch: int) -> tuple[Tensor, Tensor]:
        """Returns x = part * image + (1 - part) * other, and the same of the labels."""
        others = random.below(len(self._data.train), _MIXUP_NUMBER)
        other_random = SampleRandom(others, seed=self._seed, epoch=epoch)
        other_images, other_labels = self._read(others)
        other_images = self._data.normalise(self._changed(other_images, other_random))
        part = random.uniform(_MIXUP_NUMBER + 1)  # [n]
        whole = one_hot(labels, self._data.classes).float(), one_hot(other_labels, self._data.classes).float()
        return _mix(images, other_images, part.view(-1, 1, 1, 1)), _mix(*whole, part.view(-1, 1))

    def _read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Returns training images and labels; images in memory are copied to the device of `indices` once."""
        train = self._data.train
        if self._train_labels is None or self._train_labels.device != indices.device:
            self._train_labels = train.labels.to(indices.device)
            self._train_images = None if isinstance(train, FileImageSet) else train.images.to(indices.device)
        if self._train_images is None:
            return train.read(indices.cpu()).to(indices.device), self._train_labels[indices]
        return self._train_images.index_select(0, indices), self._train_labels[indices]


def _mix(first: Tensor, second: Tensor, part: Tensor) -> Tensor:
    return first.mul_(part).add_(second.mul_(1 - part))  # both are made here and used once


def _check_name(name: str, names: Sequence[str]) -> None:
    if name not in AUGMENTATIONS:
        raise SpecError(
            f"the augmentation {name!r} was asked for, but there is none.{did_you_mean(name, AUGMENTATIONS)} "
            f"There are: {', '.join(AUGMENTATIONS)}."
        )
    if list(names).count(name) > 1:
        raise SpecError(f"the augmentation {name!r} was asked for twice. Name each once.")
