"""Checks that the ranks of a cut network agree: on steps, optimizer settings, losses and replicated tensors.

Each rank trains its parts from its own loss. A skipped step, another learning rate or other labels on one rank would
leave parts of different networks. The ranks compare a row of numbers every few forward passes.
"""

import math
import struct
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from evenly._torch import pytree
from evenly.comm import ShardGroup, mark
from evenly.errors import MismatchError
from evenly.shards.parts.local_shards import local_shard_of

EARLY_PASSES = (2, 3, 16, 32, 64)  # most mistakes show at once
EVERY = 128  # passes between comparisons later; each takes about half of a tiny step
SAMPLED = 1 << 20  # elements of a batch or of a gradient of an output that are read
SAMPLED_OF_PARAMETER = 1 << 15  # those of parameters differ everywhere; a slow rank needs a millisecond for them
NUMBERS = (bool, int, float)
_UNCUT = "_evenly_uncut"
ADVICE = "All ranks of a cut network must make the same calls with the same batches, labels and settings."


class StepTally:
    """Counts a rank's optimizer steps and forward passes for one cut network."""

    def __init__(self) -> None:
        self.steps = 0
        self.settings = 0  # checksum of the settings of all steps
        self.lr = 0.0  # of the first group in the last step
        self.passes: int | None = None  # with gradients since the last step; None where no network counts them

    def add(self, settings: bytes, lr: float) -> None:
        """Counts a step of an optimizer with these packed settings."""
        self.steps += 1
        self.passes = None if self.passes is None else 0
        self.settings = zlib.crc32(settings, self.settings)
        self.lr = lr


_tallies: "weakref.WeakKeyDictionary[ShardGroup, StepTally]" = weakref.WeakKeyDictionary()


def tally_of(shard_group: ShardGroup) -> StepTally:
    """Returns the tally of the network that is cut over this shard group."""
    return _tallies.setdefault(shard_group, StepTally())


def mark_uncut(parameters: Iterable[torch.Tensor], tally: StepTally) -> None:
    """Links the parameters of the uncut network to the tally of the cut one; copies of them have no link."""
    for parameter in parameters:
        mark(parameter, _UNCUT, weakref.ref(tally))


def tally_of_uncut(parameter: torch.Tensor) -> StepTally | None:
    """Returns the tally of the cut network that was made from the network of this parameter."""
    tally_ref = getattr(parameter, _UNCUT, None)
    return tally_ref() if tally_ref is not None else None


class RankCheck:
    """Compares the ranks of a cut network every few passes; all ranks with a share call its methods together."""

    def __init__(self, model: nn.Module, shard_group: ShardGroup) -> None:
        self._model = weakref.ref(model)
        self._shard_group = shard_group
        self._tally = tally_of(shard_group)
        self._tally.passes = 0
        self.passes = 0  # forward passes of the network
        self._comparisons = 0
        self._output_gradients: list[float] = [0.0, 0.0, 0.0]  # sum of sizes, weighted sum, tolerance

    def begin_pass(self) -> None:
        """Counts a forward pass of the network."""
        self.passes += 1

    def before_pass(self) -> None:
        """Notes whether the pass has gradients, and compares the ranks if a comparison is due."""
        self.count_gradients()
        if _is_due(self.passes):
            self.require_same(f"before pass {self.passes}")

    def count_gradients(self) -> None:
        """Counts the pass if it has gradients, for optimizers that step without any."""
        if torch.is_grad_enabled() and self._tally.passes is not None:
            self._tally.passes += 1

    def watch_outputs(self, result: object) -> None:
        """Records the gradients of the outputs in `result` if a comparison is due before the next pass."""
        if not _is_due(self.passes + 1):
            return
        self._output_gradients = [0.0, 0.0, 0.0]
        for output in pytree.tree_leaves(result):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(self._note_gradient)

    def end(self) -> None:
        """Ends the count of passes: the network is no longer trained."""
        self._tally.passes = 0

    def require_same(self, when: str) -> None:
        """Raises `MismatchError` on every rank unless all ranks agree."""
        if self._shard_group.size == 1:
            return
        tensors = self._whole_tensors()
        name = list(tensors)[self._comparisons % len(tensors)] if tensors else ""  # one per comparison, in turn
        self._comparisons += 1
        local_row = [self._tally.steps, self._tally.settings, self._tally.lr, *self._output_gradients]
        local_row += _digest_and_tolerance(tensors[name], most=SAMPLED_OF_PARAMETER) if name else [0.0, 0.0, 0.0]
        first, *others = rows = self._shard_group.gather_numbers(local_row, self._device())
        if any(row[0] != first[0] for row in others):
            counts = {rank: int(row[0]) for rank, row in enumerate(rows)}
            raise MismatchError(
                f"the ranks of a cut network have made unequal numbers of optimizer steps {when}: {counts}. {ADVICE}"
            )
        if any(row[1] != first[1] for row in others):
            rates = {rank: row[2] for rank, row in enumerate(rows)}
            raise MismatchError(
                f"the ranks of a cut network have made steps with different optimizer settings {when}; the learning "
                f"rates of the last step were {rates}. {ADVICE}"
            )
        for offset, what in ((3, "gradients of the outputs"), (6, f"values of {name!r}")):
            deviating = [rank for rank, row in enumerate(rows) if not _alike(first, row, offset)]
            if deviating:
                raise MismatchError(
                    f"ranks {deviating} of a cut network have other {what} than rank 0 {when}. {ADVICE}"
                )

    def _device(self) -> torch.device:
        model = self._model()
        parameter = None if model is None else next(model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @torch.no_grad()
    def _note_gradient(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # another output of the same operation is in the loss, this one is not
            return
        size, weighted, tolerance = _digest_and_tolerance(gradient)
        before = self._output_gradients
        self._output_gradients = [before[0] + size, before[1] + weighted, max(before[2], tolerance)]

    def _whole_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the replicated parameters and buffers, by name."""
        model = self._model()
        named = [] if model is None else [*model.named_parameters(), *model.named_buffers()]
        tensors = {name: (tensor.detach(), local_shard_of(tensor)) for name, tensor in named}
        return {
            name: tensor
            for name, (tensor, local_shard) in tensors.items()
            if local_shard is not None and not local_shard.is_cut and tensor.is_floating_point() and tensor.numel()
        }


def _is_due(number: int) -> bool:
    return number in EARLY_PASSES or number % EVERY == 0


def packed_settings(optimizer: Optimizer) -> bytes:
    """Returns the numeric settings of all parameter groups, packed for a checksum."""
    values = [float(value) for group in optimizer.param_groups for value in _numbers(group)]
    return struct.pack(f"{len(values)}d", *values)


def _numbers(group: Mapping[str, object]) -> Iterable[float]:
    """Yields the numeric settings of a parameter group, without switches that may differ between devices."""
    for name in sorted(group):
        value = group[name]
        if name in ("params", "foreach", "fused", "capturable"):
            continue
        if isinstance(value, NUMBERS):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, NUMBERS))
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
            yield float(value)


@torch.no_grad()
def digest(tensor: torch.Tensor, *, most: int = SAMPLED) -> list[float]:
    """Returns the sum of absolute values and a weighted sum, which differ for different data.

    Of a larger tensor about `most` elements are read, at a distance that meets all columns of its rows.
    """
    flat = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor.reshape(-1)
    step = max(1, -(-flat.numel() // most))
    while math.gcd(step, flat.numel()) > 1:
        step += 1
    sample = flat[::step].double()
    positions = torch.arange(1, sample.numel() + 1, dtype=torch.float64, device=sample.device)
    return list(torch.stack([sample.abs().sum(), (sample * positions.cos()).sum()]).tolist())


def _digest_and_tolerance(tensor: torch.Tensor, *, most: int = SAMPLED) -> list[float]:
    """Returns the digest, and the relative difference of it that rounding may cause."""
    return [*digest(tensor, most=most), max(1e-4, 4 * torch.finfo(tensor.dtype).eps)]


def _alike(mine: Sequence[float], theirs: Sequence[float], offset: int) -> bool:
    tolerance = max(mine[offset + 2], theirs[offset + 2]) * max(abs(mine[offset]), abs(theirs[offset]))
    pairs = zip(mine[offset : offset + 2], theirs[offset : offset + 2], strict=True)
    return all(a == b or (a != a and b != b) or abs(a - b) <= tolerance for a, b in pairs)
