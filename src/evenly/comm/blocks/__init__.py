"""Which ranks hold which indices of a tensor, and sums over them."""
