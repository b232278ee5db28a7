"""The plain form of `exchange.py`: bytes and step time beside torch's own methods, on 2 x 2 ranks and one link rate."""

from benchmarks._exchange.lab import Figures, run_methods
from benchmarks._exchange.method import PERIOD
from benchmarks._exchange.networks import BATCH_SIZE
from benchmarks.common import Claim, Row, median, spread, write_result

PEERS = ("global DDP", "post_localSGD", "hierarchical")


def run_short(rate_mbit: float, *, rounds: int, steps: int, save: bool) -> None:
    """Runs the methods on links of so many Mbit/s and reports them."""
    figures = run_methods((2, 2), rate_mbit, rounds=rounds, steps=steps, method_set="short", batch_size=BATCH_SIZE)
    note = (
        f"2 nodes x 2 ranks, {rate_mbit:g} Mbit/s, K' = {PERIOD}, batch {BATCH_SIZE} a rank, "
        f"{figures['parameter_bytes'] / 4e6:.2f} M parameters, "
        f"{rounds} rounds of {steps} steps a method, in turns. 'no exchange' is the limit: the same without exchanges. "
        "Accuracy is that of rank 0's model on 2000 test images after all rounds."
    )
    write_result("exchange", short_rows(figures, steps), short_claims(figures, steps), note=note, save=save)


def short_rows(figures: Figures, steps: int) -> list[Row]:
    """Returns time, bytes and accuracy of each method, in rounds of so many steps."""
    rows = []
    for name, method in figures["methods"].items():
        step_bytes = median([sum(sent) / steps for sent in method["sent"]])
        rows.append(
            {
                "method": name,
                "ms_per_step": 1e3 * median(method["seconds"]),
                "spread_ms": spread([1e3 * seconds for seconds in method["seconds"]]),
                "mb_across_per_step": step_bytes / 1e6,
                "times_model_size_per_step": step_bytes / figures["parameter_bytes"],
                "accuracy": method["accuracy"],
            }
        )
    return rows


def short_claims(figures: Figures, steps: int) -> list[Claim]:
    """Returns the bytes of an exchange, alone and over post-local SGD, and the step time over the best peer's."""
    methods = figures["methods"]
    exchanges = steps // PERIOD
    sent = median([max(node_bytes) / exchanges for node_bytes in methods["evenly"]["sent"]])
    sent_by_peer = median([max(node_bytes) / exchanges for node_bytes in methods["post_localSGD"]["sent"]])
    time_ratios = [
        seconds / min(methods[peer]["seconds"][number] for peer in PEERS)
        for number, seconds in enumerate(methods["evenly"]["seconds"])
    ]
    return [
        Claim("sent_per_exchange_over_parameters", sent / figures["parameter_bytes"], 1.08, "lower"),
        Claim("sent_over_post_local", sent / sent_by_peer, 0.7, "lower"),
        Claim("step_time_over_best_peer", median(time_ratios), 1.0, "lower"),
    ]
