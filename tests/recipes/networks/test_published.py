"""The networks of the published cases: filters, sizes, and that they can be traced and trained."""

import pytest
import torch
from torch import nn

from evenly.errors import SpecError
from evenly.recipes.networks.published import PublishedCifarNet, PublishedMnistNet

CIFAR, MNIST = torch.zeros(2, 3, 32, 32), torch.zeros(2, 1, 28, 28)


def narrow_cifar(**settings):
    return PublishedCifarNet(filters=(2, 2, 3, 3, 4, 4, 5, 5), hidden=6, **settings)


def narrow_mnist(**settings):
    return PublishedMnistNet(filters=(2, 2, 3, 3), hidden=6, **settings)


def of(network: nn.Module, kind: type) -> list:
    return [module for module in network.modules() if isinstance(module, kind)]


def size(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("network", "filters", "linears", "parameters"),
    [
        (PublishedCifarNet, [60, 60, 120, 120, 240, 240, 480, 480], [(1920, 256), (256, 10)], 4_612_566),
        (PublishedMnistNet, [30, 30, 60, 60], [(2940, 128), (128, 10)], 434_888),
    ],
)
def test_the_published_filters_and_sizes(network, filters, linears, parameters):
    with torch.device("meta"):
        network = network()
    assert [conv.out_channels for conv in of(network, nn.Conv2d)] == filters
    assert {(conv.kernel_size, conv.stride, conv.padding) for conv in of(network, nn.Conv2d)} == {
        ((3, 3), (1, 1), (1, 1))
    }
    assert [(linear.in_features, linear.out_features) for linear in of(network, nn.Linear)] == linears
    assert len(of(network, nn.ReLU)) == len(filters) + 1
    assert len(of(network, nn.MaxPool2d)) == len(filters) // 2
    assert of(network, nn.Dropout) == []
    assert size(network) == parameters


@pytest.mark.parametrize(
    ("network", "images", "sides"), [(narrow_cifar(), CIFAR, [16, 8, 4, 2]), (narrow_mnist(), MNIST, [14, 7])]
)
def test_each_pair_halves_the_side(network, images, sides):
    seen = []
    for stage in network.stages:
        images = stage(images)
        seen.append(images.shape[-1])
    assert seen == sides
    assert network.head(images).shape == (2, 10)


@pytest.mark.parametrize(
    ("network", "images"),
    [
        (narrow_cifar(classes=3), CIFAR),
        (narrow_cifar(classes=3, channels=1), CIFAR[:, :1]),
        (narrow_mnist(classes=3), MNIST),
        (narrow_mnist(classes=3, channels=2, dropout=0.5), MNIST.expand(2, 2, 28, 28)),
        (PublishedCifarNet((2, 3), classes=3), CIFAR),
        (PublishedMnistNet([1] * 8, classes=3), MNIST),
    ],
)
def test_a_network_of_any_form_gives_logits(network, images):
    assert network(images).shape == (2, 3)


def test_dropout_changes_no_name_and_only_training():
    plain, dropped = narrow_cifar(), narrow_cifar(dropout=0.9)
    dropped.load_state_dict(plain.state_dict())
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert [layer.p for layer in of(dropped, nn.Dropout)] == [0.9]
    assert torch.equal(plain(images), dropped.eval()(images))


@pytest.mark.parametrize(("make", "images"), [(narrow_cifar, CIFAR), (narrow_mnist, MNIST)])
def test_a_trace_has_the_layers_and_the_same_output(make, images):
    network = make(dropout=0.5).eval()
    traced = torch.fx.symbolic_trace(network)
    assert torch.equal(traced(images), network(images))
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called[:5] == [f"stages.0.{layer}" for layer in range(5)]
    assert called[-5:] == ["head.flatten", "head.hidden", "head.relu", "head.dropout", "head.classes"]


@pytest.mark.parametrize(("make", "shape"), [(narrow_cifar, (4, 3, 32, 32)), (narrow_mnist, (4, 1, 28, 28))])
def test_every_parameter_gets_a_gradient(make, shape):
    torch.manual_seed(0)
    network = make()
    nn.functional.cross_entropy(network(torch.randn(shape)), torch.arange(4)).backward()
    assert [name for name, parameter in network.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize(
    ("network", "filters", "told"),
    [
        (PublishedCifarNet, (), r"32 x 32 .* filters \(\), .* 1 to 5 pairs"),
        (PublishedCifarNet, (4, 4, 8), r"filters \(4, 4, 8\)"),
        (PublishedCifarNet, [1] * 12, "1 to 5 pairs"),
        (PublishedMnistNet, [1] * 10, r"28 x 28 .* 1 to 4 pairs, .* Give the counts pair by pair"),
    ],
)
def test_filters_that_are_no_pairs_are_refused(network, filters, told):
    with pytest.raises(SpecError, match=told):
        network(filters)
