"""Which parameters a network trains, and with which groups of the optimizer, as ranks agreed on last."""

import json
from collections.abc import Collection, Sequence
from functools import partial
from itertools import zip_longest
from weakref import ref

import torch

from evenly.comm import CollectiveWaiter, FailureMonitor, FailureNote
from evenly.errors import CheckpointError, MismatchError, SpecError
from evenly.schedule.step_counter import Schedule

CHANGE = "trained parameters"  # the kind of notes to other nodes
KEPT_STEPS = 1000  # how long changes are remembered, for notes of nodes that are behind


class TrainedParameters:
    """The parameters that were trained, and the optimizer's groups, when `read` was called last.

    Loops freeze and unfreeze layers and add groups between steps. A change counts at the next forward.
    """

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self._unlike_checkpoint: dict[str, bool] = {}  # parameters, and whether the checkpoint's run trained them
        self.read()

    def read(self) -> None:
        """Takes what is the case now."""
        named = dict(self._module.named_parameters())
        self._names, self._parameters = list(named), list(named.values())
        self._flags = [parameter.requires_grad for parameter in self._parameters]
        self._groups = [list(map(id, group["params"])) for group in self._optimizer.param_groups]
        self._sizes = [len(group) for group in self._groups]

    def follow_resharding(self) -> None:
        """Takes the tensors and groups that resharding made; a layer frozen before it is still a change."""
        flags, sizes = self._flags, self._sizes
        self.read()
        self._flags, self._sizes = flags, sizes

    @property
    def names(self) -> set[str]:
        """The names of the parameters that were trained."""
        return {name for name, is_trained in zip(self._names, self._flags, strict=True) if is_trained}

    def resume(self, trained: Collection[str]) -> None:
        """Remembers which parameters a checkpoint's run trained: a change that it had made must be made here, too."""
        self._unlike_checkpoint = {name: name in trained for name in self.names ^ set(trained)}

    def require_resumed(self) -> None:
        """Raises `CheckpointError` if a parameter is frozen or trained that was not in the checkpoint's run.

        Those count that were so from the start; what this run has changed since it resumed is its own wish.
        """
        flags = dict(zip(self._names, (p.requires_grad for p in self._parameters), strict=True))
        for name, was_trained in self._unlike_checkpoint.items():
            if flags.get(name) != was_trained:
                before, now = ("trained", "frozen") if was_trained else ("frozen", "trained")
                raise CheckpointError(
                    f"a run was to go on from a checkpoint in which the parameter {name!r} was {before}, but it is "
                    f"{now} here: the run had changed it before. Repeat such changes when a run resumes, before the "
                    "first forward: `if epoch >= 3:` in place of `if epoch == 3:`."
                )
        self._unlike_checkpoint = {}

    @property
    def is_to_be_checked(self) -> bool:
        """Whether this is the first forward after a checkpoint, or other parameters or groups are trained now."""
        return bool(self._unlike_checkpoint) or self.have_changed

    @property
    def have_changed(self) -> bool:
        """Whether other parameters are trained now, or the optimizer has other groups.

        A network without a trained parameter, such as a discriminator in the generator's step, trains nothing: that
        alone is no change.
        """
        flags = [parameter.requires_grad for parameter in self._parameters]
        return (flags != self._flags and any(flags)) or self._group_sizes() != self._sizes

    def changes(self) -> list[str]:
        """Returns what has changed, one line for each parameter and each group."""
        flags = [parameter.requires_grad for parameter in self._parameters]
        lines = [
            f"the parameter {name!r} is {'trained' if now else 'frozen'}"
            for name, before, now in zip(self._names, self._flags, flags, strict=True)
            if before != now
        ]
        if self._group_sizes() != self._sizes:
            lines.append(f"the optimizer has groups of {self._group_sizes()} parameters")
        return lines

    def require_known(self) -> None:
        """Raises `SpecError` for a parameter that the network, or the optimizer, got after synchronize was called."""
        known_ids = set(map(id, self._parameters))
        for name, parameter in self._module.named_parameters():
            if id(parameter) not in known_ids:
                raise SpecError(
                    f"the network got the parameter {name!r} after synchronize was called, which other ranks and "
                    "exchanges do not know. Build it before synchronize, frozen by requires_grad_(False) if it is to "
                    "be trained later, or call finish() and close(), then synchronize again."
                )
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in known_ids:
                    raise SpecError(
                        f"group {number} of the optimizer got a parameter of shape {list(parameter.shape)} that is not "
                        "one of the network that synchronize was given: ranks would not share it. Add only parameters "
                        "of the network, or call finish() and close(), then synchronize again."
                    )

    def require_unchanged(self) -> None:
        """Raises `SpecError` if parameters were added or unfrozen since `read`, and a step is about to use them."""
        if self._group_sizes() != self._sizes:
            known_ids = {number for group in self._groups for number in group}
            groups = self._optimizer.param_groups
            self._raise_changed(
                [p for group in groups for p in group["params"] if id(p) not in known_ids], "was given to the optimizer"
            )
        for parameter, was_trained in zip(self._parameters, self._flags, strict=True):
            if parameter.requires_grad and not was_trained and parameter.grad is not None:
                self._raise_changed([parameter], "was unfrozen")

    def require_same_members(self) -> None:
        """Raises `SpecError` if groups of the same sizes hold other parameters than when `read` was called."""
        groups = [list(map(id, group["params"])) for group in self._optimizer.param_groups]
        if self._group_sizes() == self._sizes and groups != self._groups:
            known_ids = {number for group in self._groups for number in group}
            replaced = [p for group in self._optimizer.param_groups for p in group["params"] if id(p) not in known_ids]
            self._raise_changed(replaced, "was put into a group of the optimizer in another's place")

    def _raise_changed(self, parameters: list[torch.Tensor], case: str) -> None:
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        labels = [repr(names.get(id(p), f"of shape {list(p.shape)}, outside the model")) for p in parameters]
        raise SpecError(
            f"the parameter {labels[0] if labels else 'list'} {case} after the forward of this step, so its gradients "
            "are not averaged with the other ranks. Freeze, unfreeze and add groups between optimizer.step() and the "
            "next forward."
        )

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]


class ChangeLog:
    """The changes of this rank and of other nodes, by the step after which they were made.

    Nodes do not wait for each other at a change: a note tells the others, and a node that has gone on without it fails.
    """

    def __init__(self, monitor: FailureMonitor, schedule: Schedule, *, compares_nodes: bool) -> None:
        self._monitor, self._schedule = monitor, schedule
        self._compares_nodes = compares_nodes
        self._count = 0
        self._changes: dict[int, list[list[str]]] = {}  # of this rank, in the order of a step's forwards
        self._notes: list[FailureNote] = []  # of other nodes, for steps that this one has not come to
        if compares_nodes:
            monitor.subscribe(CHANGE, partial(_receive, ref(self)))  # it must not keep the monitor alive

    def agree(self, changes: list[str], lines: Sequence[str], ranks: Sequence[int], *, timeout_s: float) -> None:
        """Waits until all of `ranks`, which average gradients with each other, have come to a change.

        `changes` are what it changes, `lines` describe the model and the optimizer after it.

        Raises:
            MismatchError: on every rank, naming the first parameter or group that differs between them.
        """
        step, self._count = self._schedule.step, self._count + 1
        waiter = CollectiveWaiter(
            self._monitor, label=f"change {self._count} of the trained parameters", step=step, timeout_s=timeout_s
        )
        former_label = f"change {self._count - 1} of the trained parameters" if self._count > 1 else ""
        why = changes[0] if changes else "the optimizer has other groups"
        texts = waiter.gather_by_store(json.dumps(lines), ranks, why=why, after=former_label)
        rows: list[list[str]] = [json.loads(text) for text in texts]
        for rank, row in zip(ranks[1:], rows[1:], strict=True):
            _require_same_lines(rows[0], row, (ranks[0], rank), step=step)
        self._changes = {number: made for number, made in self._changes.items() if number > step - KEPT_STEPS}
        self._changes.setdefault(step, []).append(changes)
        number = len(self._changes[step])
        if self._compares_nodes and self._monitor.rank_group.rank == ranks[0]:
            self._monitor.post(CHANGE, json.dumps([number, changes]), step=step)

    @property
    def has_notes(self) -> bool:
        """Whether another node has told of a change that this one has not been compared with."""
        return bool(self._notes)

    def require_same_as_nodes(self) -> None:
        """Raises `MismatchError` if another node has made a change, at or before this step, that this one has not."""
        for note in list(self._notes):
            if self._is_reached(note):
                self._notes.remove(note)  # the thread of the monitor may add others meanwhile
                if (error := self._difference(note)) is not None:
                    raise error

    def receive(self, note: FailureNote) -> None:
        """Takes a note of another node; runs in the thread of the monitor."""
        step = self._schedule.step
        if note.step < step and (error := self._difference(note)) is not None:
            self._monitor.report(error)
            self._monitor.fail(error)
        elif note.step >= step:
            self._notes.append(note)

    def _is_reached(self, note: FailureNote) -> bool:
        """Whether this rank has come to the change; a second one in a step may still come."""
        number, _ = json.loads(note.text)
        step = self._schedule.step
        return note.step < step or (note.step == step and number <= max(1, len(self._changes.get(step, []))))

    def _difference(self, note: FailureNote) -> MismatchError | None:
        number, theirs = json.loads(note.text)
        made = self._changes.get(note.step, [])
        ours = made[number - 1] if number <= len(made) else []
        if theirs == ours or note.step <= self._schedule.step - KEPT_STEPS:
            return None
        case = next((line for line in theirs if line not in ours), "")
        where, missing = f"rank {note.rank} on {note.host}", f"rank {self._monitor.rank_group.rank}"
        if not case:
            case = next(line for line in ours if line not in theirs)
            where, missing = missing, where
        return MismatchError(
            f"nodes do not train the same after step {note.step}: on {where} {case}, but not on {missing}. Freeze, "
            "unfreeze and add parameter groups on all ranks before the same step."
        )


def _receive(owner: "ref[ChangeLog]", note: FailureNote) -> None:
    change_log = owner()
    if change_log is not None:
        change_log.receive(note)


def _require_same_lines(ours: list[str], theirs: list[str], ranks: tuple[int, int], *, step: int) -> None:
    """Raises `MismatchError` naming the first line that differs between two ranks."""
    for one, other in zip_longest(ours, theirs, fillvalue="nothing more"):
        if one != other:
            raise MismatchError(
                f"ranks that average gradients with each other do not train the same after step {step}: rank "
                f"{ranks[0]} has {one}; rank {ranks[1]} has {other}. Freeze, unfreeze and add parameter groups on all "
                "ranks alike."
            )
