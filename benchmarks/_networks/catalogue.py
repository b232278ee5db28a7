"""Published networks, each in a small form: 40 of torchvision and 60 families of timm."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

CLASSES = 10
SAMPLES = 2


@dataclass(frozen=True)
class Network:
    """How a published network is built, and the size of its images."""

    library: str
    build: Callable[[], nn.Module]
    size: int = 64
    learning_rate: float = 1e-4  # smaller where two small images make training diverge, so that rounding grows

    def example(self) -> torch.Tensor:
        """Returns a batch of random images in float64."""
        images = torch.randn(SAMPLES, 3, self.size, self.size, generator=torch.Generator().manual_seed(1))
        return images.double()


def import_torchvision() -> Any:
    """Returns torchvision; where its compiled operators do not load beside this torch, their names are declared."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("torchvision is not installed, whose networks this benchmark checks. Install it, and timm.")
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(library))
    except OSError:
        operators = torch.library.Library("torchvision", "DEF")
        _DECLARED.append(operators)
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

    return torchvision


_DECLARED: list[torch.library.Library] = []  # a library that is freed takes its declarations along


def catalogue() -> dict[str, Network]:
    """Returns all networks by name."""
    return {**_torchvision_networks(), **_timm_networks()}


def _torchvision_networks() -> dict[str, Network]:
    models = import_torchvision().models
    from torchvision.models.detection import backbone_utils, ssd, ssdlite
    from torchvision.models.maxvit import MaxVit
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2
    from torchvision.models.vision_transformer import VisionTransformer
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    plain = partial(dict, weights=None, num_classes=CLASSES)
    names = (
        "alexnet vgg11 vgg11_bn vgg13_bn resnet18 resnet34 resnet50 resnext50_32x4d wide_resnet50_2 densenet121 "
        "densenet169 squeezenet1_0 squeezenet1_1 mnasnet0_5 mnasnet1_0 mobilenet_v2 mobilenet_v3_small "
        "mobilenet_v3_large shufflenet_v2_x0_5 shufflenet_v2_x1_0 efficientnet_b0 efficientnet_v2_s convnext_tiny "
        "regnet_x_400mf regnet_y_400mf"
    )
    networks = {name: Network("torchvision", partial(getattr(models, name), **plain())) for name in names.split()}
    for name in ("resnet50", "wide_resnet50_2", "regnet_x_400mf"):  # statistics of more numbers: less rounding noise
        networks[name] = replace(networks[name], size=128)
    for name in ("googlenet", "inception_v3"):
        build = partial(getattr(models, name), **plain(init_weights=False))
        networks[name] = Network("torchvision", build, size=128 if name == "googlenet" else 299)
    swin = partial(
        SwinTransformer,
        patch_size=[4, 4],
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        stochastic_depth_prob=0.2,
        num_classes=CLASSES,
    )
    networks["swin"] = Network("torchvision", swin)
    swin_v2 = partial(swin, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)
    networks["swin_v2"] = Network("torchvision", swin_v2)
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}
    networks["vit"] = Network(
        "torchvision", partial(VisionTransformer, 64, 16, dropout=0.1, num_classes=CLASSES, **sizes)
    )
    maxvit = {"stem_channels": 8, "block_channels": [16, 32], "block_layers": [1, 1], "head_dim": 8}
    networks["maxvit"] = Network(
        "torchvision",
        partial(MaxVit, (64, 64), partition_size=4, stochastic_depth_prob=0.2, num_classes=CLASSES, **maxvit),
    )
    heads = {"weights": None, "weights_backbone": None, "num_classes": CLASSES}
    for name in ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        auxiliary = {} if name.startswith("lraspp") else {"aux_loss": True}
        networks[name] = Network("torchvision", partial(getattr(models.segmentation, name), **heads, **auxiliary))
    resnet = partial(backbone_utils.resnet_fpn_backbone, weights=None, trainable_layers=5)
    networks["fpn_resnet18"] = Network("torchvision", partial(resnet, backbone_name="resnet18"))
    networks["fpn_resnet34_p6p7"] = Network(
        "torchvision", lambda: resnet(backbone_name="resnet34", extra_blocks=LastLevelP6P7(256, 256))
    )
    mobilenet = partial(backbone_utils.mobilenet_backbone, "mobilenet_v3_large", weights=None, trainable_layers=6)
    networks["fpn_mobilenet_v3"] = Network("torchvision", partial(mobilenet, fpn=True))
    networks["ssd300_vgg16"] = Network(
        "torchvision", lambda: ssd.ssd300_vgg16(weights=None, weights_backbone=None).backbone, size=300
    )
    networks["ssdlite320"] = Network(
        "torchvision",
        lambda: ssdlite.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None).backbone,
        size=320,
        learning_rate=1e-6,
    )
    return networks


TIMM: dict[str, dict[str, Any]] = {  # arguments that make a network small, besides `Network`'s own
    "beit_base_patch16_224": {"depth": 2, "embed_dim": 48, "num_heads": 4, "img_size": 64},
    "test_byobnet": {"drop_path_rate": 0.1},
    "cait_xxs24_224": {"depth": 2, "img_size": 64},
    "coat_tiny": {"img_size": 64},
    "convit_tiny": {"img_size": 64, "depth": 3, "local_up_to_layer": 2},
    "test_convnext": {"drop_path_rate": 0.1},
    "crossvit_tiny_240": {"size": 240},
    "cspresnet50": {},
    "davit_tiny": {"depths": (1, 1, 1, 1), "embed_dims": (32, 64, 96, 128), "num_heads": (1, 2, 3, 4)},
    "deit_tiny_distilled_patch16_224": {"img_size": 64, "depth": 3},
    "densenet121": {"drop_rate": 0.1},
    "dla46_c": {"size": 128},
    "dpn48b": {},
    "edgenext_xx_small": {},
    "efficientformer_l1": {"size": 224},
    "efficientformerv2_s0": {"size": 224},
    "efficientnet_b0": {"drop_path_rate": 0.1},
    "efficientvit_b0": {},
    "efficientvit_m0": {"size": 224},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2, "size": 56},
    "fasternet_t0": {},
    "fastvit_t8": {},
    "focalnet_tiny_srf": {},
    "gcvit_xxtiny": {"img_size": 64},
    "ghostnet_050": {},
    "halonet26t": {"size": 256},
    "hardcorenas_a": {},
    "hgnetv2_b0": {},
    "hiera_tiny_224": {"size": 224},
    "hrnet_w18_small": {},
    "inception_next_atto": {},
    "inception_v4": {"size": 160, "learning_rate": 1e-8},
    "levit_128s": {"size": 224},
    "test_mambaout": {},
    "coatnet_pico_rw_224": {"size": 224},
    "poolformer_s12": {},
    "mixer_s32_224": {"img_size": 64},
    "mobilenetv3_small_050": {},
    "mobilevit_xxs": {},
    "nextvit_small": {},
    "test_nfnet": {},
    "pit_ti_224": {"size": 224},
    "pvt_v2_b0": {},
    "regnetx_002": {},
    "repghostnet_050": {},
    "repvit_m0_9": {},
    "res2net50_14w_8s": {},
    "resnest14d": {},
    "resnet10t": {"drop_path_rate": 0.1, "drop_block_rate": 0.1},
    "resnetv2_50": {"layers": (1, 1, 1, 1)},
    "rexnet_100": {"size": 128, "learning_rate": 1e-6},
    "selecsls42": {"size": 128},
    "legacy_seresnet18": {},
    "sequencer2d_s": {"img_size": 64, "layers": (1, 1, 1, 1)},
    "skresnet18": {},
    "starnet_s1": {},
    "swiftformer_xs": {},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 4, "depths": (2, 1, 1, 1), "embed_dim": 24},
    "swinv2_tiny_window8_256": {"img_size": 64, "window_size": 4, "depths": (2, 1, 1, 1), "embed_dim": 24},
    "tiny_vit_5m_224": {"size": 224},
    "tnt_s_legacy_patch16_224": {"img_size": 64, "depth": 2},
    "twins_pcpvt_small": {"img_size": 64},
    "visformer_tiny": {"img_size": 64},
    "test_vit": {"img_size": 64, "drop_path_rate": 0.1},
    "ese_vovnet19b_slim": {},
    "xception41": {},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 2},
    "volo_d1_224": {"img_size": 64},
    "rdnet_tiny": {},
}


def _timm_networks() -> dict[str, Network]:
    import timm

    networks = {}
    for name, options in TIMM.items():
        own = {key: options[key] for key in ("size", "learning_rate") if key in options}
        arguments = {key: value for key, value in options.items() if key not in own}
        build = partial(timm.create_model, name, num_classes=CLASSES, **arguments)
        networks[f"timm {name}"] = Network("timm", build, **own)
    return networks
