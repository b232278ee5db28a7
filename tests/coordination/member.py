"""A rank of the chaos test, as a program: its parameters are one number, which the exchange averages through the keys.

    python -m tests.coordination.member COORDINATOR NODE START LOCAL_RANK LOCAL_SIZE

It writes a line of JSON for each round that it has applied, and one for each that was aborted.
"""

import hashlib
import json
import random
import sys
import time
from dataclasses import replace

from evenly.coordination import CoordinationClient, ExchangeRound, MemberRank, Proposal
from evenly.errors import PeerError
from evenly.launch.addresses import parse_coordinator

SECRET = b"known to all nodes"


def main() -> None:
    coordinator, node, start, local_rank, local_size = sys.argv[1:]
    address = parse_coordinator(coordinator, source="COORDINATOR")
    member = MemberRank(node, start, int(local_rank), int(local_size))
    client = CoordinationClient(address, member, job="chaos", secret=SECRET, connect_timeout_s=30.0)
    rng = random.Random(f"{node} {start}")  # the ranks of a node train alike
    value, samples = 0.0, 0.0
    own = Proposal(version=0, lineage="", step=0, samples=0.0, signature="same", is_healthy=True)
    while True:
        time.sleep(0.02)
        value, samples = value + rng.random(), samples + 1.0
        own = replace(own, step=own.step + 1, samples=samples)
        try:
            formed = client.propose(own, timeout_s=5.0)
            average = exchange(client, formed, member, value)
            checksum = hashlib.sha256(repr(average).encode()).hexdigest()
            verdict = client.vote(formed.id, is_ok=True, checksum=checksum, timeout_s=5.0)
            if verdict.is_committed:
                value, samples = average, 0.0
                own = replace(own, version=formed.number, lineage=formed.lineage, peers=formed.nodes)
                rng = random.Random(f"{node} {formed.id}")
                tell(round=formed.id, number=formed.number, lineage=formed.lineage, value=value, nodes=formed.nodes)
            else:
                tell(why=verdict.why, lost=verdict.lost)
        except PeerError as error:
            tell(error=f"{type(error).__name__}: {error}"[:200])


def exchange(client: CoordinationClient, formed: ExchangeRound, member: MemberRank, value: float) -> float:
    """Returns the average of the members' numbers, weighted by their samples; all get it by the same sums."""
    if member.local_rank == 0:
        client.put(formed.generation, f"{formed.id}/{member.node}", repr(value).encode())
    values = [
        float(client.get(formed.generation, f"{formed.id}/{each.node}", timeout_s=5.0)) for each in formed.members
    ]
    weights = [0.0 if each.needs_state else each.samples for each in formed.members]
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


def tell(**fields: object) -> None:
    print(json.dumps({"at_s": time.monotonic(), **fields}), flush=True)


if __name__ == "__main__":
    main()
