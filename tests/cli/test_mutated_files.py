"""Files with something wrong in them, by chance: whatever it is, a verb ends well or with an `EvenlyError`."""

import copy
import json
import random

import pytest
from typer.testing import CliRunner

from evenly.cli import app
from evenly.errors import EvenlyError
from evenly.lab import load_cluster
from tests.reports.runs import epoch, failed, finished, measured, started, steps

# Seconds of 1e308 make a forecast infinite, which is refused when it is written down.
pytestmark = [pytest.mark.filterwarnings(f"ignore:{what}:RuntimeWarning") for what in ("overflow", "invalid value")]

ODD = [10**400, 10**23, -1, 0, 1e308, -1e308, 5e-324, "", None, [], {}, True, "x" * 50, 2**63, 2**31, "\ud83d", "nan"]
ODD += [float("inf"), float("nan"), 10**9, [[]], {"kind": "x"}, -(10**400)]
TEXTS = ["[" * 100_000, '{"a":' * 50_000, "1" * 5000, "\x00", "", "null"]
LAB = {"nodes": [{"name": "big", "ranks": 2, "rate_mbit": 100, "cpu": [0.8, 0.4]}, {"ranks": 1, "cores": "0-1"}]}


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutated(document, chance):
    """Returns the text of a document in which one thing is other than it was."""
    document = copy.deepcopy(document)
    *path, last = chance.choice([path for path in places(document) if path])
    held = document
    for key in path:
        held = held[key]
    action = chance.random()
    if action < 0.15:
        del held[last]
    elif action < 0.25 and isinstance(held[last], int | float):
        held[last] *= chance.choice([-1, 1e30, 10**30, 0, 1e-30])
    else:
        held[last] = chance.choice(ODD)
    return document


def run(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "80"})
    if done.exception is not None and not isinstance(done.exception, EvenlyError | SystemExit):
        raise done.exception


def attack(files, folder, *, seed, cases):
    chance = random.Random(seed)
    documents = {name: json.loads(path.read_text()) for name, path in files.items()}
    events = [started(), steps(5), measured(loss=1.0), epoch(10), failed(), finished()]
    for _ in range(cases):
        name = chance.choice([*files, "run"])
        text = chance.choice(TEXTS)
        if name == "run":
            lines = [json.loads(event.model_dump_json()) for event in events]
            text = text if chance.random() < 0.05 else "\n".join(map(json.dumps, mutated(lines, chance)))
            (folder / "run.jsonl").write_text(text + "\n")
            run("report", folder)
            continue
        paths = {**files, name: folder / "file.json"}
        paths[name].write_text(text if chance.random() < 0.05 else json.dumps(mutated(documents[name], chance)))
        words = [word for each in ("cluster", "profile", "graph") for word in (f"--{each}", paths[each])]
        run(*(["plan"] if name != "plan" and chance.random() < 0.5 else ["simulate", "--plan", paths["plan"]]), *words)


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool) or value is None:
        return "true"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def attack_lab(folder, *, seed, cases):
    chance = random.Random(seed)
    for _ in range(cases):
        document = mutated(LAB, chance)
        (folder / "lab.toml").write_text("\n".join(f"{key} = {toml(value)}" for key, value in document.items()))
        try:
            load_cluster(folder / "lab.toml")
        except EvenlyError:
            continue


def test_a_sample_of_mutated_files(files, tmp_path):
    attack(files, tmp_path, seed=0, cases=40)
    attack_lab(tmp_path, seed=0, cases=150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 3))
def test_many_mutated_files(files, tmp_path, seed):
    attack(files, tmp_path, seed=seed, cases=400)
    attack_lab(tmp_path, seed=seed, cases=3000)
