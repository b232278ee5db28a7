"""The tensors of an exchange: flat vectors, optimizer state, fingerprints, fragments."""
