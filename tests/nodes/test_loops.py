"""The loops people write: accumulation, mixed precision, GANs, frozen and tied parameters, third-party optimizers."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from evenly.errors import SpecError
from evenly.nodes import join_nodes
from evenly.spec import EveryEpoch, EverySteps, Exchange, period_of
from tests.ranks import cluster_of, ragged, run_ranks

SEEDING = threading.Lock()


def network():
    with SEEDING:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(rank, step, size=4, width=6):
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, width, generator=g, dtype=torch.float64), torch.randint(3, (size,), generator=g)


def join(rank_group, nodes, model, optimizer, every=2, **more):
    period = every if not isinstance(every, int | str) else period_of(every)
    return join_nodes(model, optimizer, rank_group=rank_group, cluster=cluster_of(nodes), period=period, **more)


def loss_of(model, data):
    return nn.functional.cross_entropy(model(data[0]), data[1])


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_accumulation_equals_one_large_batch():
    nodes = ragged(2, 1)

    def act(rank_group, accumulate):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        synchronized = join(rank_group, nodes, model, optimizer)
        for step in range(5):
            x, y = batch(rank_group.rank, step, size=6 + 2 * rank_group.rank)
            if accumulate:
                half = len(x) // 2
                with synchronized.no_sync():
                    (loss_of(synchronized, (x[:half], y[:half])) / 2).backward()
                (loss_of(synchronized, (x[half:], y[half:])) / 2).backward()
            else:
                loss_of(synchronized, (x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronized.finish()
        synchronized.close()
        return parameters(model)

    torch.testing.assert_close(run_ranks(3, act, True), run_ranks(3, act, False), rtol=1e-12, atol=1e-12)


def test_bf16_autocast_keeps_ranks_equal_and_trains():
    def act(rank_group):
        model = network().float()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        synchronized = join(rank_group, ragged(2, 1), model, optimizer, every=3)
        for _ in range(6):
            x, y = batch(0, 7)
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(synchronized, (x.float(), y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronized.finish()
        synchronized.close()
        return parameters(model), float(loss.detach())

    results = run_ranks(3, act)
    assert all(same(result[0], results[0][0]) for result in results)
    assert results[0][1] < 1.2
    assert results[0][0][0].dtype == torch.float32


def test_a_grad_scaler_that_skips_on_one_node_does_not_shift_the_schedule():
    """The classic bug: the node that skipped a step averages another iteration than the others, then hangs."""

    def act(rank_group):
        model = network().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        synchronized = join(rank_group, ragged(2, 1), model, optimizer, every=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        exchanged = []
        synchronized.on_exchange.append(lambda done: exchanged.append(done.step))
        for step in range(1, 8):
            x, y = batch(rank_group.rank, step)
            loss = loss_of(synchronized, (x.float(), y))
            if rank_group.rank == 2 and step == 3:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(synchronized.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        synchronized.finish()
        synchronized.close()
        return parameters(model), exchanged, synchronized.schedule.step

    results = run_ranks(3, act)
    for values, exchanged, step in results:
        assert same(values, results[0][0])
        assert all(torch.isfinite(value).all() for value in values)
        assert exchanged == [2, 4, 6, 7]
        assert step == 7


def test_two_models_with_two_optimizers():
    """A GAN: the discriminator also runs inside the generator's step, which must not count as a step of its own."""

    def act(rank_group):
        with SEEDING:
            torch.manual_seed(3)
            generator, critic = nn.Linear(2, 5).double(), nn.Linear(5, 1).double()
        g_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
        c_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
        g_model = join(rank_group, ragged(2, 1), generator, g_optimizer, every=3)
        c_model = join(rank_group, ragged(2, 1), critic, c_optimizer, every=2)
        for step in range(7):
            noise, real = batch(rank_group.rank, step, width=2)[0], batch(rank_group.rank, 50 + step, width=5)[0]
            c_optimizer.zero_grad()
            (c_model(g_model(noise).detach()).mean() - c_model(real).mean()).backward()
            c_optimizer.step()
            g_optimizer.zero_grad()
            (-c_model(g_model(noise)).mean()).backward()
            g_optimizer.step()
        for model in (g_model, c_model):
            model.finish()
            model.close()
        return parameters(generator) + parameters(critic), g_model.schedule, c_model.schedule

    results = run_ranks(3, act)
    for values, g_schedule, c_schedule in results:
        assert same(values, results[0][0])
        assert (g_schedule.step, g_schedule.exchanges) == (7, 3)
        assert (c_schedule.step, c_schedule.exchanges) == (7, 4)


def test_invariants_equal_in_a_node_after_each_step_and_everywhere_after_an_exchange():
    nodes = ragged(2, 1)

    def act(rank_group):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        synchronized = join(rank_group, nodes, model, optimizer, every=EverySteps(4, warmup=2))
        trace = [parameters(model)]
        for step in range(1, 11):
            loss_of(synchronized, batch(rank_group.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            trace.append(parameters(model))
        synchronized.finish()
        trace.append(parameters(model))
        synchronized.close()
        return trace

    first, second, other = run_ranks(3, act)
    for step in range(12):
        assert same(first[step], second[step]), f"inside the node after step {step}"
        agreed = step in (0, 1, 2, 6, 10, 11)  # start, warm-up, K' = 4 counted from there, finish
        assert same(first[step], other[step]) == agreed, f"across nodes after step {step}"


def test_the_period_of_an_epoch_waits_for_its_end():
    def act(rank_group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        synchronized = join(rank_group, ragged(1, 1), model, optimizer, every=EveryEpoch())
        counts = []
        for epoch in range(2):
            for step in range(3):
                loss_of(synchronized, batch(rank_group.rank, 10 * epoch + step)).backward()
                optimizer.step()
                optimizer.zero_grad()
                counts.append(synchronized.schedule.exchanges)
            synchronized.end_epoch()
            synchronized.end_epoch()  # told twice, exchanged once
        synchronized.finish()
        synchronized.close()
        return counts, synchronized.schedule.exchanges, parameters(model)

    results = run_ranks(2, act)
    assert results[0][0] == [0, 0, 0, 1, 1, 1]
    assert results[0][1] == 2
    assert same(results[0][2], results[1][2])


@pytest.mark.parametrize("told", [False, True])
def test_a_period_of_several_epochs_waits_for_the_last_of_them(told):
    """Calls are counted, or say which epoch has ended; a run that resumes goes on in the same period."""

    def train(rank_group, epochs, progress=None):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        synchronized = join(rank_group, ragged(1, 1), model, optimizer, every=period_of("3 epochs"))
        if progress is not None:
            synchronized.resume(progress)
        exchanges = []
        for epoch in epochs:
            for step in range(2):
                loss_of(synchronized, batch(rank_group.rank, 10 * epoch + step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            synchronized.end_epoch(*[epoch + 1] * told)
            synchronized.end_epoch(*[epoch + 1] * told)  # told twice, counted once
            exchanges.append(synchronized.schedule.exchanges)
        progress = synchronized.progress()
        synchronized.finish()
        synchronized.close()
        return exchanges, synchronized.schedule.exchanges, progress

    def act(rank_group):
        _, _, progress = train(rank_group.scoped("first"), range(2))
        return train(rank_group.scoped("all"), range(8))[:2], train(rank_group.scoped("then"), range(2, 4), progress)[0]

    for whole, resumed in run_ranks(2, act):
        assert whole == ([0, 0, 1, 1, 1, 2, 2, 2], 3)
        assert resumed == [1, 1]


def test_frozen_tied_and_channels_last_parameters_stay_what_they_are():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
            self.frozen = nn.Linear(4, 4)
            self.frozen.requires_grad_(False)
            self.encode, self.decode = nn.Linear(4, 4), nn.Linear(4, 4)
            self.decode.weight = self.encode.weight
            self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
            self.register_buffer("scale", torch.full((4,), 0.1))

        def forward(self, x):
            y = self.frozen(self.conv(x).mean((2, 3))) * self.mask * self.scale
            return self.decode(self.encode(y))

    def act(rank_group):
        with SEEDING:
            torch.manual_seed(rank_group.rank)
            model = Tied()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        places = [p.data_ptr() for p in model.parameters()]
        synchronized = join(rank_group, ragged(2, 1, 1), model, optimizer, every=2)
        frozen = model.frozen.weight.clone()
        g = torch.Generator().manual_seed(rank_group.rank)
        for _ in range(5):
            synchronized(torch.randn(2, 3, 5, 5, generator=g)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronized.finish()
        synchronized.close()
        assert places == [p.data_ptr() for p in model.parameters()], "parameters must be updated in place"
        assert model.decode.weight is model.encode.weight
        assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(model.frozen.weight, frozen)
        assert torch.equal(model.scale, torch.full((4,), 0.1)), "a constant buffer must not drift"
        return parameters(model)

    results = run_ranks(4, act)
    assert all(same(result, results[0]) for result in results)


def test_unused_parameters_and_bf16_parameters():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.used(x)

    def act(rank_group):
        with SEEDING:
            torch.manual_seed(0)
            model = Partly().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        synchronized = join(rank_group, ragged(2, 1), model, optimizer, find_unused_parameters=True)
        for step in range(3):
            synchronized(batch(rank_group.rank, step)[0].bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronized.finish()
        synchronized.close()
        return parameters(model)

    results = run_ranks(3, act)
    assert all(same(result, results[0]) for result in results)


def test_a_closure_and_hooks_of_the_optimizer_still_work():
    def act(rank_group):
        model = network()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        synchronized = join(rank_group, ragged(1, 1), model, optimizer, every=2)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(synchronized, batch(rank_group.rank, 0))
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(4)]
        synchronized.finish()
        synchronized.close()
        return parameters(model), losses, len(seen), synchronized.schedule.step

    results = run_ranks(2, act)
    assert same(results[0][0], results[1][0])
    assert results[0][1][-1] < results[0][1][0]
    assert results[0][2:] == (4, 4)


def test_evaluation_with_an_exchange_under_way_changes_nothing():
    """The average of the nodes is seen, and training goes on as if nobody had looked."""

    def act(rank_group, looks):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = {"exchange": Exchange(overlap=2, codec="int8", fragments=2)}
        synchronized = join(rank_group, ragged(1, 1), model, optimizer, every=4, **settings)
        seen = []
        for step in range(11):
            loss_of(synchronized, batch(rank_group.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if looks:
                with synchronized.agreed():
                    seen.append(parameters(model))
        synchronized.finish()
        synchronized.close()
        return parameters(model), seen

    looked, plain = run_ranks(2, act, True), run_ranks(2, act, False)
    for (ended, _), (wanted, _) in zip(looked, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ended, wanted, strict=True))
    for first, second in zip(looked[0][1], looked[1][1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_agreed_weighs_nodes_by_their_samples_also_with_an_exchange_under_way():
    def act(rank_group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        synchronized = join(rank_group, ragged(1, 1), model, optimizer, every=2, exchange=Exchange(overlap=2))
        for step in range(2):
            x, y = batch(rank_group.rank, step)
            few = slice(None) if rank_group.rank else slice(0, 1)
            loss_of(synchronized, (x[few], y[few])).backward()
            optimizer.step()
            optimizer.zero_grad()
        own, count = parameters(model), 1 if rank_group.rank == 0 else len(x)
        with synchronized.agreed():
            average = parameters(model)
        assert same(own, parameters(model))
        synchronized.finish()
        synchronized.close()
        return own, average, parameters(model), count

    (own_a, average_a, end_a, few), (own_b, average_b, _, many) = run_ranks(2, act)
    wanted = [(few * x + many * y) / (few + many) for x, y in zip(own_a, own_b, strict=True)]
    assert few < many
    assert same(average_a, average_b)
    torch.testing.assert_close(average_a, wanted)
    torch.testing.assert_close(end_a, wanted)


def test_agreed_shows_the_average_and_gives_the_state_back():
    def act(rank_group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        synchronized = join(rank_group, ragged(1, 1), model, optimizer, every=100)
        loss_of(synchronized, batch(rank_group.rank, 0)).backward()
        optimizer.step()
        own = parameters(model)
        with synchronized.agreed():
            average = parameters(model)
        assert same(own, parameters(model))
        synchronized.finish()
        synchronized.close()
        return own, average, parameters(model)

    (own_a, average_a, end_a), (own_b, average_b, _) = run_ranks(2, act)
    assert same(average_a, average_b)
    assert same(end_a, average_a)
    torch.testing.assert_close(average_a, [(x + y) / 2 for x, y in zip(own_a, own_b, strict=True)])
    assert not same(own_a, own_b)


@pytest.mark.parametrize("exchange", [Exchange(), Exchange(overlap=3, codec="int8")], ids=["waits", "overlaps"])
def test_a_checkpoint_inside_agreed_is_of_the_own_state(exchange):
    """The own state is there for the block, and what is saved in it is what is saved outside; nothing is sent."""

    def act(rank_group):
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(6, dtype=torch.float64), network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        synchronized = join(rank_group, ragged(1, 1), model, optimizer, every=3, exchange=exchange)
        for step in range(4):
            loss_of(synchronized, batch(rank_group.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()

        def saved():
            synchronized.prepare_checkpoint()
            state, buffers = synchronized.exchange_state(), synchronized.agreed_buffers
            return [*model.state_dict().values(), *buffers.values(), *(p["begun"] for p in state["trips"])]

        def copied():
            return [torch.as_tensor(value).clone() for value in saved()]

        outside = copied()
        with synchronized.own_state():  # outside of agreed() it changes nothing
            assert same(copied(), outside)
        with synchronized.agreed():
            average = parameters(model)
            with synchronized.own_state():
                inside = copied()
            assert same(parameters(model), average)
            with pytest.raises(SpecError, match=r"a checkpoint was called inside agreed"):
                synchronized.prepare_checkpoint()
        after = copied()
        with synchronized.agreed():
            model.load_state_dict(model.state_dict())
            with pytest.raises(SpecError, match="weights were loaded since"), synchronized.own_state():
                pass
        synchronized.finish()
        synchronized.close()
        return outside, inside, after, average

    results = run_ranks(2, act)
    for outside, inside, after, average in results:
        assert same(outside, inside)
        assert same(outside, after)
        assert same(average, results[0][-1])
    assert not same(results[0][0], results[1][0])


def test_a_rank_without_samples_adds_nothing():
    def act(rank_group):
        model = copy.deepcopy(shared)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        count = (lambda x: 0.0) if rank_group.rank == 1 else None
        synchronized = join(rank_group, ragged(2), model, optimizer, count=count)
        data = (
            batch(0, 0)
            if rank_group.rank == 0
            else (torch.full((1, 6), float("nan"), dtype=torch.float64), batch(0, 0)[1][:1])
        )
        loss_of(synchronized, data).backward()
        optimizer.step()
        synchronized.close()
        return parameters(model)

    shared = network()
    results = run_ranks(2, act)
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    loss_of(shared, batch(0, 0)).backward()
    optimizer.step()
    for result in results:
        torch.testing.assert_close(result, parameters(shared), rtol=1e-12, atol=1e-13)


def test_any_period_below_one_is_refused():
    for wish in (0, -1):
        with pytest.raises(Exception, match="at least 1"):
            period_of(wish)


def test_a_state_read_while_nodes_differ_is_warned_of_once(caplog):
    nodes = ragged(2, 1)

    def act(rank_group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        synchronized = join(rank_group, nodes, model, optimizer, every=3)
        hooks = []
        for step in range(4):
            loss_of(synchronized, batch(rank_group.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with synchronized.agreed():
                model.state_dict()  # the average of all nodes
            if step == 2:
                model.state_dict()  # just exchanged
                hooks.append(len(caplog.records))
        copied = copy.deepcopy(model)
        pickle.loads(pickle.dumps(model)).state_dict()
        copied.state_dict()
        with synchronized.being_saved():
            model.state_dict()  # a checkpoint has the states of all nodes
        hooks.append(len(caplog.records))
        synchronized.module.state_dict()
        synchronized.state_dict()
        synchronized.finish()
        synchronized.close()
        return hooks, dict(model._state_dict_pre_hooks)

    results = run_ranks(3, act)
    assert [left for _, left in results] == [{}, {}, {}], "close() leaves the network as it was"
    warnings = [record.getMessage() for record in caplog.records if "state_dict()" in record.getMessage()]
    assert len(warnings) == 3, "one on each rank"
    assert all("1 step after the last exchange" in text and "agreed()" in text for text in warnings)


def test_a_moving_average_that_is_updated_at_exchanges_is_the_same_on_all_nodes():
    nodes = ragged(2, 1)

    def act(rank_group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        synchronized = join(rank_group, nodes, model, optimizer, every=2)
        moving = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        synchronized.on_exchange.append(lambda _: moving.update_parameters(model))
        for step in range(6):
            loss_of(synchronized, batch(rank_group.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronized.finish()
        synchronized.close()
        return parameters(moving.module), parameters(model), int(moving.n_averaged)

    results = run_ranks(3, act)
    assert all(same(result[0], results[0][0]) for result in results)
    assert results[0][2] == 3
    assert not same(results[0][0], results[0][1])
