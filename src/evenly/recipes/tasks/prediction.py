"""The network of a run -> classes of test images, generated images, or generated text."""

import csv
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from evenly.checkpoints import load_weights
from evenly.errors import SpecError
from evenly.recipes.config import TrainConfig
from evenly.recipes.data import load_images
from evenly.recipes.tasks import Classification, Language
from evenly.recipes.tasks.gan import as_bytes, make_generator
from evenly.recipes.tasks.png import tiled, write_png
from evenly.recipes.training_files import SETTINGS

BATCH = 256


def read_settings(run: Path) -> TrainConfig:
    """Returns the settings of a recipe's run."""
    file = run / SETTINGS
    try:
        return TrainConfig.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(
            f"the settings of the run {run} were asked for, but {file} cannot be read: {error.strerror}. "
            "Give the folder of a run that `evenly train` made."
        ) from None
    except ValueError as error:
        raise SpecError(f"{file} is not valid: {error}. Train the run anew.") from None


class Classifier:
    """The network of a classification, with the weights of its run."""

    def __init__(self, run: Path, config: TrainConfig, *, data: Path | None, step: int | None, device: str) -> None:
        self._objective = Classification(config, data)
        self._network = self._objective.build().to(device).eval()
        self._device = device
        load_weights(self._network, run, step=step)

    @torch.no_grad()
    def predictions(self) -> Iterator[tuple[int, int, int, float]]:
        """Yields for each test image its index, its label, the class that the network tells, and its probability."""
        tests = self._objective.data.test
        for first in range(0, len(tests), BATCH):
            indices = list(range(first, min(first + BATCH, len(tests))))
            images, labels, _ = tests.__getitems__(indices)
            logits = self._network(self._objective.normalised(images.to(self._device)))
            probabilities, classes = logits.float().softmax(1).max(1)
            yield from zip(indices, labels.tolist(), classes.tolist(), probabilities.tolist(), strict=True)


def write_predictions(rows: Iterator[tuple[int, int, int, float]], file: Path | None) -> float:
    """Writes a row for each image, if there is a file, and returns the part that is right."""
    found = list(rows)
    if file is not None:
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(("index", "label", "predicted", "probability"))
            writer.writerows((index, label, kind, f"{part:.6f}") for index, label, kind, part in found)
    return sum(label == kind for _, label, kind, _ in found) / len(found)


@torch.no_grad()
def generate_images(
    run: Path, config: TrainConfig, file: Path, *, data: Path | None, step: int | None, seed: int, rows: int = 10
) -> None:
    """Writes images that the generator of a run makes, one column for each class."""
    images = load_images(config.data, data, train_limit=1, test_limit=1)
    generator = make_generator(config, images).eval()
    load_weights(generator, run, step=step, name="generator")
    noise = torch.randn(
        rows * images.classes,
        int(generator.latent),  # type: ignore[arg-type]  # a number, which nn.Module does not declare
        generator=torch.Generator().manual_seed(seed),
    )
    pictures = generator(noise, torch.arange(images.classes).repeat(rows))
    write_png(file, tiled(as_bytes(pictures), columns=images.classes))


@torch.no_grad()
def generate_text(
    run: Path, config: TrainConfig, prompt: str, *, length: int, data: Path | None, step: int | None, seed: int
) -> str:
    """Returns text that goes on from `prompt`, one character after the other, drawn by their probabilities."""
    objective = Language(config, data)
    vocabulary = objective.data.vocabulary
    unknown = sorted(set(prompt) - set(vocabulary))
    if unknown or not prompt:
        raise SpecError(
            f"the text was to begin with {prompt!r}, but the network knows only the characters of its training text"
            f"{f', not {unknown[0]!r}' if unknown else ' and needs one to begin'}. Give another beginning."
        )
    network: nn.Module = objective.build().eval()
    load_weights(network, run, step=step)
    random = torch.Generator().manual_seed(seed)
    tokens = [vocabulary.index(character) for character in prompt]
    for _ in range(length):
        logits = network(torch.tensor([tokens[-config.context :]]))[0, -1]
        tokens.append(int(torch.multinomial(logits.softmax(0), 1, generator=random)))
    return "".join(vocabulary[token] for token in tokens)
