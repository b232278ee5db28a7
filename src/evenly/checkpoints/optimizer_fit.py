"""Loads the saved state of an optimizer into one of the same kind; says in words why another one does not fit."""

from collections.abc import Callable

import torch

from evenly.checkpoints.states import Saved
from evenly.errors import CheckpointError

REMEDY = (
    "Make the optimizer that the run was started with, or start anew: another folder, or Session(folder, resume=False)"
)


def load_optimizer(
    optimizer: torch.optim.Optimizer, saved: Saved, class_name: str | None, load: Callable[[], None]
) -> None:
    """Runs `load`, which loads `saved` into `optimizer`.

    Raises:
        CheckpointError: where `saved` is of another class (`class_name`; None if that was not saved) or of other
            groups of parameters, or lacks options or state of this optimizer.
    """
    own_name = type(optimizer).__name__
    if class_name not in (None, own_name):
        raise _misfit(f"it has the state of {class_name}, and the optimizer is {own_name}")
    saved_sizes = [len(group["params"]) for group in saved["param_groups"]]
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if saved_sizes != own_sizes:
        raise _misfit(
            f"its optimizer has groups of {saved_sizes} parameters, and this start's {own_name} of {own_sizes}. Groups "
            "that the run added later are added before it resumes"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state_keys = [set(optimizer.state.get(parameter, {})) for parameter in parameters]
    options = set(optimizer.defaults)  # before loading: torch then adds "differentiable" to them, but not to the groups
    try:
        load()
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise _misfit(f"{own_name} refuses it ({type(error).__name__}: {error})") from error
    for group in optimizer.param_groups:  # they are the saved ones now
        if missing := sorted(options - set(group)):
            raise _misfit(f"the options of its optimizer lack {_quoted(missing)}, which this start's {own_name} has")
    _require_state(optimizer, state_keys, own_name)


def _require_state(optimizer: torch.optim.Optimizer, state_keys: list[set[str]], own_name: str) -> None:
    """Raises `CheckpointError` if state that the optimizer had when it was made was not saved."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for names, parameter in zip(state_keys, parameters, strict=True):
        if missing := sorted(names - set(optimizer.state.get(parameter, {}))):
            raise _misfit(f"the state of its optimizer lacks {_quoted(missing)}, which this start's {own_name} has")


def _quoted(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _misfit(case: str) -> CheckpointError:
    return CheckpointError(f"a run was to go on from a checkpoint, but {case}. {REMEDY}.")
