"""Seeds the random numbers of a program."""

import random

import numpy as np
import torch

from evenly.session.planning import require_numbers


def seed_program(seed: int) -> None:
    """Seeds the global generators of Python, numpy and torch, of all devices."""
    require_numbers(seed=seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
