"""Saving and resuming a whole run: every node's parameters, every rank's buffers, random states and positions.

Nodes differ inside a period, so each node's full tensors are saved. On the same cluster a run continues bit for bit; on
another one it starts from the average that the next exchange would have made.
"""

import logging
import random
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch

from evenly.checkpoints import folder
from evenly.checkpoints.best import KeptCheckpoints
from evenly.checkpoints.full_state import TrainedModel, full_state, local_exchanges, part_of, put_state
from evenly.checkpoints.merge import merge
from evenly.checkpoints.ownership import FolderOwner
from evenly.checkpoints.states import (
    FullState,
    LocalState,
    Manifest,
    NodeState,
    RandomState,
    RankState,
    Restored,
    Stateful,
)
from evenly.comm import ObjectGatherer, full_shape
from evenly.errors import CheckpointError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run in the folder `root`; all ranks call each method together."""

    def __init__(
        self,
        root: Path,
        gatherer: ObjectGatherer,
        *,
        rank: int,
        nodes: list[list[int]],
        owner: FolderOwner | None = None,
    ) -> None:
        self.root = root
        self.rank = rank
        self.nodes = nodes
        self._owner = owner
        self._gatherer = gatherer
        self._node = next(index for index, ranks in enumerate(nodes) if rank in ranks)
        self._leads = nodes[self._node][0] == rank

    def save(
        self,
        step: int,
        trained_models: list[TrainedModel],
        tracked: Mapping[str, Stateful],
        *,
        epoch: int,
        keep: KeptCheckpoints,
        ended_epochs: int | None = None,
    ) -> Path:
        """Writes the run's state as the checkpoint of `step` and returns its folder.

        `ended_epochs`: the run has ended, in a loop over so many epochs, and is not resumed to make as many.
        """
        token, step, best = self._together(lambda: self._begin(step, keep), "begin a checkpoint in", self.root)[0]
        name = f"step-{step:09d}"
        partial = self.root / f".{name}.{token}"
        owner = self._open(partial)
        digests = self._together(
            lambda: self._write(partial, trained_models, tracked), "write the checkpoint", self.root / name
        )
        manifest: Manifest = {
            "step": step,
            "epoch": epoch,
            "nodes": self.nodes,
            "models": {trained_model.name: _form(trained_model.model.module) for trained_model in trained_models},
            "files": {file: digest for part in digests for file, digest in part.items()},
        }
        if ended_epochs is not None:
            manifest["ended_epochs"] = ended_epochs

        def finish() -> None:
            if owner:
                folder.seal(partial, self.root / name, manifest)

        self._together(finish, "complete the checkpoint", self.root / name)

        def clear() -> None:
            if owner:
                folder.clear(self.root, keep=keep.newest, best=best)

        self._together(clear, "clear", self.root)
        return self.root / name

    def latest(self) -> Path | None:
        """Returns the newest checkpoint that every rank can see, or None."""
        self._together(lambda: folder.recover(self.root) if self._leads else None, "look into", self.root)
        names_of_ranks = self._together(
            lambda: [path.name for path in folder.checkpoints(self.root)], "look into", self.root
        )
        common = set(names_of_ranks[0]).intersection(*names_of_ranks[1:])
        if not common and any(names_of_ranks):
            parts = "; ".join(f"rank {rank}: {', '.join(names) or 'none'}" for rank, names in enumerate(names_of_ranks))
            raise CheckpointError(
                f"the ranks have no checkpoint in common in {self.root} ({parts}). "
                "Bring the missing files back, or start afresh with resume=False."
            )
        return self.root / max(common) if common else None

    def set_aside(self) -> None:
        """Moves the checkpoints of an earlier run into a folder of their own: a new run begins here."""
        at_rank_0 = self.rank == 0
        self._together(lambda: folder.set_aside(self.root) if at_rank_0 else None, "clear", self.root)
        self._together(lambda: folder.set_aside(self.root) if self._leads else None, "clear", self.root)

    def load(self, path: Path) -> Restored:
        """Returns the state this rank resumes from, read and checked on every rank."""
        read: list[Restored] = []
        self._together(lambda: read.append(self._read(path)), "read the checkpoint", path)
        return read[0]

    def _begin(self, step: int, keep: KeptCheckpoints) -> tuple[str, int, list[str]]:
        """Returns a new token, the step and the best checkpoints that stay.

        Those of rank 0 count: nodes may have made unequal numbers of steps, and may log different values.
        """
        if self._owner is not None:
            self._owner.require()
        return secrets.token_hex(4), step, keep.choose(self.root, step) if self.rank == 0 else []

    def _open(self, partial: Path) -> bool:
        """Makes the folder to write into; returns whether this rank owns it (each file system has one owner)."""

        def at_rank_0() -> None:
            if self.rank == 0:
                partial.mkdir(parents=True)

        def elsewhere() -> bool:
            if not (self.rank and self._leads):
                return self.rank == 0
            try:
                partial.mkdir(parents=True)
            except FileExistsError:  # rank 0's, or that of another node on this file system
                return False
            return True

        self._together(at_rank_0, "make the folder", partial)
        return bool(self._together(elsewhere, "make the folder", partial)[self.rank])

    def _write(
        self, partial: Path, trained_models: list[TrainedModel], tracked: Mapping[str, Stateful]
    ) -> dict[str, str]:
        digests: dict[str, str] = {}
        full = {t.name: full_state(t) for t in trained_models}  # a collective of the ranks that share a network
        if self._leads:
            value = {name: _node_state(state) for name, state in full.items()}
            digests |= folder.write_part(partial, f"node-{self._node}", value)
        rank_state: RankState = {
            "trainees": {t.name: _local_state(t, full[t.name]) for t in trained_models},
            "tracked": {name: stateful.state_dict() for name, stateful in tracked.items()},
            "random": _random_state(),
        }
        return digests | folder.write_part(partial, f"rank-{self.rank}", rank_state)

    def _read(self, path: Path) -> Restored:
        manifest = folder.read_manifest(path)
        files = manifest["files"]
        if manifest["nodes"] == self.nodes:
            node = folder.read_part(path, f"node-{self._node}", files)
            rank = folder.read_part(path, f"rank-{self.rank}", files)
        else:
            nodes = [folder.read_part(path, f"node-{index}", files) for index in range(len(manifest["nodes"]))]
            ranks = [folder.read_part(path, f"rank-{r}", files) for r in range(sum(map(len, manifest["nodes"])))]
            node, rank = merge(nodes, ranks, manifest["nodes"])
        return {"manifest": manifest, "node": node, "rank": rank}

    def _together(self, act: Callable[[], T], action: str, path: Path) -> list[T]:
        """Returns every rank's result; if one rank fails, all raise, naming it."""
        result: T | None = None
        error = None
        try:
            result = act()
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        rows = self._gatherer.gather((result, error), action, where=f" {path}")
        failed = {rank: reason for rank, (_, reason) in enumerate(rows) if reason}
        if failed:
            rank, reason = next(iter(failed.items()))
            raise CheckpointError(f"ranks {list(failed)} could not {action} {path}. Rank {rank} says: {reason}")
        return [cast("T", value) for value, _ in rows]  # without an error there is a result


def apply(state: Restored, trained_model: TrainedModel) -> None:
    """Loads a state into the model, its optimizer, its schedule and its batches."""
    saved = state["manifest"]["models"].get(trained_model.name)
    _require_same_form(saved, _form(trained_model.model.module), trained_model.name)
    node, rank = state["node"][trained_model.name], state["rank"]["trainees"][trained_model.name]
    put_state(trained_model, node, rank)
    device = next(trained_model.model.module.parameters()).device
    agreed, buffers = rank["agreed"], dict(trained_model.model.module.named_buffers())
    trained_model.model.resume(
        rank["progress"],
        None if agreed is None else {name: part_of(buffers[name], value.to(device)) for name, value in agreed.items()},
        local_exchanges(trained_model, node, rank),
        node.get("trained"),
    )
    if trained_model.feed is not None:
        trained_model.feed.resume(rank["feed"] or {})


def load_tracked(state: Restored | None, things: Mapping[str, Stateful]) -> None:
    """Loads the states that tracked objects have in a checkpoint, if there is one."""
    if state is None:
        return
    saved, step = state["rank"]["tracked"], state["manifest"]["step"]
    for name, stateful in things.items():
        if name not in saved:
            raise CheckpointError(
                f"track({name}=...) was called in a run that goes on, but its checkpoint of step {step} has no "
                f"{name!r}; it has {', '.join(map(repr, saved)) or 'nothing tracked'}. Give the name that it was saved "
                "under, or track an object that is new in this start inside the loop over session.epochs()."
            )
        try:
            stateful.load_state_dict(saved[name])
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"track({name}=...) was called in a run that goes on, but {type(stateful).__name__} refuses what its "
                f"checkpoint of step {step} has ({type(error).__name__}: {error}). Track the object that was saved "
                "under this name, or start anew with Session(folder, resume=False)."
            ) from error


def restore_random_state(state: Restored) -> None:
    """Restores torch's, Python's and numpy's generators; a new rank keeps its own."""
    saved = state["rank"]["random"]
    if saved is None:
        return
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    random.setstate(saved["python"])
    name, keys, position, has_gauss, gauss = saved["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))


def _random_state() -> RandomState:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _uses_cuda() else None,
        "python": random.getstate(),
        "numpy": [
            name,
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
    }


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())


def _node_state(full: FullState) -> NodeState:
    return {
        "parameters": full["parameters"],
        "optimizer": full["optimizer"],
        "pending": full["pending"],
        "form": full.get("form"),
        "trained": full.get("trained", []),
    }


def _local_state(trained_model: TrainedModel, full: FullState) -> LocalState:
    return {
        "buffers": full["buffers"],
        "agreed": full["agreed"],
        "progress": trained_model.model.progress(),
        "exchanges": full["exchanges"],
        "feed": trained_model.feed.state() if trained_model.feed is not None else None,
    }


def _form(module: torch.nn.Module) -> dict[str, str]:
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {list(full_shape(tensor))}"
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


def _require_same_form(saved: dict[str, str] | None, current: dict[str, str], trained_model: str) -> None:
    if saved is None:
        raise CheckpointError(f"the checkpoint has no model {trained_model!r}. Resume with the program that saved it.")
    for name in [*saved, *current]:
        if saved.get(name) != current.get(name):
            raise CheckpointError(
                f"the checkpoint was saved from another model: {name!r} is {saved.get(name, 'absent')} there "
                f"and {current.get(name, 'absent')} here. Build the same model, or start a new run folder."
            )
