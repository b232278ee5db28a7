"""The parts of `exchange.py --full` and the claims that each makes. Imports no torch."""

from benchmarks.common import Claim, Row

CLAIMS_OF_PARTS = {
    "throughput": (
        "throughput_over_limit_200mbit",
        "throughput_over_limit_50mbit",
        "throughput_over_best_peer_50mbit",
        "throughput_over_no_communication_50mbit",
        "bytes_fp32_per_step",
        "bytes_bf16_per_step",
        "bytes_int8_per_step",
        "bytes_int4_per_step",
        "ddp_over_limit_50mbit",
    ),
    "accuracy": (
        "accuracy_points_all_minus_sync",
        "accuracy_points_worst_form_minus_sync",
        "accuracy_points_nesterov_minus_sync",
    ),
    "adaptive": ("adaptive_speedup_to_ddp_accuracy_50mbit", "accuracy_points_adaptive_minus_ddp"),
    "hivemind": ("throughput_over_hivemind_50mbit",),
    "sweep": (),
}
PARTS = tuple(CLAIMS_OF_PARTS)
Slice = tuple[list[Row], list[Claim]]  # what a part measured
