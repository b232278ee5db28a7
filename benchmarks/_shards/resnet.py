"""Counts the bytes of one step of ResNet-50 on three ranks, with plain alternation and with our layout."""

import json
from typing import Any

import torch
import torch.distributed as dist
from tests.zoo import Bottleneck, ResNet
from torch import nn

from benchmarks._shards.layouts import Modes, alternating_modes
from evenly.comm import rank_group_of
from evenly.graph import Traced, trace_module
from evenly.layouts import lay_out
from evenly.shards import join_shards

SHARES = (70, 25, 5)


def run_resnet_rank() -> None:
    """Rank 0 prints, for each network and method, the bytes that were counted and those that the layout predicts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    byte_counts = {}
    for name, (model, shape) in _networks().items():
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))  # the same on every rank
        traced = trace_module(model, x)
        for method, modes in (("alternation", alternating_modes(traced.graph)), ("ours", {})):
            byte_counts[f"{name} {method}"] = _count_bytes(traced, x, modes)
    if dist.get_rank() == 0:
        print(json.dumps(byte_counts), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Returns ResNet-50 and two versions of its third stage, each with the shape of a batch.

    "five" has the first block and five of one form, "none" only the first: their difference is that of five blocks.
    """
    whole = ResNet(Bottleneck, [3, 4, 6, 3], classes=100)
    stage: Any = whole.layer3
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 10)]
    return {
        "whole": (whole, (2, 3, 64, 64)),
        "five": (nn.Sequential(*stage, *head), (2, 512, 8, 8)),
        "none": (nn.Sequential(stage[0], *head), (2, 512, 8, 8)),
    }


def _count_bytes(traced: Traced, x: torch.Tensor, modes: Modes) -> list[int]:
    """Returns the bytes of one forward and backward pass, as counted and as the layout predicts."""
    layout = lay_out(traced.graph, SHARES, modes=modes)
    sharded = join_shards(traced, layout, rank_group=rank_group_of())
    sharded(x).sum().backward()
    byte_counts = [sharded.traffic.sent_bytes, layout.traffic_bytes]
    dist.barrier()
    sharded.close()
    return byte_counts
