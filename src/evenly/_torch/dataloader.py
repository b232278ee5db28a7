"""The worker information of torch's DataLoader."""

from contextlib import AbstractContextManager

from torch.utils.data._utils import worker

from evenly._torch.patching import replaced


def outside_of_workers() -> AbstractContextManager[None]:
    """Makes `torch.utils.data.get_worker_info` return None inside the block.

    A dataset that splits itself over workers then yields all of its samples. torch has no public way to set it; a
    worker process stores it in this one variable (torch 2.11 and 2.13).
    """
    return replaced(worker, "_worker_info", None)
