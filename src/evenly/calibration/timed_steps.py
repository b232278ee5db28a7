"""Timed steps that change no parameters: of one network, or of several ranks."""

import copy
import time
from collections.abc import Sequence

import torch

from evenly.calibration.corrections import Joint
from evenly.comm import FailureMonitor, RankGroup
from evenly.comm.blocks.replicas import shard_group_of
from evenly.graph import Traced
from evenly.nodes.composition import compose_synchronized
from evenly.schedule.step_clock import StepClock
from evenly.shards import Sharded
from evenly.spec import Cluster, EverySteps, Exchange
from evenly.survey import inputs_of, interquartile_mean, synchronize_device, train_step


class TimedStep:
    """Times steps of a network that change no parameters."""

    def __init__(
        self,
        model: torch.nn.Module,
        traced: Traced,
        device: torch.device,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        clock: StepClock | None = None,
    ) -> None:
        self._model = model
        self._clock = clock  # runs during steps
        self._traced = traced
        self._device = device
        self._optimizer = optimizer or no_op_optimizer(model)

    def step_s(self, samples: int, times: int, *, warm: int) -> float:
        """Returns the seconds of a step with `samples`; one with `warm` samples comes first, if not 0."""
        inputs_by_size = {size: inputs_of(self._traced.graph, size, self._device) for size in {warm, samples} if size}
        if warm:
            self._step(inputs_by_size[warm])
        return interquartile_mean([self._step(inputs_by_size[samples]) for _ in range(times)])

    def _step(self, inputs: dict[str, torch.Tensor]) -> float:
        began = time.perf_counter()
        if self._clock is not None:
            self._clock.begin(step=0)
        train_step(self._model, self._optimizer, inputs)
        if self._clock is not None:
            self._clock.end()
        synchronize_device(self._device)
        return time.perf_counter() - began


class Ensemble:
    """Ranks that make steps together, averaging gradients, or each by itself."""

    def __init__(
        self,
        rank_group: RankGroup,
        ranks: Sequence[int],
        traced: Traced,
        cluster: Cluster,
        device: torch.device,
        *,
        timeout_s: float,
        parent: FailureMonitor,
    ) -> None:
        ensemble_group = rank_group.among(ranks, f"ensemble {list(ranks)}")
        model = copy.deepcopy(traced.model).to(device).train()
        used = {layer.where for layer in traced.graph.layers if layer.op == "parameter"}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name in used)  # DDP would wait for unused parameters
        optimizer = no_op_optimizer(model)
        exchange, period = Exchange(timeout_s=timeout_s), EverySteps(10**9)
        self._joined = compose_synchronized(
            model,
            optimizer,
            rank_group=ensemble_group,
            cluster=cluster.among(ranks),
            period=period,
            exchange=exchange,
            parent=parent,
        )
        self._joined.clock.is_wanted = True
        self._joint = TimedStep(self._joined, traced, device, optimizer)
        self._single = TimedStep(copy.deepcopy(traced.model).to(device).train(), traced, device)

    def together(self, samples: int, times: int, *, warm: int) -> Joint:
        """Returns a joint step in which this rank has `samples`, after one with `warm`; all ranks make `times`."""
        seconds = self._joint.step_s(samples, times, warm=warm)
        return Joint(seconds, interquartile_mean([spent.computing_s for spent in self._joined.clock.take()[-times:]]))

    def alone(self, samples: int, times: int, *, warm: int) -> float:
        """Returns the seconds of a solo step, after one with `warm` samples, if not 0."""
        return self._single.step_s(samples, times, warm=warm)

    def close(self) -> None:
        """Closes the process groups."""
        self._joined.close()


def joint_step_of(
    sharded: Sharded, traced: Traced, device: torch.device, *, samples: int, times: int, warm: int
) -> Joint:
    """Returns a step of a network cut over ranks, with the time in which this rank does not wait for others."""
    clock = StepClock(device)
    clock.is_wanted = True
    shard_group = shard_group_of(sharded)
    if shard_group is not None:
        shard_group.watch(clock)
    seconds = TimedStep(sharded.train(), traced, device, clock=clock).step_s(samples, times, warm=warm)
    return Joint(seconds, interquartile_mean([spent.computing_s for spent in clock.take()[-times:]]))


def no_op_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer that does the work of a step and leaves the parameters unchanged."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0, momentum=0.9)
