"""The policy of each buffer at an exchange: the user's choice, else a default by module and dtype."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch

from evenly._torch.modules import SPECTRAL_NORM, UNIT_VECTORS, forward_pre_hooks
from evenly.errors import SpecError
from evenly.exchange.tensors.averaged_tensors import averages, persistent_buffers
from evenly.spec import BufferPolicy, Exchange

_OBSERVERS = "torch.ao.quantization.observer"
_EXTREMES: Mapping[str, BufferPolicy] = {"min_val": "min", "max_val": "max"}
_BY_CLASS: Mapping[str, Mapping[str, BufferPolicy]] = {  # by full name: some classes are private or may be removed
    SPECTRAL_NORM: dict.fromkeys(UNIT_VECTORS, "first"),
    f"{_OBSERVERS}.MinMaxObserver": _EXTREMES,
    f"{_OBSERVERS}.PerChannelMinMaxObserver": _EXTREMES,
    f"{_OBSERVERS}.MovingAverageMinMaxObserver": {},
    f"{_OBSERVERS}.MovingAveragePerChannelMinMaxObserver": {},
    f"{_OBSERVERS}.HistogramObserver": {"histogram": "first", "min_val": "first", "max_val": "first"},
    "torch.ao.quantization.fake_quantize.FakeQuantize": {"scale": "first", "zero_point": "first"},  # belong together
}
_SPECTRAL_HOOK = "torch.nn.utils.spectral_norm.SpectralNorm"


def policies_of(module: torch.nn.Module, settings: Exchange) -> dict[str, BufferPolicy]:
    """Returns the policy of each buffer that belongs to the state of `module`, none of them auto.

    Raises `SpecError` if a policy does not fit the dtype of a buffer, or a pattern matches no buffer.
    """
    buffers, known_policies = persistent_buffers(module), dict(_torch_policies(module))
    for pattern in () if isinstance(settings.buffers, str) else settings.buffers:
        if not any(fnmatchcase(name, pattern) for name in buffers):
            raise SpecError(
                f"buffers= names {pattern!r}, but no buffer that is persistent and has its own memory matches: the "
                f"network has {', '.join(map(repr, buffers)) or 'none at all'}. Correct the pattern."
            )
    chosen = {name: settings.buffer_policy(name) for name in buffers}
    for name, buffer in buffers.items():
        if chosen[name] == "auto":
            chosen[name] = known_policies.get(name) or ("average" if averages(buffer) else "max")
        _require_fit(name, buffer, chosen[name])
    return chosen


def _require_fit(name: str, buffer: torch.Tensor, policy: BufferPolicy) -> None:
    if policy == "average" and not averages(buffer):
        case = "numbers that are no floats have no exact average"
    elif policy == "average" and buffer.dtype.itemsize == 1:
        case = "torch cannot add such numbers"
    elif policy in ("max", "min") and buffer.is_complex():
        case = "complex numbers have no order"
    elif policy != "keep" and (buffer.layout != torch.strided or buffer.is_quantized):
        case = f"it is {'quantized' if buffer.is_quantized else buffer.layout}, and ranks exchange plain tensors"
    else:
        return
    raise SpecError(
        f"the buffer {name!r} of {buffer.dtype} was to be treated as {policy!r} at exchanges, but {case}. Choose "
        f"another policy by buffers={{{name!r}: ...}}, such as 'first' or 'keep', or register it with persistent=False."
    )


def _torch_policies(module: torch.nn.Module) -> Iterator[tuple[str, BufferPolicy]]:
    """Yields the policies for buffers of torch's own modules that are not plain statistics."""
    for prefix, part in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(part).__mro__)
        rules = next((_BY_CLASS[name] for name in names if name in _BY_CLASS), {})
        yield from ((f"{dot}{name}", policy) for name, policy in rules.items())
        for hook in forward_pre_hooks(part):  # torch.nn.utils.spectral_norm has no module of its own
            if f"{type(hook).__module__}.{type(hook).__qualname__}" == _SPECTRAL_HOOK:
                yield from ((f"{dot}{hook.name}_{vector}", "first") for vector in "uv")
