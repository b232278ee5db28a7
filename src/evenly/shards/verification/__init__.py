"""What verifies: a cut network against the uncut one, ranks against each other."""
