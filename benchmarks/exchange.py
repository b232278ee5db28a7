"""What crosses the link, and how long a step takes: node-based communications beside torch's own ways.

All methods run in one go on the lab (2 nodes x 2 ranks, 200 Mbit/s): same network, data, steps and period. They take
turns, a few steps each, round after round; figures are medians over rounds. Bytes are read from the link's counter.
The network has 2.0 million parameters and little work per parameter, so that the wire matters on two slow cores.

With --full there are more peers and all forms of our own exchange, on links of 200 and of 50 Mbit/s, with 2 x 2 and
with 3 + 1 ranks. A round of ours begins and ends when no exchange is under way, so nothing is sent in another's turn.
Then networks are trained to the end: what each form learns, adaptive periods beside DDP, a sweep of periods.
"""

import argparse
import sys
from pathlib import Path

sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "src"))  # environments of peers have no evenly

from benchmarks._exchange.parts import PARTS


def main() -> None:
    """Runs the benchmark, or one rank of it on the lab."""
    arguments = _parse_arguments()
    if arguments.worker:
        from benchmarks._exchange.worker import run_exchange_rank

        rounds, steps, method_set, batch_size = arguments.worker
        run_exchange_rank(int(rounds), int(steps), method_set, int(batch_size))
    elif arguments.full or arguments.only:
        from benchmarks._exchange.full import run_full

        run_full(arguments.only, seeds=arguments.seeds, quick=arguments.quick, save=arguments.save)
    else:
        from benchmarks._exchange.method import PERIOD
        from benchmarks._exchange.short import run_short

        rounds, steps = (2, PERIOD) if arguments.quick else (6, 2 * PERIOD)
        run_short(arguments.rate, rounds=rounds, steps=steps, save=arguments.save)


def _parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute on two cores")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s of each node's link")
    parser.add_argument("--full", action="store_true", help="all peers and forms, two links, 2 x 2 and 3 + 1 ranks")
    parser.add_argument("--only", choices=PARTS, help="one part of --full; the others stay as they were saved")
    parser.add_argument("--seeds", type=int, default=3, help="of the parts of --full that train to the end")
    parser.add_argument("--worker", nargs=4, metavar=("ROUNDS", "STEPS", "METHODS", "BATCH"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
