"""Exchanges beside the training in one process: snapshots of fragments, averaged, merged some steps later."""

import torch
from torch import nn

from evenly.exchange.tensors.averaged_tensors import parameter_entries
from evenly.exchange.tensors.fragments import split
from tests.reference import Reference


class Overlapped(Reference):
    """Snapshots of fragments are averaged when they are due, and merged some steps later."""

    def __init__(self, model, make_optimizer, nodes, period, exchange, *, rows=True):
        super().__init__(model, make_optimizer, nodes)
        self.period, self.settings, self.made = period, exchange, 0
        entries = parameter_entries(dict(model.named_parameters()))
        pieces = split(entries, [e.tensor.numel() for e in entries], exchange.fragments, rows=rows)
        self.fragments = [{name: rows and slice(rows.start, rows.stop) for name, rows in p.items()} for p in pieces]
        self.since = [[0.0] * len(self.replicas) for _ in self.fragments]
        self.counts = [0] * len(self.fragments)
        self.due = []  # what is to be merged: step, and a function
        self.agreed = [b.clone() for b in self.replicas[0].buffers()]
        self.points, self.outers = {}, {}
        for number, fragment in enumerate(self.fragments):
            for name, rows in fragment.items():
                point = nn.Parameter(_part(dict(model.named_parameters())[name], rows).detach().clone())
                self.points[number, name] = point
                if exchange.outer is not None:
                    kind = getattr(torch.optim, exchange.outer.name)
                    self.outers[number, name] = kind([point], **exchange.outer.settings)

    def train(self, row):
        before = list(self.samples)
        self.step(row, nn.functional.cross_entropy)
        self.made += 1
        for place, (now, old) in enumerate(zip(self.samples, before, strict=True)):
            for since in self.since:
                since[place] += now - old
        for act in [act for step, act in self.due if step == self.made]:
            act()
        self.due = [(step, act) for step, act in self.due if step != self.made]
        warms_up = self.made <= self.period.warmup
        place = (self.made - self.period.warmup - 1) % self.period.steps + 1
        count = len(self.fragments)
        chosen = [f for f in range(count) if warms_up or place == -(-self.period.steps * (f + 1) // count)]
        if chosen:
            self.begin(chosen, overlap=0 if warms_up else self.settings.overlap)

    def finish(self):
        for _, act in self.due:
            act()
        self.due = []
        if any(any(since) for since in self.since):
            self.begin(range(len(self.fragments)), overlap=0)

    @torch.no_grad()
    def load(self, state):
        """Goes on from these weights on all ranks as if nodes had just agreed on them."""
        for replica in self.replicas:
            replica.load_state_dict(state)
        self.due = []
        self.since = [[0.0] * len(self.replicas) for _ in self.fragments]
        for (number, name), point in self.points.items():
            point.copy_(_part(dict(self.replicas[0].named_parameters())[name], self.fragments[number][name]))
            if self.settings.outer is not None:
                outer = self.settings.outer
                self.outers[number, name] = getattr(torch.optim, outer.name)([point], **outer.settings)

    @torch.no_grad()
    def begin(self, fragments, *, overlap):
        samples = max((self.since[f] for f in fragments), key=sum)
        of_node = [sum(samples[rank] for rank in ranks) for ranks in self.nodes]
        weights = [amount / sum(of_node) for amount in of_node]
        acts = []
        for fragment in fragments:
            self.since[fragment] = [0.0] * len(self.replicas)
            self.counts[fragment] += 1
            acts += [self._parameter(fragment, name, rows, weights, overlap) for name, rows in self._in(fragment)]
            if self.counts[fragment] % self.settings.state_every == 0:
                acts += self._states(fragment, weights, overlap)
        if len(self.fragments) - 1 in fragments:
            acts.append(self._buffers([s / sum(samples) for s in samples], overlap))
        for act in acts:
            self.due.append((self.made + overlap, act)) if overlap else act()

    def _in(self, fragment):
        return self.fragments[fragment].items()

    def _parameter(self, fragment, name, rows, weights, overlap):
        own = [_part(dict(r.named_parameters())[name], rows).detach() for r in self.replicas]
        snapshots = [value.clone() for value in own]
        average = sum(w * snapshots[ranks[0]] for w, ranks in zip(weights, self.nodes, strict=True))
        if (fragment, name) in self.outers:
            point = self.points[fragment, name]
            point.grad = point.detach() - average
            with torch.enable_grad():
                self.outers[fragment, name].step()
            average = point.detach().clone()

        @torch.no_grad()
        def act():
            for value, snapshot in zip(own, snapshots, strict=True):
                value.copy_(value + average - snapshot if overlap else average)

        return act

    def _states(self, fragment, weights, overlap):
        acts = []
        for name, rows in self._in(fragment):
            parameters = [dict(r.named_parameters())[name] for r in self.replicas]
            states = [o.state[p] for o, p in zip(self.optimizers, parameters, strict=True)]
            for slot in states[0]:
                policy = self.settings.policy_of(slot)
                if policy == "reset":
                    acts += self._resets([state[slot] for state in states], parameters[0], rows)
                elif policy == "average" and states[0][slot].shape == parameters[0].shape:
                    acts.append(self._state([_part(s[slot], rows) for s in states], weights, overlap, slot))
        return acts

    def _resets(self, values, parameter, rows):
        """Rows of momenta with their fragment, counters with the last rows."""
        if rows is None or values[0].shape == parameter.shape:
            return [lambda: [_part(value, rows).zero_() for value in values]]
        return [lambda: [value.zero_() for value in values]] if rows.stop == len(parameter) else []

    def _state(self, own, weights, overlap, slot):
        snapshots = [value.clone() for value in own]
        average = sum(w * snapshots[ranks[0]] for w, ranks in zip(weights, self.nodes, strict=True))

        def act():
            for value, snapshot in zip(own, snapshots, strict=True):
                value.copy_(value + average - snapshot if overlap else average)
                if slot == "exp_avg_sq":
                    value.clamp_(min=0)

        return act

    def _buffers(self, shares, overlap):
        own = [list(replica.buffers()) for replica in self.replicas]
        snapshots = [[b.clone() for b in row] for row in own]

        def act():
            for place, before in enumerate(self.agreed):
                seen = [row[place] for row in snapshots]
                if before.is_floating_point():
                    now = before + sum(share * (b - before) for share, b in zip(shares, seen, strict=True))
                else:
                    now = torch.stack(seen).amax(0)
                for row, snapshot in zip(own, seen, strict=True):
                    row[place].copy_(row[place] + now - snapshot if overlap else now)
                self.agreed[place] = now

        return act


def _part(tensor, rows):
    return tensor if rows is None else tensor[rows]
