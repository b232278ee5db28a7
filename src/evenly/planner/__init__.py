"""Cluster + Profile + Graph + settings -> Plan. Pure and deterministic."""

from evenly.planner.balance import balance
from evenly.planner.calibration_targets import cut_to_try, group_to_try, may_pay
from evenly.planner.plan import plan
from evenly.planner.simulate import simulate
from evenly.planner.simulated_run import SimulatedRun, simulate_run
from evenly.planner.warnings import doubts

__all__ = [
    "SimulatedRun",
    "balance",
    "cut_to_try",
    "doubts",
    "group_to_try",
    "may_pay",
    "plan",
    "simulate",
    "simulate_run",
]
