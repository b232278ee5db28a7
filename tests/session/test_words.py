"""The words of a session for a loop: loaders, reductions, accumulation, progress."""

import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenly
from evenly.errors import DataError, SpecError
from evenly.spec import Measured
from tests.processes import run_processes
from tests.ranks import ragged
from tests.session.loop_programs import Net, accumulate, accumulate_plainly
from tests.session.programs import dataset, network


@pytest.mark.parametrize(
    ("samples", "nodes", "count", "size"), [([3, 1, 2], ragged(2, 1), 2, 23), ([4, 1], ragged(2), 3, 21)]
)
def test_accumulated_batches_are_one_step_of_the_large_batch(samples, nodes, count, size):
    """Also the last batches of an epoch, which are fewer and smaller; of 21 samples rank 1 has none in the last."""
    node_of = [node for node, ranks in enumerate(nodes) for _ in ranks]
    ranks = run_processes(
        nodes,
        "tests.session.loop_programs:accumulate",
        {"samples": samples, "nodes": node_of, "count": count, "size": size},
    )
    alone = accumulate([count * sum(samples)], [0], count=1, size=size)
    for rank in ranks:
        assert rank["made"] == rank["steps"] == rank["counted"] == alone["made"]
        for parameter, expected in zip(rank["parameters"], alone["parameters"], strict=True):
            torch.testing.assert_close(torch.tensor(parameter), torch.tensor(expected), rtol=1e-9, atol=1e-12)


def test_batches_are_accumulated_in_a_network_that_is_cut_and_after_a_broken_epoch():
    expected = accumulate_plainly()
    for rank in run_processes(ragged(2), "tests.session.loop_programs:accumulate_cut"):
        torch.testing.assert_close(torch.tensor(rank), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_a_period_of_two_epochs(tmp_path):
    """Also with a step after the loader has ended, which is of the same epoch; and over a second start."""
    program, folder = "tests.session.loop_programs:exchange_every_second_epoch", str(tmp_path)
    for rank in run_processes(ragged(1, 1), program, {"folder": folder, "epochs": 3}):
        assert rank == [0, 1, 2]  # before the second and third epoch, and at the end of the run
    for rank in run_processes(ragged(1, 1), program, {"folder": folder, "epochs": 6}):
        assert rank == [3, 3, 4]  # the last checkpoint was saved after the exchange at the end of the run


def test_values_of_all_ranks():
    first, second, third = results = run_processes(ragged(2, 1), "tests.session.loop_programs:words")
    samples = [x for rank in results for batch in rank["before"] for x in batch]
    assert samples == [x for rank in results for batch in rank["after"] for x in batch] == list(range(7))
    assert all(rank["mean"] == pytest.approx(3.0) for rank in results)
    assert all(rank["equal"] == [1.0, 1.0] for rank in results)
    rows = [[[[rank] * 2] * rank, "torch.int8", ["a", rank]] for rank in range(3)]
    assert first["gathered"] == second["gathered"] == third["gathered"] == rows
    assert [rank["is_main"] for rank in results] == [True, False, False]
    assert first["drawn"] == second["drawn"] == third["drawn"]


def test_ranks_of_one_network_evaluate_the_same_samples_and_count_them_once():
    results = run_processes(ragged(2), "tests.session.loop_programs:words", {"shares": [2, 1]})
    assert [rank["after"] for rank in results] == [[[0, 1], [2, 3], [4, 5], [6]]] * 2
    assert all(rank["mean"] == pytest.approx(3.0) for rank in results)


def test_a_loader_is_prepared_like_its_dataset():
    def losses(data, **options):
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with evenly.Session(device="cpu") as session:
            plan = session.plan(batch_size=8)
            trained, _, loader = session.prepare(model, optimizer, data, plan=plan, **options)
            assert session.steps_per_epoch(data, plan, **options) == len(loader)
            made = []
            for _ in session.epochs(2):
                for x, y in loader:
                    loss = nn.functional.cross_entropy(trained(x), y)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    made.append(float(loss.detach()))
            return made

    assert losses(DataLoader(dataset(), batch_size=5, shuffle=True, drop_last=True)) == losses(
        dataset(), shuffle=True, drop_last=True
    )


def test_a_dict_of_tensors_is_counted_by_hand_too():
    model, batch = Net(), {"scale": 1.0, "x": torch.ones(6, 5).double(), "y": torch.ones(6, 1).double()}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = evenly.synchronize(model, optimizer, every=1)
    trained(batch).backward()
    optimizer.step()
    assert trained.batch_samples == 6
    trained.close()
    torch.distributed.destroy_process_group()


def test_logged_tensors_and_what_is_not_one_number(tmp_path):
    with evenly.Session(tmp_path) as session:
        session.log(loss=torch.tensor(0.25, requires_grad=True), accuracy=torch.tensor([1]), nothing=None)
        with pytest.raises(SpecError, match=r"loss=.*shape \[2\]"):
            session.log(loss=torch.zeros(2))
        with pytest.raises(SpecError, match="one number"):
            session.log(loss="small")
        with pytest.raises(SpecError, match="count is 0 on every rank"):
            session.mean(1.0, count=0)
        with pytest.raises(SpecError, match="cannot be sent: object"):
            session.gather([object()])
        with pytest.raises(SpecError, match="count=-1"):
            session.mean(1.0, count=-1)
    (event,) = evenly.Run.read(tmp_path).of(Measured)
    assert event.values == {"loss": 0.25, "accuracy": 1.0, "nothing": None}


def test_what_is_asked_in_the_wrong_place():
    with evenly.Session(device="cpu") as session:
        with pytest.raises(SpecError, match="come from prepare"):
            session.feed(dataset(), train=True)
        with pytest.raises(SpecError, match="before prepare"), session.accumulate(2):
            pass
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained, _, _ = session.prepare(model, optimizer, plan=session.plan(batch_size=4))
        with pytest.raises(SpecError, match=r"accumulate\(\) was given 0"), session.accumulate(0):
            pass
        with pytest.raises(SpecError, match="not called inside"), session.accumulate(2) as batch:
            batch.backward(torch.zeros((), requires_grad=True))
        with session.accumulate(9, is_last=True) as batch:  # of a loader of one's own
            batch.backward(trained(torch.ones(4, 6, 5)).sum())
        assert batch.is_last
        with pytest.raises(DataError, match="Give the dataset itself"):
            session.prepare(network(), optimizer, evenly.feed(dataset(), session.plan(batch_size=4)), name="b",
                            plan=session.plan(batch_size=4))  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(*, steps=3, leave_at=None, **options):
    data = TensorDataset(torch.ones(4 * steps, 2))
    with evenly.Session(device="cpu", **options) as session:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trained, _, loader = session.prepare(model, optimizer, data, plan=session.plan(batch_size=4))
        for _ in session.epochs(2):
            for (x,) in loader:
                loss = trained(x).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if leave_at == "step":
                    break
            session.log(loss=loss)
            if leave_at is not None:
                break
        session.print("done")


def test_a_mean_of_numbers_has_their_precision():
    with evenly.Session(device="cpu", progress=False) as session:
        assert session.mean(16777217.0) == 16777217.0
        assert session.mean(0.1) == 0.1


@pytest.mark.parametrize("wish", ["epochs", "5 epochs", 1.5, 0, True])
def test_checkpoints_are_saved_by_steps_or_epochs(wish):
    with pytest.raises(SpecError, match=r"checkpoint_every=.*Give a number of steps, 'epoch' or None"):
        evenly.Session(checkpoint_every=wish)


@pytest.mark.parametrize("keep", [0, -1, 1.5])
def test_at_least_one_checkpoint_is_kept(keep):
    with pytest.raises(SpecError, match="keep was given"):
        evenly.Session(keep=keep)


def test_a_second_loop_and_odd_numbers_of_epochs_are_refused():
    with evenly.Session(device="cpu", progress=False) as session:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = TensorDataset(torch.ones(8, 2))
        trained, _, loader = session.prepare(model, optimizer, data, plan=session.plan(batch_size=4))
        for count in (1.5, -1, "3", None):
            with pytest.raises(SpecError, match=r"epochs\(\) was given"):
                list(session.epochs(count))
        epochs = session.epochs(1)
        next(epochs)
        (x,) = next(iter(loader))
        with pytest.raises(SpecError, match=r"without batch.backward\(\)"), session.accumulate(2):
            trained(x).mean().backward()
        with pytest.raises(SpecError, match=r"accumulate\(\) was given"), session.accumulate("2"):
            pass
        with pytest.raises(SpecError, match=r"epochs\(\) was called a second time"):
            list(session.epochs(2))


def test_a_line_for_each_epoch_on_stderr(capsys):
    run()
    out, err = capsys.readouterr()
    assert out == "done\n"
    first, second = err.splitlines()
    assert first.startswith("epoch 1/2: 3 steps, ")
    assert " samples/s, loss " in first
    assert second.startswith("epoch 2/2: 3 steps, ")
    run(progress=False)
    assert capsys.readouterr() == ("done\n", "")


@pytest.mark.parametrize(("leave_at", "lines"), [("epoch", ["epoch 1/2: 3 steps, "]), ("step", [])])
def test_an_early_end_is_said_and_a_whole_epoch_has_its_line(capsys, leave_at, lines):
    run(leave_at=leave_at)
    *epochs, last = capsys.readouterr().err.splitlines()
    assert [line.startswith(start) for line, start in zip(epochs, lines, strict=True)] == [True] * len(lines)
    assert last.startswith(f"stopped early after step {3 if lines else 1}: the program left the loop over epochs")


def test_a_bar_where_stderr_is_a_terminal(monkeypatch):
    monkeypatch.setattr("evenly.session.counters.RECORD_S", 0.0)
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    run()
    assert "epoch 1/2, step " in stream.getvalue()
    assert "epoch 2/2: 3 steps, " in stream.getvalue()


def test_a_resumed_run_says_where_it_goes_on(tmp_path, capsys):
    run(folder=tmp_path)
    capsys.readouterr()
    run(folder=tmp_path)
    assert capsys.readouterr().err.splitlines() == ["resumed at step 6"]
