"""Run, plan or forecast -> table, picture. No torch."""

from evenly.reports.forecast_table import RANK_HEADERS, compare, rank_cells, side_by_side
from evenly.reports.phases import PHASE_HEADERS, phase_rows, remarks
from evenly.reports.plan_picture import Panel, draw_picture, require_picture
from evenly.reports.plan_table import (
    PLAN_HEADERS,
    BlockRow,
    RankRow,
    bars,
    block_rows,
    gigabytes,
    left_out_notes,
    milliseconds,
    per_second,
    plan_cells,
    rank_rows,
    totals,
)
from evenly.reports.predictions import PREDICTION_HEADERS, prediction_rows
from evenly.reports.reading import RecordedRun, read_recorded
from evenly.reports.run_files import require_no_run, write_run
from evenly.reports.table import HEADERS, TableRow, cells, notes, read_row, report, row_of

__all__ = [
    "HEADERS",
    "PHASE_HEADERS",
    "PLAN_HEADERS",
    "PREDICTION_HEADERS",
    "RANK_HEADERS",
    "BlockRow",
    "Panel",
    "RankRow",
    "RecordedRun",
    "TableRow",
    "bars",
    "block_rows",
    "cells",
    "compare",
    "draw_picture",
    "gigabytes",
    "left_out_notes",
    "milliseconds",
    "notes",
    "per_second",
    "phase_rows",
    "plan_cells",
    "prediction_rows",
    "rank_cells",
    "rank_rows",
    "read_recorded",
    "read_row",
    "remarks",
    "report",
    "require_no_run",
    "require_picture",
    "row_of",
    "side_by_side",
    "totals",
    "write_run",
]
