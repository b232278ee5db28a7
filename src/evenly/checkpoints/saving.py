"""Saving and resuming a whole run: every node's parameters, every rank's buffers, random states and positions.

Nodes differ inside a period, so each node's full tensors are saved. On the same cluster a run continues bit for bit; on
another one it starts from the average that the next exchange would have made.
"""

import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from evenly.checkpoints import folder
from evenly.checkpoints.best import KeptCheckpoints
from evenly.checkpoints.content import NODE, RANK, form_of_module, misform, tensors_misfit
from evenly.checkpoints.files import damaged
from evenly.checkpoints.folder import UNREADABLE, CopiedPart
from evenly.checkpoints.full_state import TrainedModel, full_state
from evenly.checkpoints.manifest import MANIFEST, read_manifest
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
from evenly.checkpoints.votes import together
from evenly.checkpoints.writing import CheckpointWriter, PendingCheckpoint
from evenly.comm import ObjectGatherer
from evenly.errors import CheckpointDamageError, CheckpointError, PeerError

T = TypeVar("T")

logger = logging.getLogger(__name__)

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.05, 1.0  # between two questions whether a checkpoint has ended


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
        self._store_gatherer = gatherer.by_store()
        self._pending: PendingCheckpoint | None = None
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
        """Writes the run's state as the checkpoint of `step` and returns its folder; arguments as those of `start`."""
        pending = self.start(step, trained_models, tracked, epoch=epoch, keep=keep, ended_epochs=ended_epochs)
        self.wait()
        return pending.result()

    def start(
        self,
        step: int,
        trained_models: list[TrainedModel],
        tracked: Mapping[str, Stateful],
        *,
        epoch: int,
        keep: KeptCheckpoints,
        ended_epochs: int | None = None,
    ) -> PendingCheckpoint:
        """Copies the run's state and returns the checkpoint of `step`, which a thread now writes.

        The one before must have ended. `ended_epochs`: the run has ended, in a loop over so many epochs, and is not
        resumed to make as many.
        """
        began = time.monotonic()
        self.wait()
        token, step, best = self._together(lambda: self._begin(step, keep), "begin a checkpoint in", self.root)[0]
        manifest: dict[str, Any] = {
            "step": step,
            "epoch": epoch,
            "nodes": self.nodes,
            "models": {
                trained_model.name: form_of_module(trained_model.model.module) for trained_model in trained_models
            },
        }
        if ended_epochs is not None:
            manifest["ended_epochs"] = ended_epochs
        parts: list[CopiedPart] = []
        failure: BaseException | None = None
        try:
            parts = self._copied(trained_models, tracked)
        except BaseException as error:  # the others must not wait for this rank's files
            failure = error
        ends_run = isinstance(failure, PeerError) or not isinstance(failure, Exception)  # it is not the state's
        writer = CheckpointWriter(
            path=self.root / f"step-{step:09d}",
            token=token,
            rank=self.rank,
            leads=self._leads,
            parts=parts,
            failure=failure,
            manifest=manifest,
            keep=keep,
            best=best,
            owner=self._owner,
            gatherer=self._store_gatherer,
        )
        self._pending = PendingCheckpoint(writer.path, step, writer.write, began=began)
        if failure is not None and ends_run:
            raise failure
        self._pending.held_s = time.monotonic() - began
        return self._pending

    def wait(self) -> None:
        """Returns when the checkpoint that was started last has ended on all ranks.

        They ask each other: a connection that breaks tells at once of a rank that has died, and rank 0, which may host
        the store, does not end before the others know the outcome.
        """
        pending = self._pending
        if pending is None:
            return
        began, has_ended, pause_s = time.monotonic(), False, SHORTEST_WAIT_S
        while not has_ended:
            answer = pending.ends_within(pause_s)
            has_ended = all(self._gatherer.gather(answer, "wait for the checkpoint in", where=f" {self.root}"))
            pause_s = min(2 * pause_s, LONGEST_WAIT_S)
        pending.held_s += time.monotonic() - began
        self._pending = None

    def close(self) -> None:
        """Waits for the checkpoint that is being written, also after a failure, as long as its ranks live."""
        while self._pending is not None and not self._pending.ends_within(LONGEST_WAIT_S):
            pass

    def load_newest(self) -> Restored | None:
        """Returns the state this rank resumes from, of the newest checkpoint that is whole on all ranks, if any is.

        Newer ones that are damaged get another name, and the log says so.
        """
        problems: dict[Path, CheckpointDamageError] = {}
        for path in reversed(self.common()):
            try:
                state = self.load(path)
            except CheckpointDamageError as error:
                problems[path] = error
                continue
            self._set_aside_damaged(problems, path)
            return state
        if problems:
            reasons = " ".join(map(str, problems.values()))
            raise CheckpointDamageError(
                f"a run was to go on in {self.root}, but none of its checkpoints is whole. {reasons} Restore one of "
                "them from a copy, or start afresh with resume=False."
            )
        return None

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

    def common(self) -> list[Path]:
        """Returns the checkpoints that every rank can see, oldest first."""
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
        return sorted((self.root / name for name in common), key=folder.step_of)

    def _set_aside_damaged(self, problems: Mapping[Path, CheckpointDamageError], used: Path) -> None:
        def rename() -> None:
            for path in problems if self._leads else ():
                folder.set_damaged_aside(path)

        if problems:
            self._together(rename, "rename the damaged checkpoints in", self.root)
        for path, error in problems.items() if self.rank == 0 else ():
            logger.warning("%s The run goes on from %s, and %s is now damaged-%s", error, used, path.name, path.name)

    def _begin(self, step: int, keep: KeptCheckpoints) -> tuple[str, int, list[str]]:
        """Returns a new token, the step and the best checkpoints that stay.

        Those of rank 0 count: nodes may have made unequal numbers of steps, and may log different values.
        """
        if self._owner is not None:
            self._owner.require()
        return secrets.token_hex(4), step, keep.choose(self.root, step) if self.rank == 0 else []

    def _copied(self, trained_models: list[TrainedModel], tracked: Mapping[str, Stateful]) -> list[CopiedPart]:
        """Returns copies of what this rank writes."""
        parts = []
        full = {t.name: full_state(t) for t in trained_models}  # a collective of the ranks that share a network
        if self._leads:
            parts.append(
                folder.copied(f"node-{self._node}", {name: _node_state(state) for name, state in full.items()})
            )
        rank_state: RankState = {
            "trainees": {t.name: _local_state(t, full[t.name]) for t in trained_models},
            "tracked": {name: stateful.state_dict() for name, stateful in tracked.items()},
            "random": _random_state(),
        }
        return [*parts, folder.copied(f"rank-{self.rank}", rank_state)]

    def _read(self, path: Path) -> Restored:
        manifest = read_manifest(path)
        if manifest["step"] != folder.step_of(path):
            raise damaged(path / MANIFEST, f"it is of step {manifest['step']}")
        if manifest["nodes"] == self.nodes:
            node, rank = _read_node(path, manifest, self._node), _read_rank(path, manifest, self.rank)
        else:
            nodes = [_read_node(path, manifest, index) for index in range(len(manifest["nodes"]))]
            ranks = [_read_rank(path, manifest, rank) for rank in range(sum(map(len, manifest["nodes"])))]
            try:
                node, rank = merge(nodes, ranks, manifest["nodes"])
            except UNREADABLE as error:
                raise damaged(path / MANIFEST, f"its parts do not fit each other, {error!r}") from error
        return {"manifest": manifest, "node": node, "rank": rank}

    def _together(self, act: Callable[[], T], action: str, path: Path) -> list[T]:
        """Returns every rank's result; if one rank fails, all raise, naming it."""
        return together(lambda value, what: self._gatherer.gather(value, what, where=f" {path}"), act, action, path)


def _read_node(path: Path, manifest: Manifest, node: int) -> dict[str, NodeState]:
    value: dict[str, NodeState] = folder.read_part(path, f"node-{node}", manifest["files"], manifest.get("sizes", {}))
    problem = misform(value, NODE) or _other_models(value, manifest)
    for name, forms in manifest["models"].items() if not problem else ():
        problem = problem or tensors_misfit(forms, value[name]["parameters"])
    if problem:
        raise damaged(path / f"node-{node}.json", problem)
    return value


def _read_rank(path: Path, manifest: Manifest, rank: int) -> RankState:
    value: RankState = folder.read_part(path, f"rank-{rank}", manifest["files"], manifest.get("sizes", {}))
    problem = misform(value, RANK) or _other_models(value["trainees"], manifest)
    for name, forms in manifest["models"].items() if not problem else ():
        problem = problem or tensors_misfit(forms, value["trainees"][name]["buffers"])
    if problem:
        raise damaged(path / f"rank-{rank}.json", problem)
    return value


def _other_models(models: Mapping[str, object], manifest: Manifest) -> str:
    return "" if models.keys() == manifest["models"].keys() else "it is of other models than the manifest"


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
