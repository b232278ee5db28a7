"""Layers cut in unequal shares: how long a step takes, and what travels, beside an even split and one device alone.

Everything runs in one go on the lab: three devices of one node with CPU quotas, in turns, a step each, round after
round; figures are medians over rounds. The published net is run at 70/25/5 of a core, a wide net at 50/30/20.
"Published" deals the filters out by the published rounding and alternates partitioned and reduced layers, with a
replicated tensor after every pair; "even" does the same with equal shares. "Ours" is `evenly.shard` with
`cut_batch=True`, "without the slowest" the same with the last share at 0. "Alone" is the fastest device with the whole
network, "ideal" that work divided by the summed speed. Bytes and messages are counted in every collective and compared
with the plan. The peer tensor_parallel (see peer_tensor_parallel.py) has the time of all devices in one process.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Claim, median, spread, write_result

NAMES = ("alone", "even", "ours", "ours, filters", "published", "ours, without the slowest")
QUICK = 3  # so many of them


def wide_net() -> nn.Module:
    """Returns the late part of a network: convolutions of 240 to 480 filters and an MLP of 4096."""
    return nn.Sequential(
        nn.Conv2d(120, 240, 3, padding=1), nn.ReLU(), nn.Conv2d(240, 240, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(240, 480, 3, padding=1), nn.ReLU(), nn.Conv2d(480, 480, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(480 * 4, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10),
    )  # fmt: skip


def case(name: str, batch: int) -> tuple[nn.Module, torch.Tensor]:
    from evenly.recipes.published import PublishedCifarNet

    torch.manual_seed(0)
    if name == "cifar":
        return PublishedCifarNet(), torch.randn(batch, 3, 32, 32)
    return wide_net(), torch.randn(batch, 120, 8, 8)


def published_rounding(filters: int, shares: Sequence[float]) -> list[int]:
    """Returns whole filters: every share rounded, what is missing or too much goes to the fastest device."""
    counts = [round(filters * share / sum(shares)) for share in shares]
    fastest = max(range(len(shares)), key=lambda rank: shares[rank])
    counts[fastest] += filters - sum(counts)
    return counts


def alternation(graph: object) -> dict[str, tuple[str, ...]]:
    """Returns the modes of plain alternation: partitioned, reduced, ...; blocks begin and end replicated."""
    makers = {tensor.name: layer for layer in graph.layers for tensor in layer.outputs}
    modes: dict[str, tuple[str, ...]] = {}
    turns: dict[str, int] = {}
    for layer in graph.layers:
        if layer.op in ("conv", "linear"):
            block = layer.where.rsplit(".", 1)[0] if "layer" in layer.where else ""
            turn = 0 if "downsample" in layer.where else turns.get(block, 0)
            turns[block] = turn + 1
            modes[layer.name] = ("reduced",) if turn % 2 else ("partitioned",)
        elif layer.op == "join":
            modes[layer.name] = ("whole",)
        elif layer.op in ("bias", "batch_norm", "unary", "spatial", "view") and layer.inputs:
            maker = makers[layer.inputs[0]]
            while maker.op in ("bias", "batch_norm", "unary", "spatial", "view"):
                maker = makers[maker.inputs[0]]
            if modes.get(maker.name) == ("reduced",):
                modes[layer.name] = ("whole",)
    return modes


class Way:
    """One way to train, with the seconds of each step and what was counted in the last."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) if model is not None else None
        self.seconds: list[float] = []

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Makes one training step."""
        if self.model is not None:
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def ways_of(name: str, batch: int, shares: Sequence[float], names: Sequence[str]) -> dict[str, Way]:
    from evenly.comm import party_of
    from evenly.graph import follow
    from evenly.planner import lay_out
    from evenly.shards import join_shards

    model, example = case(name, batch)
    traced = follow(model, example)
    graph = traced.graph
    widths = {layer.where: layer.outputs[0].shape[1] for layer in graph.layers if layer.op in ("conv", "linear")}
    rounded = {where: published_rounding(width, shares) for where, width in widths.items()}
    plain = alternation(graph)
    layouts = {
        "even": lay_out(graph, [1] * len(shares), modes=plain),
        "published": lay_out(graph, shares, layer_shares=rounded, modes=plain),
        "ours, filters": lay_out(graph, shares),
        "ours": lay_out(graph, shares, cut_batch=True),
        "ours, without the slowest": lay_out(graph, [*shares[:-1], 0], cut_batch=True),
    }
    if dist.get_rank() == 0:
        print(layouts["ours"].explain(), file=sys.stderr, flush=True)
    made = {key: Way(join_shards(traced, layouts[key], party=party_of())) for key in names}
    return {"alone": Way(model if dist.get_rank() == 0 else None), **made}


def loopback_bytes() -> int:
    import psutil

    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def timed(way: Way, act: Callable[[], None]) -> None:
    dist.barrier()
    began = time.perf_counter()
    act()
    dist.barrier()
    way.seconds.append(time.perf_counter() - began)


def worker(name: str, batch: int, rounds: int, ways: int, shares: Sequence[float], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _, x = case(name, batch)
    y = torch.randint(10, (batch,), generator=torch.Generator().manual_seed(1))
    found = ways_of(name, batch, shares, NAMES[1:ways])
    (folder / f"ready{dist.get_rank()}").touch()  # torch is loaded and networks are cut: the quotas may begin
    while not (folder / "go").exists():
        time.sleep(0.02)
    counted = {}
    for _ in range(rounds + 1):  # the first warms up and is not counted
        for key, way in found.items():
            if key != "alone":
                way.model.traffic.clear()
            sent = loopback_bytes()
            timed(way, lambda way=way: way.step(x, y))
            if key != "alone":
                traffic, layout = way.model.traffic, way.model.layout
                counted[key] = {
                    "messages": traffic.messages, "bytes": traffic.sent_bytes, "wire": loopback_bytes() - sent,
                    "predicted_messages": layout.messages, "predicted_bytes": layout.traffic_bytes,
                }  # fmt: skip
    if dist.get_rank() == 0:
        seconds = {key: way.seconds[1:] for key, way in found.items()}
        print(json.dumps({"seconds": seconds, "counted": counted}), flush=True)
    dist.barrier()
    for key, way in found.items():
        if key != "alone":
            way.model.close()
    dist.destroy_process_group()


def resnet_worker() -> None:
    """Counts one step of ResNet-50, plain alternation and ours."""
    from tests.zoo import Bottleneck, ResNet

    from evenly.comm import party_of
    from evenly.graph import follow
    from evenly.planner import lay_out
    from evenly.shards import join_shards

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    told = {}
    whole = ResNet(Bottleneck, [3, 4, 6, 3], classes=100)
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 10)]
    networks = {
        "whole": (whole, (2, 3, 64, 64)),
        "five": (nn.Sequential(*whole.layer3, *tail), (2, 512, 8, 8)),  # a first block, then five of one form
        "none": (nn.Sequential(whole.layer3[0], *tail), (2, 512, 8, 8)),
    }
    for key, (model, shape) in networks.items():
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))  # the same on every rank
        traced = follow(model, x)
        for way, modes in (("alternation", alternation(traced.graph)), ("ours", {})):
            layout = lay_out(traced.graph, [70, 25, 5], modes=modes)
            sharded = join_shards(traced, layout, party=party_of())
            sharded(x).sum().backward()
            told[f"{key} {way}"] = [sharded.traffic.sent_bytes, layout.traffic_bytes]
            dist.barrier()
            sharded.close()
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def on_lab(cpu: Sequence[float] | None, *arguments: str) -> dict:
    from evenly.lab import Lab, LabCluster, LabNode

    cluster = LabCluster(nodes=(LabNode(name="box", ranks=3),))
    with tempfile.TemporaryDirectory() as folder, Lab(cluster) as lab:

        def limit() -> None:
            while not all(Path(folder, f"ready{rank}").exists() for rank in range(3)):
                time.sleep(0.05)
            for rank, quota in enumerate(cpu or ()):
                lab.set_cpu(rank, quota)
            Path(folder, "go").touch()

        threading.Thread(target=limit, daemon=True).start()
        words = [sys.executable, str(Path(__file__).resolve()), *arguments, *([folder] if cpu else [])]
        result = lab.run(words, output="capture", timeout_s=1500)
    result.check()
    print(result.stderr[0][-4000:] if result.stderr else "", file=sys.stderr)
    return json.loads(result.stdout[0].strip().splitlines()[-1])


def peer(name: str, batch: int, rounds: int, shares: Sequence[float]) -> list[float] | None:
    """Returns the seconds a step of tensor_parallel, which needs an environment of its own; None where it is not."""
    from evenly.lab import Lab, LabCluster, LabNode

    python = Path(__file__).resolve().parents[1] / ".peers" / "tensor_parallel" / "bin" / "python"
    script = Path(__file__).resolve().parent / "peer_tensor_parallel.py"
    if not python.exists():
        return None
    with Lab(LabCluster(nodes=(LabNode(name="box", ranks=1, cpu=sum(shares) / 100),))) as lab:
        result = lab.run([str(python), str(script), name, str(batch), str(rounds)], output="capture", timeout_s=600)
    result.check()
    return json.loads(result.stdout[0].strip().splitlines()[-1])["seconds"]


def rows_of(network: str, told: dict, batch: int, shares: Sequence[float]) -> list[dict]:
    times = {key: 1e3 * median(values) for key, values in told["seconds"].items()}
    alone = times["alone"]
    rows = []
    for key in times:
        seen = told["counted"].get(key, {})
        rows.append(
            {
                "network": f"{network} {'/'.join(map(str, shares))}",
                "way": key,
                "ms_per_step": times[key],
                "spread_ms": spread([1e3 * s for s in told["seconds"][key]]),
                "samples_per_s": 1e3 * batch / times[key],
                "speedup_over_alone": alone / times[key],
                "messages": seen.get("messages"),
                "mb": seen["bytes"] / 1e6 if seen else None,
                "mb_predicted": seen["predicted_bytes"] / 1e6 if seen else None,
                "mb_on_the_wire": seen["wire"] / 1e6 if seen else None,
            }
        )
    if told.get("peer"):
        step = 1e3 * median(told["peer"])
        rows.append({**dict.fromkeys(rows[0]), "network": rows[0]["network"], "way": "tensor_parallel, one process",
                     "ms_per_step": step, "samples_per_s": 1e3 * batch / step, "speedup_over_alone": alone / step,
                     "spread_ms": spread([1e3 * s for s in told["peer"]])})  # fmt: skip
    ideal = alone * max(shares) / sum(shares)
    rows.append({**dict.fromkeys(rows[0]), "network": rows[0]["network"], "way": "ideal", "ms_per_step": ideal,
                 "samples_per_s": 1e3 * batch / ideal, "speedup_over_alone": alone / ideal})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, about two minutes on two cores")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--resnet", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.resnet:
        resnet_worker()
        return
    if arguments.worker:
        name, batch, rounds, ways, shares, folder = arguments.worker
        worker(name, int(batch), int(rounds), int(ways), [float(share) for share in shares.split(",")], Path(folder))
        return
    batch, rounds = 96, 1 if arguments.quick else 3
    cases = {"cifar": (batch, (70, 25, 5)), "wide": (batch, (50, 30, 20))}
    ways = str(QUICK if arguments.quick else len(NAMES))
    told = {}
    for name, (size, shares) in cases.items():
        words = ["--worker", name, str(size), str(rounds), ways, ",".join(map(str, shares))]
        told[name] = on_lab([share / 100 for share in shares], *words)
    for name, (size, shares) in cases.items():
        told[name]["peer"] = peer(name, size, rounds, shares)
    resnet = on_lab(None, "--resnet")
    report(told, resnet, cases, save=arguments.save)


def report(told: dict, resnet: dict, cases: dict, *, save: bool) -> None:
    rows = [row for name, (size, shares) in cases.items() for row in rows_of(name, told[name], size, shares)]
    for way in ("alternation", "ours"):
        more, fewer = resnet[f"five {way}"], resnet[f"none {way}"]
        resnet[f"blocks {way}"] = [a - b for a, b in zip(more, fewer, strict=True)]
        for key in ("whole", "blocks"):
            counted, predicted = resnet[f"{key} {way}"]
            rows.append({**dict.fromkeys(rows[0]), "network": f"ResNet-50, {key}", "way": way, "mb": counted / 1e6,
                         "mb_predicted": predicted / 1e6})  # fmt: skip
    cifar, wide = ({k: median(v) for k, v in told[name]["seconds"].items()} for name in ("cifar", "wide"))
    seen = [entry for name in told for entry in told[name]["counted"].values()]
    ratios = [e["bytes"] / e["predicted_bytes"] for e in seen] + [e["messages"] / e["predicted_messages"] for e in seen]
    ratios += [pair[0] / pair[1] for key, pair in resnet.items() if isinstance(pair, list)]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    best = min(wide[key] for key in ("ours", "ours, filters") if key in wide)
    blocks = resnet["blocks ours"][0] / resnet["blocks alternation"][0]
    claims = [
        Claim("speedup_over_even_70_25_5", cifar["even"] / cifar["ours"], 4.0, "higher"),
        Claim("speedup_over_fastest_alone_wide_50_30_20", wide["alone"] / best, 1.5, "higher"),
        Claim("bytes_counted_over_predicted", worst, 1.0, "lower"),
        Claim("resnet50_stream_bytes_over_alternation", blocks, 0.4, "lower"),
    ]
    sizes = ", ".join(f"{name}: batch {size}" for name, (size, _) in cases.items())
    note = (
        f"{sizes}. Quotas of a core with a 4 ms period, ranks on loopback. MB are those of all ranks together; 'on the "
        "wire' is what the loopback interface counted, with headers. ResNet-50 'blocks' are the five bottleneck blocks "
        "1024-256-256-1024 of its third stage: a run with them less a run without."
    )
    write_result("shards", rows, claims, note=note, save=save)


if __name__ == "__main__":
    main()
