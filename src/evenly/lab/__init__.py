"""An uneven cluster on one Linux machine: namespaces, shaped links, CPU quotas, byte counters. No torch."""

from evenly.lab._lab import Lab, clean
from evenly.lab._machine import missing
from evenly.lab.cluster import LabCluster, LabNode, load_cluster
from evenly.lab.result import LabResult

__all__ = ["Lab", "LabCluster", "LabNode", "LabResult", "clean", "load_cluster", "missing"]
