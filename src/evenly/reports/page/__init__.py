"""Runs -> one HTML page that needs no network: figures, charts, a timeline, a comparison."""

from evenly.reports.page.render import render, write_page

__all__ = ["render", "write_page"]
