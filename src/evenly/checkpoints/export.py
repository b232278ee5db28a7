"""The weights of a run on disk: found, averaged over the nodes, written to one file or loaded into a plain network."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from evenly.checkpoints import folder
from evenly.checkpoints.averages import averaged_buffers, averaged_parameters, merge_pending_parameters, node_weights
from evenly.checkpoints.best import best_step
from evenly.checkpoints.content import LOCAL, PIECE, ListOf, MapOf, misform, tensors_misfit
from evenly.checkpoints.files import damaged
from evenly.checkpoints.loading import LoadReport, load_state
from evenly.checkpoints.manifest import MANIFEST, read_manifest
from evenly.checkpoints.state_form import StateForm, state_of
from evenly.checkpoints.states import LocalState, Manifest, NodeState
from evenly.checkpoints.weight_files import (
    ENDINGS,
    WeightState,
    plain_state,
    read_weights,
    require_free,
    write_weights,
)
from evenly.errors import CheckpointError, SpecError

Source = str | os.PathLike[str]


@dataclass(frozen=True)
class ExportedWeights:
    """What `export_weights` wrote, and from where."""

    path: str
    checkpoint: Path
    step: int
    num_nodes: int
    num_tensors: int
    size_bytes: int


def export_weights(
    run: Source,
    to: Source,
    *,
    step: int | None = None,
    best: bool = False,
    model: str | None = None,
    force: bool = False,
) -> ExportedWeights:
    """Writes the weights of a run, averaged over its nodes, under the names of the plain network.

    Args:
        run: a run folder, or one of its checkpoints.
        to: a file that ends in `.safetensors`, `.pt` or `.pth`, or a folder that ends in a slash, for
            torch.distributed.checkpoint.
        step: the checkpoint of this step; the newest if left out.
        best: the checkpoint with the best value, in a run with `keep_best`.
        model: the name of the model in a run with several.
        force: whether weights that are there already are replaced.
    """
    require_free(to, force=force)
    checkpoint = find_checkpoint(Path(run), step=step, best=best)
    manifest = read_manifest(checkpoint)
    state = plain_state(averaged_state(checkpoint, manifest, _chosen_model(manifest, model, checkpoint)))
    write_weights(to, state)
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    size_bytes = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
    return ExportedWeights(
        os.fspath(to), checkpoint, manifest["step"], len(manifest["nodes"]), len(tensors), size_bytes
    )


def load_weights(
    model: nn.Module,
    source: Source,
    *,
    step: int | None = None,
    best: bool = False,
    name: str | None = None,
    strict: bool = True,
) -> LoadReport:
    """Loads the weights of a run into a plain network, in place, and returns what was loaded from where.

    If something is missing, unexpected or of another shape, nothing is changed, and `CheckpointError` names it.

    Args:
        model: the network, also compiled or wrapped by `evenly.synchronize`, `evenly.shard` or DDP. On several ranks
            all of them load.
        source: a run folder, one of its checkpoints, or a file or folder that `evenly export` or `session.save` wrote.
        step: the checkpoint of this step; the newest if left out.
        best: the checkpoint with the best value, in a run with `keep_best`.
        name: the name of the model in a run with several.
        strict: whether the weights must be exactly those of the network; otherwise what is in both is loaded.
    """
    path = Path(source)
    if _is_weights(path):
        given = {"step": step, "best": best or None, "name": name}
        if chosen := [option for option, value in given.items() if value is not None]:
            raise SpecError(
                f"{chosen[0]}= was given, but {path} holds the weights of one network, not a run. Leave it out, or "
                "give the run folder."
            )
        return load_state(model, read_weights(path), path, strict=strict)
    checkpoint = find_checkpoint(path, step=step, best=best)
    manifest = read_manifest(checkpoint)
    chosen_model = _chosen_model(manifest, name, checkpoint)
    state = averaged_state(checkpoint, manifest, chosen_model, partial=not strict)
    return load_state(model, plain_state(state), checkpoint, strict=strict)


def find_checkpoint(path: Path, *, step: int | None = None, best: bool = False) -> Path:
    """Returns the checkpoint in a run folder that is asked for, or the folder itself if it is one."""
    if step is not None and best:
        raise SpecError(f"step {step} and the best checkpoint were asked for. Choose one of the two.")
    if not path.exists():
        raise CheckpointError(f"weights were asked for from {path}, but there is no such folder. Give a run folder.")
    if not path.is_dir():
        raise CheckpointError(f"weights were asked for from {path}, but it is no run folder. Give a run folder.")
    if (path / MANIFEST).is_file():
        _require_step(path, step, best=best)
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = {folder.step_of(checkpoint): checkpoint for checkpoint in folder.checkpoints(root)}
    if not found:
        raise CheckpointError(
            f"weights were asked for from {path}, but it holds no complete checkpoint. Give the folder of a run that "
            "has saved one, such as runs/first."
        )
    if best:
        return found[best_step(root, found)]
    if step is not None and step not in found:
        steps = ", ".join(map(str, sorted(found)))
        raise CheckpointError(
            f"the checkpoint of step {step} was asked for, but {path} has those of steps {steps}. Choose one of these."
        )
    return found[max(found) if step is None else step]


def averaged_state(checkpoint: Path, manifest: Manifest, model: str, *, partial: bool = False) -> WeightState:
    """Returns the state_dict of a saved model, averaged over nodes; with `partial` without entries that are absent."""
    _require_all_files(checkpoint, manifest)
    try:
        return _averaged_state(checkpoint, manifest, model, partial=partial)
    except (*folder.UNREADABLE, IndexError, OverflowError) as error:
        raise damaged(checkpoint / MANIFEST, f"its parts do not fit each other, {error!r}") from error


def _averaged_state(checkpoint: Path, manifest: Manifest, model: str, *, partial: bool) -> WeightState:
    layout = manifest["nodes"]
    nodes, forms = zip(*(_read_node(checkpoint, manifest, node, model) for node in range(len(layout))), strict=True)
    ranks = [_read_rank(checkpoint, manifest, rank, model) for rank in range(sum(map(len, layout)))]
    for node in nodes:
        merge_pending_parameters(node)
    weights = node_weights(ranks, layout)
    tensors = {**averaged_buffers(ranks, weights, layout), **averaged_parameters(list(nodes), ranks, weights)}
    form: StateForm | None = forms[0]
    if form is not None and partial:
        form = {**form, "entries": [entry for entry in form["entries"] if entry[1] != "absent"]}
    return state_of(form, tensors)


def _read_node(checkpoint: Path, manifest: Manifest, node: int, model: str) -> tuple[NodeState, StateForm | None]:
    """Returns a node's parameters, without the state of its optimizer, and the form of the network's state_dict."""
    paths = [(model, "parameters"), (model, "pending"), (model, "form")]
    values = folder.read_entries(checkpoint, f"node-{node}", manifest["files"], paths, manifest.get("sizes", {}))
    parameters, pending, form = values
    problem = misform(parameters, MapOf(torch.Tensor)) or misform(pending, ListOf(ListOf(PIECE)))
    if problem := problem or tensors_misfit(manifest["models"][model], parameters):
        raise damaged(checkpoint / f"node-{node}.json", problem)
    return {"parameters": parameters, "pending": pending, "optimizer": {"state": {}}}, cast("StateForm | None", form)


def _read_rank(checkpoint: Path, manifest: Manifest, rank: int, model: str) -> LocalState:
    """Returns what one rank saved of a model."""
    paths, sizes = [("trainees", model)], manifest.get("sizes", {})
    (state,) = folder.read_entries(checkpoint, f"rank-{rank}", manifest["files"], paths, sizes)
    if problem := misform(state, LOCAL) or tensors_misfit(manifest["models"][model], state["buffers"]):
        raise damaged(checkpoint / f"rank-{rank}.json", problem)
    return cast("LocalState", state)


def _is_weights(path: Path) -> bool:
    """Returns whether a path is a file of weights, or a torch.distributed.checkpoint folder, and no run."""
    if path.is_dir():
        return (path / ".metadata").is_file() and not (path / MANIFEST).is_file()
    if path.is_file() and path.suffix not in ENDINGS:
        raise SpecError(
            f"weights were to be loaded from {path}, but its ending is {path.suffix or 'missing'!r}. Give a run "
            f"folder, or a file that ends in {', '.join(ENDINGS)}."
        )
    return path.is_file()


def _chosen_model(manifest: Manifest, name: str | None, checkpoint: Path) -> str:
    models = list(manifest["models"])
    if name is None and len(models) == 1:
        return models[0]
    if name not in models:
        case = "no model was named" if name is None else f"there is no model {name!r}"
        raise CheckpointError(
            f"weights were asked for from {checkpoint}, but {case}: it holds {', '.join(map(repr, models))}. "
            "Name one of these."
        )
    return name


def _require_step(checkpoint: Path, step: int | None, *, best: bool) -> None:
    """Raises `CheckpointError` if another checkpoint is asked for than the given folder."""
    saved = read_manifest(checkpoint)["step"]
    if best or step not in (None, saved):
        asked = "the best checkpoint" if best else f"step {step}"
        raise CheckpointError(
            f"{asked} was asked for, but {checkpoint} is the checkpoint of step {saved}. Give the run folder."
        )


def _require_all_files(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` if files of some nodes are on other machines."""
    absent = sorted({name.split(".")[0] for name in manifest["files"] if not (checkpoint / name).is_file()})
    if absent:
        raise CheckpointError(
            f"the average over all nodes was asked for, but {checkpoint} has no files of {', '.join(absent)}. If each "
            "node has its own disk, copy the files of all nodes into one folder."
        )
