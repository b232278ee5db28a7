"""Train one network on uneven machines."""
