"""`evenly predict`: what the network of a recipe's run tells, or makes."""

from pathlib import Path
from typing import Annotated

import typer

from evenly.cli._completion import runs
from evenly.errors import SpecError


def predict(
    run: Annotated[Path, typer.Argument(autocompletion=runs, help="The folder of a run that `evenly train` made.")],
    data: Annotated[Path | None, typer.Option(help="Folder of the data set's files; see `evenly data`.")] = None,
    to: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="predictions.csv: a row for each test image; for a gan: images.png."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Take the checkpoint of this step, not the newest.")] = None,
    device: Annotated[str, typer.Option(help="Where classes are computed: cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of generated images and text.")] = 0,
    begin: Annotated[str, typer.Option(metavar="TEXT", help="What generated text begins with.")] = "\n",
    length: Annotated[int, typer.Option(min=1, help="Characters of generated text.")] = 500,
) -> None:
    """Use the network of a run: classify the test images, or generate images or text.

    Nodes differ between exchanges: the average of their weights is taken. It needs no launcher.

    Examples: `evenly predict runs/first --to predictions.csv`; `evenly predict runs/gan --to images.png`;
    `evenly predict runs/language --begin "To be" --length 300`.
    """
    from evenly.cli._documents import require_writable
    from evenly.recipes.tasks import prediction

    if to is not None:
        require_writable(to)
    config = prediction.read_settings(run)
    if config.task == "gan":
        if to is None:
            raise SpecError(f"the run {run} generates images, but no file was named for them. Add --to images.png.")
        prediction.generate_images(run, config, to, data=data, step=step, seed=seed)
        print(f"{to}: generated images, one column for each class")
    elif config.task == "language":
        print(prediction.generate_text(run, config, begin, length=length, data=data, step=step, seed=seed))
    else:
        classifier = prediction.Classifier(run, config, data=data, step=step, device=device)
        accuracy = prediction.write_predictions(classifier.predictions(), to)
        print(f"accuracy {accuracy:.4f}" + (f"; each image in {to}" if to is not None else ""))
