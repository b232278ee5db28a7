"""Graph + shares -> Layout: how every tensor is cut. Pure, no torch."""

from evenly.layouts.layout import lay_out, relaid
from evenly.layouts.search import TransferCosts

__all__ = ["TransferCosts", "lay_out", "relaid"]
