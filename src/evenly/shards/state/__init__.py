"""State of a cut network: saving and loading the full state, moving units between ranks."""
