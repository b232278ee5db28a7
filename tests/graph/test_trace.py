"""What a network looks like as a value, and what is refused with its name rather than cut wrongly."""

import cProfile
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from evenly.errors import SpecError
from evenly.graph import trace, trace_module
from evenly.spec.graph import Graph, Layer
from tests.shards.compare import compare
from tests.zoo import ZOO

IMAGE = torch.randn(4, 2, 6, 6, dtype=torch.float64)


class Net(nn.Module):
    """A convolution, then what is given."""

    def __init__(self, act: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.act = act
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.register_buffer("count", torch.zeros(6, 1, 1))
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.act(self, self.conv(x))


def net(act: Callable[..., Any], **parts: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return Net(act, **parts).double()


def layer_of(graph: Graph, op: str) -> Layer:
    return next(layer for layer in graph.layers if layer.op == op)


def test_a_graph_says_what_feeds_whom_and_what_it_costs() -> None:
    graph = trace(nn.Sequential(nn.Linear(3, 5), nn.ReLU()), torch.randn(7, 3))
    x, weight, bias, linear, added, relu, output = graph.layers
    assert [layer.kind for layer in (x, weight, bias, output)] == ["source", "source", "source", "output"]
    assert (linear.kind, linear.where, linear.inputs) == ("mixing", "0", (x.name, weight.name))
    assert (added.op, added.inputs) == ("bias", (linear.name, bias.name))
    assert (relu.kind, relu.inputs) == ("pointwise", (added.name,))
    assert linear.flops == 2 * 7 * 3 * 5
    assert linear.outputs[0].shape == (7, 5)
    assert (x.outputs[0].has_grad, linear.outputs[0].has_grad) == (False, True)


def test_a_frozen_beginning_needs_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 5).requires_grad_(False), nn.ReLU(), nn.Linear(5, 2))
    tensors = trace(model, torch.randn(7, 3)).tensors
    assert [tensors[name].has_grad for name in ("linear", "linear_1")] == [False, True]


@pytest.mark.parametrize("name", ["resnet18", "gpt2_separate_tied", "nanogpt", "shufflenet_v2", "lstm"])
def test_tracing_leaves_the_network_as_it_is(name: str) -> None:
    model, example = ZOO[name].build(), ZOO[name].example()
    model.eval()
    next(model.children()).train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    graph = trace(model, example)
    assert trace(model, example) == graph
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert Graph.from_json(graph.to_json()).fingerprint == graph.fingerprint


def test_another_batch_is_another_graph() -> None:
    model = nn.Linear(3, 2)
    assert trace(model, torch.randn(4, 3)).fingerprint != trace(model, torch.randn(5, 3)).fingerprint


def test_a_program_that_is_profiled_is_traced_alike() -> None:
    model, profiler = net(lambda m, x: x.relu()), cProfile.Profile()
    profiler.enable()
    try:
        graph = trace(model, IMAGE)
        IMAGE.sum()
    finally:
        profiler.disable()
    assert graph == trace(model, IMAGE)
    assert any("sum" in str(entry.code) for entry in profiler.getstats()), "the profiler went on after the trace"


def test_an_example_is_a_tensor_a_tuple_a_list_or_named_arguments() -> None:
    model = nn.Bilinear(3, 4, 2)
    a, b = torch.randn(5, 3), torch.randn(5, 4)
    graphs = [trace(model, example) for example in ((a, b), [a, b], {"input2": b, "input1": a})]
    assert graphs[0] == graphs[1] == graphs[2]
    assert trace(nn.Linear(3, 2), a) == trace(nn.Linear(3, 2), (a,)) == trace(nn.Linear(3, 2), {"input": a})


class Settings(nn.Module):
    def forward(self, x: Tensor, mode: str = "a", times: int = 1, mask: Tensor | None = None) -> Tensor:
        x = x * times if mode == "a" else x
        return x if mask is None else x * mask


class Many(nn.Module):
    def forward(self, *args: Tensor) -> Tensor:
        return args[0]


@pytest.mark.parametrize(
    ("model", "example", "said"),
    [
        (nn.Linear(3, 2), (torch.randn(4, 3), torch.randn(4)), r"does not fit forward.*Linear"),
        (nn.Linear(3, 2), {"wrong": torch.randn(4, 3)}, r"does not fit forward.*Linear"),
        (nn.Linear(3, 2), (), r"does not fit forward.*Linear"),
        (Settings(), (torch.randn(4, 3), "b"), r"gives \['mode'\]; arguments of forward must be tensors"),
        (Settings(), (None,), "no tensor"),
        (Many(), (torch.randn(4, 3),), r"\*args"),
        (nn.Linear(3, 2), torch.randn(4, 5), "the example must fit the network"),
    ],
)
def test_an_example_that_does_not_fit_is_refused(model: nn.Module, example: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        trace(model, example)


def test_arguments_that_are_not_given_keep_their_defaults() -> None:
    x = torch.randn(4, 3)
    ops = [layer.op for layer in trace(Settings(), x).layers]
    assert ops == ["input", "unary", "output"]
    assert [layer.op for layer in trace(Settings(), {"x": x, "mask": x}).layers].count("join") == 1
    assert trace(Settings(), x) == trace(Settings(), {"x": x, "mask": None})


def test_tied_weights_are_one_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    graph = trace(model, torch.randn(4, 3))
    first, second = (layer for layer in graph.layers if layer.op == "linear")
    assert first.inputs[1] == second.inputs[1]


def test_hooks_are_refused_by_name() -> None:
    def refused(change: Callable[[nn.Module], Any], said: str) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        change(model)
        with pytest.raises(SpecError, match=said):
            trace(model, torch.randn(4, 3))

    refused(lambda m: m[0].register_forward_hook(lambda *_: None), "'0' has forward hooks")
    refused(lambda m: m[1].register_forward_pre_hook(lambda *_: None), "'1' has forward pre hooks")
    refused(lambda m: m[1].register_full_backward_hook(lambda *_: None), "'1' has backward hooks")
    refused(lambda m: m.register_full_backward_pre_hook(lambda *_: None), "'Sequential' has backward pre hooks")
    refused(lambda m: m[0].weight.register_hook(lambda g: g), r"'0\.weight' has a gradient hook")
    refused(lambda m: m[0].bias.register_post_accumulate_grad_hook(lambda p: None), r"'0\.bias' has a gradient hook")


def counted(self: Net, x: Tensor) -> Tensor:
    self.count += 1
    return x * self.count


def counted_anew(self: Net, x: Tensor) -> Tensor:
    before = x * self.count
    self.count = self.count + 1
    self.count = self.count * 2
    return before + x * self.count


@pytest.mark.parametrize("act", [counted, counted_anew, lambda self, x: x * self.count.add_(1)])
def test_a_buffer_that_forward_changes_is_changed_on_every_rank(act: Callable[..., Any]) -> None:
    compare(lambda: net(act), IMAGE, [2, 1])


def overwritten(self: Net, x: Tensor) -> Tensor:
    self.count = x.sum()
    return x


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (overwritten, "requires a gradient"),
        (lambda self, x: x * self.count[0].mul_(2).sum(), "changes a part of 'count'"),
    ],
)
def test_a_buffer_that_cannot_be_kept_is_refused(act: Callable[..., Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        trace(net(act), IMAGE)


def test_random_numbers_that_are_the_same_at_every_call_are_refused() -> None:
    with pytest.raises(SpecError, match="random numbers"):
        trace(net(lambda _, x: x + torch.rand(6, 1, 1)), IMAGE)


def on_values(self: Net, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def test_a_forward_that_branches_on_values_is_refused() -> None:
    with pytest.raises(SpecError, match=r"forward of Net .* cannot be.*control flow.*module of its own"):
        trace(net(on_values), IMAGE)


def test_a_module_that_branches_on_values_is_computed_whole_and_named() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return on_values(None, x)  # type: ignore[arg-type]

    build = lambda: nn.Sequential(nn.Conv2d(2, 6, 1), nn.ReLU(), Branch(), nn.Conv2d(6, 4, 1)).double()  # noqa: E731
    graph = trace(build(), IMAGE)
    closed = layer_of(graph, "opaque")
    assert closed.where == "2"
    assert "control flow" in closed.note
    assert "control flow" in graph.explain()
    compare(build, IMAGE, [2, 1])


def test_a_forward_may_branch_on_sizes_but_not_on_the_batch() -> None:
    def on_width(self: Net, x: Tensor) -> Tensor:
        assert x.shape[-1] > 2, "too narrow"
        return x * 2 if x.size(1) == 6 and x.ndim == 4 else x

    compare(lambda: net(on_width), IMAGE, [2, 1])
    with pytest.raises(SpecError, match="control flow"):
        trace(net(lambda _, x: x * 2 if x.shape[0] > 3 else x), IMAGE)


def test_a_forward_that_does_other_things_in_training_has_two_programs() -> None:
    def other(self: Net, x: Tensor) -> Tensor:
        return x.relu() if self.training else x

    traced = trace_module(net(other), IMAGE)
    assert traced.evaluation is not None
    assert len(traced.evaluation.graph.layers) == len(traced.graph.layers) - 1
    compare(lambda: net(other), IMAGE, [2, 1])


def masked(self: Net, x: Tensor) -> Tensor:
    t = x.shape[-1]
    return x * self.mask[:t, :t] + self.mask[0, :t]


@pytest.mark.parametrize(
    "act",
    [
        masked,
        lambda _, x: x * torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.float64).view(6, 1, 1),
        lambda _, x: x + torch.full((x.shape[1], 1, 1), 2.0),
        lambda _, x: x + torch.arange(x.shape[1]).view(-1, 1, 1),
        lambda _, x: x * torch.linspace(0, 1, x.shape[2], dtype=torch.float64, device=x.device).view(-1, 1),
        lambda _, x: torch.cat([x, x.new_zeros(x.shape[0], 1, 6, 6)], 1),
    ],
)
def test_buffers_and_constants_of_forward_are_followed(act: Callable[..., Any]) -> None:
    def build() -> nn.Module:
        model = net(act)
        model.register_buffer("mask", torch.ones(9, 9, dtype=torch.float64).tril())
        return model

    model = build()
    attributes = set(vars(model))
    trace(model, IMAGE)
    assert set(vars(model)) == attributes
    compare(build, IMAGE, [2, 1])


def test_dropout_is_off_in_evaluation() -> None:
    model = net(lambda self, x: F.dropout(x, 0.3, training=self.training))
    assert trace_module(model, IMAGE).switches == {"dropout": {"training": (True, False)}}


IN_PLACE: dict[str, Callable[..., Any]] = {}


def in_place(act: Callable[..., Any]) -> Callable[..., Any]:
    IN_PLACE[act.__name__] = act
    return act


@in_place
def another_name_sees_it(_: Net, x: Tensor) -> Tensor:
    y = x
    x += 1
    return x * y


@in_place
def a_method_changes_it(_: Net, x: Tensor) -> Tensor:
    x.mul_(2).clamp_(min=-1)
    return x.relu_() + x


@in_place
def a_function_changes_it(_: Net, x: Tensor) -> Tensor:
    y = F.relu(x, inplace=True)
    return x * 2 + y


@in_place
def a_function_with_an_underscore_changes_it(_: Net, x: Tensor) -> Tensor:
    y = x
    F.relu_(x)
    return y + 1


@in_place
def a_module_changes_it(self: Net, x: Tensor) -> Tensor:
    y = self.act_in_place(x)
    return x + y


@in_place
def a_view_changes_it(_: Net, x: Tensor) -> Tensor:
    y = x[:, :2]
    y += 1
    return x


@in_place
def a_view_sees_it(_: Net, x: Tensor) -> Tensor:
    y = x.view(x.shape[0], -1)
    x *= 2
    return y


@in_place
def a_chunk_changes_it(_: Net, x: Tensor) -> Tensor:
    a, _b = x.chunk(2, 1)
    a.relu_()
    return x


@in_place
def a_part_is_assigned(_: Net, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 0
    return x


@in_place
def parts_are_changed(_: Net, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:3].zero_()
    y[:, 0] += x[:, 1]
    y[..., 0].fill_(2.0)
    return y * x


@in_place
def values_are_copied_into_it(_: Net, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.copy_(x)
    return y + x


@in_place
def sizes_are_numbers(_: Net, x: Tensor) -> Tensor:
    n = x.shape[1]
    m = n
    n += 1
    return x * n + m


REFUSED = {"a_view_sees_it", "a_chunk_changes_it"}
REFUSED |= {"values_are_copied_into_it"}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_change_in_place_is_followed_or_refused(name: str) -> None:
    """Never is it lost in silence."""
    build = lambda: net(IN_PLACE[name], act_in_place=nn.ReLU(inplace=True))  # noqa: E731
    if name in REFUSED:
        with pytest.raises(SpecError):
            trace(build(), IMAGE)
    else:
        compare(build, IMAGE, [2, 1])


class Looping(nn.Module):
    """What only export can follow; its normalization is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head, self.last = nn.Linear(8, 5), nn.BatchNorm1d(5, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):  # as fx would have it
            raise TypeError
        y = self.norm(self.first(x))
        for _ in range(2):
            y = self.norm(self.second(y).relu())
        return self.last(self.head(y.mean((2, 3))))


def test_batch_norm_of_an_exported_network():
    layers = trace(Looping(), torch.randn(4, 3, 6, 6)).layers
    assert [layer.where for layer in layers if layer.op == "batch_norm"] == ["norm", "norm", "norm", "last"]
    compare(lambda: Looping().double(), torch.randn(4, 3, 6, 6, dtype=torch.float64), [2, 1])


def test_a_network_that_raises_by_itself_is_not_blamed_on_tracing():
    class Loud(Looping):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not today")

    with pytest.raises(SpecError, match=r"was to be traced, but raised RuntimeError: not today. Give"):
        trace(Loud(), torch.randn(4, 3, 6, 6))


def test_a_network_that_counts_its_samples_in_a_way_that_nothing_follows():
    """`len` is a number of the example for export, and no number for fx; what was seen once would count for ever."""

    class Counting(Looping):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / len(x)

    with pytest.raises(SpecError, match="other batch sizes"):
        trace(Counting(), torch.randn(4, 3, 6, 6))


def test_an_exported_network_that_reads_what_its_normalization_counts():
    class Reading(Looping):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.norm.num_batches_tracked

    compare(lambda: Reading().double(), torch.randn(4, 3, 6, 6).double(), [2, 1])


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_encoders_whose_layers_torch_would_fuse_in_evaluation(count, dropout):
    if count and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 exports several such layers in other ways in training than in evaluation")

    def build() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout, batch_first=True)
        return (nn.TransformerEncoder(layer, count) if count else layer).double()

    example = torch.randn(4, 5, 8, dtype=torch.float64)
    before = torch.backends.mha.get_fastpath_enabled()
    traced = trace_module(build(), example)
    assert torch.backends.mha.get_fastpath_enabled() == before
    attention = [changed["4"] for name, changed in traced.switches.items() if "attention" in name]
    assert attention == [(dropout, 0.0)] * (max(1, count) if dropout else 0)
    if not dropout:
        compare(build, example, [2, 1])


class RunsBesideAThread(nn.Module):
    """Lets a thread compute with another network; tracing runs its forward as it is, since it branches on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        thread = threading.Thread(target=differentiate)
        thread.start()
        thread.join()
        return self.layer(x) if x.sum() >= 0 else x


def differentiate() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    try:
        RESULTS.append(*torch.autograd.grad(nn.Linear(3, 3)(x).sum(), x))
    except RuntimeError as error:
        RESULTS.append(error)


RESULTS: list[Tensor | RuntimeError] = []


def test_networks_of_other_threads_are_left_alone() -> None:
    """torch's own counter of flops puts hooks on them, with which autograd.grad() for an input is an error."""
    trace(nn.Sequential(RunsBesideAThread(), nn.ReLU()), torch.ones(2, 3))
    assert RESULTS
    assert all(isinstance(result, Tensor) for result in RESULTS)
