"""What every rank of `make demo` runs: three ways to train one network, in turns of a few steps.

All ranks train one way for a turn, then the next: a moment in which the machine is busy with other things hits all ways
alike. Each way is a run of its own, with a folder of its own, whose time stands still while others have their turn.
"""

import argparse
import faulthandler
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenly
from evenly.planner import simulate
from evenly.recipes.data import load_images
from evenly.recipes.networks.small_resnet import SmallResNet
from evenly.spec import Forecast, Plan, Profile, deal
from evenly.spec.plan import Prediction

PERIOD = 8  # steps between exchanges, and steps of a turn
BATCH = 48  # of all ranks together
WIDTH = 32
READY = "all ranks have started"
GRACE_S = 60.0  # after the last turn, for the tests of the networks and the end
EPOCHS = 1000  # more than there is time for


@dataclass
class Way:
    """One way to train: a run, and its steps."""

    name: str
    session: evenly.Session
    model: nn.Module
    plan: Plan
    predicted_s: float
    steps: Iterator[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the runs and the result go")
    parser.add_argument("--data", help="folder of Fashion-MNIST; 'made' for made digits", default="")
    parser.add_argument("--until", type=float, required=True, help="when the last turn ends, in seconds since 1970")
    arguments = parser.parse_args()
    limit_s = max(0.0, arguments.until - time.time()) + GRACE_S
    faulthandler.dump_traceback_later(limit_s, exit=True)  # a rank that hangs says where
    torch.manual_seed(0)
    folder = Path(arguments.data) if arguments.data else None
    data = load_images("digits", None) if arguments.data == "made" else load_images("fashion", folder)
    train, test = data.normalised()
    train, test = TensorDataset(*train[:6000]), TensorDataset(*test[:1200])
    with ExitStack() as stack:
        ways = open_ways(stack, arguments.folder, train)
        rows = take_turns(ways, arguments.folder, until=arguments.until)
        status(ways[0].session, arguments.folder, "testing the three networks")
        for way in ways:
            way.session.stop("the time of the demo is over")
            way.session.run_clock.resume()
            for _ in way.steps:
                pass
            way.session.run_clock.pause()
            rows[way.name]["accuracy"] = percent = accuracy(way, test)
            way.session.log(accuracy=percent / 100)
        write(ways[0].session, arguments.folder, rows)


def open_ways(stack: ExitStack, folder: Path, train: TensorDataset) -> list[Way]:
    """Returns the three ways, ready to train."""
    sessions = {
        name: stack.enter_context(evenly.Session(folder / name, progress=False, checkpoint_every=None, resume=False))
        for name in ("global", "node-based", "planned")
    }
    for session in sessions.values():
        session.run_clock.pause()
    first = sessions["global"]
    x = train[:BATCH][0]
    wait_for_quotas(first, folder)
    model = SmallResNet(WIDTH).to(first.device)
    status(first, folder, "measuring the devices and links")
    profile = evenly.measure(model, x.to(first.device), quick=True)
    graph = evenly.trace(model, x.to(first.device))
    share = BATCH // first.world_size
    plans = {
        "global": first.plan(batch_size=share, every="global"),
        "node-based": sessions["node-based"].plan(batch_size=share, every=PERIOD),
    }
    plans["planned"] = planned(sessions["planned"], model, x, profile, plans["node-based"])
    ways = []
    for name, session in sessions.items():
        session.describe(way=name)  # reports compare runs with other settings, and average those with the same
        torch.manual_seed(0)
        network = SmallResNet(WIDTH)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.03, momentum=0.9, nesterov=True)
        forecast = simulate(plans[name], session.cluster, profile, graph, steps=10 * PERIOD)
        plan = with_forecast(plans[name], forecast)
        synchronized, _, loader = session.prepare(network, optimizer, train, plan=plan)
        steps = train_steps(session, synchronized, optimizer, loader)
        ways.append(Way(name, session, synchronized, plan, forecast.step_s, steps))
    return ways


def with_forecast(plan: Plan, forecast: Forecast) -> Plan:
    """Returns the plan with what its simulation gave, for the report of its run."""
    between_s = 0.0 if plan.period.kind == "global" else forecast.exchange_s  # there each step has it
    step_s = (forecast.seconds - between_s) / forecast.steps
    predicted = Prediction(step_s=step_s, exchange_s=between_s / max(1, forecast.exchanges))
    return plan.model_copy(update={"predicted": plan.predicted or predicted})


def planned(session: evenly.Session, model: nn.Module, x: torch.Tensor, profile: Profile, even: Plan) -> Plan:
    """Returns the plan for all ranks by what was measured: if the shortest leaves some out, batches go by speed."""
    plan = session.plan(model, x.to(session.device), global_batch=BATCH, every=PERIOD, profile=profile)
    if len(plan.active) == len(plan.roles) and not plan.replicas:
        return plan
    share = BATCH // len(profile.devices)
    speeds = [share / device.step.at(share) for device in profile.devices]
    samples = [max(1, count) for count in deal(BATCH, speeds)]
    roles = [role.model_copy(update={"samples": count}) for role, count in zip(even.roles, samples, strict=True)]
    return even.model_copy(update={"roles": tuple(roles)})


def train_steps(
    session: evenly.Session, model: nn.Module, optimizer: torch.optim.Optimizer, loader: evenly.batches.Feed
) -> Iterator[None]:
    """Trains, and yields after every step."""
    for _ in session.epochs(EPOCHS):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss.detach())
            yield


def take_turns(ways: list[Way], folder: Path, *, until: float) -> dict[str, dict[str, object]]:
    """Trains all ways in turns until the time is over, and returns the seconds and bytes of each turn."""
    rows: dict[str, dict[str, object]] = {
        way.name: {"seconds": [], "bytes": [], "predicted_s": way.predicted_s, "samples": list(way.plan.batch_shares)}
        for way in ways
    }
    is_over, number = False, 0
    while not is_over:
        began = time.time()
        for place in range(len(ways)):
            way = ways[(place + number) % len(ways)]
            status(way.session, folder, f"round {number}, {way.name}")
            turn_s, turn_bytes = take_turn(way)
            if number:  # the first round warms up
                rows[way.name]["seconds"].append(turn_s)  # type: ignore[attr-defined]
                rows[way.name]["bytes"].append(turn_bytes)  # type: ignore[attr-defined]
        number += 1
        write(ways[0].session, folder, rows)
        (is_over, *_) = ways[0].session.gather(2 * time.time() - began > until)
    return rows


def take_turn(way: Way) -> tuple[float, int]:
    """Makes the steps of one turn and returns its seconds and the bytes that all nodes sent."""
    session, clock = way.session, way.session.run_clock
    is_first = session.rank in [ranks[0] for ranks in session.cluster.rank_lists()]
    session.sum(0)  # all ranks begin together
    before_bytes, before_s = clock.interface_bytes(), clock.monotonic()
    clock.resume()
    for _ in range(PERIOD):
        next(way.steps)
    session.sum(0)
    clock.pause()
    (sent_bytes,) = session.sum(clock.interface_bytes() - before_bytes if is_first else 0)
    return clock.monotonic() - before_s, int(sent_bytes)


def write(session: evenly.Session, folder: Path, rows: dict[str, dict[str, object]]) -> None:
    """Writes the turns so far in one move: another program reads them meanwhile."""
    if session.is_main:
        (folder / "turns.new").write_text(json.dumps(rows, indent=1))
        (folder / "turns.new").replace(folder / "turns.json")


def wait_for_quotas(session: evenly.Session, folder: Path) -> None:
    """Waits until the program that started the ranks has made them uneven: starting took no part of the comparison."""
    status(session, folder, READY)
    while session.is_main and not (folder / "go").exists():
        time.sleep(0.05)
    session.sum(0)


def status(session: evenly.Session, folder: Path, words: str) -> None:
    """Writes what is done now, for the view of the program that started the ranks."""
    if session.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "status").write_text(words)


@torch.no_grad()
def accuracy(way: Way, test: TensorDataset) -> float:
    """Returns the part of the test images that are right, in per cent; each rank tests its part."""
    way.model.eval()
    right = sum(int((way.model(x).argmax(1) == y).sum()) for x, y in way.session.feed(test, batch_size=256))
    return 100 * way.session.sum(right)[0] / len(test)


if __name__ == "__main__":
    main()
