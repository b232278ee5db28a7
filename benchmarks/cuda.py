"""What evenly adds to training a GPT on a GPU: a rank alone in its node, a node of two ranks, and two nodes.

Parts: `alone` and `compiled` (124 M parameters, one rank), `node` (two ranks of one node on one GPU, over gloo),
`nodes` (two nodes of one rank), `billion` (the same with 1 B parameters in bfloat16) and `codecs` (beside a copy on the
device). The methods of a part train in turns in the same processes. --quick runs on a CPU, too, with a small network.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._cuda.parts import OVERLAP, PARTS, PERIOD, Part
from benchmarks.common import RESULTS_DIR, ROW_ORIGIN, Claim, Row, median, spread, write_result
from benchmarks.local_ranks import run_ranks

CODECS = "codecs"
ALL = (*PARTS, CODECS)
OVER = {"alone": "plain", "compiled": "plain", "node": "DDP"}  # the method that ratios refer to, else "no exchange"
CLAIMS = {  # part, method, bar
    "alone_over_plain_gpt124m": ("alone", "evenly", 1.01),
    "alone_over_plain_gpt124m_compiled": ("compiled", "evenly", 1.01),
    "node_of_two_over_ddp_gpt124m": ("node", "evenly", 1.0),
    "two_nodes_int8_over_no_exchange_gpt124m": ("nodes", "int8", 1.03),
    "two_nodes_int8_over_no_exchange_gpt1b": ("billion", "int8", 1.05),
}
CODEC_PART_OF_COPY = 0.25  # of the bandwidth of a copy
OFFLOADED, MOST_DEVICE_BYTES = "int8, offload", 0.3  # more on the device than without exchanges, over the parameters
NOTE = (
    "All ranks on one device. A GPT of 124 M parameters, 16 x 512 tokens a rank, bf16 autocast, fused AdamW; or of 1 B "
    f"parameters in bfloat16, 16 x 1024 tokens. Nodes exchange every {PERIOD} steps, overlapped with {OVERLAP}. Ratios "
    "are medians over rounds of neighbouring turns. The bandwidth of codecs and copies counts bytes read and written."
)


def main() -> None:
    """Runs the parts, or one rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds; without a GPU a small network")
    parser.add_argument("--only", nargs="+", choices=ALL, metavar="PART", help=f"some of {', '.join(ALL)}")
    parser.add_argument("--save", action="store_true", help="keep the result; parts not run keep their rows")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        from benchmarks._cuda.worker import run_codecs, run_part

        if arguments.worker == CODECS:
            run_codecs()
        else:
            run_part(arguments.worker, quick=arguments.quick)
        return
    rows = saved_rows() if arguments.save else []
    for name in arguments.only or ALL:
        options = ["--worker", name, *(["--quick"] if arguments.quick else [])]
        variables = [{"OMP_NUM_THREADS": 2, **part_variables(name)}] * num_ranks(name)
        figures = run_ranks(__file__, *options, variables=variables, timeout_s=580)
        new_rows = codec_rows(figures) if name == CODECS else part_rows(name, figures)
        rows = [*(row for row in rows if row["part"] != name), *new_rows]
        report(rows, name, save=arguments.save)


def num_ranks(name: str) -> int:
    """Returns the processes of a part."""
    return 1 if name == CODECS else PARTS[name].num_ranks


def part_variables(name: str) -> dict[str, object]:
    """Returns the environment variables of the ranks of a part."""
    part: Part | None = PARTS.get(name)
    return {} if part is None else part.variables


def saved_rows() -> list[Row]:
    """Returns the rows of the kept result."""
    file = RESULTS_DIR / "cuda.json"
    return list(json.loads(file.read_text())["rows"]) if file.exists() else []


def part_rows(name: str, figures: dict[str, Any]) -> list[Row]:
    """Returns a row for each method of a part."""
    methods = figures["methods"]
    reference = methods[OVER.get(name, "no exchange")]
    return [
        {
            "part": name,
            "network": figures["network"],
            "method": method,
            "ms_per_step": 1e3 * median(own["step_s"]),
            "spread_ms": spread([1e3 * seconds for seconds in own["step_s"]]),
            "ratio": median([a / b for a, b in zip(own["step_s"], reference["step_s"], strict=True)]),
            "exchange_ms": 1e3 * median(own["exchange_s"]) if own["exchange_s"] else None,
            "waited_ms": 1e3 * median(own["waited_s"]) if own["waited_s"] else None,
            "sent_mb": median(own["sent_bytes"]) / 1e6 if own["sent_bytes"] else None,
            "more_bytes_over_parameters": (own["peak_bytes"] - reference["peak_bytes"]) / own["parameter_bytes"],
            **ROW_ORIGIN,
        }
        for method, own in methods.items()
    ]


def codec_rows(figures: dict[str, Any]) -> list[Row]:
    """Returns a row for each codec and direction, and for the copy."""
    return [
        {
            "part": CODECS,
            "method": name,
            "ms": 1e3 * median(own["seconds"]),
            "spread_ms": spread([1e3 * seconds for seconds in own["seconds"]]),
            "gb_per_s": own["bytes"] / median(own["seconds"]) / 1e9,
            **ROW_ORIGIN,
        }
        for name, own in figures.items()
    ]


def report(rows: Sequence[Row], latest: str, *, save: bool) -> None:
    """Prints the rows of the latest part and all claims; with `save` writes all rows to `results/cuda.json`."""
    by_method = {(row["part"], row["method"]): row for row in rows}
    claims = [
        Claim(claim, by_method[part, method]["ratio"], bar, "lower")
        for claim, (part, method, bar) in CLAIMS.items()
        if (part, method) in by_method and by_method[part, method]["network"] != "small"
    ]
    offloaded = [row["more_bytes_over_parameters"] for row in rows if row["method"] == OFFLOADED]
    if offloaded:
        claims.append(Claim("exchange_device_bytes_over_parameters", max(offloaded), MOST_DEVICE_BYTES, "lower"))
    if (CODECS, "copy") in by_method:
        bar = CODEC_PART_OF_COPY * by_method[CODECS, "copy"]["gb_per_s"]
        claims += [
            Claim(f"{codec}_code_gb_per_s", by_method[CODECS, f"{codec}, encode"]["gb_per_s"], bar, "higher")
            for codec in ("int8", "int4")
        ]
    shown = [{key: row[key] for key in row if key not in ROW_ORIGIN} for row in rows if row["part"] == latest]
    write_result("cuda", rows, claims, note=NOTE, save=save, shown=shown)


if __name__ == "__main__":
    main()
