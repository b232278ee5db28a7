"""What published networks do besides layers: each thing is cut exactly, on a tiny network that does it."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from evenly.comm import RankGroup
from evenly.errors import SpecError
from evenly.graph import trace
from evenly.layouts import TransferCosts, lay_out
from evenly.shards import Sharded, local_shard_of, shard_model, verify
from evenly.shards.run import retrace
from evenly.shards.run.dropout import draw
from tests.ranks import run_ranks
from tests.shards.compare import compare
from tests.shards.playing import Act, play

SHARES = [3, 2]
MANY_MESSAGES = TransferCosts(flops_per_byte=0.0, flops_per_message=0.0)


def images(samples: int = 4, size: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(samples * 100 + size)
    return torch.randn(samples, 3, size, size, dtype=torch.float64, generator=generator)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


class NormAct(nn.BatchNorm2d):
    """A batch norm that is written out, with an activation, as in libraries of image networks."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        y = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum or 0.1,
            self.eps,
        )
        return F.relu_(y)


def blocks(*between: nn.Module, width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *between, nn.Conv2d(width, 6, 3, padding=1), nn.Flatten(2), Mean()
    )


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1)


@pytest.mark.parametrize("cut_batch", [False, True])
def test_a_batch_norm_that_is_written_out_is_cut_with_its_statistics(cut_batch: bool) -> None:
    rates = TransferCosts(flops_per_byte=1e4) if cut_batch else None
    layout = compare(partial(blocks_of, NormAct(8)), images(), [2, 1], cut_batch=cut_batch, rates=rates)
    modes = {choice.mode for choice in layout.choices if choice.op == "batch_norm"}
    assert modes <= {"local", "moments"}
    assert not any(choice.note for choice in layout.choices)


def blocks_of(*between: nn.Module) -> nn.Module:
    return blocks(*between).double()


def test_a_rank_without_channels_of_such_a_batch_norm_takes_part() -> None:
    narrow = lambda: nn.Sequential(nn.Conv2d(3, 2, 1), NormAct(2), nn.Conv2d(2, 6, 1)).double()  # noqa: E731
    layout = compare(narrow, images(), [5, 3, 1])
    assert any(0 in cut.counts() for cut in layout.cuts)


class Averaging(nn.Module):
    """Keeps a running mean of each channel in a buffer, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
            self.batches.add_(1)
        return x * (1 + self.running.view(-1, 1, 1))


def test_buffers_that_forward_changes_in_place_change_on_every_rank() -> None:
    layout = compare(partial(blocks_of, Averaging()), images(), SHARES)
    assert sum(choice.op == "assign" for choice in layout.choices) == 3


def test_a_parameter_that_forward_changes_is_refused_by_name() -> None:
    class Changing(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.mul_(0.9)
            return super().forward(x)

    with pytest.raises(SpecError, match=r"changes '1\.weight' in place"):
        compare(lambda: nn.Sequential(nn.Conv2d(3, 8, 1), Changing(8, 3, 1)).double(), images(), SHARES)


class Overwriting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_zeros((x.shape[2], x.shape[3]))
        for number, rows in enumerate((slice(0, 2), slice(2, 4))):
            mask[rows, 1:] = number + 1.0
        y = x * mask
        y[:, 0] = 0.5
        return y


def test_parts_of_tensors_may_be_overwritten() -> None:
    layout = compare(partial(blocks_of, Overwriting()), images(), SHARES)
    assert "writes into a part" in layout.explain()


class DropPath(nn.Module):
    """Stochastic depth: whole samples are dropped, in training only."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.p)
        return x * kept.div_(1 - self.p)


class Noise(nn.Module):
    def __init__(self, draw_noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw_noise = draw_noise

    def forward(self, x: Tensor) -> Tensor:
        return x * self.draw_noise(x) if self.training else x


class HiddenNoise(nn.Module):
    """Cannot be traced; draws with torch's own generator."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            noise = torch.rand(x.shape, dtype=x.dtype) if self.training else torch.ones_like(x)
        return x * noise


NOISE: dict[str, Callable[[], nn.Module]] = {
    "stochastic depth": DropPath,
    "randn_like": lambda: Noise(torch.randn_like),
    "rand": lambda: Noise(lambda x: torch.rand(x.shape, dtype=x.dtype, device=x.device)),
    "bernoulli": lambda: Noise(lambda x: torch.bernoulli(x.sigmoid())),
    "uniform_": lambda: Noise(lambda x: torch.empty_like(x).uniform_(0.5, 1.5)),
    "randint": lambda: Noise(lambda x: torch.randint(3, (x.shape[0], 1, 1, 1))),
    "RReLU": nn.RReLU,
    "alpha dropout": nn.AlphaDropout,
    "gumbel softmax": lambda: Noise(lambda x: F.gumbel_softmax(x, dim=1)),
    "a module that cannot be traced": HiddenNoise,
}


def _trained(rank_group: RankGroup, model: nn.Module, shares: Sequence[float], steps: int) -> list[Tensor]:
    sharded = shard_model(model, images(), rank_group=rank_group, shares=shares)
    sharded._dropout_stream.seed = 5
    try:
        outputs = []
        for _ in range(steps):
            outputs.append(sharded(images()))
            outputs[-1].square().sum().backward()
        gradients = [local_shard_of(p).full(p.grad) for p in sharded.parameters()]  # type: ignore[union-attr,arg-type]
        sharded.eval()
        return [*(x.detach() for x in outputs), *gradients, sharded(images()).detach()]
    finally:
        sharded.close()


@pytest.mark.parametrize("name", NOISE)
def test_random_numbers_do_not_depend_on_the_cut(name: str) -> None:
    _require_same_numbers(NOISE[name])


def _require_same_numbers(build: Callable[[], nn.Module]) -> None:
    models = [seeded(lambda: blocks(build())) for _ in range(2)]
    runs = [
        run_ranks(len(shares), _trained, model, shares, 2)
        for model, shares in zip(models, ([1], [5, 3, 1]), strict=True)
    ]
    alone = runs[0][0]
    assert not torch.equal(alone[0], alone[1]), "every step draws anew"
    for found in itertools.chain(*runs[1:]):
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    plain = models[0].eval()(images())
    torch.testing.assert_close(alone[-1], plain, rtol=1e-9, atol=1e-9)


def test_drawn_numbers_have_torchs_distribution_and_differ_between_steps() -> None:
    zeros = torch.zeros(200, 50)
    first, second = (draw("rand_like", torch.rand_like, (zeros,), {}, key) for key in (1, 2))
    assert abs(float(first.mean()) - 0.5) < 0.02
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, draw("rand_like", torch.rand_like, (zeros,), {}, 1), rtol=0, atol=0)


def test_verify_compares_a_network_with_stochastic_depth() -> None:
    models = [seeded(lambda: blocks(NormAct(8), DropPath(), nn.Dropout(0.3))) for _ in range(2)]

    def act(rank_group: RankGroup) -> tuple[bool, bool]:
        model = models[rank_group.rank]
        sharded = shard_model(model, images(), rank_group=rank_group, shares=SHARES)
        try:
            report = verify(model, sharded, images())
            return report.ok, sharded.training
        finally:
            sharded.close()

    assert run_ranks(2, act) == [(True, True)] * 2


class Auxiliary(nn.Module):
    """A second head that only training has; evaluation gives probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)
        self.norm, self.auxiliary, self.head = NormAct(8), nn.Linear(8, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.stem(x))
        y = self.head(self.body(h).mean((2, 3)))
        return (y, self.auxiliary(h.mean((2, 3)))) if self.training else y.softmax(-1)


def test_a_network_may_do_other_things_in_evaluation() -> None:
    compare(lambda: Auxiliary().double(), images(), [5, 3, 1])


def test_modules_may_be_in_different_modes() -> None:
    def freeze(model: nn.Module) -> None:
        model.norm.eval()

    def evaluate(model: nn.Module) -> None:
        model.eval()

    acts = [
        Act(images()),
        Act(images(), freeze),
        Act(images(2), evaluate, trains=False),
        Act(images(3), nn.Module.train),
    ]
    assert play(partial(seeded, Auxiliary), images(), SHARES, acts) == ""


class Caching(nn.Module):
    """Keeps what it computes of its parameters, in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(8))
        self.register_buffer("order", torch.arange(8).flip(0))
        self.cache: dict[str, Tensor] = {}
        self.last: Tensor | None = None

    def train(self, mode: bool = True) -> "Caching":
        self.cache, self.last = {}, None
        return super().train(mode)

    def gains(self, device: torch.device) -> Tensor:
        if self.training:
            return self.gain[self.order]
        if str(device) not in self.cache:
            self.cache[str(device)] = self.gain[self.order]
        self.last = self.gain * 2
        return self.cache[str(device)]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gains(x.device).view(-1, 1, 1)


def test_a_cache_of_what_does_not_depend_on_the_inputs_is_allowed() -> None:
    compare(partial(blocks_of, Caching()), images(), SHARES)


def test_a_network_that_keeps_its_activations_is_still_refused() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[str, Tensor] = {}
            self.inner = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.kept["x"] = self.inner(x)
            return self.kept["x"]

    with pytest.raises(SpecError, match="changes its attribute 'kept'"):
        compare(lambda: Keeping().double(), images(), SHARES)


class Positions(nn.Module):
    """Replaces a buffer by one of another shape, depending on values, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.grid.numel() != x.shape[-1] or bool(self.grid.sum() < 0):
            self.grid = torch.arange(x.shape[-1], dtype=x.dtype)
        return x + self.grid


def test_a_module_that_is_computed_whole_may_replace_its_buffers() -> None:
    layout = compare(partial(blocks_of, Positions()), images(), SHARES)
    assert "it cannot be traced" in layout.explain()


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.attend(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("cut_batch", [False, True])
def test_images_of_other_sizes(cut_batch: bool) -> None:
    net = lambda: seeded(lambda: blocks(NormAct(8), nn.MaxPool2d(2), nn.Dropout(0.0)))  # noqa: E731
    evaluate = lambda model: model.eval()  # noqa: E731
    acts = [Act(images(size=size)) for size in (6, 10, 8, 6)] + [Act(images(3, size=12), evaluate, trains=False)]
    assert play(net, images(), SHARES, acts, cut_batch=cut_batch) == ""


def test_sequences_of_other_lengths_and_a_limit_of_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrace, "MOST_TRACES", 2)
    lengths = (5, 7, 4, 9, 7, 5)
    ids = [torch.randint(11, (3, length), generator=torch.Generator().manual_seed(length)) for length in lengths]
    assert play(partial(seeded, Tokens), ids[0], SHARES, [Act(x) for x in ids]) == ""


def test_a_size_that_the_network_does_not_take_is_the_networks_own_error() -> None:
    flat = lambda: seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 6), nn.ReLU(), nn.Linear(6, 4)))  # noqa: E731
    said = play(flat, images(), SHARES, [Act(images()), Act(images(size=8))])
    assert "must fit the network" in said
    assert "number of dims" in play(flat, images(), SHARES, [Act(images()[0])])


def _penalized(model: nn.Module) -> tuple[Tensor, Tensor]:
    x = images().requires_grad_()
    y = model(x)
    weights = torch.arange(y.numel(), dtype=y.dtype).cos().view(y.shape)
    (slope,) = torch.autograd.grad((y * weights).sum(), x, create_graph=True)
    loss = y.square().mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "BatchNorm2d": nn.BatchNorm2d,
    "NormAct": NormAct,
    "GroupNorm of one group": partial(nn.GroupNorm, 1),
    "GroupNorm of four groups": partial(nn.GroupNorm, 4),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("shares", [[2, 1], [9, 5, 1]])
def test_gradients_of_gradients(name: str, shares: list[float]) -> None:
    norm = NORMS[name]
    models = [seeded(lambda: blocks(norm(8), nn.Tanh(), nn.Conv2d(8, 8, 1, groups=2))) for _ in range(len(shares) + 1)]
    truth = _penalized(models[-1])

    def act(rank_group: RankGroup) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
        example = images().requires_grad_()
        sharded: Sharded = shard_model(models[rank_group.rank], example, rank_group=rank_group, shares=shares)
        try:
            found = _penalized(sharded)
            return found, [local_shard_of(p).full(p.grad) for p in sharded.parameters()]  # type: ignore[union-attr,arg-type]
        finally:
            sharded.close()

    for found, gradients in run_ranks(len(shares), act):
        torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-9)
        for ours, parameter in zip(gradients, models[-1].parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-9, atol=1e-9)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 5, **options)
        self.first, self.head = nn.Linear(4, 6), nn.LazyLinear(3)
        self.has_cells = self.rnn.mode == "LSTM"
        self(torch.zeros(2, 3, 4))  # gives the head its size

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, states = self.rnn(self.first(x))
        return self.head(y), states[0][-1] + states[1][0].mean() if self.has_cells else states[-1]


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": partial(Recurrent, nn.LSTM, batch_first=True),
    "LSTM, steps first": partial(Recurrent, nn.LSTM),
    "LSTM with projections": partial(Recurrent, nn.LSTM, batch_first=True, proj_size=3, num_layers=2),
    "GRU of both directions": partial(Recurrent, nn.GRU, batch_first=True, bidirectional=True, bias=False),
    "RNN": partial(Recurrent, nn.RNN, batch_first=True, nonlinearity="relu", num_layers=2),
}
SEQUENCES = torch.randn(5, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("cut_batch", [False, True])
def test_recurrent_layers_are_cut_along_the_batch(name: str, cut_batch: bool) -> None:
    build = lambda: RECURRENT[name]().double()  # noqa: E731
    layout = compare(build, SEQUENCES, [5, 3, 1], cut_batch=cut_batch, rates=MANY_MESSAGES)
    (choice,) = [choice for choice in layout.choices if choice.op == "recurrent"]
    assert choice.mode == "bystander"
    cut_dim = "4 / 2 / 1 of 7 indices of dim 1" if name == "LSTM, steps first" else "3 / 2 / 0 of 5 samples"
    assert cut_dim in layout.explain()


def test_a_recurrent_layer_that_is_faster_whole_is_named_as_what_it_is() -> None:
    layout = compare(lambda: RECURRENT["LSTM"]().double(), SEQUENCES, SHARES)
    assert "recurrent  whole        whole on every rank" in layout.explain()
    assert "cutting the units of LSTM takes longer; cutting its batch takes longer" in layout.explain()
    single = lay_out(trace(RECURRENT["LSTM"]().double(), SEQUENCES[:1]), SHARES)
    assert "cutting the units of LSTM takes longer; cutting its batch is not possible here" in single.explain()


class GivenStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.start = nn.LSTM(4, 5, num_layers=2, batch_first=True), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        start = self.start(x[:, 0]).unflatten(1, (2, 5)).transpose(0, 1)
        y, (hidden, cells) = self.rnn(x, (start, start.tanh()))
        return y * cells[-1].unsqueeze(1) + self.rnn(x, (hidden, cells))[0]


def test_states_that_are_given_and_used_again() -> None:
    compare(lambda: GivenStates().double(), SEQUENCES, SHARES, rates=MANY_MESSAGES)


def test_dropout_between_recurrent_layers_does_not_depend_on_the_cut() -> None:
    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(8, 8, num_layers=2, dropout=0.4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.rnn(x.mean(-1).transpose(1, 2))[0].transpose(1, 2).unsqueeze(-1)

    _require_same_numbers(Pixels)


def test_sequences_of_other_lengths_through_recurrent_layers() -> None:
    sequences = [torch.randn(n, steps, 4, dtype=torch.float64) for n, steps in ((1, 7), (2, 4), (5, 7))]
    build = partial(seeded, RECURRENT["GRU of both directions"])
    assert play(build, SEQUENCES, [5, 3, 1], [Act(x) for x in sequences], cut_batch=True) == ""


class Compiled(nn.Module):
    def __init__(self, compile_inner: bool) -> None:
        super().__init__()
        self.inner: nn.Module = blocks(NormAct(8))
        self.head = nn.Linear(6, 4)
        if compile_inner:
            self.inner = torch.compile(self.inner, backend="eager", dynamic=False)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


COMPILED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile": lambda model: torch.compile(model, backend="eager", dynamic=False),  # type: ignore[return-value]
    "compile()": lambda model: [model.compile(backend="eager", dynamic=False), model][1],  # type: ignore[list-item]
    "an inner module": lambda model: model,
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_network_is_cut_as_the_uncompiled_one(name: str) -> None:
    plain = seeded(partial(Compiled, False))
    models = [COMPILED[name](seeded(partial(Compiled, name == "an inner module"))) for _ in SHARES]

    def act(rank_group: RankGroup) -> Tensor:
        sharded = shard_model(models[rank_group.rank], images(), rank_group=rank_group, shares=SHARES)
        try:
            assert not any("_orig_mod" in choice.note for choice in sharded.layout.choices)
            assert any(choice.mode == "partitioned" for choice in sharded.layout.choices)
            return sharded(images()).detach()
        finally:
            sharded.close()

    for found in run_ranks(len(SHARES), act):
        torch.testing.assert_close(found, plain(images()).detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by torch.compile
def test_a_cut_network_runs_uncompiled_inside_of_a_compiled_function() -> None:
    plain = seeded(partial(Compiled, False))
    models = [seeded(partial(Compiled, False)) for _ in SHARES]
    compiled_names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        compiled_names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def act(rank_group: RankGroup) -> list[Tensor]:
        sharded = shard_model(models[rank_group.rank], images(), rank_group=rank_group, shares=SHARES)
        step = torch.compile(lambda x: sharded(x * 2.0).cos(), backend=backend)
        try:
            return [step(images(samples)).detach() for samples in (4, 3)]
        finally:
            sharded.close()

    for found in run_ranks(len(SHARES), act):
        for ours, samples in zip(found, (4, 3), strict=True):
            torch.testing.assert_close(ours, plain(images(samples) * 2.0).cos().detach(), rtol=1e-9, atol=1e-9)
    assert any("mul" in name for name in compiled_names)
    assert not any("conv" in name or "linear" in name for name in compiled_names)


def test_a_tensor_that_only_gives_its_shape_is_not_sent() -> None:
    class Shaped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(2).reshape_as(x).view_as(x)

    layout = compare(partial(blocks_of, Shaped()), images(), SHARES)
    assert not [move.name for move in layout.moves if move.name.startswith("gather")]


class Rolled(nn.Module):
    """Shifts positions, as between the windows of some transformers; by default the channels stay in their order."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def forward(self, x: Tensor) -> Tensor:
        return torch.roll(x.roll(*self.arguments).relu(), (1, -2), (-1, 2)) * x


@pytest.mark.parametrize("cut_batch", [False, True])
def test_rolled_positions_stay_cut_by_channels(cut_batch: bool) -> None:
    rates = TransferCosts(flops_per_byte=1e4) if cut_batch else None
    layout = compare(partial(blocks_of, Rolled((1, -2), (2, 3))), images(), [3, 2, 1], cut_batch=cut_batch, rates=rates)
    assert [choice.mode for choice in layout.choices if choice.op == "roll"] == ["bystander"] * 2
    assert not any(choice.note for choice in layout.choices)


@pytest.mark.parametrize("arguments", [(3, 1), (1, 0), (5,), ((1, 1), (0, 1))], ids=str)
def test_rolled_channels_samples_and_flattened_tensors_are_exact(arguments: tuple[Any, ...]) -> None:
    for cut_batch in (False, True):
        rates = TransferCosts(flops_per_byte=1e4) if cut_batch else None
        layout = compare(partial(blocks_of, Rolled(*arguments)), images(), SHARES, cut_batch=cut_batch, rates=rates)
        assert ("rolls all dims as one" in layout.explain()) == (len(arguments) == 1)


def test_a_layer_with_one_output_and_a_bias_is_cut_by_its_inputs() -> None:
    """The last layer of a discriminator, a regression, a grey image."""

    def build() -> nn.Module:
        layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2), nn.ReLU(), nn.Conv2d(8, 1, 1)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(25, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    layout = compare(build, images(), [3, 2, 1])
    assert {c.mode for c in layout.choices if c.where in ("4", "8") and c.op in ("conv", "linear")} == {"reduced"}
    assert not any(choice.note for choice in layout.choices)


def test_one_number_may_be_the_bias_of_several_outputs() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(1))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.mean((2, 3)), self.weight, self.bias)

    layout = compare(lambda: Shared().double(), images(), SHARES)
    assert "unusual shape" in layout.explain()
