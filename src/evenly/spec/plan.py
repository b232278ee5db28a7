"""The plan of a run: the role of each rank, the period, and how exchanges are made."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from evenly.spec._value import Document, Value
from evenly.spec.cluster import Cluster
from evenly.spec.exchange import Exchange, misfit
from evenly.spec.layout import Layout
from evenly.spec.period import Adaptive, AnyPeriod, EveryEpoch, EveryGradient, EverySeconds, EverySteps, Period

MOST_SAMPLES = 2**40  # of a global batch
MOST_NAMED = 8  # ranks or networks in a line


class Role(Value):
    """What one rank does: the node it belongs to and the samples it takes of every global batch."""

    rank: Annotated[int, Field(ge=0)]
    node: Annotated[int, Field(ge=0)]
    device: str = "cpu"
    samples: Annotated[int, Field(ge=0, le=MOST_SAMPLES)] = Field(
        default=0, description="of the global batch; 0: none, or not planned"
    )
    left_out: str = Field(default="", description="why the rank takes no part; empty: it does")
    compute_s: Annotated[float, Field(ge=0)] = Field(default=0.0, description="predicted for a step; 0: not known")
    memory_bytes: Annotated[int, Field(ge=0)] = Field(default=0, description="predicted; 0: not known")
    free_bytes: Annotated[int, Field(ge=0)] = Field(default=0, description="that it may use; 0: not known")
    most_samples: Annotated[int, Field(ge=0)] = Field(default=0, description="for which it has memory; 0: not known")


class Prediction(Value):
    """What a plan is expected to take, in seconds."""

    step_s: Annotated[float, Field(gt=0)]
    exchange_s: Annotated[float, Field(ge=0)] = 0.0
    is_measured: bool = Field(default=True, description="whether from measurements, or from the speeds you gave")


class Replica(Value):
    """Ranks that share one network; each holds its parts of the layers."""

    ranks: tuple[int, ...] = Field(min_length=1)
    layout: Layout
    reason: str = Field(default="", description="why it is cut; empty: it is whole, or not said")

    @model_validator(mode="after")
    def _one_share_each(self) -> Self:
        if len(self.layout.shares) != len(self.ranks):
            raise ValueError(f"the layout has {len(self.layout.shares)} shares for the ranks {list(self.ranks)}")
        return self


class Plan(Document):
    """The work of every rank."""

    version: Literal[1] = 1
    roles: tuple[Role, ...] = Field(min_length=1)
    period: Period = Field(default_factory=EveryEpoch)
    exchange: Exchange = Field(default_factory=Exchange)
    replicas: tuple[Replica, ...] = Field(default=(), description="who holds a network together; none: nothing is cut")
    batch_size: Annotated[int, Field(ge=0)] = Field(default=0, description="samples of all ranks; 0: not said")
    graph: str = Field(default="", description="fingerprint of the network it was made for; empty: any")
    rebalance: bool = Field(default=False, description="whether batches and units follow the devices' speed")
    predicted: Prediction | None = None

    @model_validator(mode="after")
    def _every_rank_has_one_role(self) -> Self:
        ranks = [role.rank for role in self.roles]
        if ranks != list(range(len(ranks))):
            raise ValueError(f"roles must be given for ranks 0..{len(ranks) - 1} in order; they are for {ranks}")
        nodes = sorted({role.node for role in self.roles})
        if nodes != list(range(len(nodes))):
            raise ValueError(f"nodes must be numbered 0..{len(nodes) - 1}; the roles name {nodes}")
        ranks_of_replicas = sorted(rank for replica in self.replicas for rank in replica.ranks)
        if ranks_of_replicas and ranks_of_replicas != self.active:
            raise ValueError(
                f"replicas hold the ranks {ranks_of_replicas}; each of the ranks {self.active} must be in one"
            )
        for replica in self.replicas:
            if len({self.roles[rank].node for rank in replica.ranks}) > 1:
                raise ValueError(f"the replica of ranks {list(replica.ranks)} reaches over nodes; keep it inside one")
            if len({self.roles[rank].samples for rank in replica.ranks}) > 1:
                raise ValueError(f"the ranks {list(replica.ranks)} of a replica see one batch; give them equal samples")
        self._samples_add_up()
        if case := misfit(self.period, self.exchange):
            raise ValueError(case)
        return self

    def _samples_add_up(self) -> None:
        if not self.active:
            raise ValueError("every rank is left out")
        planned = [role.samples > 0 for role in self.roles if not role.left_out]
        if any(planned) and not all(planned):
            idle = [role.rank for role in self.roles if role.samples == 0 and not role.left_out]
            raise ValueError(f"ranks {idle} have no samples while others do; give every rank at least 1, or none")
        busy = [role.rank for role in self.roles if role.samples and role.left_out]
        if busy:
            raise ValueError(f"ranks {busy} have samples but are left out")
        total = sum(self.batch_shares)
        if self.batch_size and any(planned) and total != self.batch_size:
            raise ValueError(f"the samples of the ranks add up to {total}, not to the batch_size of {self.batch_size}")

    @property
    def active(self) -> list[int]:
        """The ranks that take part."""
        return [role.rank for role in self.roles if not role.left_out]

    @property
    def takers(self) -> list[int]:
        """The ranks that take a batch of their own: each rank, or the first of each replica."""
        return [replica.ranks[0] for replica in self.replicas] or self.active

    @property
    def batch_shares(self) -> list[int]:
        """The samples of each taker."""
        return [self.roles[rank].samples for rank in self.takers]

    @classmethod
    def even(
        cls,
        cluster: Cluster,
        *,
        batch_size: int = 0,
        period: AnyPeriod | None = None,
        exchange: Exchange | None = None,
    ) -> Self:
        """Returns the plan in which every rank of `cluster` takes `batch_size` samples a step."""
        roles = [
            Role(rank=rank, node=cluster.node_of(rank), device=cluster.device_of(rank).kind, samples=batch_size)
            for rank in range(cluster.world_size)
        ]
        return cls(roles=tuple(roles), period=period or EveryEpoch(), exchange=exchange or Exchange())

    def among_active(self) -> Self:
        """Returns the plan of the active ranks, renumbered from 0; nodes without any are left out."""
        ranks = {rank: index for index, rank in enumerate(self.active)}
        numbers = {node: index for index, node in enumerate(sorted({self.roles[rank].node for rank in ranks}))}
        roles = [
            self.roles[rank].model_copy(update={"rank": index, "node": numbers[self.roles[rank].node]})
            for rank, index in ranks.items()
        ]
        replicas = [
            replica.model_copy(update={"ranks": tuple(ranks[rank] for rank in replica.ranks)})
            for replica in self.replicas
        ]
        return self.model_copy(update={"roles": tuple(roles), "replicas": tuple(replicas)})

    def replica_of(self, rank: int) -> Replica | None:
        """Returns the replica that a rank belongs to; None where nothing is cut."""
        return next((replica for replica in self.replicas if rank in replica.ranks), None)

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of each node."""
        rank_lists: list[list[int]] = [[] for _ in range(1 + max(role.node for role in self.roles))]
        for role in self.roles:
            rank_lists[role.node].append(role.rank)
        return rank_lists

    @property
    def remarks(self) -> list[str]:
        """What decided besides the speed of the ranks: memory, and the gain from cuts."""
        cut = {replica.ranks[0]: replica for replica in self.replicas if len(replica.ranks) > 1}
        names_by_reason: dict[str, list[str]] = {}
        for rank in self.takers:
            name = f"{_named(cut[rank].ranks)} together" if rank in cut else f"rank {rank}"
            if 0 < self.roles[rank].samples == self.roles[rank].most_samples:
                names_by_reason.setdefault("no memory for more samples", []).append(name)
            if rank in cut and cut[rank].reason:
                names_by_reason.setdefault(cut[rank].reason, []).append(name)
        return [f"{_listed(names)}: {reason}" for reason, names in names_by_reason.items()]

    def explain(self) -> str:
        """Returns a description of the plan, with its predicted times."""
        of_all = f"{len(self.active)} of " if len(self.active) < len(self.roles) else ""
        size = f"{of_all}{counted(len(self.roles), 'rank')} on {counted(len(self.nodes), 'node')}"
        averages = len(self.takers) > 1 or len(self.roles) == 1
        lines = [f"{size}; {_period_words(self)}" if averages else size]  # one network: no averaging
        for node, ranks in enumerate(self.nodes):
            replicas = [_replica_words(self, replica) for replica in self.replicas if replica.ranks[0] in ranks]
            parts = [
                f"rank {rank} ({self.roles[rank].device}){_samples_words(self.roles[rank])}"
                for rank in ranks
                if not self.roles[rank].left_out
            ]
            lines.append(f"node {node}: " + ("; ".join(replicas) or ", ".join(parts) or "nobody"))
        lines += [
            f"rank {role.rank} ({role.device}) is left out: {role.left_out}" for role in self.roles if role.left_out
        ]
        return "\n".join([*lines, *self.remarks, *_layout_words(self), *_predicted_words(self)])


def _period_words(plan: Plan) -> str:
    match plan.period:
        case EveryGradient():
            return f"gradients are averaged over all {'networks' if plan.replicas else 'ranks'} at every step"
        case EverySteps(steps=steps, warmup=warmup):
            often = "step" if steps == 1 else f"{steps} steps"
        case EveryEpoch(epochs=epochs, warmup=warmup):
            often = "epoch" if epochs == 1 else f"{epochs} epochs"
        case EverySeconds(seconds=seconds, warmup=warmup):
            often = f"{seconds:g} s"
        case Adaptive(warmup=warmup):
            often = f"so many steps as {wish_words(plan.period)}"
    if len({plan.roles[rank].node for rank in plan.takers}) == 1:
        return "gradients are averaged at every step" if len(plan.takers) > 1 else "one rank takes all samples"
    start = f" (every step for the first {warmup})" if warmup else ""
    how = f"across nodes every {often}{start}{_exchange_words(plan.exchange)}"
    if len({plan.roles[rank].node for rank in plan.takers}) == len(plan.takers) > 1:  # one a node
        return f"parameters are averaged {how}"
    return f"gradients are averaged inside each node at every step, parameters {how}"


def wish_words(period: Adaptive) -> str:
    """Returns the goal of an adaptive period in words.

    >>> wish_words(Adaptive(drift=0.1))
    'keep nodes within 10 % of their average'
    """
    if period.exchange_budget is not None:
        return f"let exchanges take {100 * period.exchange_budget:.3g} % of the time"
    return f"keep nodes within {100 * (period.drift or 0):.3g} % of their average"


def travel_words(exchange: Exchange) -> list[str]:
    """Returns the settings of an exchange that differ from plain averaging, in words.

    >>> travel_words(Exchange(overlap=3, codec="int8"))
    ['beside 3 steps', 'as int8']
    """
    parts = []
    if exchange.fragments > 1:
        parts.append(f"in {exchange.fragments} fragments")
    if exchange.overlap:
        parts.append(f"beside {counted(exchange.overlap, 'step')}")
    if exchange.codec != "fp32":
        parts.append(f"as {exchange.codec}")
    if exchange.offload:
        parts.append("in host memory")
    return parts


def _exchange_words(exchange: Exchange) -> str:
    words = travel_words(exchange)
    if exchange.outer is not None:
        settings = ", ".join(f"{key} {value}" for key, value in exchange.outer.settings.items())
        words.append(f"by {exchange.outer.name} outside ({settings or 'as torch has it'})")
    policy = exchange.optimizer_state
    treated = {"keep": "kept local", "average": "averaged too", "reset": "set to zero"}
    state = (
        treated[policy] if isinstance(policy, str) else ", ".join(f"{slot} {treated[p]}" for slot, p in policy.items())
    )
    often = f" at every {exchange.state_every}th exchange" if exchange.state_every > 1 and state != "kept local" else ""
    chosen = [f"{pattern} {policy}" for pattern, policy in exchange.buffer_patterns.items()]
    buffers = "" if exchange.buffers == "auto" else f"; buffers: {', '.join(chosen)}"
    return f"{', ' if words else ''}{', '.join(words)}; optimizer state is {state}{often}{buffers}"


def _replica_words(plan: Plan, replica: Replica) -> str:
    roles = [plan.roles[rank] for rank in replica.ranks]
    devices = [role.device for role in roles]
    devices = devices[:1] if len(set(devices)) == 1 else devices
    samples = f", {counted(roles[0].samples, 'sample')} a step" if roles[0].samples else ""
    if len(roles) == 1 and samples:
        samples = f",{_samples_words(roles[0])}"
    return (
        f"{_named(replica.ranks)} ({', '.join(devices)}) {'holds' if len(roles) == 1 else 'hold'} one network{samples}"
    )


def _layout_words(plan: Plan) -> Iterator[str]:
    """Yields every layout once, with the ranks that have it where there are several."""
    holders_by_layout: dict[str, list[str]] = {}
    for replica in plan.replicas:
        holders_by_layout.setdefault(replica.layout.explain(), []).append(_named(replica.ranks))
    for text, holders in holders_by_layout.items():
        owner = (
            f" of {'; '.join(holders)}"
            if len(holders_by_layout) > 1
            else " of each network"
            if len(holders) > 1
            else ""
        )
        yield f"layout{owner}: {text}"


def _predicted_words(plan: Plan) -> Iterator[str]:
    """Yields the predicted times."""
    if plan.predicted is not None:
        exchange_s = plan.predicted.exchange_s if plan.period.kind != "global" else 0.0  # there each step has it
        exchange = f", an exchange {_milliseconds(exchange_s)}" if exchange_s else ""
        source = "what was measured" if plan.predicted.is_measured else "the speeds you gave"
        yield f"predicted from {source}: a step takes {_milliseconds(plan.predicted.step_s)}{exchange}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds < 9 else f"{seconds:.4g} s"


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _listed(names: Sequence[str]) -> str:
    rest = [f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return "; ".join([*names[:MOST_NAMED], *rest])


def _samples_words(role: Role) -> str:
    if not role.samples:
        return ""
    times = [f"computes {_milliseconds(role.compute_s)}"] if role.compute_s else []
    unit, size = (1e9, "GB") if role.memory_bytes >= 1e9 else (1e6, "MB")
    needs = [f"needs {role.memory_bytes / unit:.3g} {size}"] if role.memory_bytes else []
    details = f" ({', '.join([*times, *needs])})" if times or needs else ""
    return f" {counted(role.samples, 'sample')} a step{details}"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun.

    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
