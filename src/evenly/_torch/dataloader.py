"""What torch's DataLoader tells its workers about themselves."""

from contextlib import AbstractContextManager

from torch.utils.data._utils import worker

from evenly._torch.patching import replaced


def outside_of_workers() -> AbstractContextManager[None]:
    """Has `torch.utils.data.get_worker_info` tell of no worker inside of the block, and of the same one after it.

    A dataset that splits itself over workers then gives all of its samples. torch has no public way to set it; a
    worker holds it in this one variable of its process (torch 2.11 and 2.13).
    """
    return replaced(worker, "_worker_info", None)
