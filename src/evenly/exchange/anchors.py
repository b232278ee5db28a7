"""Anchors: the values all nodes agreed on last, and the averages across nodes that update them.

With x_n the values of node n, w_n its weight and g the anchor of the last exchange, the nodes agree on

    g' = g + sum_n w_n (x_n - g),   or   g' = outer(g, gradient = -sum_n w_n (x_n - g)).

With a codec, nodes send encoded d_n = x_n - g + e_n, where e_n is the encoding error of the last exchange. The sums
are encoded too, and all nodes use the decoded sums, so g' is bit-identical everywhere.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import NotRequired, TypedDict

import torch

from evenly.comm import (
    CollectiveWaiter,
    Group,
    Work,
    all_gather,
    all_reduce,
    all_to_all,
    gather_rows,
    to_device,
    to_host,
)
from evenly.comm.blocks.slice import Slice
from evenly.errors import CheckpointError, MismatchError, NonFiniteError, SpecError
from evenly.exchange.codecs import Codec, find_codec
from evenly.exchange.outer_state import OuterState
from evenly.exchange.votes import Quorum
from evenly.spec import Exchange, Outer

DRIFT_CHUNK = 2**16  # elements that stay in the processor's cache
NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


@dataclass(frozen=True)
class TransferStats:
    """The bytes this rank sent to other nodes in an exchange, and how far its node had drifted from the average."""

    sent_bytes: int = 0
    squared_distance: float = 0.0  # to the average
    squared_norm: float = 0.0  # of the average

    @property
    def drift(self) -> float:
        """The distance to the average over the norm of the average."""
        return math.sqrt(self.squared_distance / self.squared_norm) if self.squared_norm else 0.0


@dataclass(frozen=True)
class _Anchor:
    agreed: torch.Tensor
    residual: torch.Tensor | None = None  # [nodes, piece], encoding error of this node's differences
    sum_residual: torch.Tensor | None = None  # [piece], encoding error of the sum that this rank computed
    outer: torch.optim.Optimizer | None = None


AnchorsBefore = dict[str, _Anchor]  # by the key of the slice


class AnchorState(TypedDict):
    """An anchor in a checkpoint."""

    agreed: torch.Tensor
    lost: torch.Tensor | None
    lost_sum: torch.Tensor | None
    outer: dict[str, object] | None  # the state_dict() of the outer optimizer
    loaded: NotRequired[bool]  # taken from loaded weights, not yet compared between nodes


class Anchors:
    """The anchor of each slice on this rank; kept only if the settings need it (a codec or an outer optimizer)."""

    def __init__(self, settings: Exchange) -> None:
        self._codec, self._outer = find_codec(settings.codec), settings.outer
        self._anchors: dict[str, _Anchor] = {}
        self._totals: dict[str, torch.Tensor] = {}  # memory for sums, by the key of the slice
        self._unverified: set[str] = set()  # keys of anchors taken from loaded weights, not yet compared between nodes
        if self._outer is not None:
            _try_outer(self._outer)  # fail now, not at the first exchange

    @property
    def are_kept(self) -> bool:
        """Whether the settings need anchors."""
        return self._codec is not None or self._outer is not None

    def reset(self, parts: Sequence[Slice], *, verified: bool = True) -> None:
        """Sets the anchors to values that are equal on all nodes; if not `verified`, the next exchange compares."""
        self._anchors = {part.key: self._new_anchor(part.values.clone()) for part in parts}
        self._unverified = set() if verified else set(self._anchors)

    def used_on(self, stream: torch.cuda.Stream, fragments: Sequence[int]) -> None:
        """Records that another stream is about to read and replace the anchors of these fragments."""
        prefixes = tuple(f"{fragment}/" for fragment in fragments)
        for anchor in (anchor for key, anchor in self._anchors.items() if key.startswith(prefixes)):
            for tensor in (anchor.agreed, anchor.residual, anchor.sum_residual):
                if tensor is not None and tensor.is_cuda:
                    tensor.detach().record_stream(stream)
            for state in anchor.outer.state.values() if anchor.outer is not None else ():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.is_cuda:
                        value.record_stream(stream)

    def agree(self, parts: Sequence[Slice], quorum: Quorum, waiter: CollectiveWaiter, *, exact: bool) -> TransferStats:
        """Replaces the values of each slice by the agreed ones, or the change to them; `exact`: without the codec."""
        self._verify([part for part in parts if part.key in self._unverified], waiter)
        codec = None if exact else self._codec
        coded = [part for part in parts if codec is not None and part.key]
        plain = [part for part in parts if codec is None or not part.key]
        sums = self._begin_sums(plain, quorum)
        sent_bytes = sum(2 * (len(quorum.weights) - 1) * p.values.nbytes // len(quorum.weights) for p in plain)
        drifts = []
        if codec is not None:
            for part, coded_anchor, sent in self._average_coded(codec, coded, quorum, waiter):
                drifts.append(self._apply(part, coded_anchor.agreed.detach(), coded_anchor))
                sent_bytes += sent
        waiter.wait([work for _, work in sums])
        for part, (total, _) in zip(plain, sums, strict=True):
            is_idle = quorum.weights[quorum.node] == 0 and part.key in self._anchors  # keeps its encoding error
            uncoded_anchor = replace(self._anchors[part.key], sum_residual=None) if is_idle else None
            drifts.append(self._apply(part, to_device(total, part.values.device), uncoded_anchor))
        known_drifts = [drift for drift in drifts if drift is not None]
        if not known_drifts:
            return TransferStats(sent_bytes)
        squared_distance, squared_norm = torch.stack(known_drifts).sum(0).tolist()  # one device sync
        return TransferStats(sent_bytes, squared_distance, squared_norm)

    def _verify(self, parts: Sequence[Slice], waiter: CollectiveWaiter) -> None:
        """Raises `MismatchError` if nodes loaded different weights."""
        local = [_digest(self._anchors[part.key].agreed).to(part.values.device) for part in parts]
        digests = [to_host(digest, part.group) for digest, part in zip(local, parts, strict=True)]
        gathered = [all_gather(digest, part.group) for digest, part in zip(digests, parts, strict=True)]
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

    def _apply(self, part: Slice, average: torch.Tensor, errors_of: _Anchor | None = None) -> torch.Tensor | None:
        """Writes the agreed values; returns squared distance to and norm of the average, for slices with a key.

        The new anchor keeps the encoding errors of `errors_of`.
        """
        drift = _drift(part.values, average) if part.key else None
        agreed = self._update_anchor(part, average, errors_of)
        part.values.copy_(agreed - part.values if part.is_difference else agreed)
        return drift

    def _begin_sums(self, parts: Sequence[Slice], quorum: Quorum) -> list[tuple[torch.Tensor, Work]]:
        """Starts the sums of slices that are sent without a codec, plus the encoding errors of earlier exchanges."""
        weight, sums = quorum.weights[quorum.node], []
        for part in parts:
            total = self._weighted(part, weight)
            anchor = self._anchors.get(part.key)
            if anchor is not None and anchor.residual is not None and weight:
                total.add_(anchor.residual.view(-1)[: total.numel()], alpha=weight)
            if anchor is not None and anchor.sum_residual is not None:
                own_piece = total[quorum.node * anchor.sum_residual.numel() :][: anchor.sum_residual.numel()]
                own_piece.add_(anchor.sum_residual[: own_piece.numel()])
            host_total = to_host(total, part.group)
            sums.append((host_total, all_reduce(host_total, part.group)))
        return sums

    def _weighted(self, part: Slice, weight: float) -> torch.Tensor:
        """Returns the values of a slice times the weight of this node, where no anchor keeps them in reused memory."""
        values = part.values
        if self.are_kept or values.is_cuda or not part.key:
            return values * weight if weight else torch.zeros_like(values)  # 0 * NaN would not be 0
        total = self._totals.get(part.key)
        if total is None or total.shape != values.shape or total.dtype != values.dtype:
            total = self._totals[part.key] = torch.empty_like(values)
        return torch.mul(values, weight, out=total) if weight else total.zero_()

    def state(self) -> dict[str, AnchorState]:
        """Returns the state for a checkpoint."""
        return {
            key: {
                "agreed": anchor.agreed.detach(),
                "lost": anchor.residual,
                "lost_sum": anchor.sum_residual,
                "outer": None if anchor.outer is None else anchor.outer.state_dict(),
                "loaded": key in self._unverified,
            }
            for key, anchor in self._anchors.items()
        }

    def fit(self, state: dict[str, AnchorState]) -> bool:
        """Returns whether a checkpoint's state, saved with the same settings, has the same slices."""
        return state.keys() == self._anchors.keys() and all(
            anchor.agreed.shape == state[key]["agreed"].shape for key, anchor in self._anchors.items()
        )

    def resume(self, state: dict[str, AnchorState]) -> None:
        """Restores a checkpoint's state."""
        for key, saved in state.items():
            device = self._anchors[key].agreed.device
            residual, sum_residual = saved["lost"], saved["lost_sum"]
            anchor = replace(
                self._new_anchor(saved["agreed"].to(device)),
                residual=None if residual is None else residual.to(device),
                sum_residual=None if sum_residual is None else sum_residual.to(device),
            )
            if anchor.outer is not None:
                if saved["outer"] is None:
                    raise CheckpointError(
                        f"the checkpoint has no state of the outer optimizer for {key!r}, though it was made with one. "
                        "It is damaged; resume from another."
                    )
                anchor.outer.load_state_dict(saved["outer"])
            self._anchors[key] = anchor
        self._unverified = {key for key, saved in state.items() if saved.get("loaded")}

    def vectors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns what is kept for each element, by name and by the key of the slice.

        All ranks return the same names, also those without a slice.
        """
        vectors = {"agreed": {key: anchor.agreed.detach() for key, anchor in self._anchors.items()}}
        if self._codec is not None:
            vectors["residual"] = {key: _flat_residual(anchor) for key, anchor in self._anchors.items()}
        if self._outer is not None:
            state = OuterState(partial(_make_outer, self._outer))
            rows = {key: state.vectors(a.outer) for key, a in self._anchors.items() if a.outer is not None}
            vectors |= {f"outer/{slot}": {key: row[slot] for key, row in rows.items()} for slot in state.new_values}
        return vectors

    def names(self) -> list[str]:
        """Returns the names of `vectors`."""
        slots = [] if self._outer is None else list(OuterState(partial(_make_outer, self._outer)).new_values)
        return ["agreed", *(["residual"] if self._codec is not None else []), *(f"outer/{slot}" for slot in slots)]

    def fork(self) -> AnchorsBefore:
        """Returns the anchors as they are, for `put_back`; steps of outer optimizers do not reach them."""
        if self._outer is None:
            return dict(self._anchors)
        return {key: self._copied(anchor) for key, anchor in self._anchors.items()}

    def accept(self) -> None:
        """Takes the anchors as equal on all nodes."""
        self._unverified = set()

    def put_back(self, anchors: AnchorsBefore) -> None:
        """Restores what `fork` returned."""
        self._anchors = anchors

    def _copied(self, anchor: _Anchor) -> _Anchor:
        copied = replace(self._new_anchor(anchor.agreed.detach().clone()), residual=anchor.residual)
        copied = replace(copied, sum_residual=anchor.sum_residual)
        if anchor.outer is not None and copied.outer is not None:
            copied.outer.load_state_dict(deepcopy(anchor.outer.state_dict()))
        return copied

    def new_values(self) -> dict[str, float]:
        """Returns the elements of `vectors`, by name, for a parameter that was not exchanged before.

        Its anchor is its own value, which is equal on all nodes.
        """
        slots = {} if self._outer is None else OuterState(partial(_make_outer, self._outer)).new_values
        return {"residual": 0.0, **{f"outer/{slot}": value for slot, value in slots.items()}}

    def rebuild(self, parts: Mapping[str, Sequence[Slice]], *, nodes: int) -> None:
        """Makes the anchors of other slices of the parameters, from what `vectors` returned for the former ones.

        The encoding error of a sum, which one node keeps for all, is dropped: it is at most the rounding of one code.
        """
        values = {name: {part.key: part.values for part in slices} for name, slices in parts.items()}
        is_verified, self._anchors = not self._unverified, {}
        for key, agreed in values["agreed"].items():
            anchor = self._new_anchor(agreed.clone())
            if self._codec is not None and bool(values["residual"][key].any()):
                rows = agreed.new_zeros(nodes, -(-agreed.numel() // nodes))
                rows.view(-1)[: agreed.numel()].copy_(values["residual"][key])
                anchor = replace(anchor, residual=rows)
            if anchor.outer is not None and self._outer is not None:
                state = OuterState(partial(_make_outer, self._outer))
                state.put(anchor.outer, {slot: values[f"outer/{slot}"][key] for slot in state.new_values})
            self._anchors[key] = anchor
        self._unverified = set() if is_verified else set(self._anchors)

    def _new_anchor(self, agreed: torch.Tensor) -> _Anchor:
        if self._outer is None:
            return _Anchor(agreed)
        parameter = torch.nn.Parameter(agreed)
        return _Anchor(parameter, outer=_make_outer(self._outer, parameter))

    def _update_anchor(self, part: Slice, average: torch.Tensor, errors_of: _Anchor | None) -> torch.Tensor:
        """Returns the new anchor: the average, or the outer optimizer's step from the last anchor towards it."""
        if not part.key or not self.are_kept:
            return average
        previous = self._anchors[part.key]
        if previous.outer is None:
            agreed = average
        else:
            previous.agreed.grad = previous.agreed.detach() - average
            with torch.enable_grad():
                previous.outer.step()
            previous.agreed.grad = None
            agreed = previous.agreed
        residual, sum_residual = (None, None) if errors_of is None else (errors_of.residual, errors_of.sum_residual)
        self._anchors[part.key] = _Anchor(agreed, residual, sum_residual, previous.outer)
        return agreed.detach()

    def _average_coded(
        self, codec: Codec, parts: Sequence[Slice], quorum: Quorum, waiter: CollectiveWaiter
    ) -> list[tuple[Slice, _Anchor, int]]:
        """Returns for each slice its average with encoding errors, and the bytes this rank sent for it."""
        own_node, weights = quorum.node, quorum.weights
        scattered = []
        for part in parts:
            rows = self._differences(part, len(weights), has_weight=weights[own_node] > 0)  # [nodes, piece]
            codes = {node: codec.code_of(row) for node, row in enumerate(rows) if node != own_node}
            scattered.append((part, rows, codes, *_scatter_codes(codes, part.group)))
        waiter.wait([work for *_, work in scattered])
        summed = []
        for part, rows, codes, received, _ in scattered:
            received_codes = dict(zip(codes, to_device(received, rows.device), strict=True))
            weighted_codes = {node: (weights[node], code) for node, code in received_codes.items()}
            total = self._sum(codec, part, rows[own_node] * weights[own_node], weighted_codes)
            code = codec.code_of(total)
            gathered, work = all_gather(to_host(code, part.group), part.group)  # [nodes, bytes]
            rows[own_node].zero_()  # this node's own piece entered the sum unencoded
            for node, sent in codes.items():
                _subtract(rows[node], codec.decode(sent, rows.shape[1]))
            _subtract(total, codec.decode(code, total.numel()))
            residual = rows if weights[own_node] else self._anchors[part.key].residual  # weight 0: nothing was sent
            summed.append((part, residual, total, gathered, work))
        waiter.wait([work for *_, work in summed])
        results = []
        for part, residual, total, gathered, _ in summed:
            codes_of_all = to_device(gathered, total.device)
            decoded = [codec.decode(code.clone(), total.numel()) for code in codes_of_all]  # clone aligns the row
            average = self._anchors[part.key].agreed.detach() + torch.cat(decoded)[: part.values.numel()]
            results.append((part, _Anchor(average, residual, total), 2 * (len(weights) - 1) * gathered.shape[1]))
        return results

    def _sum(
        self, codec: Codec, part: Slice, total: torch.Tensor, others: dict[int, tuple[float, torch.Tensor]]
    ) -> torch.Tensor:
        for weight, code in others.values():
            if weight:
                total.add_(codec.decode(code.clone(), total.numel()).to(total.dtype), alpha=weight)
        sum_residual = self._anchors[part.key].sum_residual
        return total if sum_residual is None else total.add_(sum_residual)

    def _differences(self, part: Slice, nodes: int, *, has_weight: bool) -> torch.Tensor:
        """Returns d_n, zero-padded, one row for the owner of each piece of the sum: [nodes, piece]."""
        anchor, size = self._anchors[part.key], part.values.numel()
        rows = part.values.new_zeros(nodes, -(-size // nodes))
        flat = rows.view(-1)[:size]
        if not has_weight:  # a node without samples adds nothing
            return rows
        torch.sub(part.values, anchor.agreed.detach(), out=flat)
        if anchor.residual is not None:
            rows.add_(anchor.residual)
        return rows


def _flat_residual(anchor: _Anchor) -> torch.Tensor:
    """Returns the encoding error of each element of a slice."""
    if anchor.residual is None:
        return torch.zeros_like(anchor.agreed.detach())
    return anchor.residual.view(-1)[: anchor.agreed.numel()]


def of_node(stats: TransferStats, group: Group, waiter: CollectiveWaiter) -> TransferStats:
    """Returns the statistics with the drift of the whole node, summed over the slices of the ranks in `group`."""
    own_row = torch.tensor([stats.squared_distance, stats.squared_norm], dtype=torch.float64)
    rows = gather_rows(own_row, group, waiter)
    squared_distance, squared_norm = rows.sum(0).tolist()
    if not math.isfinite(squared_norm):  # of the average, which is the same on all nodes: all raise
        raise NonFiniteError(
            "a parameter had become NaN or infinite when nodes exchanged, though no gradient had; nothing was merged. "
            "Look at the optimizer's settings, and at what else changes parameters."
        )
    return TransferStats(stats.sent_bytes, squared_distance, squared_norm)


def _digest(values: torch.Tensor) -> torch.Tensor:
    """Returns a checksum of the bits, as one number."""
    bits = values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return torch.tensor([int.from_bytes(hashlib.sha256(bits).digest()[:6])])


def _scatter_codes(codes: dict[int, torch.Tensor], group: Group) -> tuple[torch.Tensor, Work]:
    """Starts sending each node its code; the result has one row from every other node."""
    sent = to_host(torch.stack(list(codes.values())), group)  # [nodes - 1, bytes]
    received = torch.empty_like(sent)
    sizes = [sent.shape[1] if node in codes else 0 for node in range(len(codes) + 1)]
    return received, all_to_all(received.view(-1), sent.view(-1), sizes, sizes, group, largest=sent.shape[1])


def _subtract(row: torch.Tensor, decoded: torch.Tensor) -> None:
    row.sub_(decoded.to(row.dtype))


def _drift(values: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
    """Returns the squared distance of the values to their average, and the squared norm of the average: [2]."""
    if average.is_cuda:
        norm = torch.linalg.vector_norm(average, dtype=torch.float64)  # squares of large numbers fit
        return torch.stack([torch.dist(values, average).double(), norm]).square_()
    squares = torch.zeros(2, dtype=torch.float64)
    for chunk, average_chunk in zip(values.split(DRIFT_CHUNK), average.split(DRIFT_CHUNK), strict=True):
        squares[0] += _norm(chunk - average_chunk) ** 2
        squares[1] += _norm(average_chunk) ** 2
    return squares


def _norm(values: torch.Tensor) -> float:
    norm = float(torch.linalg.vector_norm(values))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _try_outer(outer: Outer) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = _make_outer(outer, parameter)
    if outer.settings.get("capturable") or outer.settings.get("fused"):  # may need a GPU
        return
    try:
        for _ in range(2):  # some settings are checked only in step()
            optimizer.step()
    except Exception as error:
        raise SpecError(f"the outer optimizer {outer.name} cannot step with {outer.settings}: {error}.") from None


def _make_outer(outer: Outer, parameter: torch.Tensor) -> torch.optim.Optimizer:
    make = _optimizer_class(outer.name)
    if make is None or outer.name in NOT_ELEMENTWISE:
        case = "is no class of torch.optim" if make is None else "is not elementwise, and ranks hold slices"
        raise SpecError(
            f"the outer optimizer {outer.name!r} was asked for, which {case}. Take SGD, Adam or another one."
        )
    try:
        return make([parameter], **outer.settings)
    except Exception as error:
        raise SpecError(f"the outer optimizer {outer.name} cannot be made with {outer.settings}: {error}.") from None


def _optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer] | None:
    kind, base = getattr(torch.optim, name, None), torch.optim.Optimizer
    return kind if isinstance(kind, type) and issubclass(kind, base) and kind is not base else None
