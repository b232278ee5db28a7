"""Layers cut in unequal shares: how long a step takes, and what travels, beside an even split and one device alone.

Everything runs in one go on the lab: three devices of one node with CPU quotas, in turns of two steps, of which the
second is timed, round after round; figures are medians over rounds. The published net is run at 70/25/5 of a core, a
wide net at 50/30/20. "Published" deals the filters out by the published rounding and alternates partitioned and
reduced layers, with a replicated tensor after every pair; "even" does the same with equal shares. "Ours" is
`evenly.shard` with `cut_batch=True`; "planned" is cut as the planner finds best after measuring the devices with their
quotas, over all or some of them; "without the slowest" is as "ours" with the last share at 0. "Alone" is the fastest
device with the whole network, "ideal" that work divided by the summed speed. Bytes and messages are counted in every
collective and compared with the plan. Two peers split evenly: DTensor on the same ranks, and tensor_parallel (see
peer_tensor_parallel.py), which has the time of all devices in one process.
"""

import argparse
import sys
from pathlib import Path

sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BATCH_SIZE = 96
SHARES = {"cifar": (70, 25, 5), "wide": (50, 30, 20)}  # of each network, in percent of a core
QUICK_METHODS = 4  # with --quick only so many methods run


def main() -> None:
    """Runs the benchmark, or one rank of it on the lab."""
    arguments = _parse_arguments()
    if arguments.resnet:
        from benchmarks._shards.resnet import run_resnet_rank

        run_resnet_rank()
    elif arguments.worker:
        from benchmarks._shards.worker import run_shards_rank

        name, batch_size, rounds, num_methods, shares, folder = arguments.worker
        percent = [float(share) for share in shares.split(",")]
        run_shards_rank(name, int(batch_size), int(rounds), int(num_methods), percent, Path(folder))
    else:
        run_all(quick=arguments.quick, save=arguments.save)


def _parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, about three minutes on two cores")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--resnet", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_all(*, quick: bool, save: bool) -> None:
    """Runs both networks, the peer and ResNet-50, and reports them."""
    from benchmarks._shards.lab import run_on_lab, run_peer, run_with_quotas
    from benchmarks._shards.result import NetworkFigures, report
    from benchmarks._shards.worker import NAMES

    rounds = 1 if quick else 4
    num_methods = QUICK_METHODS if quick else len(NAMES)
    printed = {}
    for name, shares in SHARES.items():
        options = [name, str(BATCH_SIZE), str(rounds), str(num_methods), ",".join(map(str, shares))]
        printed[name] = run_with_quotas([share / 100 for share in shares], "--worker", *options)
    networks = []
    for name, shares in SHARES.items():
        peer_seconds = run_peer(name, BATCH_SIZE, rounds, shares)
        networks.append(NetworkFigures(name, BATCH_SIZE, shares, **printed[name], peer_seconds=peer_seconds))
    report(networks, run_on_lab("--resnet"), save=save)


if __name__ == "__main__":
    main()
