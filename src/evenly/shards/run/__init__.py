"""What runs: the cut network and the program of one rank."""
