"""Trains one network by one method, some steps at a time."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenly
from benchmarks._cuda.networks import Case
from evenly.nodes import Synchronized

NEVER = 10**9  # a period longer than any run


class Trainer:
    """A network with its optimizer: plain, under torch's DDP, or under `evenly.synchronize` with some settings."""

    def __init__(
        self,
        case: Case,
        method: str,
        *,
        settings: dict[str, Any] | None = None,
        nodes: list[list[int]],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Builds the method "plain", "DDP" (in `group`), or any other name: evenly with the `settings`."""
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        before = self._allocated()
        model = case.network(self.device)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if case.is_compiled:
            model.compile()
        if method == "DDP":
            model = DistributedDataParallel(model, process_group=group)
        elif method != "plain":
            model = evenly.synchronize(model, self._optimizer, nodes=nodes, **{"every": NEVER, **(settings or {})})
        self._model = model
        self._is_cast = case.dtype == torch.float32
        self._tokens, self._next = case.batch_of(dist.get_rank(), self.device)
        self.parameter_bytes = sum(p.nbytes for p in model.parameters())
        self.step_seconds: list[float] = []
        self.exchanges: list[Any] = []
        if isinstance(model, Synchronized):
            model.on_exchange.append(self.exchanges.append)
        self.held_bytes = self._allocated() - before
        self.peak_bytes = 0  # during rounds, of all that this process holds

    def run_round(self, steps: int) -> None:
        """Makes some steps and records the seconds of one; all ranks begin together."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = self._allocated()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self._step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated() - before + self.held_bytes)
        self.step_seconds.append((time.perf_counter() - began) / steps)

    def _step(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._is_cast):
            logits = self._model(self._tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), self._next.flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
