"""`evenly export`: the weights of a run as one file, averaged over its nodes."""

from pathlib import Path
from typing import Annotated

import typer

from evenly.cli._completion import runs


def export(
    run: Annotated[Path, typer.Argument(autocompletion=runs, help="A run folder, or one of its checkpoints.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help="model.safetensors, model.pt (loads with weights_only=True), or a folder that ends in a slash, for "
            "torch.distributed.checkpoint.",
        ),
    ],
    step: Annotated[int | None, typer.Option(help="Take the checkpoint of this step, not the newest.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Take the checkpoint with the best value of Session(keep_best=...).")
    ] = False,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which model, in a run that has prepared several.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace weights that are there already.")] = False,
) -> None:
    """Write the weights of a run under the names that the plain network's state_dict has.

    Nodes differ between exchanges: the file holds their average, weighted by samples. It needs no launcher.
    `evenly.load_weights` loads it, and so do safetensors and torch.

    Examples: `evenly export runs/first --to model.safetensors`; `evenly export runs/first --best --to model.pt`.
    """
    from evenly.cli._documents import require_writable
    from evenly.spec.plan import counted

    place = Path(to)
    require_writable(place / "weights" if place.is_dir() else place)
    from evenly.checkpoints import export_weights

    written = export_weights(run, to, step=step, best=best, model=model, force=force)
    nodes = "" if written.num_nodes == 1 else f", the average of {counted(written.num_nodes, 'node')}"
    print(
        f"{written.path}: {counted(written.num_tensors, 'tensor')}, {written.size_bytes / 1e6:.1f} MB, "
        f"step {written.step} of {run}{nodes}"
    )
