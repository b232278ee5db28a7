"""What crosses the link, and how long a step takes: node-based communications beside torch's own ways.

All methods run in one go on the lab (2 nodes x 2 ranks, 200 Mbit/s): same network, data, steps and period. They take
turns, a few steps each, round after round; figures are medians over rounds. Bytes are read from the link's counter.
The network has 2.0 million parameters and little work per parameter, so that the wire matters on two slow cores.

With --full there are more peers and all forms of our own exchange, on links of 200 and of 50 Mbit/s, with 2 x 2 and
with 3 + 1 ranks. A round of ours begins and ends when no exchange is under way, so nothing is sent in another's turn.
Then networks are trained to the end: what each form learns, adaptive periods beside DDP, a sweep of periods.
"""

import argparse
import json
import sys
import time
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "src"))  # environments of peers have no evenly

from benchmarks.common import RESULTS_DIR, ROW_ORIGIN, Claim, median, print_table, spread, write_result
from benchmarks.exchange_ways import BATCH, MOST_BUSY, PERIOD, SLOW, Method, busy_network, network, versions, ways_of

CLAIMS = {  # by the part of --full that makes them
    "throughput": (
        "throughput_over_limit_200mbit", "throughput_over_limit_50mbit", "throughput_over_best_peer_50mbit",
        "bytes_fp32_per_step", "bytes_bf16_per_step", "bytes_int8_per_step", "bytes_int4_per_step",
        "ddp_over_limit_50mbit",
    ),
    "accuracy": (
        "accuracy_points_all_minus_sync", "accuracy_points_worst_form_minus_sync",
        "accuracy_points_nesterov_minus_sync",
    ),
    "adaptive": ("adaptive_speedup_to_ddp_accuracy_50mbit", "accuracy_points_adaptive_minus_ddp"),
    "hivemind": ("throughput_over_hivemind_50mbit",),
    "sweep": (),
}  # fmt: skip
CASES = (((2, 2), 200.0), ((2, 2), 50.0), ((3, 1), 200.0), ((3, 1), 50.0))  # ranks of the nodes, Mbit/s
PARTS = tuple(CLAIMS)
STEP_S = 0.12  # of the busy network without exchanges: DDP comes to at most a quarter of that at 50 Mbit/s
PEERS_PYTHON = RESULTS_DIR.parents[1] / ".peers" / "exchange" / "bin" / "python"


def sent_by_nodes(nodes: list[list[int]]) -> list[int]:
    """Returns the bytes that each node has sent over its link so far; all ranks call it."""
    from evenly.session.ledger import interface_bytes

    dist.barrier()
    time.sleep(0.05)
    rows = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.tensor([interface_bytes()]))
    return [int(rows[ranks[0]]) for ranks in nodes]


def run_round(method: Method, batches: list[tuple[torch.Tensor, torch.Tensor]], nodes: list[list[int]]) -> None:
    before = sent_by_nodes(nodes)
    dist.barrier()
    began = time.perf_counter()
    for x, y in batches:
        loss = nn.functional.cross_entropy(method.model(x), y)
        loss.backward()
        method.step()
        method.zero()
    dist.barrier()
    method.seconds.append((time.perf_counter() - began) / len(batches))
    after = sent_by_nodes(nodes)
    method.sent.append([b - a for a, b in zip(before, after, strict=True)])


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def worker(rounds: int, steps: int, sitting: str, batch: int) -> None:
    from evenly.recipes.fashion_data import load_fashion

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    import evenly

    nodes = evenly.discover().rank_lists()
    train, test = load_fashion()
    images, labels = train.tensors
    made = network if sitting == "short" else busy_network
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))

    def batches(first: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        starts = [((first + step) * world + rank) * batch for step in range(count)]
        rows = [order[[(start + i) % len(order) for i in range(batch)]] for start in starts]
        return [(images[chosen], labels[chosen]) for chosen in rows]

    makes, ways = ways_of(sitting, batch), {}
    for table in [[name] for name in makes] if sitting == "apart" else [list(makes)]:  # those at one table take turns
        ways |= {name: makes[name](nodes, made()) for name in table}
        for name in table:  # a period warms up, and some steps let what is under way arrive
            run_round(ways[name], batches(0, PERIOD + ways[name].lead), nodes)
        for number in range(1, rounds + 1):
            for name in table:
                count = PERIOD if sitting == "full" and name in SLOW else steps
                run_round(ways[name], batches(number * steps, count), nodes)
    size = sum(p.numel() * p.element_size() for p in made().parameters())
    result = {
        name: {
            "seconds": way.seconds[1:],  # without the first round
            "sent": way.sent[1:],
            "accuracy": accuracy(way.plain, test.tensors[0][:2000], test.tensors[1][:2000]),
        }
        for name, way in ways.items()
    }
    if rank == 0:
        told = {"parameter_bytes": size, "batch": batch, "methods": result, "versions": versions()}
        print(json.dumps(told), flush=True)
    dist.barrier()
    for way in ways.values():
        way.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute on two cores")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s of each node's link")
    parser.add_argument("--full", action="store_true", help="all peers and forms, two links, 2 x 2 and 3 + 1 ranks")
    parser.add_argument("--only", choices=PARTS, help="one part of --full; the others stay as they were saved")
    parser.add_argument("--seeds", type=int, default=3, help="of the parts of --full that train to the end")
    parser.add_argument("--worker", nargs=4, metavar=("ROUNDS", "STEPS", "SITTING", "BATCH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        rounds, steps, sitting, batch = arguments.worker
        worker(int(rounds), int(steps), sitting, int(batch))
        return
    rounds, steps = (2, PERIOD) if arguments.quick else (6, 2 * PERIOD)
    if arguments.full or arguments.only:
        run_full(arguments)
        return
    told = on_lab((2, 2), arguments.rate, rounds, steps, "short", BATCH)
    report(told, rounds=rounds, steps=steps, rate=arguments.rate, save=arguments.save)


def run_full(arguments: argparse.Namespace) -> None:
    """Runs the parts of --full, or one of them, and tells all."""
    from benchmarks.exchange_training import accuracy_part, adaptive_part, sweep_part

    rounds, steps = (1, 2 * PERIOD) if arguments.quick else (4, 4 * PERIOD)
    seeds = 1 if arguments.quick else arguments.seeds
    acts = {
        "throughput": lambda: throughput_part(rounds, steps, busy_batch()),
        "accuracy": lambda: accuracy_part(seeds, quick=arguments.quick),
        "adaptive": lambda: adaptive_part(seeds, quick=arguments.quick),
        "hivemind": lambda: hivemind_part(1 if arguments.quick else 3, 2 * PERIOD, busy_batch()),
        "sweep": lambda: sweep_part(1, quick=arguments.quick),
    }
    chosen = [arguments.only] if arguments.only else list(PARTS)
    rows, claims = kept_parts([part for part in PARTS if part not in chosen]) if arguments.save else ([], [])
    for part in chosen:
        mine, promised = acts[part]()
        if not mine:  # what was kept of it stays
            mine, promised = kept_parts([part]) if arguments.save else ([], [])
        rows += [{**ROW_ORIGIN, **row} for row in mine]
        claims += promised
        note = (
            f"Throughput: K' = {PERIOD}, 0.56 M parameters, a batch (up to {MOST_BUSY} a rank) chosen so that a step "
            f"takes about {STEP_S:g} s, for which DDP reaches at most a quarter of the limit at 50 Mbit/s; methods "
            "in turns; 'no exchange' is the limit, our best form the one that comes nearest; hivemind runs after "
            "its own limit; bytes go both ways, read at the links. Training: ResNet of 0.27 M parameters, 12800 "
            "images; accuracy: 5 epochs, batch 16 a rank, rate 0.05; adaptive (exchanges may cost 20 % of the time, "
            "overlap 2, int8) and sweep: 3 epochs, batch 8, rate 0.01; seconds run from the first step to the "
            "evaluated model."
        )
        tell_parts(rows, claims, note=note, save=arguments.save)


def kept_parts(parts: list[str]) -> tuple[list[dict], list[Claim]]:
    """Returns the rows and claims of these parts from the saved result."""
    file = RESULTS_DIR / "exchange_full.json"
    if not file.exists():
        return [], []
    kept = json.loads(file.read_text())
    names = {name for part in parts for name in CLAIMS[part]}
    where = {"architecture": kept["machine"]["architecture"]}
    rows = [{**where, **row} for row in kept["rows"] if row["part"] in parts]
    return rows, [Claim(**claim) for claim in kept["claims"] if claim["name"] in names]


def tell_parts(rows: list[dict], claims: list[Claim], *, note: str, save: bool) -> None:
    """Tells the rows part by part, which have different columns, and all claims."""
    for part in PARTS[:-1]:
        if mine := [row for row in rows if row["part"] == part]:
            print_table([{key: value for key, value in row.items() if key != "versions"} for row in mine])
    write_result(
        "exchange_full", rows, claims, note=note, save=save, shown=[row for row in rows if row["part"] == "sweep"]
    )


def on_lab(ranks: tuple[int, ...], rate: float, rounds: int, steps: int, sitting: str, batch: int) -> dict:
    """Returns what the ranks of these nodes saw, with links of so many Mbit/s."""
    from evenly.lab import Lab, LabCluster, LabNode

    nodes = tuple(LabNode(name=f"node{i}", ranks=count, rate_mbit=rate) for i, count in enumerate(ranks))
    python = PEERS_PYTHON if sitting != "short" and PEERS_PYTHON.exists() else Path(sys.executable)
    command = [str(python), str(Path(__file__).resolve()), "--worker", str(rounds), str(steps), sitting, str(batch)]
    with Lab(LabCluster(nodes=nodes)) as lab:
        result = lab.run(command, output="capture", timeout_s=1500 if sitting != "apart" else 600)
    result.check()
    print(f"{ranks} ranks at {rate:g} Mbit/s, {sitting}: done", file=sys.stderr, flush=True)
    return json.loads(result.stdout[0].strip().splitlines()[-1])


@cache
def busy_batch() -> int:
    """Returns the samples of a rank with which a step of the busy network takes about `STEP_S` on this machine."""
    told = on_lab((2, 2), 200.0, 2, 2 * PERIOD, "pace", MOST_BUSY)
    seconds = median(told["methods"]["no exchange"]["seconds"])
    batch = max(4, min(MOST_BUSY, 4 * round(MOST_BUSY * STEP_S / seconds / 4)))
    words = f"a step with {MOST_BUSY} samples takes {1e3 * seconds:.0f} ms: batches of {batch}"
    print(words, file=sys.stderr, flush=True)
    return batch


def compared(told: dict, ranks: tuple[int, ...], rate: float, steps: int) -> list[dict]:
    """Returns a row for each method of one run, beside its limit: no exchange."""
    limit, rows = told["methods"]["no exchange"]["seconds"], []
    for name, way in told["methods"].items():
        made = PERIOD if name in SLOW else steps
        rows.append(
            {
                "nodes": " + ".join(map(str, ranks)),
                "mbit_per_s": rate,
                "method": name,
                "batch": told["batch"],
                "ms_per_step": 1e3 * median(way["seconds"]),
                "spread_ms": spread([1e3 * s for s in way["seconds"]]),
                "throughput_over_limit": median([free / own for free, own in zip(limit, way["seconds"], strict=True)]),
                "times_model_size_per_step": median([sum(sent) / made for sent in way["sent"]])
                / told["parameter_bytes"],
                "versions": told["versions"],
            }
        )
    return rows


def hivemind_part(rounds: int, steps: int, batch: int) -> tuple[list[dict], list[Claim]]:
    """Returns the rows of hivemind, which goes on in the turns of others, so it comes after its limit.

    One of our forms runs there too. Nothing of it where it is not installed or does not end.
    """
    from evenly import EvenlyError

    rows: list[dict] = []
    ahead = []
    for ranks, rate in CASES if PEERS_PYTHON.exists() else ():
        try:
            told = compared(on_lab(ranks, rate, rounds, steps, "apart", batch), ranks, rate, steps)
        except EvenlyError as error:
            print(f"left out: {error}", file=sys.stderr, flush=True)
            continue
        over = {row["method"]: row["throughput_over_limit"] for row in told}
        if "hivemind" in over:
            rows += [{"part": "hivemind", **row} for row in told]
            ahead += [over["evenly, fp32"] / over["hivemind"]] if rate == 50.0 else []
    return rows, [Claim("throughput_over_hivemind_50mbit", min(ahead), 1.25, "higher")] if ahead else []


def throughput_part(rounds: int, steps: int, batch: int) -> tuple[list[dict], list[Claim]]:
    """Returns the rows of all links and nodes, and what was promised."""
    rows, over, bytes_of, best, rivals = [], {}, {}, {}, {}
    for ranks, rate in CASES:
        for row in compared(on_lab(ranks, rate, rounds, steps, "full", batch), ranks, rate, steps):
            over[ranks, rate, row["method"]] = row["throughput_over_limit"]
            bytes_of[ranks, rate, row["method"]] = row["times_model_size_per_step"]
            rows.append({"part": "throughput", **row})
        here = {name: value for (*case, name), value in over.items() if case == [ranks, rate]}
        best[ranks, rate] = max(value for name, value in here.items() if name.startswith("evenly"))
        rivals[ranks, rate] = max(value for name, value in here.items() if rival(name))
    even = ((2, 2), 200.0)
    claims = [
        Claim("throughput_over_limit_200mbit", min(v for (_, r), v in best.items() if r == 200.0), 0.95, "higher"),
        Claim("throughput_over_limit_50mbit", min(v for (_, r), v in best.items() if r == 50.0), 0.90, "higher"),
        Claim(
            "throughput_over_best_peer_50mbit",
            min(value / rivals[case] for case, value in best.items() if case[1] == 50.0),
            1.25,
            "higher",
        ),
        Claim("bytes_fp32_per_step", bytes_of[(*even, "evenly, fp32")], 0.27, "lower"),
        Claim("bytes_bf16_per_step", bytes_of[(*even, "evenly, bf16")], 0.14, "lower"),
        Claim("bytes_int8_per_step", bytes_of[(*even, "evenly, int8")], 0.075, "lower"),
        Claim("bytes_int4_per_step", bytes_of[(*even, "evenly, int4")], 0.042, "lower"),
        Claim("ddp_over_limit_50mbit", max(over[r, m, "global DDP"] for r, m in best if m == 50.0), 0.25, "lower"),
    ]
    return rows, claims


def rival(name: str) -> bool:
    return name != "no exchange" and not name.startswith("evenly")


def report(told: dict, *, rounds: int, steps: int, rate: float, save: bool) -> None:
    size, ways = told["parameter_bytes"], told["methods"]
    exchanges = steps // PERIOD
    rows = []
    for name, way in ways.items():
        per_step = [sum(sent) / steps for sent in way["sent"]]
        rows.append(
            {
                "method": name,
                "ms_per_step": 1e3 * median(way["seconds"]),
                "spread_ms": spread([1e3 * s for s in way["seconds"]]),
                "mb_across_per_step": median(per_step) / 1e6,
                "times_model_size_per_step": median(per_step) / size,
                "accuracy": way["accuracy"],
            }
        )
    peers = ("global DDP", "post_localSGD", "hierarchical")
    sent = [max(round_) / exchanges for round_ in ways["evenly"]["sent"]]
    theirs = [max(round_) / exchanges for round_ in ways["post_localSGD"]["sent"]]
    ratios = [
        mine / min(ways[peer]["seconds"][number] for peer in peers)
        for number, mine in enumerate(ways["evenly"]["seconds"])
    ]
    claims = [
        Claim("sent_per_exchange_over_parameters", median(sent) / size, 1.08, "lower"),
        Claim("sent_over_post_local", median(sent) / median(theirs), 0.7, "lower"),
        Claim("step_time_over_best_peer", median(ratios), 1.0, "lower"),
    ]
    note = (
        f"2 nodes x 2 ranks, {rate:g} Mbit/s, K' = {PERIOD}, batch {BATCH} a rank, {size / 4e6:.2f} M parameters, "
        f"{rounds} rounds of {steps} steps a method, in turns. 'no exchange' is the limit: the same without exchanges. "
        "Accuracy is that of rank 0's model on 2000 test images after all rounds."
    )
    write_result("exchange", rows, claims, note=note, save=save)


if __name__ == "__main__":
    main()
