"""Run -> table. No torch."""

from evenly.reports.table import HEADERS, Row, cells, report, row_of

__all__ = ["HEADERS", "Row", "cells", "report", "row_of"]
