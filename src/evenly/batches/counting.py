"""A call of the model -> how many samples it counts."""

import torch

from evenly._torch.tensors import samples_in
from evenly.errors import SpecError


def samples_of_call(yielded: int | None, module: torch.nn.Module, *args: object, **kwargs: object) -> float:
    """Returns the samples of a batch that `module` is called with: those of the batch that its loader `yielded` last.

    Raises `SpecError` if none was yielded in this epoch and the module trains. In evaluation it is the leading dim of
    the first tensor.
    """
    if yielded is not None:
        return float(yielded)
    if module.training:
        raise SpecError(
            "the model was called for training with a batch that is not from the loader of prepare(), so its number of "
            "samples is unknown. Iterate over that loader, and train each batch before the next. To train with a "
            "loader of your own, leave the dataset out of prepare(), or give count=."
        )
    samples = samples_in((*args, *kwargs.values()))
    return 1.0 if samples is None else float(samples)
