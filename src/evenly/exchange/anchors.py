"""The points that nodes agree on: parts of the parameters, averaged across nodes in the form the user chose.

With x_n the values of node n, w_n its weight and g the point of the last exchange, the nodes agree on

    g' = g + sum_n w_n (x_n - g),   or   g' = outer(g, gradient = -sum_n w_n (x_n - g)).

With a codec d_n = x_n - g + e_n travels coded, where e_n is what the code of the last exchange lost; the sums travel
coded to those who need them, and all nodes take the decoded ones, so g' is the same everywhere to the last bit.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from evenly.comm import CollectiveWaiter, all_gather, all_reduce, all_to_all, to_device, to_host
from evenly.comm.blocks.slice import Slice
from evenly.errors import MismatchError, NonFiniteError, SpecError
from evenly.exchange.codecs import Codec, find_codec
from evenly.exchange.membership import Quorum
from evenly.spec import Exchange, Outer

NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


@dataclass(frozen=True)
class TransferStats:
    """What an exchange cost this rank in bytes to other nodes, and how far its node had gone away from the average."""

    sent_bytes: int = 0
    distance: float = 0.0  # squared, to the average
    length: float = 0.0  # squared, of the average

    @property
    def drift(self) -> float:
        """The distance to the average over its length."""
        return math.sqrt(self.distance / self.length) if self.length else 0.0


@dataclass(frozen=True)
class _Anchor:
    agreed: torch.Tensor
    lost: torch.Tensor | None = None  # [nodes, piece], of the own differences by their code
    lost_sum: torch.Tensor | None = None  # [piece], of the sum that this rank made
    outer: torch.optim.Optimizer | None = None


class Anchors:
    """What one rank remembers of the last exchange of each part, where the settings need it."""

    def __init__(self, settings: Exchange) -> None:
        self._codec, self._outer = find_codec(settings.codec), settings.outer
        self._anchors: dict[str, _Anchor] = {}
        self._unverified: set[str] = set()  # points that each node has taken from what it has loaded
        if self._outer is not None:
            _try_outer(self._outer)  # refused now, not at the first exchange

    @property
    def are_kept(self) -> bool:
        """Whether anything has to be remembered."""
        return self._codec is not None or self._outer is not None

    def begin(self, parts: Sequence[Slice], *, verified: bool = True) -> None:
        """Remembers values that are the same on all nodes, and nothing else; if not `verified`, the next exchange
        makes sure of it."""
        self._anchors = {part.key: self._point(part.values.clone()) for part in parts}
        self._unverified = set() if verified else set(self._anchors)

    def used_on(self, stream: torch.cuda.Stream, fragments: Sequence[int]) -> None:
        """Tells that the points of these fragments are about to be read and replaced on another stream than before."""
        names = tuple(f"{fragment}/" for fragment in fragments)
        for point in (point for key, point in self._anchors.items() if key.startswith(names)):
            for tensor in (point.agreed, point.lost, point.lost_sum):
                if tensor is not None:
                    tensor.detach().record_stream(stream)
            for state in point.outer.state.values() if point.outer is not None else ():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.is_cuda:
                        value.record_stream(stream)

    def agree(self, parts: Sequence[Slice], quorum: Quorum, waiter: CollectiveWaiter, *, exact: bool) -> TransferStats:
        """Replaces the values of each part by those agreed on, or by the change to them; if `exact`, without codes."""
        self._verify([part for part in parts if part.key in self._unverified], waiter)
        codec = None if exact else self._codec
        coded = [part for part in parts if codec is not None and part.key]
        plain = [part for part in parts if codec is None or not part.key]
        sums = self._begin_sums(plain, quorum)
        sent_bytes = sum(2 * (len(quorum.weights) - 1) * p.values.nbytes // len(quorum.weights) for p in plain)
        drifts = []
        if codec is not None:
            for part, found, sent in self._average_coded(codec, coded, quorum, waiter):
                drifts.append(self._settle(part, found.agreed.detach(), found))
                sent_bytes += sent
        waiter.wait([work for _, work in sums])
        for part, (total, _) in zip(plain, sums, strict=True):
            waits = quorum.weights[quorum.node] == 0 and part.key in self._anchors  # to tell what its code lost
            left = replace(self._anchors[part.key], lost_sum=None) if waits else None
            drifts.append(self._settle(part, to_device(total, part.values.device), left))
        seen = [drift for drift in drifts if drift is not None]
        distance, length = torch.stack(seen).sum(0).tolist() if seen else (0.0, 0.0)  # a device is asked once
        return TransferStats(sent_bytes, distance, length)

    def _verify(self, parts: Sequence[Slice], waiter: CollectiveWaiter) -> None:
        """Raises `MismatchError` where nodes go on from different loaded weights."""
        told = [to_host(_digest(self._anchors[part.key].agreed).to(part.values.device), part.group) for part in parts]
        gathered = [all_gather(digest, part.group) for digest, part in zip(told, parts, strict=True)]
        waiter.wait([work for _, work in gathered])
        for rows, _ in gathered:
            others = [node for node, row in enumerate(rows.tolist()) if row != rows[0].tolist()]
            if others:
                raise MismatchError(
                    f"nodes have loaded weights between two exchanges with an outer optimizer or a codec, but those of "
                    f"nodes {others} are not those of node 0. Load the same on all ranks, or call finish() after it "
                    "without outer and codec."
                )
        self._unverified -= {part.key for part in parts}

    def _settle(self, part: Slice, average: torch.Tensor, coded: _Anchor | None = None) -> torch.Tensor | None:
        """Takes over what was agreed on; returns the squared distance to it and its length, of a part with a key."""
        drift = _drift(part.values, average) if part.key else None
        agreed = self._remember(part, average, coded)
        part.values.copy_(agreed - part.values if part.change else agreed)
        return drift

    def _begin_sums(self, parts: Sequence[Slice], quorum: Quorum) -> list[tuple[torch.Tensor, dist.Work]]:
        """Starts the sums of what travels as it is, with all that codes have lost before."""
        weight, sums = quorum.weights[quorum.node], []
        for part in parts:
            total = part.values * weight if weight else torch.zeros_like(part.values)  # 0 * NaN would not be 0
            point = self._anchors.get(part.key)
            if point is not None and point.lost is not None and weight:
                total.add_(point.lost.view(-1)[: total.numel()], alpha=weight)
            if point is not None and point.lost_sum is not None:
                own = total[quorum.node * point.lost_sum.numel() :][: point.lost_sum.numel()]
                own.add_(point.lost_sum[: own.numel()])
            travelling = to_host(total, part.group)
            sums.append((travelling, all_reduce(travelling, part.group)))
        return sums

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {
            key: {
                "agreed": point.agreed.detach(),
                "lost": point.lost,
                "lost_sum": point.lost_sum,
                "outer": None if point.outer is None else point.outer.state_dict(),
                "loaded": key in self._unverified,
            }
            for key, point in self._anchors.items()
        }

    def fit(self, state: dict[str, Any]) -> bool:
        """Returns whether a checkpoint's state, made with the same settings, is for these parts."""
        return state.keys() == self._anchors.keys() and all(
            point.agreed.shape == state[key]["agreed"].shape for key, point in self._anchors.items()
        )

    def resume(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint's state."""
        for key, saved in state.items():
            device = self._anchors[key].agreed.device
            lost, lost_sum = (None if saved[n] is None else saved[n].to(device) for n in ("lost", "lost_sum"))
            point = replace(self._point(saved["agreed"].to(device)), lost=lost, lost_sum=lost_sum)
            if point.outer is not None:
                point.outer.load_state_dict(saved["outer"])
            self._anchors[key] = point
        self._unverified = {key for key, saved in state.items() if saved.get("loaded")}

    def _point(self, agreed: torch.Tensor) -> _Anchor:
        if self._outer is None:
            return _Anchor(agreed)
        parameter = torch.nn.Parameter(agreed)
        return _Anchor(parameter, outer=_make_outer(self._outer, parameter))

    def _remember(self, part: Slice, average: torch.Tensor, coded: _Anchor | None) -> torch.Tensor:
        """Returns what the nodes agree on: the average, or where the outer optimizer goes from the last point to it."""
        if not part.key or not self.are_kept:
            return average
        before = self._anchors[part.key]
        if before.outer is None:
            agreed = average
        else:
            before.agreed.grad = before.agreed.detach() - average
            with torch.enable_grad():
                before.outer.step()
            before.agreed.grad = None
            agreed = before.agreed
        lost, lost_sum = (None, None) if coded is None else (coded.lost, coded.lost_sum)
        self._anchors[part.key] = _Anchor(agreed, lost, lost_sum, before.outer)
        return agreed.detach()

    def _average_coded(
        self, codec: Codec, parts: Sequence[Slice], quorum: Quorum, waiter: CollectiveWaiter
    ) -> list[tuple[Slice, _Anchor, int]]:
        """Returns the average of each part, what its codes lost, and the bytes that this rank sent for it."""
        own, weights = quorum.node, quorum.weights
        dealt = []
        for part in parts:
            rows = self._differences(part, len(weights), weighs=weights[own] > 0)  # [nodes, piece]
            codes = {node: codec.code_of(row) for node, row in enumerate(rows) if node != own}
            dealt.append((part, rows, codes, *_deal(codes, part.group)))
        waiter.wait([work for *_, work in dealt])
        summed = []
        for part, rows, codes, received, _ in dealt:
            others = dict(zip(codes, to_device(received, rows.device), strict=True))
            total = self._sum(codec, part, rows[own] * weights[own], {n: (weights[n], c) for n, c in others.items()})
            code = codec.code_of(total)
            gathered, work = all_gather(to_host(code, part.group), part.group)  # [nodes, bytes]
            rows[own].zero_()  # the own piece of the sum took it as it is
            for node, sent in codes.items():
                _subtract(rows[node], codec.decode(sent, rows.shape[1]))
            _subtract(total, codec.decode(code, total.numel()))
            lost = rows if weights[own] else self._anchors[part.key].lost  # nobody has heard what it said
            summed.append((part, lost, total, gathered, work))
        waiter.wait([work for *_, work in summed])
        found = []
        for part, lost, total, gathered, _ in summed:
            codes_of_all = to_device(gathered, total.device)
            moved = [codec.decode(code.clone(), total.numel()) for code in codes_of_all]  # clone: a row may lie oddly
            average = self._anchors[part.key].agreed.detach() + torch.cat(moved)[: part.values.numel()]
            found.append((part, _Anchor(average, lost, total), 2 * (len(weights) - 1) * gathered.shape[1]))
        return found

    def _sum(
        self, codec: Codec, part: Slice, total: torch.Tensor, others: dict[int, tuple[float, torch.Tensor]]
    ) -> torch.Tensor:
        for weight, code in others.values():
            if weight:
                total.add_(codec.decode(code.clone(), total.numel()).to(total.dtype), alpha=weight)
        lost_sum = self._anchors[part.key].lost_sum
        return total if lost_sum is None else total.add_(lost_sum)

    def _differences(self, part: Slice, nodes: int, *, weighs: bool) -> torch.Tensor:
        """Returns d_n, filled up with zeros, a row for the owner of each piece of the sum: [nodes, piece]."""
        point, size = self._anchors[part.key], part.values.numel()
        rows = part.values.new_zeros(nodes, -(-size // nodes))
        flat = rows.view(-1)[:size]
        if not weighs:  # a node without samples has nothing to tell
            return rows
        torch.sub(part.values, point.agreed.detach(), out=flat)
        if point.lost is not None:
            rows.add_(point.lost)
        return rows


def of_node(carried: TransferStats, group: dist.ProcessGroup, waiter: CollectiveWaiter) -> TransferStats:
    """Returns what was carried with the drift of the whole node, of which each rank of `group` knows some slices."""
    rows, work = all_gather(torch.tensor([carried.distance, carried.length], dtype=torch.float64), group)
    waiter.wait([work])
    distance, length = rows.sum(0).tolist()
    if not math.isfinite(length):  # of the average, which is the same on all nodes: all raise
        raise NonFiniteError(
            "a parameter had become NaN or infinite when nodes exchanged, though no gradient had; nothing was merged. "
            "Look at the optimizer's settings, and at what else changes parameters."
        )
    return TransferStats(carried.sent_bytes, distance, length)


def _digest(values: torch.Tensor) -> torch.Tensor:
    """Returns a checksum of the bits, as one number."""
    bits = values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return torch.tensor([int.from_bytes(hashlib.sha256(bits).digest()[:6])])


def _deal(codes: dict[int, torch.Tensor], group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Starts giving each node its code; the result has a row from each of the others."""
    sent = to_host(torch.stack(list(codes.values())), group)  # [nodes - 1, bytes]
    received = torch.empty_like(sent)
    sizes = [sent.shape[1] if node in codes else 0 for node in range(len(codes) + 1)]
    return received, all_to_all(received.view(-1), sent.view(-1), sizes, sizes, group)


def _subtract(row: torch.Tensor, decoded: torch.Tensor) -> None:
    row.sub_(decoded.to(row.dtype))


def _drift(values: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
    length = torch.linalg.vector_norm(average, dtype=torch.float64)  # squares of large numbers fit
    return torch.stack([torch.dist(values, average).double(), length]).square_()  # [2]


def _try_outer(outer: Outer) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    made = _make_outer(outer, parameter)
    if outer.settings.get("capturable") or outer.settings.get("fused"):  # may ask for a GPU
        return
    try:
        for _ in range(2):  # some settings are looked at only here
            made.step()
    except Exception as error:
        raise SpecError(f"the outer optimizer {outer.name} cannot step with {outer.settings}: {error}.") from None


def _make_outer(outer: Outer, parameter: torch.Tensor) -> torch.optim.Optimizer:
    kind: Any = getattr(torch.optim, outer.name, None)
    known = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    if not known or outer.name in NOT_ELEMENTWISE:
        case = (
            "treats more than one element at a time, and ranks have slices" if known else "is no class of torch.optim"
        )
        raise SpecError(
            f"the outer optimizer {outer.name!r} was asked for, which {case}. Take SGD, Adam or another one."
        )
    try:
        made: torch.optim.Optimizer = kind([parameter], **outer.settings)
    except Exception as error:
        raise SpecError(f"the outer optimizer {outer.name} cannot be made with {outer.settings}: {error}.") from None
    return made
