"""Every network narrow, on few samples: what is affordable to train on ranks that are threads."""

from typing import Any

import torch

from evenly.recipes.networks import NETWORKS

NARROW: dict[str, dict[str, Any]] = {
    "vgg16": {"width": 4},
    "resnet18": {"width": 4},
    "resnet34": {"width": 4},
    "resnet50": {"width": 4},
    "resnet101": {"width": 2},
    "resnet20": {"width": 4},
    "resnet32": {"width": 4, "shortcut": "conv"},
    "resnet56": {"width": 4},
    "resnext29": {"groups": 4, "group_width": 2, "width": 4},
    "densenet121": {"growth": 4, "blocks": (2, 3, 4, 2)},
    "dla": {"width": 4},
    "mobilenetv2": {"width": 0.25},
    "shufflenetv2": {"filters": (8, 12, 16), "last_filters": 16},
    "efficientnet-b0": {"width": 0.25, "dropout": 0.0},
    "convmixer": {"width": 12, "depth": 2},
    "vit": {"width": 12, "depth": 2, "heads": 3},
    "cait": {"width": 12, "depth": 2, "class_depth": 1, "heads": 3},
    "swin": {"width": 6, "depths": (2, 2), "heads": (3, 3)},
    "published-cifar": {"filters": (4, 4, 6, 6, 8, 8), "hidden": 12},
    "published-mnist": {"filters": (4, 4, 6, 6), "hidden": 12},
    "small-resnet": {"width": 4},
    "lstm-rows": {"hidden": 8},
    "acgan-generator": {"latent": 6, "width": 8},
    "acgan-discriminator": {"width": 4, "dropout": 0.0},
    "gpt": {"vocabulary": 13, "context": 8, "width": 12, "depth": 2, "heads": 3},
}


def example(name: str, samples: int = 3, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Returns the inputs of the narrow network `name`."""
    generator = torch.Generator().manual_seed(5)
    if name == "gpt":
        return (torch.randint(13, (samples, 8), generator=generator),)
    if name == "acgan-generator":
        noise = torch.randn(samples, 6, dtype=dtype, generator=generator)
        return noise, torch.randint(7, (samples,), generator=generator)
    shape = [int(size) for size in NETWORKS[name].inputs[0].split("x")[1:]]
    return (torch.randn(samples, *shape, dtype=dtype, generator=generator),)
