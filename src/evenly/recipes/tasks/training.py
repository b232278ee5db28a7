"""Settings -> a training on all ranks together, recorded in a folder, and its figures."""

from collections.abc import Callable, Sequence
from pathlib import Path

from evenly.errors import SpecError
from evenly.recipes.config import TrainConfig
from evenly.recipes.tasks import Classification, Language, train_gan, train_supervised
from evenly.recipes.tasks.results_file import ResultsFile
from evenly.recipes.training_files import IMAGES, SETTINGS
from evenly.session import Session
from evenly.spec import Event, Plan

UNUSED = {  # settings that a task has no use for
    "classification": ("context",),
    "gan": ("context", "augment", "pretrained", "label_smoothing", "channels_last", "compiled", "shares", "cut_batch"),
    "language": ("image_size", "augment", "skip_unreadable", "label_smoothing", "channels_last"),
}


def train(
    config: TrainConfig,
    *,
    folder: Path | None = None,
    data: Path | None = None,
    resume: bool = True,
    listeners: Sequence[Callable[[Event], None]] = (),
    plan: Plan | None = None,
    device: str = "auto",
) -> dict[str, float]:
    """Returns the figures at the end: of a rank that the plan leaves out, none.

    Args:
        config: what is trained, and how.
        folder: of the run: its record, checkpoints, settings and results.
        data: the folder of the data set; the usual one if left out.
        resume: whether to go on from the newest checkpoint in `folder`.
        listeners: called with every event on rank 0; without one, progress is printed.
        plan: who does what; made from the settings if left out.
        device: as in `Session`.
    """
    _refuse_unused(config)
    objective = None
    if config.task != "gan":
        objective = (Classification if config.task == "classification" else Language)(config, data)
    figures: dict[str, float] = {}
    with Session(
        folder,
        device=device,
        seed=config.seed,
        resume=resume,
        checkpoint_every=config.checkpoint_every,
        progress=not listeners,
    ) as session:
        for listener in listeners:
            session.listen(listener)
        own_folder = folder if session.is_main else None
        if own_folder is not None:
            own_folder.mkdir(parents=True, exist_ok=True)
            (own_folder / SETTINGS).write_text(config.model_dump_json(indent=1) + "\n", encoding="utf-8")
        results = ResultsFile(own_folder, is_resumed=resume)
        if objective is None:
            images = None if own_folder is None else own_folder / IMAGES
            figures = train_gan(config, session, data_folder=data, plan=plan, results=results, images_folder=images)
        else:
            figures = train_supervised(objective, config, session, plan=plan, results=results)
    return figures


def _refuse_unused(config: TrainConfig) -> None:
    """Raises `SpecError` for a setting that was changed and would change nothing."""
    for name in UNUSED[config.task]:
        value, usual = getattr(config, name), TrainConfig.model_fields[name].default
        if value != usual:
            raise SpecError(
                f"{name}={value!r} was given, but a {config.task} training has no use for it. Leave it out."
            )
