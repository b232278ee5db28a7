"""Published networks, cut over two ranks in unequal shares: which are exact, and what is computed whole.

40 networks of torchvision (classification, segmentation, backbones of detectors) and families of timm, each in a small
form with small images, in float64. Every network trains 3 steps whole and cut over shares 2 to 1; outputs, gradients,
buffers and parameters may differ by 1e-9 of their size. A network that differs by more, but by no more than 4 times
what one rounding of its weights changes in the whole network, is "noisy": batch norm of very few numbers magnifies it.
Dropout and stochastic depth are off there; with them on, one rank and two must give the same first step. "cut" counts
the layers with weights that are cut, "whole" the operations that every rank computes whole, with the reasons that
`explain()` gives.

Needs torchvision and timm. `--page` writes the table into docs/networks.md.
"""

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "networks.md"
MARK = "<!-- table -->\n"
QUICK = ("squeezenet1_1", "shufflenet_v2_x0_5", "timm test_byobnet", "timm test_vit")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="networks to check; by default all")
    parser.add_argument("--quick", action="store_true", help="four small networks, under a minute")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--page", action="store_true", help="write the table into docs/networks.md")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit-s", type=int, default=400, help="for one network")
    parser.add_argument("--rows", type=Path, help="a file of rows to go on from, and to add to")
    arguments = parser.parse_args()
    rows = check_all(arguments)
    report(rows, save=arguments.save)
    if arguments.page:
        write_page(rows)


def check_all(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Returns one row for each network."""
    import torch

    warnings.filterwarnings("ignore")  # of the libraries
    torch.set_num_threads(1)  # the ranks are threads already
    from benchmarks._networks.catalogue import catalogue
    from benchmarks._networks.check import check_network

    networks = catalogue()
    names = arguments.names or (QUICK if arguments.quick else list(networks))
    known = {}
    if arguments.rows is not None and arguments.rows.exists():
        known = {row["network"]: row for row in map(json.loads, arguments.rows.read_text().splitlines())}
    for name in names:
        if name not in known:
            row = {"network": name, "library": networks[name].library}
            row |= check_network(networks[name], steps=arguments.steps, limit_s=arguments.limit_s)
            known[name] = row
            print(json.dumps(row), file=sys.stderr, flush=True)
            if arguments.rows is not None:
                with arguments.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return [known[name] for name in names]


def report(rows: list[dict[str, object]], *, save: bool) -> None:
    """Prints the table and the claims."""
    from benchmarks.common import Claim, write_result

    exact = sum(row["result"] == "exact" for row in rows)
    wrong = sum(row["result"] in ("wrong", "failed") for row in rows)
    claims = [
        Claim("exact_networks_fraction", exact / len(rows), 0.95, "higher"),
        Claim("wrong_networks", wrong, 0, "lower"),
    ]
    shown = [
        {key: row[key] for key in ("network", "result", "cut", "whole", "random", "seconds")}
        | {"note": str(row["note"])[:60]}
        for row in rows
    ]
    write_result("networks", rows, claims, note=__doc__ or "", save=save, shown=shown)


def write_page(rows: list[dict[str, object]]) -> None:
    """Writes the counts and the table of all networks into the page, after its mark."""
    from benchmarks.common import describe_machine

    machine = describe_machine()
    seconds = sum(float(str(row["seconds"])) for row in rows)
    lines = [
        "| library | networks | exact | of these partly whole | noisy | refused | wrong |",
        "|---|---|---|---|---|---|---|",
        *(_counts_line(name, [row for row in rows if row["library"] == name]) for name in ("torchvision", "timm")),
        _counts_line("both", rows),
        "",
        f"Together the checks took {seconds / 60:.0f} minutes ({machine['architecture']}, torch {machine['torch']}).",
        "",
        "## Networks",
        "",
        "| network | library | result | layers cut | computed whole | why |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = str(row["network"]).removeprefix("timm ")
        why = row["note"] or "; ".join(row["reasons"])  # type: ignore[call-overload]
        lines.append(
            f"| {name} | {row['library']} | {row['result']} | {row['cut']} | {row['whole']} | "
            f"{str(why).replace('|', '/')} |"
        )
    head = PAGE.read_text().split(MARK)[0]
    PAGE.write_text(head + MARK + "\n" + "\n".join(lines) + "\n")


def _counts_line(library: str, rows: list[dict[str, object]]) -> str:
    counts = Counter(str(row["result"]) for row in rows)
    partly = sum(row["result"] == "exact" and bool(row["whole"]) for row in rows)
    wrong = counts["wrong"] + counts["failed"]
    numbers = [len(rows), counts["exact"], partly, counts["noisy"], counts["refused"], wrong]
    return f"| {library} | {' | '.join(map(str, numbers))} |"


if __name__ == "__main__":
    main()
