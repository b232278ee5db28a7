"""A second start with another optimizer or other tracked objects: an error in words, or what was saved."""

import pytest
import torch
from torch import nn

import evenly
from evenly.checkpoints.optimizer_fit import load_optimizer
from evenly.errors import CheckpointError
from tests.session.programs import dataset, network


class Averaged(torch.optim.SGD):
    """Has an option and a state of its own from the start."""

    def __init__(self, params, *, decay=0.9, keeps=True):
        super().__init__(params, lr=0.1)
        self.defaults["decay"] = decay
        for group in self.param_groups:
            group.setdefault("decay", decay)
            for parameter in group["params"] if keeps else ():
                self.state[parameter]["average"] = parameter.detach().clone()


class Averaging:
    """Tracked, with a state that lacks a key."""

    def __init__(self, *names):
        self.values = dict.fromkeys(names, 1.0)

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state):
        self.values = {name: state[name] for name in self.values}


def train(folder, make, *, epochs, track=None, later=None):
    with evenly.Session(folder, device="cpu") as session:
        model = network()
        optimizer = make(model)
        plan = session.plan(batch_size=20)
        trained, optimizer, loader = session.prepare(model, optimizer, dataset(), plan=plan)
        session.track(**(track or {}))
        for _ in session.epochs(epochs):
            session.track(**(later or {}))
            for x, y in loader:
                nn.functional.cross_entropy(trained(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    return optimizer


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def two_groups(model):
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (lambda model: torch.optim.Adam(model.parameters()), "it has the state of SGD, and the optimizer is Adam"),
        (two_groups, r"groups of \[6\] parameters, and this start's SGD of \[1, 5\]"),
    ],
)
def test_another_optimizer_is_told_in_words(tmp_path, second, words):
    train(tmp_path, sgd, epochs=1)
    with pytest.raises(CheckpointError, match=f"{words}.*resume=False"):
        train(tmp_path, second, epochs=2)


def test_options_and_state_that_were_not_saved_are_named(tmp_path):
    def plain(model):
        optimizer = Averaged(model.parameters(), keeps=False)
        del optimizer.defaults["decay"], optimizer.param_groups[0]["decay"]
        return optimizer

    train(tmp_path / "option", plain, epochs=1)
    with pytest.raises(CheckpointError, match="options of its optimizer lack 'decay', which this start's Averaged has"):
        train(tmp_path / "option", lambda model: Averaged(model.parameters()), epochs=2)
    train(tmp_path / "state", lambda model: Averaged(model.parameters(), keeps=False), epochs=1)
    with pytest.raises(CheckpointError, match="lacks 'average', which this start's Averaged has"):
        train(tmp_path / "state", lambda model: Averaged(model.parameters()), epochs=2)


def test_a_checkpoint_without_the_class_goes_on_with_the_same_optimizer_only():
    """Older checkpoints have no class."""
    model = network()
    saved, other = sgd(model).state_dict(), torch.optim.Adam(model.parameters())
    with pytest.raises(CheckpointError, match="lack 'betas', 'eps', which this start's Adam has"):
        load_optimizer(other, saved, None, lambda: other.load_state_dict(saved))
    same = sgd(model)
    load_optimizer(same, saved, None, lambda: same.load_state_dict(saved))


def test_a_tracked_name_that_was_not_saved_is_told(tmp_path):
    train(tmp_path, sgd, epochs=1, track={"average": Averaging("a")})
    with pytest.raises(CheckpointError, match=r"no 'mean'; it has 'average'.*inside the loop"):
        train(tmp_path, sgd, epochs=2, track={"mean": Averaging("a")})
    with pytest.raises(CheckpointError, match=r"Averaging refuses .*KeyError: 'b'"):
        train(tmp_path, sgd, epochs=2, track={"average": Averaging("a", "b")})
    train(tmp_path, sgd, epochs=2, track={"average": Averaging("a")}, later={"mean": Averaging("a")})
    train(tmp_path, sgd, epochs=3, track={"average": Averaging("a"), "mean": Averaging("a")})
