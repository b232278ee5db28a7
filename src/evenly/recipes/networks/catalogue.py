"""The networks that have a name: where they are made, what goes in, and how many parameters they have.

A table of strings, so that listing it needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

HERE = "evenly.recipes.networks"
CIFAR, MNIST = ("64x3x32x32",), ("64x1x28x28",)


@dataclass(frozen=True)
class NetworkInfo:
    """Where a network is made and what is published about it.

    Attributes:
        module: the module of `function`.
        function: makes the network; a class or a function.
        inputs: sizes of a usual batch, one text for each argument of forward.
        parameters: how many it has with its usual input, 10 classes and no options.
        source: where that figure is from.
        options: what `function` takes besides classes, channels and size.
        dtypes: of the inputs, in their order.
    """

    module: str
    function: str
    inputs: tuple[str, ...]
    parameters: int
    source: str
    options: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32",)

    @property
    def takes_images(self) -> bool:
        """Whether the first input is a batch of images [n, channels, size, size]."""
        return self.inputs[0].count("x") == 3


def _images(file: str, function: str, parameters: int, source: str, *options: str) -> NetworkInfo:
    return NetworkInfo(f"{HERE}.{file}", function, CIFAR, parameters, source, options)


COMMON = "the common implementation for CIFAR"
NETWORKS: Mapping[str, NetworkInfo] = MappingProxyType(
    {
        "vgg16": _images("vgg", "vgg16", 14_728_266, COMMON, "width"),
        "resnet18": _images("resnet", "resnet18", 11_173_962, COMMON, "width"),
        "resnet34": _images("resnet", "resnet34", 21_282_122, COMMON, "width"),
        "resnet50": _images("resnet", "resnet50", 23_520_842, COMMON, "width"),
        "resnet101": _images("resnet", "resnet101", 42_512_970, COMMON, "width"),
        "resnet20": _images("cifar_resnet", "resnet20", 269_722, "paper: 0.27 M", "width", "shortcut"),
        "resnet32": _images("cifar_resnet", "resnet32", 464_154, "paper: 0.46 M", "width", "shortcut"),
        "resnet56": _images("cifar_resnet", "resnet56", 853_018, "paper: 0.85 M", "width", "shortcut"),
        "resnext29": _images(
            "resnext", "resnext29", 4_774_218, COMMON, "groups", "group_width", "width", "stem_kernel"
        ),
        "densenet121": _images("densenet", "densenet121", 6_956_298, COMMON, "growth", "blocks"),
        "dla": _images("dla", "dla", 15_232_314, "paper: 15.8 M for ImageNet, 15,742,104 without unused ones", "width"),
        "mobilenetv2": _images("mobilenet", "mobilenetv2", 2_296_922, COMMON, "width"),
        "shufflenetv2": _images("shufflenet", "shufflenetv2", 1_263_854, COMMON, "filters", "last_filters"),
        "efficientnet-b0": _images(
            "efficientnet", "efficientnet_b0", 4_020_358, "paper: 5.3 M for ImageNet, 5,288,548", "width", "dropout"
        ),
        "convmixer": _images(
            "convmixer",
            "convmixer",
            594_186,
            "paper: 707 k with kernel=9, patch=1, which is 706,570",
            *("width", "depth", "kernel", "patch"),
        ),
        "vit": _images(
            "vit",
            "VisionTransformer",
            5_362_762,
            "paper: 5.7 M for ImageNet, 5,717,416",
            *("patch", "width", "depth", "heads", "dropout"),
        ),
        "cait": _images(
            "cait",
            "CaitTransformer",
            11_601_610,
            "paper: 12.0 M for ImageNet, 11,956,264",
            *("patch", "width", "depth", "class_depth", "heads"),
        ),
        "swin": _images(
            "swin",
            "SwinTransformer",
            27_505_108,
            "paper: 28.3 M for ImageNet, 28,288,354",
            *("patch", "window", "width", "depths", "heads"),
        ),
        "published-cifar": _images(
            "published", "PublishedCifarNet", 4_612_566, "layers of the paper", "filters", "hidden", "dropout"
        ),
        "published-mnist": NetworkInfo(
            f"{HERE}.published",
            "PublishedMnistNet",
            MNIST,
            434_888,
            "layers of the paper",
            ("filters", "hidden", "dropout"),
        ),
        "small-resnet": NetworkInfo(
            f"{HERE}.small_resnet", "SmallResNet", MNIST, 77_562, "of this library", ("width", "blocks")
        ),
        "lstm-rows": NetworkInfo(
            f"{HERE}.lstm",
            "RowLSTM",
            MNIST,
            214_282,
            "two layers of 128 units: 80,896 + 132,096 + 1,290",
            ("hidden", "layers", "dropout"),
        ),
        "acgan-generator": NetworkInfo(
            f"{HERE}.acgan",
            "AcganGenerator",
            ("64x100", "64"),
            857_065,
            "of this library",
            ("latent", "width"),
            ("float32", "int64"),
        ),
        "acgan-discriminator": NetworkInfo(
            f"{HERE}.acgan", "AcganDiscriminator", MNIST, 103_243, "of this library", ("width", "dropout")
        ),
        "gpt": NetworkInfo(
            f"{HERE}.gpt",
            "CharacterGPT",
            ("16x256",),
            10_745_088,
            "nanoGPT: 10.65 M without positions; GPT-2: 124,439,808",
            ("vocabulary", "context", "width", "depth", "heads", "dropout", "bias"),
            ("int64",),
        ),
    }
)
