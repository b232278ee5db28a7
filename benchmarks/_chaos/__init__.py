"""Parts of the benchmark of faults."""
