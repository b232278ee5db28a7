"""A generator of images against a discriminator that also tells their class (ACGAN).

The discriminator D returns whether an image is real, and its class c; the generator G makes images of given classes
from noise z. With L_S = -log P(right source) and L_C = -log P(right class), D minimises L_S + L_C on real images and
on those of G; G minimises L_S for the source "real", and L_C.

Reference: Odena, Olah, Shlens, *Conditional image synthesis with auxiliary classifier GANs*, ICML 2017.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from evenly.batches.evaluation import EvaluationFeed
from evenly.nodes import Synchronized
from evenly.recipes.config import TrainConfig
from evenly.recipes.data import ImageData, load_images
from evenly.recipes.networks import build_network
from evenly.recipes.optim import build_schedule
from evenly.recipes.tasks.parts import autocast, describe, make_network, make_optimizer, rank_batch
from evenly.recipes.tasks.png import tiled, write_png
from evenly.recipes.tasks.results_file import ResultsFile
from evenly.recipes.tasks.supervised import TEST_BATCH
from evenly.session import Session
from evenly.spec import Plan

ROWS = 10  # of a grid of generated images; its columns are the classes
PRIMES = (2_654_435_761, 40_503_000_713, 1)  # keep the random numbers of different epochs and seeds apart


def train_gan(
    config: TrainConfig,
    session: Session,
    *,
    data_folder: Path | None,
    plan: Plan | None,
    results: ResultsFile,
    images_folder: Path | None,
) -> dict[str, float]:
    """Returns the figures of the trained networks; writes a grid of generated images after every epoch."""
    data = load_images(
        config.data,
        data_folder,
        train_limit=config.train_limit,
        test_limit=config.test_limit,
        size=config.image_size,
        skip_unreadable=config.skip_unreadable,
    )
    torch.manual_seed(config.seed)
    generator = make_generator(config, data)
    discriminator = build_network(
        f"{config.model}-discriminator", classes=data.classes, channels=data.channels, size=data.size[0]
    )
    wishes = config.model_dump(include={"overlap", "fragments", "codec", "outer", "optimizer_state"})
    plan = plan or session.plan(batch_size=rank_batch(config, session), every=config.every, **wishes)
    steps = session.steps_per_epoch(data.train, plan)
    describe(session, config, generator, discriminator, total_steps=config.epochs * steps)
    adversaries = Adversaries(config, session, data, generator, discriminator, plan=plan)
    schedules = [
        build_schedule(
            config.schedule,
            optimizer,
            steps=config.epochs * steps,
            steps_per_epoch=steps,
            **config.schedule_options,
        )
        for optimizer in (adversaries.discriminator_optimizer, adversaries.generator_optimizer)
    ]
    session.track(discriminator_schedule=schedules[0], generator_schedule=schedules[1])
    tests = session.feed(data.test, batch_size=TEST_BATCH, collate_fn=data.test.collate)
    for epoch in session.epochs(config.epochs):
        losses: list[torch.Tensor] = []
        for batch in adversaries.loader:
            losses.append(adversaries.step(batch, epoch=epoch))
            for schedule in schedules:
                schedule.step()
        figures = adversaries.mean_losses(losses)
        session.log(**figures, epoch=epoch + 1)
        results.add(epoch=epoch + 1, **figures)
        if images_folder is not None:
            adversaries.draw(images_folder / f"epoch-{epoch + 1}.png")
    figures = adversaries.evaluate(tests)
    session.log(**figures)
    results.add(epoch=config.epochs, **figures)
    return figures


def make_generator(config: TrainConfig, data: ImageData) -> nn.Module:
    """Returns the generator of images like those of `data`."""
    return make_network(
        config, f"{config.model}-generator", classes=data.classes, channels=data.channels, size=data.size[0]
    )


class Adversaries:
    """The two networks and their optimizers."""

    def __init__(
        self,
        config: TrainConfig,
        session: Session,
        data: ImageData,
        generator: nn.Module,
        discriminator: nn.Module,
        *,
        plan: Plan,
    ) -> None:
        self._config = config
        self._session = session
        self._data = data
        self._latent = int(generator.latent)  # type: ignore[arg-type]  # a number, which nn.Module does not declare
        self.discriminator_optimizer = make_optimizer(config, discriminator)
        self.generator_optimizer = make_optimizer(config, generator)
        self._discriminator: Synchronized
        self._generator: Synchronized
        self._discriminator, _, self.loader = session.prepare(
            discriminator,
            self.discriminator_optimizer,
            data.train,
            plan=plan,
            name="discriminator",
            collate_fn=data.train.collate,
        )
        self._generator, _, _ = session.prepare(generator, self.generator_optimizer, plan=plan, name="generator")

    def step(self, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *, epoch: int) -> torch.Tensor:
        """Makes a step of each network and returns their losses [2]: of the discriminator, of the generator."""
        images, labels, indices = batch
        noise, classes = self._draw_noise(len(labels), epoch=epoch, first=int(indices[0]))
        with autocast(self._config, self._session):
            with torch.no_grad():
                fake = self._generator.module(noise, classes)
            real = scaled(images)
            sources, kinds = self._discriminator(torch.cat([real, fake]))  # one forward: one averaging covers both
            is_real = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))]).to(sources)
            discriminator_loss = _loss(sources, is_real, kinds, torch.cat([labels, classes]))
        discriminator_loss.backward()
        self.discriminator_optimizer.step()
        self.discriminator_optimizer.zero_grad()
        with autocast(self._config, self._session):
            # The plain discriminator: its gradients are thrown away, not averaged.
            sources, kinds = self._discriminator.module(self._generator(noise, classes))
            generator_loss = _loss(sources, torch.ones_like(sources), kinds, classes)
        generator_loss.backward()
        self.generator_optimizer.step()
        self.generator_optimizer.zero_grad()
        self.discriminator_optimizer.zero_grad()
        return torch.stack([discriminator_loss.detach(), generator_loss.detach()])

    def mean_losses(self, losses: list[torch.Tensor]) -> dict[str, float]:
        """Returns the mean losses of an epoch on this rank."""
        if not losses:
            return {}
        discriminator_loss, generator_loss = torch.stack(losses).mean(0).tolist()
        return {"discriminator_loss": discriminator_loss, "generator_loss": generator_loss}

    @torch.no_grad()
    def evaluate(self, tests: EvaluationFeed) -> dict[str, float]:
        """Returns how often the discriminator tells the class of test images, and of generated ones."""
        self._generator.eval()
        self._discriminator.eval()
        right = generated = count = 0.0
        for number, (images, labels, _) in enumerate(tests):
            _, kinds = self._discriminator.module(scaled(images))
            noise, classes = self._draw_noise(len(labels), epoch=-1, first=number)
            _, generated_kinds = self._discriminator.module(self._generator.module(noise, classes))
            right += float((kinds.argmax(1) == labels).sum())
            generated += float((generated_kinds.argmax(1) == classes).sum())
            count += len(labels)
        self._generator.train()
        self._discriminator.train()
        right, generated, count = self._session.sum(right, generated, count)
        return {"accuracy": right / count, "generated_accuracy": generated / count}

    @torch.no_grad()
    def draw(self, file: Path) -> None:
        """Writes generated images, one column for each class, from the same noise every time."""
        classes = torch.arange(self._data.classes, device=self._session.device).repeat(ROWS)
        noise, _ = self._draw_noise(len(classes), epoch=-1, first=0)
        self._generator.eval()
        images = self._generator.module(noise, classes).float().cpu()
        self._generator.train()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_png(file, tiled(as_bytes(images), columns=self._data.classes))

    def _draw_noise(self, count: int, *, epoch: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns noise [n, latent] and classes [n] that depend on the epoch and the first sample of the batch only."""
        numbers = (self._config.seed, epoch, first)
        random = torch.Generator().manual_seed(sum(n * p for n, p in zip(numbers, PRIMES, strict=True)) % 2**63)
        noise = torch.randn(count, self._latent, generator=random)
        classes = torch.randint(0, self._data.classes, (count,), generator=random)
        return noise.to(self._session.device), classes.to(self._session.device)


def scaled(images: torch.Tensor) -> torch.Tensor:
    """Returns bytes as numbers from -1 to 1, which generators make.

    >>> scaled(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-1.,  1.])
    """
    return images.float() / 127.5 - 1


def as_bytes(images: torch.Tensor) -> torch.Tensor:
    """Returns numbers from -1 to 1 as bytes."""
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _loss(sources: torch.Tensor, is_real: torch.Tensor, kinds: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    source_loss = F.binary_cross_entropy_with_logits(sources.float(), is_real.float())
    return source_loss + F.cross_entropy(kinds.float(), classes)
