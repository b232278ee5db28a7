"""Sessions keep the best checkpoints and save weights that a plain program loads."""

import json

import pytest
import torch

import evenly
from evenly import Session
from evenly.checkpoints import export_weights
from evenly.errors import CheckpointError, SpecError
from tests.processes import run_processes
from tests.ranks import ragged
from tests.session.programs import network

TRAIN = "tests.session.weight_programs:train"


def saved_steps(folder):
    return [int(path.name[5:]) for path in sorted((folder / "checkpoints").glob("step-*"))]


def require_weights(source, shown, **options):
    """Requires that a plain network gets these weights, to the bit."""
    model = network()
    evenly.load_weights(model, source, **options)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, torch.tensor(shown[name], dtype=tensor.dtype)), name


@pytest.mark.parametrize(("nodes", "shares"), [(ragged(2, 1), None), (ragged(2, 2), [3, 1])], ids=["whole", "cut"])
def test_the_best_checkpoint_stays_and_is_exported(tmp_path, nodes, shares):
    """The values of rank 0 count. At the end of an epoch of 5 steps nodes differ: they exchange every 4 steps."""
    arguments = {"folder": str(tmp_path), "values": [0.5, 0.9, None, 0.7], "shares": shares, "bad_place": "x.bin"}
    results = run_processes(nodes, TRAIN, arguments)
    steps = sorted(int(step) for step in results[0]["shown"])
    assert saved_steps(tmp_path) == [steps[1], steps[3]]  # the best and the newest
    best = results[0]["shown"][str(steps[1])]
    require_weights(tmp_path, best, best=True)
    export_weights(tmp_path, tmp_path / "best.safetensors", best=True)
    require_weights(tmp_path / "best.safetensors", best)
    require_weights(tmp_path, results[0]["shown"][str(steps[3])], step=steps[3])
    for result in results:
        assert result["saved"] == str(tmp_path / "last.safetensors")
        assert result["is_there"]
        assert result["problem"].startswith("SpecError: weights were to be written to x.bin, but its ending is '.bin'")
    evenly.load_weights(network(), tmp_path / "last.safetensors")


def test_the_best_of_a_resumed_run_are_compared_with_those_before(tmp_path):
    """Logged on rank 0 only; the smallest two stay; of equal values the earlier one."""
    values, rule = [0.4, 0.2, 0.3, 0.2, 0.1], ["accuracy", "min", 2]
    arguments = {"folder": str(tmp_path), "values": values, "keep_best": rule, "only_rank_0": True}
    first = run_processes(ragged(1), TRAIN, {**arguments, "epochs": 3})[0]
    second = run_processes(ragged(1), TRAIN, arguments)[0]
    steps = sorted(int(step) for step in {**first["shown"], **second["shown"]})
    assert saved_steps(tmp_path) == [steps[1], steps[4]]
    require_weights(tmp_path, second["shown"][str(steps[4])], best=True)
    run = Session(tmp_path, keep_best=("accuracy", "min", 2), resume=False)
    with run:
        pass
    assert saved_steps(tmp_path) == []
    require_weights(tmp_path / "checkpoints" / "earlier-1", second["shown"][str(steps[4])], best=True)


def test_a_value_belongs_to_the_checkpoint_of_its_step_or_else_to_the_next(tmp_path):
    with Session(tmp_path, device="cpu", keep=1, keep_best=("error", "min"), checkpoint_every=None) as session:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained, _, _ = session.prepare(model, optimizer, plan=session.plan(batch_size=2))

        def step():
            trained(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        session.checkpoint()
        session.log(error=0.1)  # of step 1, which is saved already
        step()
        session.log(error=0.3)  # no checkpoint here: it is that of step 3
        step()
        session.checkpoint()
        step()
        session.log(error=float("nan"))
        session.checkpoint()
        assert saved_steps(tmp_path) == [1, 4]
        assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["values"] == {"1": 0.1, "3": 0.3}


@pytest.mark.parametrize(
    ("keep_best", "told"),
    [
        ("loss", r"keep_best='loss' was given, which would keep the largest value\. Say which is better: keep_best="),
        (("loss", "least"), "is no name, mode and number"),
        (("loss", "min", 0), "is no name, mode and number"),
        (3, "is no name, mode and number"),
    ],
)
def test_rules_that_say_nothing_clear_are_refused(tmp_path, keep_best, told):
    with pytest.raises(SpecError, match=told):
        Session(tmp_path, keep_best=keep_best)


def test_a_folder_is_needed_and_values_too(tmp_path):
    with pytest.raises(SpecError, match="the session has no folder"):
        Session(keep_best="accuracy")
    model = torch.nn.Linear(2, 1)
    with Session(tmp_path, device="cpu", keep_best="accuracy") as session:
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=session.plan(batch_size=2))
        session.checkpoint()
        with pytest.raises(SpecError, match=r"the weights of 'judge' were to be saved, but the session has prepared"):
            session.save(tmp_path / "judge.pt", name="judge")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* has a value of it"):
        evenly.load_weights(model, tmp_path, best=True)
