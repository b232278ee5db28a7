"""A single process that plays all ranks of a random run with any form of exchange, without communication."""

import copy
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from evenly.exchange.codecs import find_codec
from evenly.exchange.tensors.averaged_tensors import parameter_entries
from evenly.exchange.tensors.buffer_policies import policies_of
from evenly.exchange.tensors.fragments import split
from evenly.schedule.adaptive import ExchangeCosts, choose
from evenly.schedule.step_counter import Schedule
from evenly.spec import Adaptive, EveryEpoch
from tests.nodes.random_runs import weights_of_samples


class RefusedError(Exception):
    """The run has come to where all ranks must raise."""


@dataclass
class Point:
    """What nodes agreed on for one fragment, as a vector, and what codes have lost since: of each part."""

    agreed: torch.Tensor
    outer: torch.optim.Optimizer | None
    lost: dict = field(default_factory=dict)  # by part and node: [nodes, piece]
    sum_residual: dict = field(default_factory=dict)  # by part and node: [piece]


@dataclass
class PendingTensor:
    """An exchange that is merged later."""

    due: int
    fragments: tuple
    stateful: tuple
    steps: int
    begun: int
    changes: dict  # of each fragment and rank
    states: list  # slot, rank, name, rows, change
    buffers: dict  # agreed
    snapshot: list  # buffers of each rank
    measured: ExchangeCosts
    seen: list  # drift and steps of each node
    loaded: list = field(default_factory=list)  # names, of each rank
    is_state_loaded: bool = False


class Player:
    """All ranks of a run; `nodes` are the ranks of each node, or its replicas where networks are cut.

    Then `parts` are the elements of each fragment that travel together, as places in its vector.
    """

    def __init__(self, model, make_optimizer, nodes, *, period, settings, rows=True, parts=None) -> None:
        self.nodes, self.period, self.settings = nodes, period, settings
        count = sum(map(len, nodes))
        self.models = [copy.deepcopy(model) for _ in range(count)]
        self.optimizers = [make_optimizer(m) for m in self.models]
        self.schedule = Schedule(period, settings.fragments, least=settings.least_adaptive_steps)
        entries = parameter_entries(dict(model.named_parameters()))
        self.pieces = split(entries, [e.tensor.numel() for e in entries], settings.fragments, rows=rows)
        self.trained = {entry.home for entry in entries}
        self.policies = policies_of(model, settings)
        self.samples = [[0.0] * count for _ in self.pieces]
        self.counts = [0] * len(self.pieces)
        self.pending: list[PendingTensor] = []
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.parts = parts
        self._follow_settings()
        self.restarts, self.unverified = [0] * count, set()
        self.points = self._begin()
        self.loaded = [set() for _ in self.models]
        self.is_state_loaded = self.differs = False
        self.seen = [ExchangeCosts() for _ in nodes]

    # ---- training

    def step(self, batches, loss_of) -> None:
        """Makes one step of all ranks; a batch is a tensor and the samples it counts."""
        self.take_loaded()
        counts = [count for _, count in batches]
        for model, optimizer, (x, _) in zip(self.models, self.optimizers, batches, strict=True):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
        for ranks in self.nodes:
            total = sum(counts[rank] for rank in ranks)
            shares = [counts[rank] / total if total else 0.0 for rank in ranks]
            for parameters in zip(*(self.models[rank].parameters() for rank in ranks), strict=True):
                mean = sum(share * p.grad for share, p in zip(shares, parameters, strict=True))
                for parameter in parameters:
                    parameter.grad = mean.clone()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.samples = [[a + b for a, b in zip(row, counts, strict=True)] for row in self.samples]
        due = self.schedule.advance()
        for pending_exchange in [
            pending_exchange for pending_exchange in self.pending if pending_exchange.due <= self.schedule.step
        ]:
            self.merge(pending_exchange)
        if due:
            self.exchange(due, waits=self.schedule.warms_up)

    def end_epoch(self) -> None:
        if self.schedule.since and isinstance(self.period, EveryEpoch):
            self.exchange(range(len(self.pieces)))

    def finish(self) -> None:
        self.take_loaded()
        for pending_exchange in list(self.pending):
            self.merge(pending_exchange)
        if self.schedule.since:
            self.exchange(range(len(self.pieces)), waits=True, exact=True)
        else:
            self._average_rest()

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks hold the same to the last bit."""
        return not self.schedule.since and not self.pending and not self.differs and not any(self.loaded)

    # ---- what a loop does besides

    @torch.no_grad()
    def load(self, state, ranks) -> None:
        for rank in ranks:
            self.models[rank].load_state_dict(state, strict=False)
            self.loaded[rank] |= state.keys()

    @torch.no_grad()
    def write(self, change, ranks) -> None:
        """Changes weights by hand."""
        for rank in ranks:
            change(self.models[rank])

    def load_optimizer(self, change) -> None:
        for optimizer in self.optimizers:
            change(optimizer)
        self.is_state_loaded = True

    @torch.no_grad()
    def accept(self) -> None:
        for rank, model in enumerate(self.models):
            self.loaded[rank] |= dict(model.state_dict()).keys()
        self.take_loaded()

    def restart(self, codec) -> None:
        """Goes on from a checkpoint; with another codec only where nodes have just agreed."""
        self.take_loaded()
        if codec in (None, self.settings.codec):
            return
        if self.schedule.since or self.pending:
            raise RefusedError("other settings inside a period")
        self.settings = self.settings.model_copy(update={"codec": codec})
        self._follow_settings()
        self.points, self.unverified = self._begin(), set(range(len(self.pieces))) if self.keeps_points else set()

    def _follow_settings(self) -> None:
        self.codec = find_codec(self.settings.codec)
        self.keeps_points = self.codec is not None or self.settings.outer is not None

    def take_loaded(self) -> None:
        """Goes on from loaded weights as agreed ones."""
        for pending_exchange in self.pending:
            pending_exchange.is_state_loaded |= self.is_state_loaded
            for names, loaded in zip(pending_exchange.loaded, self.loaded, strict=True):
                names |= loaded
        for rank, names in enumerate(self.loaded):
            found = names & self.trained
            self.differs |= bool(found)
            if found == self.trained:
                for row in self.samples:
                    row[rank] = 0.0
            if found and self.keeps_points:
                if found != self.trained:
                    raise RefusedError("a part was loaded")
                self.restarts[rank] += 1
        if self.keeps_points and any(names & self.trained for names in self.loaded):
            self.points, self.unverified = self._begin(), set(range(len(self.pieces)))
        self.loaded, self.is_state_loaded = [set() for _ in self.models], False

    @torch.no_grad()
    def evaluate(self, look) -> None:
        """Calls `look` while all ranks have the average."""
        kept = [copy.deepcopy(model.state_dict()) for model in self.models]
        own = copy.deepcopy((self.buffers, self.differs))
        self.differs |= any(names & self.trained for names in self.loaded)
        for pending_exchange in self.pending:
            self._put_parameters(pending_exchange, but=self.loaded)
            self._put_buffers(pending_exchange, but=self.loaded)
        if self.schedule.since or self.pending:
            whole = [names & self.trained == self.trained for names in self.loaded]
            self._average_all(
                [0.0 if w else max(s) for w, s in zip(whole, zip(*self.samples, strict=True), strict=True)]
            )
        else:
            self._average_rest()
        look()
        self.buffers, self.differs = own
        for model, state in zip(self.models, kept, strict=True):
            model.load_state_dict(state)

    # ---- exchanges

    @torch.no_grad()
    def exchange(self, fragments, *, waits=False, exact=False) -> None:
        self.take_loaded()
        for pending_exchange in [t for t in self.pending if waits or set(t.fragments) & set(fragments)]:
            self.merge(pending_exchange)
        self._require_same_points(fragments)
        overlap = 0 if waits else self.settings.overlap
        samples = [max(self.samples[f][rank] for f in fragments) for rank in range(len(self.models))]
        nodes, ranks = weights_of_samples(self.nodes, samples)
        for f in fragments:
            self.counts[f] += 1
        stateful = tuple(f for f in fragments if self.counts[f] % self.settings.state_every == 0)
        agreed, drifts = {}, [[0.0, 0.0] for _ in self.nodes]
        for f in fragments:
            agreed[f] = self._agree(f, nodes, drifts, exact=exact)
        steps, step = self.schedule.since_of(fragments), self.schedule.step
        pending_exchange = PendingTensor(
            step + overlap, tuple(fragments), stateful, steps, step,
            {(f, rank): agreed[f] - self._flat(m, f) for f in fragments for rank, m in enumerate(self.models)},
            self._average_states(stateful, nodes),
            self._agree_on_buffers(ranks) if len(self.pieces) - 1 in fragments else {},
            [{name: b.clone() for name, b in m.named_buffers()} for m in self.models],
            ExchangeCosts(0.0, 0.0, max(s.drift for s in self.seen), max(s.steps for s in self.seen)),
            [ExchangeCosts(0.0, 0.0, (d / length) ** 0.5 if length else 0.0, steps) for d, length in drifts],
            [set() for _ in self.models],
        )  # fmt: skip
        self.schedule.record_begun(fragments)
        for f in fragments:
            self.samples[f] = [0.0] * len(self.models)
        self.pending.append(pending_exchange)
        if not overlap:
            self.merge(pending_exchange, copied=agreed)

    @torch.no_grad()
    def merge(self, pending_exchange, *, copied=None) -> None:
        self.pending.remove(pending_exchange)
        self._put_parameters(pending_exchange, copied=copied)
        self._put_buffers(pending_exchange, copied=copied)
        if not pending_exchange.is_state_loaded:
            for rank, name, slot, rows, change in pending_exchange.states:
                value = _part(self._state(rank, name)[slot], rows)
                value.add_(change)
                if slot == "exp_avg_sq":
                    value.clamp_(min=0.0)
            self._reset_states(pending_exchange.stateful)
        self.differs = copied is None
        if isinstance(self.period, Adaptive) and pending_exchange.begun > self.period.warmup:
            self.seen = pending_exchange.seen
            self.schedule.next_length, _ = choose(
                self.period, self.settings, self.schedule.next_length, pending_exchange.measured
            )

    def _require_same_points(self, fragments) -> None:
        if not self.keeps_points:
            return
        if len(set(self.restarts)) > 1:
            raise RefusedError("not all ranks have loaded")
        for f in self.unverified & set(fragments):
            first, *others = (self._loaded_points[node][f] for node in range(len(self.nodes)))
            if any(not torch.equal(first, other) for other in others):
                raise RefusedError("nodes have loaded different weights")
        self.unverified -= set(fragments)

    def _begin(self) -> list[Point]:
        self._loaded_points = [
            [self._flat(self.models[ranks[0]], f) for f in range(len(self.pieces))] for ranks in self.nodes
        ]
        found = []
        for flat in self._loaded_points[0]:
            outer = None
            if self.settings.outer is not None:
                flat = torch.nn.Parameter(flat.clone())
                outer = getattr(torch.optim, self.settings.outer.name)([flat], **self.settings.outer.settings)
            found.append(Point(flat, outer))
        return found

    def _agree(self, f, weights, drifts, *, exact) -> torch.Tensor:
        """Returns what nodes agree on for a fragment."""
        point, values = self.points[f], [self._flat(self.models[ranks[0]], f) for ranks in self.nodes]
        if self.codec is not None and not exact:
            average = self._decoded(f, point, values, weights)
        else:
            average = sum(w * v for w, v in zip(weights, values, strict=True))
            self._add_lost(f, point, average, weights)
        for drift, value in zip(drifts, values, strict=True):
            drift[0] += float((value - average).square().sum())
            drift[1] += float(average.square().sum())
        if not self.keeps_points:
            return average
        if point.outer is None:
            point.agreed = average
            return average
        point.agreed.grad = point.agreed.detach() - average
        with torch.enable_grad():
            point.outer.step()
        return point.agreed.detach().clone()

    def _parts(self, f, size):
        """Yields the elements of a vector that travel together, and how many of them each node sums."""
        borders = {size * place // len(ranks) for ranks in self.nodes for place in range(len(ranks) + 1)}
        whole = [torch.arange(*ends) for ends in pairwise(sorted(borders))]
        for number, elements in enumerate(whole if self.parts is None else self.parts[f]):
            yield number, elements, -(-len(elements) // len(self.nodes))

    def _decoded(self, f, point, values, weights) -> torch.Tensor:
        """Returns the average as codes bring it."""
        count, average, agreed = len(self.nodes), torch.empty_like(values[0]), point.agreed.detach()

        def decoded(vector):
            return self.codec.decode(self.codec.encode(vector), len(vector)).double()

        for part, elements, piece in self._parts(f, len(agreed)):
            rows = torch.zeros(count, count, piece, dtype=torch.float64)  # from node, to node
            for node in range(count):
                if weights[node]:
                    rows[node].view(-1)[: len(elements)] = (values[node] - agreed)[elements]
                    rows[node] += point.lost.get((part, node), 0.0)
            sums = []
            for owner in range(count):
                total = rows[owner, owner] * weights[owner] + point.sum_residual.get((part, owner), 0.0)
                for node in range(count):
                    if node != owner and weights[node]:
                        total = total + weights[node] * decoded(rows[node, owner])
                sums.append(decoded(total))
                point.sum_residual[part, owner] = total - sums[-1]
            for node in range(count):
                if weights[node]:  # nobody has heard what one without samples said
                    left = [
                        rows[node, o] * 0 if o == node else rows[node, o] - decoded(rows[node, o]) for o in range(count)
                    ]
                    point.lost[part, node] = torch.stack(left)
            average[elements] = agreed[elements] + torch.cat(sums)[: len(elements)]
        return average

    def _add_lost(self, f, point, average, weights) -> None:
        """Adds what codes have lost to an average without codes."""
        for part, elements, piece in self._parts(f, len(average)):
            for node, weight in enumerate(weights):
                if weight and (part, node) in point.lost:
                    average[elements] += weight * point.lost.pop((part, node)).view(-1)[: len(elements)]
                left = point.sum_residual.pop((part, node), None)
                if left is not None:
                    own = elements[node * piece :][:piece]
                    average[own] += left[: len(own)]

    def _average_all(self, samples) -> None:
        nodes, ranks = weights_of_samples(self.nodes, samples)
        for f in range(len(self.pieces)):
            flats = [self._flat(self.models[ranks_of[0]], f) for ranks_of in self.nodes]
            mean = sum(w * v for w, v in zip(nodes, flats, strict=True))
            for model in self.models:
                self._put(model, f, mean)
        self._average_buffers(ranks)
        self.differs = False

    @torch.no_grad()
    def _average_rest(self) -> None:
        """Averages what differs though no step was made; all ranks count alike."""
        samples = [1.0] * len(self.models)
        if self.differs:
            self._average_all(samples)
            return
        for f in range(len(self.pieces)):
            first, *others = (self._flat(model, f) for model in self.models)
            if any(not torch.allclose(first, other, rtol=1e-9, atol=1e-9) for other in others):
                raise RefusedError("nodes differ though no step was made")
        self._average_buffers(weights_of_samples(self.nodes, samples)[1])

    # ---- parameters, state and buffers

    def _flat(self, model, f) -> torch.Tensor:
        named = dict(model.named_parameters())
        return torch.cat([_part(named[n].detach(), rows).reshape(-1) for n, rows in self.pieces[f].items()]).clone()

    def _put(self, model, f, flat, *, but=(), adds=False) -> None:
        named, begin = dict(model.named_parameters()), 0
        for name, rows in self.pieces[f].items():
            target = _part(named[name].detach(), rows)
            value = flat[begin : begin + target.numel()].view(target.shape)
            begin += target.numel()
            if name not in but:
                target.copy_(target + value if adds else value)

    def _put_parameters(self, pending_exchange, *, copied=None, but=None) -> None:
        for (f, rank), change in pending_exchange.changes.items():
            dropped = pending_exchange.loaded[rank] | (but[rank] if but else set())
            value = change if copied is None else copied[f]
            self._put(self.models[rank], f, value, but=dropped, adds=copied is None)

    def _state(self, rank, name):
        return self.optimizers[rank].state[dict(self.models[rank].named_parameters())[name]]

    def _average_states(self, fragments, weights) -> list:
        found = []
        for f in fragments:
            for name, rows in self.pieces[f].items():
                shape = dict(self.models[0].named_parameters())[name].shape
                for slot, first in self._state(0, name).items():
                    if self.settings.policy_of(slot) != "average" or first is None or first.shape != shape:
                        continue
                    own = [_part(self._state(rank, name)[slot], rows) for rank in range(len(self.models))]
                    leaders = [own[ranks[0]] for ranks in self.nodes]
                    mean = sum(w * v for w, v in zip(weights, leaders, strict=True))
                    found += [(rank, name, slot, rows, mean - value) for rank, value in enumerate(own)]
        return found

    def _reset_states(self, fragments) -> None:
        for f in fragments:
            for name, rows in self.pieces[f].items():
                for rank, model in enumerate(self.models):
                    parameter = dict(model.named_parameters())[name]
                    for slot, value in self._state(rank, name).items():
                        if self.settings.policy_of(slot) != "reset" or value is None:
                            continue
                        if value.shape == parameter.shape:
                            _part(value, rows).zero_()
                        elif rows is None or rows.stop == len(parameter):
                            value.zero_()

    def _agree_on_buffers(self, weights) -> dict:
        found = {}
        for name, before in self.buffers.items():
            own = [dict(model.named_buffers())[name].clone() for model in self.models]
            policy = self.policies[name]
            if policy == "keep" or all(torch.equal(value, before) for value in own):
                continue
            if policy == "average":
                found[name] = sum(w * value for w, value in zip(weights, own, strict=True))
            elif policy == "first":
                found[name] = own[0]
            else:
                stacked = torch.stack(own)
                found[name] = stacked.amax(0) if policy == "max" else stacked.amin(0)
        return found

    def _put_buffers(self, pending_exchange, *, copied=None, but=None) -> None:
        for rank, model in enumerate(self.models):
            for name, agreed in pending_exchange.buffers.items():
                buffer, snapshot = dict(model.named_buffers())[name], pending_exchange.snapshot[rank][name]
                if name in pending_exchange.loaded[rank] or (but and name in but[rank]):
                    continue
                if copied is not None:
                    buffer.copy_(agreed)
                elif self.policies[name] == "first":
                    buffer.copy_(buffer if torch.equal(agreed, snapshot) else agreed)
                elif self.policies[name] in ("max", "min") and buffer.is_floating_point():
                    extreme = torch.maximum if self.policies[name] == "max" else torch.minimum
                    buffer.copy_(extreme(buffer, agreed))
                else:
                    buffer.add_(agreed - snapshot)
        self.buffers.update({name: agreed.clone() for name, agreed in pending_exchange.buffers.items()})

    def _average_buffers(self, weights) -> None:
        for name, agreed in self._agree_on_buffers(weights).items():
            for model in self.models:
                dict(model.named_buffers())[name].copy_(agreed)
            self.buffers[name] = agreed.clone()


def _part(tensor, rows):
    return tensor if rows is None else tensor[rows.start : rows.stop]
