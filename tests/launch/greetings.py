"""Reads what `greet.py` printed."""

import json
from typing import Any


def greetings(output: str) -> list[dict[str, Any]]:
    lines = [line.partition("greeting ")[2] for line in output.splitlines() if "greeting " in line]
    return sorted((json.loads(line) for line in lines), key=lambda said: said["place"]["rank"])
