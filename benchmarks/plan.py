"""Plans against the clock: what was predicted, who waited, and whether any plan made by hand is faster.

On the lab, for five clusters: equal devices; 70/25/5 of a core; one device useless; two nodes with unequal numbers of
ranks and a slow link; one device with little memory. In each the devices and links are measured, a plan is made, and it
runs beside at least six plans made by hand, in turns, a few steps each, round after round; figures are medians, of
several nodes the largest of their medians, as nodes wait for each other only at exchanges, many steps apart. How
long a rank waits is read from its CPU time: one that never waits uses all of its quota.

A prediction is what the plan says before it runs. The speed of a shared machine changes by 20 % within minutes, so
devices are measured again in the middle of the run and after it: what would have been predicted then is told beside it
(`predictions_ms`), and counts for nothing.

Also: unequal batches on 100 % and 30 % of a core beside equal ones, and the accuracy with both; a device that becomes
four times slower in the middle of a run; the time to plan ResNet-152 for 1,024 devices, and to simulate 10,000 nodes.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import HERE, RESULTS, Claim, median, spread, tell

CASES: dict[str, dict[str, Any]] = {
    "equal": {"cpu": [[0.7, 0.7]]},
    "70/25/5": {"cpu": [[0.7, 0.25, 0.05]]},
    "one useless": {"cpu": [[0.8, 0.6, 0.04]]},
    "two nodes": {"cpu": [[0.5, 0.5], [0.4]], "rate_mbit": 100.0},
    "little memory": {"cpu": [[0.8, 0.5]], "memory_samples": 12},
    "100/30": {"cpu": [[1.0, 0.3]]},
}
UNEVEN, EQUAL, BY_SPEED = "100/30", "equal batches", "batches by speed"  # unequal batches against equal ones
BATCH = 64
STEPS = 8  # of a round
FEW = 3  # steps of the first round
ROUNDS = 24
HOPELESS, BEHIND = 1.3, 1.12  # so many times slower than the best after the first round, or the first quarter: it ends
SLOW_AT = 30  # the step at which a device becomes slow
FIXED_AT = SLOW_AT + 50  # from here on shares are fixed
TRY, AGAIN = 6, 4  # steps with each of them, then so many times more with the best
PARTS_TRIED = range(4, 17)  # fiftieths of the work, for the slow device
TIMES = 3  # runs of a device that becomes slow


def network() -> Any:
    """Returns a convolutional network with enough to do in every layer."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.Conv2d(after, after, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10))


def alternatives(
    chosen: Any, cluster: Any, profile: Any, graph: Any, free: list[int] | None, memory: list[int] | None
) -> dict[str, Any]:
    """Returns plans as a person would make them, by name; none of them is the chosen one."""
    from evenly.planner import lay_out
    from evenly.planner.costs import Works
    from evenly.planner.memory import cut_needs
    from evenly.spec import Plan, Replica, Role, deal

    ranks = range(cluster.world_size)
    speed = {rank: 1.0 / profile.devices[rank].step.at(BATCH) for rank in ranks}
    order = sorted(ranks, key=lambda rank: -speed[rank])
    made: dict[str, Any] = {}

    def add(name: str, counts: dict[int, int], replicas: tuple[Any, ...] = ()) -> None:
        if free is not None and not replicas and any(counts[r] > limit for r, limit in enumerate(free) if r in counts):
            return  # it does not fit
        roles = [
            Role(rank=r, node=cluster.node_of(r), samples=counts.get(r, 0), left_out="" if counts.get(r) else "by hand")
            for r in ranks
        ]
        made[name] = Plan(roles=tuple(roles), replicas=replicas, period=chosen.period)

    add("fastest alone", {order[0]: BATCH})
    add(EQUAL, dict(zip(ranks, deal(BATCH, [1.0] * len(ranks)), strict=True)))
    add(BY_SPEED, dict(zip(ranks, deal(BATCH, [speed[r] for r in ranks]), strict=True)))
    for size in range(2, len(order)):
        few = sorted(order[:size])
        add(f"{size} fastest, equal batches", dict(zip(few, deal(BATCH, [1.0] * size), strict=True)))
        add(f"{size} fastest, by speed", dict(zip(few, deal(BATCH, [speed[r] for r in few]), strict=True)))
    leader = order[0]
    for name, weigh in (
        ("milder", lambda r: speed[r] ** 0.5),
        ("stronger", lambda r: speed[r] ** 1.5),
        ("a quarter more for the fastest", lambda r: speed[r] * (1.25 if r == leader else 1.0)),
        ("a quarter less for the fastest", lambda r: speed[r] * (0.75 if r == leader else 1.0)),
    ):
        if all(counts := deal(BATCH, [weigh(r) for r in ranks])):
            add(f"batches by speed, {name}", dict(zip(ranks, counts, strict=True)))
    for name, mixed in _with_others(chosen).items():
        add(name, mixed)
    if free is not None:
        small = min(ranks, key=lambda r: free[r])
        others = [r for r in ranks if r != small]
        for few in sorted({0, 1, *(free[small] * part // 6 for part in range(2, 7))}):
            rest = deal(BATCH - few, [speed[r] for r in others])
            add(f"{few} for the one with little memory", {**dict(zip(others, rest, strict=True)), small: few})
    if len(cluster.nodes) == 1:
        for name, shares, cut in (
            ("cut, equal", [1.0] * len(ranks), False),
            ("cut by speed", [speed[r] for r in ranks], False),
            ("cut by speed, batch too", [speed[r] for r in ranks], True),
        ):
            layout = lay_out(graph, shares, cut_batch=cut)
            needs = cut_needs(Works(graph), layout, profile.sample_bytes)
            if memory is not None and any(n.samples_in(m) < BATCH for n, m in zip(needs, memory, strict=True)):
                continue
            add(name, dict.fromkeys(ranks, BATCH), (Replica(ranks=tuple(ranks), layout=layout),))
    found: dict[str, Any] = {}
    known = [_told(chosen)]
    for name, plan in made.items():
        if all(c > 0 for c in plan.batch_shares) and _told(plan) not in known:
            found[name] = plan
            known.append(_told(plan))
    return found


def _with_others(chosen: Any) -> dict[str, dict[int, int]]:
    """Returns the samples of the chosen plan, but one of them for a rank that it leaves out."""
    counts = {role.rank: role.samples for role in chosen.roles}
    pairs = [(giver, rank) for rank in counts for giver in counts if counts[giver] > 1 and not counts[rank]]
    return {
        f"chosen, but a sample of rank {giver} for rank {rank}": {**counts, giver: counts[giver] - 1, rank: 1}
        for giver, rank in pairs
        if not chosen.replicas
    }


def _told(plan: Any) -> tuple[Any, ...]:
    """Returns what makes a plan different from others."""
    layouts = [(replica.ranks, replica.layout.model_dump_json()) for replica in plan.replicas]
    return ([role.samples for role in plan.roles], layouts)


class Way:
    """A plan that can be run step by step, on the ranks that take part."""

    def __init__(self, plan: Any, cluster: Any, party: Any, number: int) -> None:
        import torch

        from evenly.comm import Alarm
        from evenly.nodes import join_nodes
        from evenly.session.sharding import shard_for
        from evenly.session.stage import Stage

        self.seconds: list[float] = []
        self.busy: list[float] = []
        self.exchanges: list[float] = []  # seconds for each step of a period
        self.takes_part = party.rank in plan.active
        if not self.takes_part:
            return
        own = party.among(plan.active, f"way{number}")
        alarm = Alarm(own.chapter("alarm"))
        stage = Stage(own, cluster.among(plan.active), alarm, folder=None, resume=False, timeout_s=300.0)
        inner = plan.among_active() if len(plan.active) < len(plan.roles) else plan
        model = network()
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        part = shard_for(model, self._optimizer, inner, stage, timeout_s=300.0)
        settings = {"period": inner.period, "exchange": inner.exchange, "parent": alarm}
        self._model = join_nodes(part, self._optimizer, party=own, cluster=stage.cluster, **settings)
        steps = getattr(inner.period, "steps", 1)
        self._model.on_exchange.append(lambda done: self.exchanges.append(done.seconds / steps))
        samples = inner.roles[own.rank].samples
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(samples, 3, 32, 32, generator=generator)
        self._y = torch.randint(10, (samples,), generator=generator)
        self._closing: list[Callable[[], None]] = [self._model.close, stage.close, alarm.close]

    def step(self) -> None:
        """Makes one training step."""
        import torch

        torch.nn.functional.cross_entropy(self._model(self._x), self._y).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def run(self, steps: int, quota: float) -> None:
        """Makes some steps and notes how long one takes, and how busy this rank was."""
        import torch.distributed as dist

        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        ends = [began]
        for _ in range(steps if self.takes_part else 0):
            self.step()
            ends.append(time.perf_counter())
        if self.takes_part:
            self.seconds.append(median([after - before for before, after in pairwise(ends)]))
            self.busy.append((time.process_time() - used) / (ends[-1] - began) / quota)
        dist.barrier()

    def close(self) -> None:
        """Ends the connections."""
        for close in self._closing if self.takes_part else ():
            close()
        self._closing = []


class Quotas:
    """How ranks on the lab ask for the CPU time of their devices to be limited, or not: through files in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder, self._asked = Path(folder), 0

    def ask(self, rank: int) -> None:
        """Waits until all ranks have asked and the next quotas hold."""
        self._asked += 1
        (self._folder / f"{self._asked}.{rank}").touch()
        _wait_for(self._folder / f"{self._asked}.done")

    def serve(self, lab: Any, answers: list[list[float | None]]) -> None:
        """Sets these quotas, one list after another, whenever all ranks have asked."""
        for number, quotas in enumerate(answers, start=1):
            for rank in range(len(quotas)):
                _wait_for(self._folder / f"{number}.{rank}")
            for rank, quota in enumerate(quotas):
                lab.set_cpu(rank, quota)
            (self._folder / f"{number}.done").touch()


def worker(name: str, rounds: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from evenly.comm import party_of
    from evenly.graph import follow
    from evenly.planner import simulate
    from evenly.session import discover
    from evenly.session.by_hand import measure_party

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, quotas = dist.get_rank(), Quotas(folder)
    example = torch.randn(BATCH, 3, 32, 32)
    network()(example[:2]).sum().backward()  # loads what a first step loads
    traced = follow(network(), example)
    cluster, graph, device = discover(), traced.graph, torch.device("cpu")
    limits, memory = memory_limits(name, traced)
    quotas.ask(rank)  # from here on devices are uneven
    wishes: Any = {"quick": rounds < 2, "memory_bytes": memory and memory[rank], "timeout_s": 600.0}
    measure = partial(measure_party, party_of(), traced, cluster, device, **wishes)
    seen_profiles = [measure()]
    quotas.ask(rank)  # plans are made without limits, or a slow device would take minutes
    plans = all_plans(cluster, seen_profiles[0], graph, limits, memory)
    ways = {key: Way(made, cluster, party_of(), number) for number, (key, made) in enumerate(plans.items())}
    for way in ways.values():
        way.run(2, 1.0)
    quotas.ask(rank)
    kept = [ways["chosen"], *(way for key, way in ways.items() if name == UNEVEN and key in (EQUAL, BY_SPEED))]
    quota = [quota for node in CASES[name]["cpu"] for quota in node][rank]
    run_in_turns(ways, kept, rounds, quota, lambda: seen_profiles.append(measure()))
    for way in ways.values():
        way.close()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, {key: (way.seconds[1:], way.busy[1:], way.exchanges) for key, way in ways.items()})
    seen_profiles.append(measure())
    quotas.ask(rank)  # no limits
    if rank == 0:
        steps = 4 * getattr(plans["chosen"].period, "steps", STEPS)
        forecasts = [
            {key: simulate(made, cluster, seen, graph, steps=steps).step_s for key, made in plans.items()}
            for seen in seen_profiles
        ]
        counts = {key: [role.samples for role in made.roles] for key, made in plans.items()}
        words = {"seen": told, "predicted": forecasts, "samples": counts, "explained": plans["chosen"].explain()}
        print(json.dumps(words), flush=True)
    dist.barrier()
    os._exit(0)


def memory_limits(name: str, traced: Any) -> tuple[list[int] | None, list[int] | None]:
    """Returns for how many samples each rank may have memory, and how much that is; None where there is enough."""
    import torch

    from evenly.survey.devices import DeviceSurvey

    if "memory_samples" not in CASES[name]:
        return None, None
    limits = [CASES[name]["memory_samples"], 10**6]
    survey = DeviceSurvey(traced, torch.device("cpu"), budget_s=0.0, tell=lambda _: None)
    return limits, [4 * traced.graph.parameter_bytes + limits[0] * survey.sample_bytes(), 10**12]


def all_plans(
    cluster: Any, profile: Any, graph: Any, limits: list[int] | None, memory: list[int] | None
) -> dict[str, Any]:
    """Returns the chosen plan and those by hand, as rank 0 makes them."""
    from evenly.planner import plan

    chosen = plan(cluster, profile, graph, batch_size=BATCH, memory_bytes=memory)
    made = {"chosen": chosen, **alternatives(chosen, cluster, profile, graph, limits, memory)}
    told = _same({key: made_plan.to_json() for key, made_plan in made.items()})
    return {key: type(chosen).from_json(text) for key, text in told.items()}


def run_in_turns(ways: dict[str, Way], kept: list[Way], rounds: int, quota: float, halfway: Callable[[], None]) -> None:
    """Runs the plans in turns; those that are far behind after some steps stop there, but not those that are kept."""
    for way in ways.values():
        way.run(FEW, quota)
    going = _closer(list(ways.values()), kept, HOPELESS)
    for way in going:
        way.seconds[1:], way.busy[1:] = [], []
    for number in range(rounds):
        for place in range(len(going)):
            going[(place + number) % len(going)].run(STEPS, quota)
        if number + 1 == rounds // 4:
            going = _closer(going, kept, BEHIND)
        if number + 1 == rounds // 2:
            halfway()


def _closer(ways: list[Way], kept: list[Way], limit: float) -> list[Way]:
    """Returns the plans that are less than `limit` times slower than the best, and those kept; ends the others."""
    seconds = [_largest(median(way.seconds[1:] or way.seconds) if way.takes_part else 0.0) for way in ways]
    near = [way for way, s in zip(ways, seconds, strict=True) if way in kept or s < limit * min(seconds)]
    for way in ways:
        if way not in near:
            way.close()  # the threads that watch for failures take CPU time that a slow device feels
    return near


def _largest(seconds: float) -> float:
    """Returns the largest of all ranks' numbers."""
    import torch
    import torch.distributed as dist

    number = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)


def slowing_worker(what: str, folder: str) -> None:
    """Trains while the second device becomes four times slower, then tries fixed shares for the best rate there is.

    What follows the speed is batches, or units of a network that is cut over both.
    """
    import torch
    from torch.utils.data import TensorDataset

    import evenly
    from evenly.spec import Plan, Role

    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks of a cut network see the same
    data = TensorDataset(torch.randn(BATCH * 400, 3, 32, 32), torch.randint(10, (BATCH * 400,)))
    with evenly.Session(device="cpu") as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        plan = Plan(roles=tuple(Role(rank=rank, node=0, samples=BATCH // 2) for rank in range(2)))
        if what == "units":
            plan = session.plan(model, torch.randn(BATCH, 3, 32, 32), batch_size=BATCH, shares=[1, 1], cut_batch=True)
        plan = plan.model_copy(update={"rebalance": True})
        model, optimizer, loader = session.prepare(model, optimizer, data, plan=plan)
        quotas = Quotas(folder)
        quotas.ask(session.rank)
        rates: list[float] = []
        for _ in session.epochs(1):
            began = time.perf_counter()
            for x, y in loader:
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                rates.append(BATCH / (time.perf_counter() - began))
                step = len(rates)
                if step == SLOW_AT:
                    quotas.ask(session.rank)
                if step >= FIXED_AT and (step - FIXED_AT) % TRY == 0:
                    loader.between[1:] = []  # from here on shares are fixed
                    if step == FIXED_AT + TRY * (len(PARTS_TRIED) + AGAIN):
                        break
                    share_out(what, next_part(rates, session), model, optimizer, loader)
                began = time.perf_counter()
            break
        if session.rank == 0:
            print(json.dumps({"rates": rates}), flush=True)
        os._exit(0)


def next_part(rates: list[float], session: Any) -> float:
    """Returns the part of the work that the slow device gets now: one after another, then the best of all again."""
    seen = [median(rates[start + 1 : start + TRY]) for start in range(FIXED_AT, len(rates), TRY)][: len(PARTS_TRIED)]
    if len(seen) < len(PARTS_TRIED):
        return PARTS_TRIED[len(seen)] / 50
    best = session.sum(seen.index(max(seen)) if session.rank == 0 else 0)[0]  # the best of many was a lucky one
    return PARTS_TRIED[int(best)] / 50


def share_out(what: str, part: float, model: Any, optimizer: Any, loader: Any) -> None:
    """Gives the second device a part of the work."""
    from evenly.planner import relaid
    from evenly.shards import reshard

    if what == "batches":
        few = max(1, round(BATCH * part))
        loader.reshare([BATCH - few, few])
        return
    layout = model.module.layout
    total = sum(layout.shares)
    wanted = [(1 - part) * total / layout.shares[0], part * total / layout.shares[1]]
    reshard(model.module, optimizer, relaid(model.module._program.traced.graph, layout, wanted))
    model.relearn(dict(model.agreed_buffers))  # the network has no buffers


def accuracy_worker(samples: str, seed: int) -> None:
    """Trains on Fashion-MNIST with these samples on each rank and tells the accuracy."""
    import torch

    import evenly
    from evenly.recipes.fashion_data import load_fashion
    from evenly.recipes.resnet import SmallResNet
    from evenly.spec import Plan, Role

    torch.set_num_threads(1)
    train, test = load_fashion(None, limit=5120)
    with evenly.Session(device="cpu", seed=seed) as session:
        torch.manual_seed(seed)
        model = SmallResNet(8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        roles = [Role(rank=rank, node=0, samples=int(count)) for rank, count in enumerate(samples.split("/"))]
        model, optimizer, loader = session.prepare(model, optimizer, train, plan=Plan(roles=tuple(roles)))
        for _ in session.epochs(2):
            for x, y in loader:
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        x, y = (tensor[:2000] for tensor in test.tensors)
        with torch.no_grad():
            right = (model(x).argmax(1) == y).float().mean().item()
        if session.rank == 0:
            print(json.dumps({"accuracy": right}), flush=True)


def accuracies() -> dict[str, Any]:
    """Returns the accuracy with equal and with unequal batches of the same 64 samples, three seeds each."""
    from evenly.lab import Lab, LabCluster, LabNode

    found: dict[str, list[float]] = {"32/32": [], "49/15": []}
    with Lab(LabCluster(nodes=(LabNode(name="n", ranks=2),))) as lab:
        for seed in range(3):
            for samples, seen in found.items():
                words = [sys.executable, str(Path(__file__).resolve()), "--accuracy", samples, str(seed)]
                result = lab.run(words, output="capture", timeout_s=300)
                result.check()
                seen.append(json.loads(result.stdout[0].strip().splitlines()[-1])["accuracy"])
    told = "; ".join(f"{samples} {', '.join(f'{a:.1%}' for a in seen)}" for samples, seen in found.items())
    return {"cluster": "accuracy", "plan": f"Fashion-MNIST, 2 epochs of 5120, three seeds: {told}"}


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def rebalanced_rate(what: str, times: int = TIMES) -> tuple[float, dict[str, Any]]:
    """Returns the rate from 20 steps after a device was slowed on, over the best that fixed shares reach then.

    Of some runs it is the one in the middle.
    """
    found = sorted(_slowed(what) for _ in range(times))
    ratio, told = found[len(found) // 2]
    all_ratios = ", ".join(f"{ratio:.2f}" for ratio, _ in found)
    return ratio, {"cluster": f"slowed, {what} follow", "plan": f"{told}; in {times} runs {all_ratios} of it"}


def _slowed(what: str) -> tuple[float, str]:
    from evenly.lab import Lab, LabCluster, LabNode

    with tempfile.TemporaryDirectory() as folder, Lab(LabCluster(nodes=(LabNode(name="n", ranks=2),))) as lab:
        quotas: list[list[float | None]] = [[0.7, 0.7], [0.7, 0.175]]
        threading.Thread(target=Quotas(folder).serve, args=(lab, quotas), daemon=True).start()
        words = [sys.executable, str(Path(__file__).resolve()), "--slowing", what, folder]
        result = lab.run(words, output="capture", timeout_s=600)
    result.check()
    rates = json.loads(result.stdout[0].strip().splitlines()[-1])["rates"]
    best = median(rates[FIXED_AT + TRY * len(PARTS_TRIED) + 1 :])
    reached, before = median(rates[SLOW_AT + 20 : FIXED_AT]), median(rates[5:SLOW_AT])
    dip = median(rates[SLOW_AT : SLOW_AT + 5])
    print(f"slowed, {what} follow: {reached:.0f} of {best:.0f} samples/s", file=sys.stderr, flush=True)
    return reached / best, f"{before:.0f}, then {dip:.0f}, then {reached:.0f} samples/s; at best {best:.0f}"


def _same(value: Any) -> Any:
    """Returns rank 0's value on every rank."""
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_lab(name: str, rounds: int) -> dict[str, Any]:
    from evenly.lab import Lab, LabCluster, LabNode

    case = CASES[name]
    nodes = [
        LabNode(name=f"n{i}", ranks=len(cpu), rate_mbit=case.get("rate_mbit")) for i, cpu in enumerate(case["cpu"])
    ]
    quotas: list[float | None] = [quota for cpu in case["cpu"] for quota in cpu]
    with tempfile.TemporaryDirectory() as folder, Lab(LabCluster(nodes=tuple(nodes))) as lab:
        answers = [quotas, [None] * len(quotas), quotas, [None] * len(quotas)]
        threading.Thread(target=Quotas(folder).serve, args=(lab, answers), daemon=True).start()
        words = [sys.executable, str(Path(__file__).resolve()), "--worker", name, str(rounds), folder]
        result = lab.run(words, output="capture", timeout_s=3600)
    result.check()
    return json.loads(result.stdout[0].strip().splitlines()[-1])


def step_of(nodes: list[list[float]]) -> float:
    """Returns the seconds of a step: nodes meet at exchanges only, many steps apart, so each has its own median."""
    return max(median(rounds) for rounds in nodes)


def over(ours: list[list[float]], nodes: list[list[float]]) -> float:
    """Returns the time of the chosen plan over that of another, in the rounds that both ran; of one node by rounds."""
    if len(ours) == len(nodes) == 1:
        return median([a / b for a, b in zip(ours[0], nodes[0], strict=False)])
    count = min(len(ours[0]), len(nodes[0]))
    return step_of([rounds[:count] for rounds in ours]) / step_of([rounds[:count] for rounds in nodes])


def rows_of(name: str, told: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    ours: list[list[float]] = []
    homes = [index for index, node in enumerate(CASES[name]["cpu"]) for _ in node]
    for key in told["samples"]:  # the chosen plan first
        predictions = [forecasts[key] for forecasts in told["predicted"]]
        between = [seconds for row in told["seen"] for seconds in row[key][2]]
        spread_s = median(between) if between else 0.0
        nodes = []  # the rounds of each
        for home in sorted(set(homes)):
            seen = [row[key][0] for row, own in zip(told["seen"], homes, strict=True) if own == home and row[key][0]]
            nodes += [[max(pair) + spread_s for pair in zip(*seen, strict=True)]] if seen else []
        ours = ours or nodes
        step = step_of(nodes)
        quotas = [quota for node in CASES[name]["cpu"] for quota in node]
        waits = {rank: max(0.0, 1 - median(row[key][1])) for rank, row in enumerate(told["seen"]) if row[key][0]}
        rows.append(
            {
                "cluster": name,
                **HERE,
                "plan": key,
                "samples": "/".join(map(str, told["samples"][key])),
                "ms_per_step": 1e3 * step,
                "ms_spread": spread([1e3 * max(seconds) for seconds in zip(*nodes, strict=True)]),
                "predicted_ms": 1e3 * predictions[0],
                "predictions_ms": [round(1e3 * seconds, 1) for seconds in predictions],
                "chosen_over": over(ours, nodes),
                "prediction_error": predictions[0] / step - 1,
                "slowest_waits": waits[min(waits, key=lambda rank: quotas[rank])],
                "most_wait": max(waits.values()),
            }
        )
    return rows


def plan_large() -> tuple[float, float]:
    """Returns the seconds to plan ResNet-152 for 1,024 devices, and to simulate 10,000 nodes for 1,000 steps."""
    import torch
    from tests.zoo import Bottleneck, ResNet

    from evenly.graph import trace
    from evenly.planner import plan, simulate
    from evenly.spec import Cluster, Device, Node, Profile

    graph = trace(
        ResNet(Bottleneck, [3, 8, 36, 3], classes=1000).to("meta"), torch.empty(32, 3, 224, 224, device="meta")
    )

    def cluster_of(nodes: int, ranks: int) -> Cluster:
        device = Device(kind="cuda", memory_bytes=80 * 2**30)
        made = [
            Node(name=f"n{i}", ranks=range(i * ranks, (i + 1) * ranks), devices=[device] * ranks) for i in range(nodes)
        ]
        return Cluster(nodes=made)

    large = cluster_of(128, 8)
    profile = Profile.from_speeds(large, graph, [100.0] * 512 + [40.0] * 512, flops_per_s=5e13)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        plan(large, profile, graph, batch_size=32768)
        seconds.append(time.perf_counter() - began)
    wide = cluster_of(10_000, 1)
    profile = Profile.from_speeds(wide, graph, [100.0] * 5000 + [60.0] * 5000, flops_per_s=5e13)
    made = plan(wide, profile, graph, batch_size=320_000, every=50)
    began = time.perf_counter()
    simulate(made, wide, profile, graph, steps=1000, jitter=0.1)
    return median(seconds), time.perf_counter() - began


PARTS = ("slowed", "accuracy", "large")  # besides the clusters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cluster and few rounds, about a minute on two cores")
    parser.add_argument(
        "--save", action="store_true", help="keep the result in benchmarks/results/; with --only its part"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each plan; fewer on a slow machine")
    parser.add_argument("--only", help=f"one part: {', '.join([*CASES, *PARTS])}")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--accuracy", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--slowing", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.slowing:
        slowing_worker(*arguments.slowing)
        return
    if arguments.accuracy:
        accuracy_worker(arguments.accuracy[0], int(arguments.accuracy[1]))
        return
    if arguments.worker:
        name, rounds, folder = arguments.worker
        worker(name, int(rounds), folder)
        return
    if arguments.only in PARTS:
        run_part(arguments.only, save=arguments.save)
        return
    names = [arguments.only] if arguments.only else ["equal", "100/30"] if arguments.quick else list(CASES)
    rounds = 1 if arguments.quick else arguments.rounds
    rows: list[dict[str, Any]] = []
    for name in names:
        found = rows_of(name, on_lab(name, rounds))
        rows += found
        for row in sorted(found, key=lambda row: row["ms_per_step"])[:6]:
            words = f"{row['ms_per_step']:.0f} ms {row['ms_spread']}, predicted {row['predictions_ms']}"
            print(f"{name}: {row['plan']} {row['samples']} {words}", file=sys.stderr, flush=True)
        over, error = max(row["chosen_over"] for row in found[1:]), found[0]["prediction_error"]
        print(f"{name}: {over:.3f} times the best by hand, predicted {error:+.1%}", file=sys.stderr, flush=True)
    if arguments.only and arguments.save:
        report(*with_kept(rows, arguments.only), save=True)
        return
    if arguments.only:
        report(rows, None, None, save=False)
        return
    slowed = [rebalanced_rate(what, 1 if arguments.quick else TIMES) for what in ("batches", "units")]
    large = plan_large()
    others = [*(row for _, row in slowed), large_row(large), *([] if arguments.quick else [accuracies()])]
    rows += [{**dict.fromkeys(rows[0]), **row} for row in others]
    report(rows, large, min(rate for rate, _ in slowed), save=arguments.save)


def large_row(large: tuple[float, float]) -> dict[str, Any]:
    words = f"ResNet-152 for 1,024 devices planned in {large[0]:.2f} s, 10,000 nodes simulated in {large[1]:.2f} s"
    return {"cluster": "large", "plan": words}


def run_part(part: str, *, save: bool) -> None:
    """Runs what is not a cluster, and tells it with all that is kept."""
    if part == "accuracy":
        report(*with_kept([accuracies()], part), save=save)
        return
    slowed = [rebalanced_rate(what) for what in ("batches", "units")] if part == "slowed" else []
    large = plan_large() if part == "large" else None
    found = [row for _, row in slowed] if large is None else [large_row(large)]
    rows, kept, rate = with_kept(found, part)
    large = large or kept
    report(rows, large, min((rate for rate, _ in slowed), default=rate), save=save)


def with_kept(
    rows: list[dict[str, Any]], name: str
) -> tuple[list[dict[str, Any]], tuple[float, float] | None, float | None]:
    """Returns the kept result with the rows of one cluster run anew: each row tells the commit that it was run at."""
    kept = json.loads((RESULTS / "plan.json").read_text())
    values = {claim["name"]: claim["value"] for claim in kept["claims"]}
    where = {"commit": kept["commit"], "architecture": kept["machine"]["architecture"]}
    before = [{**where, **row} for row in kept["rows"]]
    of_part = [row["cluster"].split(",")[0] == name for row in before]
    place = of_part.index(True) if any(of_part) else len(before)
    others = [row for row, is_part in zip(before, of_part, strict=True) if not is_part]
    rows = [{**dict.fromkeys(before[0]), **HERE, **row} for row in rows]
    large = values["plan_resnet152_1024_devices_s"], values["simulate_10000_nodes_1000_steps_s"]
    return [*others[:place], *rows, *others[place:]], large, values["rebalanced_rate_over_possible"]


def report(rows: list[dict[str, Any]], large: tuple[float, float] | None, rate: float | None, *, save: bool) -> None:
    plans = {row["cluster"]: row for row in rows if row["plan"] == "chosen"}
    chosen = {name: row for name, row in plans.items() if name != UNEVEN or len(plans) == 1}  # that one has its own bar
    over = {
        name: max(r["chosen_over"] for r in rows if r["cluster"] == name and r["plan"] != "chosen") for name in chosen
    }
    claims = [
        Claim("worst_prediction_error", max(abs(row["prediction_error"]) for row in chosen.values()), 0.1, "lower"),
        Claim("worst_wait_fraction", max(row["slowest_waits"] for row in chosen.values()), 0.1, "lower"),
        Claim("worst_chosen_over_best_alternative", max(over.values()), 1.03, "lower"),
    ]
    if large is not None and rate is not None:
        claims += [
            Claim("plan_resnet152_1024_devices_s", large[0], 2.0, "lower"),
            Claim("simulate_10000_nodes_1000_steps_s", large[1], 10.0, "lower"),
            Claim("rebalanced_rate_over_possible", rate, 0.85, "higher"),
        ]
    uneven = {row["plan"]: row["chosen_over"] for row in rows if row["cluster"] == UNEVEN}
    if uneven:
        speedup = uneven.get(BY_SPEED, 1.0) / uneven[EQUAL]  # if nothing is called so, the chosen plan is that
        claims.append(Claim("uneven_batch_speedup_100_30", speedup, 1.8, "higher"))
    note = f"Global batch of {BATCH}; quotas of a core, ranks on loopback or shaped links."
    tell("plan", rows, claims, note=note, save=save)


if __name__ == "__main__":
    main()
