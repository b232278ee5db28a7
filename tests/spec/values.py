"""Generated values of every noun."""

from hypothesis import strategies as st

from evenly.spec import (
    CheckpointSaved,
    Cluster,
    Curve,
    Device,
    DeviceForecast,
    DeviceProfile,
    EpochDone,
    EveryEpoch,
    EveryGradient,
    EverySteps,
    Exchange,
    ExchangeDone,
    Forecast,
    LayerCurves,
    Link,
    Measured,
    Node,
    Plan,
    Prediction,
    Profile,
    Rate,
    Rebalanced,
    Role,
    Run,
    RunFailed,
    RunFinished,
    RunStarted,
    StepsDone,
    Straggler,
)

texts = st.text(st.characters(codec="utf-8"), max_size=12)
counts = st.integers(0, 2**70)
numbers = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)

nonnegative = st.floats(min_value=0, allow_infinity=False)

periods = st.one_of(
    st.builds(EverySteps, steps=st.integers(1), warmup=counts),
    st.builds(EveryEpoch, epochs=st.integers(1), warmup=counts),
    st.builds(EveryGradient),
)
devices = st.builds(
    Device,
    kind=st.sampled_from(["cpu", "cuda"]),
    index=counts,
    name=texts,
    identity=texts,
    memory_bytes=counts,
    cores=counts,
)
exchanges = st.builds(
    Exchange,
    optimizer_state=st.sampled_from(["keep", "average"]),
    timeout_s=st.floats(min_value=1e-3, max_value=1e6),
    nonfinite=st.sampled_from(["stop", "skip"]),
)


@st.composite
def rank_lists(draw: st.DrawFn) -> list[list[int]]:
    """Draws the ranks of each node: unequal numbers, in any order, each rank once."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ranks = iter(draw(st.permutations(range(sum(sizes)))))
    return [[next(ranks) for _ in range(size)] for size in sizes]


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    lists = draw(rank_lists())
    nodes = [Node(name=draw(texts), ranks=r, devices=[draw(devices) for _ in r]) for r in lists]
    return Cluster(nodes=nodes)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    lists = draw(rank_lists())
    least = draw(st.sampled_from([0, 1]))  # samples for nobody, or for everybody
    samples = st.integers(1, 2**40) if least else st.just(0)
    idle = draw(st.sets(st.integers(1, 20), max_size=3))  # never rank 0: somebody takes part
    roles = [
        Role(rank=rank, node=node, device=draw(texts), compute_s=draw(nonnegative), memory_bytes=draw(counts), **taking)
        for rank, node in sorted((rank, node) for node, ranks in enumerate(lists) for rank in ranks)
        for taking in [{"left_out": "slow"} if rank in idle else {"samples": draw(samples)}]
    ]
    predicted = draw(st.none() | st.builds(Prediction, step_s=positive, exchange_s=nonnegative))
    size = draw(st.sampled_from([0, sum(role.samples for role in roles)]))
    return Plan(
        roles=roles,
        period=draw(periods),
        exchange=draw(exchanges),
        predicted=predicted,
        batch_size=size,
        graph=draw(texts),
    )


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    sizes = sorted(draw(st.sets(st.integers(1, 2**40), min_size=1, max_size=4)))
    return Curve(sizes=sizes, seconds=[draw(st.floats(1e-15, 1e15)) for _ in sizes])


rates = st.builds(Rate, latency_s=st.floats(0, 1e6), bytes_per_s=st.floats(1e-3, 1e21))
layer_curves = st.builds(LayerCurves, outputs=curves(), inputs=curves(), samples=curves())


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    ranks = range(draw(st.integers(1, 4)))
    ends = st.sampled_from(ranks)
    ways = st.tuples(ends, ends).filter(lambda way: way[0] != way[1]) if len(ranks) > 1 else st.nothing()
    lanes = st.lists(
        st.builds(lambda way, rate: Link(source=way[0], target=way[1], rate=rate), ways, rates), max_size=3
    )
    layers = st.dictionaries(texts, layer_curves, max_size=2)
    devices = [
        DeviceProfile(rank=rank, step=draw(curves()), layers=draw(layers), free_bytes=draw(counts)) for rank in ranks
    ]
    return Profile(
        cluster=draw(texts), graph=draw(texts), batch_size=draw(st.integers(1)), devices=devices, lanes=draw(lanes)
    )


forecasts = st.builds(
    Forecast,
    steps=st.integers(1),
    seconds=nonnegative,
    samples_per_s=nonnegative,
    exchanges=counts,
    devices=st.lists(st.builds(DeviceForecast, rank=counts, node=counts, compute_s=nonnegative), max_size=3),
)


settings_values = st.one_of(texts, st.integers(-(2**40), 2**40), numbers, st.booleans(), st.none())
events = st.one_of(
    st.builds(
        RunStarted,
        at_s=numbers,
        name=texts,
        cluster=clusters(),
        plan=st.none() | plans(),
        settings=st.dictionaries(texts, settings_values, max_size=3),
        resumed_step=counts,
    ),
    st.builds(StepsDone, at_s=numbers, epoch=counts, step=counts, samples=counts),
    st.builds(
        ExchangeDone,
        at_s=numbers,
        number=counts,
        step=counts,
        seconds=numbers,
        sent_bytes=counts,
        weights=st.lists(numbers, max_size=3),
    ),
    st.builds(Rebalanced, at_s=numbers, step=counts, samples=st.lists(counts, max_size=3)),
    st.builds(EpochDone, at_s=numbers, epoch=counts, step=counts),
    st.builds(Measured, at_s=numbers, step=counts, values=st.dictionaries(texts, st.none() | numbers, max_size=3)),
    st.builds(
        Straggler,
        at_s=numbers,
        step=counts,
        rank=counts,
        host=texts,
        factor=numbers,
        since_step=counts,
        is_over=st.booleans(),
    ),
    st.builds(CheckpointSaved, at_s=numbers, step=counts, path=texts, seconds=numbers),
    st.builds(RunFailed, at_s=numbers, step=counts, error=texts),
    st.builds(
        RunFinished,
        at_s=numbers,
        seconds=numbers,
        steps=counts,
        samples=counts,
        samples_per_s=numbers,
        exchanges=counts,
        exchange_seconds=numbers,
        sent_bytes=counts,
        interface_bytes=st.lists(counts, max_size=3),
    ),
)
runs = st.builds(Run, events=st.lists(events, max_size=5))
