"""What the ranks of the tests of `--devices` run: say which device a session computes on, and a loop by hand."""

import json
import os
from dataclasses import asdict

import torch

import evenly
from evenly.launch import find_place, pick_device


def main() -> None:
    place = find_place()
    by_hand = pick_device(place)
    with evenly.Session(progress=False) as session:
        total = torch.ones((), device=session.device) + session.rank
        line = {
            "place": asdict(place),
            "session": str(session.device),
            "by hand": str(by_hand),
            "devices": [device.kind for node in session.cluster.nodes for device in node.devices],
            "sum": session.sum(float(total)),
        }
        with evenly.Session(device="cpu", progress=False) as other:
            line["asked"] = str(other.device)
    os.write(1, f"greeting {json.dumps(line)}\n".encode())  # in one piece: ranks share the pipe


if __name__ == "__main__":
    main()
