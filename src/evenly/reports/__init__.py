"""Run -> table. No torch."""

from evenly.reports.table import HEADERS, Row, cells, notes, read_row, report, row_of

__all__ = ["HEADERS", "Row", "cells", "notes", "read_row", "report", "row_of"]
