"""The result of `exchange.py --full`, which may be measured and saved part by part."""

import json
from collections.abc import Sequence

from benchmarks._exchange.lab import STEP_S
from benchmarks._exchange.method import PERIOD
from benchmarks._exchange.networks import MAX_BATCH_SIZE
from benchmarks._exchange.parts import CLAIMS_OF_PARTS, PARTS, Slice
from benchmarks.common import RESULTS_DIR, Claim, Row, print_table, write_result

NOTE = (
    f"Throughput: K' = {PERIOD}, 0.56 M parameters, a batch (up to {MAX_BATCH_SIZE} a rank) chosen so that a step "
    f"takes about {STEP_S:g} s, for which DDP reaches at most a quarter of the limit at 50 Mbit/s; methods "
    "in turns; 'no exchange' is the limit, our best form the one that comes nearest; hivemind runs after "
    "its own limit; bytes go both ways, read at the links. Training: ResNet of 0.27 M parameters, 12800 "
    "images; accuracy: 5 epochs, batch 16 a rank, rate 0.05; adaptive (exchanges may cost 20 % of the time, "
    "overlap 2, int8) and sweep: 3 epochs, batch 8, rate 0.01; seconds run from the first step to the "
    "evaluated model."
)


def saved_parts(parts: Sequence[str]) -> Slice:
    """Returns the rows and claims of these parts from the saved result; none where there is no such file."""
    file = RESULTS_DIR / "exchange_full.json"
    if not file.exists():
        return [], []
    saved = json.loads(file.read_text())
    claim_names = {name for part in parts for name in CLAIMS_OF_PARTS[part]}
    origin = {"architecture": saved["machine"]["architecture"]}
    rows = [{**origin, **row} for row in saved["rows"] if row["part"] in parts]
    return rows, [Claim(**claim) for claim in saved["claims"] if claim["name"] in claim_names]


def report_parts(rows: Sequence[Row], claims: Sequence[Claim], *, save: bool) -> None:
    """Prints a table for each part, as their columns differ, then all claims and the JSON object."""
    *first_parts, last_part = PARTS
    for part in first_parts:
        part_rows = [row for row in rows if row["part"] == part]
        print_table([{key: value for key, value in row.items() if key != "versions"} for row in part_rows])
    last_rows = [row for row in rows if row["part"] == last_part]
    write_result("exchange_full", rows, claims, note=NOTE, save=save, shown=last_rows)
