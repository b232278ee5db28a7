"""A session without a launcher: what is saved, refused, recorded."""

import json

import pytest
import torch
from torch import nn

import evenly
from evenly.comm.nested_state import flatten, restore
from evenly.errors import CheckpointError, SpecError
from evenly.spec import CheckpointSaved, Measured, Run, RunFailed, RunFinished, RunStarted
from tests.session.programs import dataset, network


def loop(session, *, epochs=1, model=None, plan=None, **prepare):
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan or session.plan(batch_size=8)
    synchronized, optimizer, loader = session.prepare(model, optimizer, dataset(), plan=plan, **prepare)
    for _ in session.epochs(epochs):
        for x, y in loader:
            nn.functional.cross_entropy(synchronized(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with evenly.Session() as session:
        loop(session)
        with pytest.raises(SpecError, match="folder"):
            session.checkpoint()
    assert not list(tmp_path.iterdir())


def test_a_session_that_is_not_open_says_so():
    with pytest.raises(SpecError, match=r"it is not open.*with evenly\.Session"):
        evenly.Session().plan(batch_size=8)


def test_the_record_tells_the_run(tmp_path):
    heard = []
    with evenly.Session(tmp_path / "run") as session:
        session.listen(heard.append)
        session.describe(width=3)
        loop(session, epochs=2)
        session.log(accuracy=0.5)
    run = Run.read(tmp_path / "run")
    assert run.of(RunStarted)[0].settings == {"width": 3}
    assert run.latest_values() == {"accuracy": 0.5}
    assert len(run.of(CheckpointSaved)) == 2
    end = run.last(RunFinished)
    assert (end.steps, end.samples) == (14, 106)
    assert tuple(heard) == run.events
    (phases,) = end.phases
    assert 0 < phases.compute_s < end.seconds
    assert (phases.exchange_s, phases.exchange_bytes, phases.gradient_bytes) == (0.0, 0, 0)


def test_checkpoints_by_steps_need_a_period_in_steps(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenly.Session(tmp_path / "run", checkpoint_every=5) as session:
        plan = session.plan(batch_size=4, every="2s")
        with pytest.raises(SpecError, match="unequal numbers of them"):
            session.prepare(model, optimizer, plan=plan)


def test_a_failure_is_recorded_and_the_group_closed(tmp_path):
    with pytest.raises(ZeroDivisionError), evenly.Session(tmp_path) as session:
        session.log(loss=1.0 / 0)
    assert "ZeroDivisionError" in Run.read(tmp_path).last(RunFailed).error
    assert not torch.distributed.is_initialized()


def test_a_line_cut_by_a_crash_does_not_spoil_the_next_run(tmp_path):
    with evenly.Session(tmp_path) as session:
        session.log(a=1.0)
    with (tmp_path / "run.jsonl").open("a") as stream:
        stream.write('{"event":"meas')
    with evenly.Session(tmp_path) as session:
        session.log(b=2.0)
    assert [event.values for event in Run.read(tmp_path).of(Measured)] == [{"a": 1.0}, {"b": 2.0}]


def test_a_plan_for_others_is_refused(tmp_path):
    one = evenly.Cluster.model_validate({"nodes": [{"name": "a", "ranks": [0], "devices": [{"kind": "cpu"}]}]})
    two = evenly.Cluster.model_validate(
        {"nodes": [{"name": "a", "ranks": [0, 1], "devices": [{"kind": "cpu"}, {"kind": "cpu"}]}]}
    )
    with evenly.Session() as session:
        with pytest.raises(SpecError, match="2 ranks, but 1"):
            loop(session, plan=evenly.Plan.even(two, batch_size=4))
        loop(session, plan=evenly.Plan.even(one, batch_size=4))
        with pytest.raises(SpecError, match="name="):
            loop(session)


def test_a_plan_edited_wrongly_is_refused_with_the_field(tmp_path):
    with evenly.Session() as session:
        session.plan(batch_size=4, every=5).save(tmp_path / "plan.json")
    value = json.loads((tmp_path / "plan.json").read_text())
    value["period"]["steps"] = 0
    (tmp_path / "plan.json").write_text(json.dumps(value))
    with pytest.raises(SpecError, match=r"plan\.json.*period\.steps"):
        evenly.Plan.load(tmp_path / "plan.json")


def test_arguments_that_a_plan_does_not_know_are_named():
    with evenly.Session() as session, pytest.raises(SpecError, match="speeds=, which it does not know"):
        session.plan(batch_size=4, speeds=[1])


@pytest.mark.parametrize("wish", ["fast", "profile.json", None])
def test_a_profile_that_is_none_is_refused(wish):
    with (
        pytest.raises(SpecError, match=r"Profile\.load\('profile\.json'\)"),
        evenly.Session(device="cpu") as session,
    ):
        session.plan(torch.nn.Linear(3, 2), torch.ones(4, 3), global_batch=4, profile=wish)


@pytest.mark.parametrize("wish", [0, -1])
def test_a_period_below_one_is_refused(wish):
    with evenly.Session() as session, pytest.raises(SpecError, match="at least 1"):
        session.plan(batch_size=4, every=wish)


def test_a_checkpoint_of_another_model_names_the_parameter(tmp_path):
    with evenly.Session(tmp_path) as session:
        loop(session)
    other = network()
    other[5] = nn.Linear(27, 4)
    with pytest.raises(CheckpointError, match=r"'5\.weight'"), evenly.Session(tmp_path) as session:
        loop(session, epochs=2, model=other)
    assert not torch.distributed.is_initialized()


def test_a_missing_file_and_a_broken_manifest_are_told(tmp_path):
    with evenly.Session(tmp_path) as session:
        loop(session)
    (newest,) = (tmp_path / "checkpoints").glob("step-*")
    (newest / "node-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match="node-0"), evenly.Session(tmp_path) as session:
        loop(session)
    (newest / "manifest.json").write_text('{"version": 1, ')
    with pytest.raises(CheckpointError, match="manifest"), evenly.Session(tmp_path) as session:
        loop(session)
    (newest / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="manifest"), evenly.Session(tmp_path) as session:
        loop(session)
    with evenly.Session(tmp_path, resume=False) as session:
        loop(session)


def test_tracked_things_are_resumed(tmp_path):
    def once(epochs):
        with evenly.Session(tmp_path) as session:
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            synchronized, _, loader = session.prepare(model, optimizer, dataset(), plan=session.plan(batch_size=16))
            session.track(schedule=schedule, scaler=scaler)
            for _ in session.epochs(epochs):
                for x, y in loader:
                    scaler.scale(nn.functional.cross_entropy(synchronized(x), y)).backward()
                    scaler.step(optimizer)
                    scaler.update(2.0 * scaler.get_scale())
                    optimizer.zero_grad()
                schedule.step()
            return optimizer.param_groups[0]["lr"], scaler.get_scale()

    assert once(1) == (0.5, 8.0 * 2**4)
    assert once(3) == (0.125, 8.0 * 2**12)


def test_a_gan_has_two_models_in_one_run(tmp_path):
    def once():
        with evenly.Session(tmp_path) as session:
            torch.manual_seed(0)
            first, second = nn.Linear(5, 5), nn.Linear(5, 1)
            optimizers = [torch.optim.Adam(m.parameters()) for m in (first, second)]
            plan = session.plan(batch_size=8)
            data = torch.utils.data.TensorDataset(torch.ones(16, 5))
            maker, _, loader = session.prepare(first, optimizers[0], data, plan=plan, name="maker")
            judge, _, nothing = session.prepare(second, optimizers[1], plan=plan, name="judge")
            assert nothing is None
            for _ in session.epochs(1):
                for (x,) in loader:
                    judge(maker(x)).mean().backward()
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            return [p.detach().clone() for p in (*first.parameters(), *second.parameters())]

    torch.testing.assert_close(once(), once(), rtol=0, atol=0)  # the second time everything is done already


def test_state_of_any_optimizer_goes_through_json_and_tensors():
    value = {
        "state": {0: {"step": torch.tensor(3.0), "moments": [torch.ones(2), None]}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "name": "a", "params": [0], "fused": None}],
    }
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(flatten(value, "o", tensors))
    back = restore(json.loads(text), tensors)
    assert back["param_groups"] == value["param_groups"]
    assert isinstance(back["param_groups"][0]["betas"], tuple)
    torch.testing.assert_close(back["state"], value["state"])
    with pytest.raises(CheckpointError, match="object"):
        flatten({"thing": object()}, "o", {})


def test_starting_afresh_sets_earlier_checkpoints_aside(tmp_path):
    with evenly.Session(tmp_path, keep=1) as session:
        loop(session, epochs=2)
    with evenly.Session(tmp_path, keep=1, resume=False) as session:
        loop(session, epochs=1)
    steps = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
    assert steps == ["step-000000007"]
    assert len(list((tmp_path / "checkpoints").glob("earlier-1/step-*"))) == 1


def test_an_error_of_torch_gives_way_to_what_the_alarm_knows():
    """A collective inside torch only says that somebody is missing."""

    def lose_a_rank():
        with evenly.Session() as session:
            session._monitor.fail(evenly.errors.PeerError("rank 3 has gone"))
            raise RuntimeError("Timed out waiting 34000ms for recv operation to complete")

    with pytest.raises(evenly.errors.PeerError, match="rank 3 has gone") as caught:
        lose_a_rank()
    assert isinstance(caught.value.__context__, RuntimeError)


def test_a_loader_of_ones_own_is_refused_where_the_session_has_made_one():
    own = torch.utils.data.DataLoader(dataset(), batch_size=8)
    x, y = next(iter(own))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenly.Session(device="cpu") as session:
        synchronized, optimizer, loader = session.prepare(model, optimizer, dataset(), plan=session.plan(batch_size=8))
        with pytest.raises(SpecError, match=r"is not from the loader .* leave the dataset out"):
            synchronized(x)
        batches = list(loader)  # the samples of the last one would count for all
        with pytest.raises(SpecError, match="train each batch before the next"):
            synchronized(batches[0][0])
        synchronized.eval()
        assert synchronized(x).shape == (8, 3)
        nn.functional.cross_entropy(synchronized(x), y).backward()  # trained in evaluation: as large as the batch is
        assert all(parameter.grad.any() for parameter in model.parameters())
    with evenly.Session(device="cpu") as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        synchronized, optimizer, _ = session.prepare(model, optimizer, plan=session.plan(batch_size=8))
        nn.functional.cross_entropy(synchronized(x), y).backward()
        assert all(parameter.grad.any() for parameter in model.parameters())
