"""Puts the state of a checkpoint into models, tracked objects and random generators."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from evenly.checkpoints.content import form_of_module
from evenly.checkpoints.folder import UNREADABLE
from evenly.checkpoints.full_state import TrainedModel, local_exchanges, part_of, put_state
from evenly.checkpoints.states import Restored, Stateful
from evenly.errors import CheckpointDamageError, CheckpointError, EvenlyError


def apply(state: Restored, trained_model: TrainedModel) -> None:
    """Loads a state into the model, its optimizer, its schedule and its batches."""
    name, module = trained_model.name, trained_model.model.module
    _require_same_form(state["manifest"]["models"].get(name), form_of_module(module), name)
    node, rank = state["node"][name], state["rank"]["trainees"][name]
    buffers = dict(module.named_buffers())
    device = next(module.parameters()).device
    with _told_as_damage(state, f"the model {name!r}"):
        if missing := sorted(dict(module.named_parameters()).keys() - node["parameters"].keys()):
            raise KeyError(missing[0])
        put_state(trained_model, node, rank)
        agreed = rank["agreed"]
        trained_model.model.resume(
            rank["progress"],
            None if agreed is None else {key: part_of(buffers[key], value.to(device)) for key, value in agreed.items()},
            local_exchanges(trained_model, node, rank),
            node.get("trained"),
        )
    if trained_model.feed is not None:
        trained_model.feed.resume(rank["feed"] or {})


@contextmanager
def _told_as_damage(state: Restored, what: str) -> Iterator[None]:
    """Turns errors of Python and torch about what a checkpoint holds into `CheckpointDamageError`."""
    try:
        yield
    except EvenlyError:
        raise
    except (*UNREADABLE, OverflowError, IndexError) as error:
        raise CheckpointDamageError(
            f"{what} was to be restored from the checkpoint of step {state['manifest']['step']}, but that does not "
            f"fit ({type(error).__name__}: {error}). Restore the checkpoint from a copy, or start anew with "
            "Session(folder, resume=False)."
        ) from error


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
    with _told_as_damage(state, "the state of the random generators"):
        torch.set_rng_state(saved["torch"])
        if saved["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["cuda"])
        random.setstate(saved["python"])
        name, keys, position, has_gauss, gauss = saved["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))


def _require_same_form(saved: dict[str, str] | None, current: dict[str, str], trained_model: str) -> None:
    if saved is None:
        raise CheckpointError(f"the checkpoint has no model {trained_model!r}. Resume with the program that saved it.")
    for name in [*saved, *current]:
        if saved.get(name) != current.get(name):
            raise CheckpointError(
                f"the checkpoint was saved from another model: {name!r} is {saved.get(name, 'absent')} there "
                f"and {current.get(name, 'absent')} here. Build the same model, or start a new run folder."
            )
