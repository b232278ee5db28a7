"""Checkpoints that somebody made up or changed on purpose: each is answered by a typed error, within two seconds."""

import json
import os
import pickle
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file

from evenly import Session, load_weights
from evenly.checkpoints import folder
from evenly.checkpoints.dcp import write_state
from evenly.checkpoints.files import digest_of_file
from evenly.checkpoints.manifest import MANIFEST, write_manifest
from evenly.checkpoints.weight_files import plain_state, write_weights
from evenly.errors import CheckpointError
from tests.session.programs import dataset, network

LIMIT_S = 2.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run with one checkpoint."""
    root = tmp_path_factory.mktemp("hostile")
    train(root)
    return root


def train(root: Path, *, epochs: int = 1) -> None:
    with Session(root, device="cpu", keep=1, progress=False) as session:
        torch.manual_seed(5)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        plan = session.plan(batch_size=8, every=3, codec="int8")
        synchronized, _, loader = session.prepare(model, optimizer, dataset(), plan=plan)
        session.track(schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1))
        for _ in session.epochs(epochs):
            for x, y in loader:
                torch.nn.functional.cross_entropy(synchronized(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()


@pytest.fixture
def checkpoint(saved, tmp_path) -> Path:
    """A copy of its checkpoint, to be changed."""
    shutil.copytree(saved, tmp_path / "run")
    (path,) = folder.checkpoints(tmp_path / "run" / "checkpoints")
    return path


def manifest_of(checkpoint: Path) -> dict:
    content = json.loads((checkpoint / MANIFEST).read_text())
    return {key: value for key, value in content.items() if key not in ("version", "sha256")}


def sign(checkpoint: Path, **changes) -> None:
    """Writes a manifest whose checksums are right."""
    content = manifest_of(checkpoint)
    content["files"] = {name: digest_of_file(checkpoint / name) for name in content["files"]}
    content["sizes"] = {name: (checkpoint / name).stat().st_size for name in content["files"]}
    write_manifest(checkpoint, {**content, **changes})


def require_refused(checkpoint: Path, *, loads: bool = True) -> None:
    """Both who resumes and who loads weights gets a `CheckpointError` within two seconds."""
    began = time.monotonic()
    with pytest.raises(CheckpointError) as told:
        train(checkpoint.parents[1], epochs=2)
    assert time.monotonic() - began < LIMIT_S
    assert len(str(told.value)) < 2000
    if loads:
        began = time.monotonic()
        with pytest.raises(CheckpointError):
            load_weights(network(), checkpoint)
        assert time.monotonic() - began < LIMIT_S


DIGEST = "0" * 64
MANIFESTS = {
    "parent": lambda m: {"files": {**m["files"], "../../../secret.json": DIGEST}},
    "absolute": lambda m: {"files": {**m["files"], "/etc/passwd": DIGEST}},
    "other name": lambda m: {"files": {**m["files"], "node-0.json/../x": DIGEST}},
    "surplus": lambda m: {"files": {**m["files"], "node-1.json": DIGEST}},
    "no files": lambda _: {"files": {}},
    "files are a list": lambda m: {"files": list(m["files"])},
    "digest is a number": lambda m: {"files": {**m["files"], "node-0.json": 5}},
    "digest is short": lambda m: {"files": {**m["files"], "node-0.json": "ab"}},
    "huge step": lambda _: {"step": 10**300},
    "step of another": lambda _: {"step": 8},
    "negative step": lambda _: {"step": -1},
    "step is a text": lambda _: {"step": "7"},
    "step is true": lambda _: {"step": True},
    "step is a fraction": lambda _: {"step": 7.0},
    "infinite epoch": lambda _: {"epoch": float("inf")},
    "huge epoch": lambda _: {"epoch": 2**70},
    "ended after too many": lambda _: {"ended_epochs": 2**64},
    "no nodes": lambda _: {"nodes": []},
    "an empty node": lambda _: {"nodes": [[0], []]},
    "a huge rank": lambda _: {"nodes": [[10**18]]},
    "a rank twice": lambda _: {"nodes": [[0], [0]]},
    "many ranks": lambda _: {"nodes": [list(range(200_000))]},
    "nodes are a number": lambda _: {"nodes": 5},
    "models are a list": lambda _: {"models": ["model"]},
    "a model is a text": lambda _: {"models": {"model": "x"}},
    "a form is a number": lambda _: {"models": {"model": {"0.weight": 7}}},
    "another shape": lambda m: {"models": {"model": {**m["models"]["model"], "0.weight": "float32 [1]"}}},
    "another model": lambda m: {"models": {**m["models"], "other": {}}},
    "sizes are texts": lambda m: {"sizes": dict.fromkeys(m["files"], "1")},
    "huge sizes": lambda m: {"sizes": dict.fromkeys(m["files"], 2**60)},
    "an unknown key": lambda _: {"run": "import os"},
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_was_made_up(checkpoint, case):
    sign(checkpoint, **MANIFESTS[case](manifest_of(checkpoint)))
    require_refused(checkpoint, loads=case != "step of another")


TEXTS = {
    "not JSON": b"\x80\x04K*.",
    "a pickle": pickle.dumps({"step": 7}),
    "another program's": b'{"name": "web app", "start_url": "/", "icons": []}',
    "empty": b"",
    "a number": b"7",
    "nested without end": b"[" * 200_000,
    "dicts without end": b'{"a":' * 200_000,
    "a number without end": b'{"version": 3, "step": ' + b"9" * 100_000 + b"}",
    "not unicode": b'{"version": 3, "step": "\xff\xfe"}',
    "half a character": b'{"version": 3, "step": "\\ud800"}',
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_manifest_that_is_none(checkpoint, case):
    (checkpoint / MANIFEST).write_bytes(TEXTS[case])
    require_refused(checkpoint)


@pytest.mark.parametrize("name", [MANIFEST, "node-0.safetensors", "rank-0.json"])
@pytest.mark.parametrize("how", ["link", "dangling", "endless", "pipe", "folder", "huge"])
def test_a_file_that_is_no_file(checkpoint, tmp_path, name, how):
    """The links lead to the right content, outside of the folder."""
    file = checkpoint / name
    content = file.read_bytes()
    file.unlink()
    if how == "link":
        (tmp_path / "outside").write_bytes(content)
        file.symlink_to(tmp_path / "outside")
    elif how == "dangling":
        file.symlink_to(tmp_path / "nowhere")
    elif how == "endless":
        file.symlink_to("/dev/zero")
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    else:
        file.touch()
        os.truncate(file, 2**40)  # takes no room
    require_refused(checkpoint)


def change_json(checkpoint: Path, name: str, change) -> None:
    file = checkpoint / f"{name}.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    sign(checkpoint)


def entry(content, *path):
    """Returns the pair of a nested dict at a path of keys."""
    pair = None
    for key in path:
        pair = next(pair for pair in content["$dict"] if pair[0] == key)
        content = pair[1]
    return pair


def setter(*path, to):
    return lambda content: entry(content, *path).__setitem__(1, to)


LOCAL = ("trainees", "model")
RANKS = {
    "huge step": setter(*LOCAL, "progress", "step", to=10**300),
    "negative step": setter(*LOCAL, "progress", "step", to=-1),
    "step is a text": setter(*LOCAL, "progress", "step", to="7"),
    "since is huge": setter(*LOCAL, "progress", "since", to=[2**80]),
    "no period": setter(*LOCAL, "progress", "period", to=[]),
    "no samples": setter(*LOCAL, "progress", "samples", to=[]),
    "a position that is huge": setter(*LOCAL, "feed", "offset", to=10**30),
    "a position that is negative": setter(*LOCAL, "feed", "offset", to=-5),
    "a position that is a list": setter(*LOCAL, "feed", "offset", to=[1]),
    "no buffers": setter(*LOCAL, "buffers", to=None),
    "a buffer is a text": setter(*LOCAL, "buffers", "1.running_mean", to="x"),
    "an anchor without values": setter(*LOCAL, "exchanges", "points", to={"$dict": [["x", {"$dict": []}]]}),
    "exchanges are a number": setter(*LOCAL, "exchanges", to=7),
    "no random state": setter("random", "torch", to=5),
    "a random state of texts": setter("random", "python", to={"$tuple": ["a", "b", "c"]}),
    "random numbers that are huge": setter("random", "numpy", to=["MT19937", 10**30, 2**80, 0, 0.0]),
    "nothing tracked": setter("tracked", to=None),
    "no models": setter("trainees", to={"$dict": []}),
    "a tensor that is not there": setter(*LOCAL, "buffers", "1.running_mean", to={"$tensor": "nothing"}),
    "a tensor of another name": setter(*LOCAL, "buffers", "1.running_mean", to={"$tensor": ["a"]}),
    "another thing": setter(*LOCAL, "progress", to={"$object": "os.system"}),
    "pairs that are none": setter(*LOCAL, "progress", to={"$dict": [[1, 2, 3]]}),
    "a key that is a list": setter(*LOCAL, "progress", to={"$dict": [[[1], 2]]}),
}
NODES = {
    "no parameters": setter("model", "parameters", to={"$dict": []}),
    "parameters are a list": setter("model", "parameters", to=[]),
    "no optimizer": setter("model", "optimizer", to={"$dict": []}),
    "groups are a number": setter("model", "optimizer", "param_groups", to=5),
    "a group without parameters": setter("model", "optimizer", "param_groups", to=[{"$dict": []}]),
    "state is a text": setter("model", "optimizer", "state", to="x"),
    "pending is a number": setter("model", "pending", to=3),
    "a piece of nothing": setter("model", "pending", to=[[{"$dict": [["home", "0.weight"]]}]]),
    "trained is a number": setter("model", "trained", to=3),
}
FORMS = {
    "a huge view": ["view", {"$tuple": ["0.weight", 0, [10**12], [0]]}],
    "a view beyond the memory": ["view", {"$tuple": ["0.weight", 10**9, [3], [1]]}],
    "a view of nothing": ["view", {"$tuple": ["nothing", 0, [3], [1]]}],
    "a view of a text": ["view", "x"],
    "a tensor of nothing": ["tensor", "nothing"],
    "a tensor of a list": ["tensor", [1]],
}


@pytest.mark.parametrize("case", RANKS)
def test_a_rank_that_was_made_up(checkpoint, case):
    change_json(checkpoint, "rank-0", RANKS[case])
    is_weights = any(word in case for word in ("buffer", "model", "exchanges"))
    if case == "a position that is huge":
        is_weights = True
    require_refused(checkpoint, loads=is_weights)


@pytest.mark.parametrize("case", NODES)
def test_a_node_that_was_made_up(checkpoint, case):
    change_json(checkpoint, "node-0", NODES[case])
    require_refused(checkpoint, loads="parameters" in case and "group" not in case)


@pytest.mark.parametrize("case", FORMS)
def test_a_state_dict_that_was_made_up(checkpoint, case):
    def change(content):
        rows = entry(content, "model", "form", "entries")[1]
        rows[0]["$tuple"][1:] = FORMS[case]

    change_json(checkpoint, "node-0", change)
    began = time.monotonic()
    with pytest.raises(CheckpointError):
        load_weights(network(), checkpoint)
    assert time.monotonic() - began < LIMIT_S


def test_one_tensor_is_not_taken_a_million_times(checkpoint):
    def change(content):
        name = entry(content, *LOCAL, "buffers", "1.running_mean")[1]
        entry(content, "tracked")[1] = {"$dict": [["x", [name] * 100_000]]}

    change_json(checkpoint, "rank-0", change)
    require_refused(checkpoint, loads=False)


@pytest.mark.parametrize("how", ["shape", "dtype", "foreign", "zip", "header"])
def test_tensors_of_another_program(checkpoint, how):
    """A tensor of another shape would be spread over the parameter without an error."""
    file = checkpoint / "node-0.safetensors"
    tensors = load(file.read_bytes())
    name = next(name for name, tensor in tensors.items() if tuple(tensor.shape) == (9, 6, 3) and "param" in name)
    if how == "shape":
        tensors[name] = torch.ones(1)
    elif how == "dtype":
        tensors[name] = tensors[name].double()
    elif how == "foreign":
        tensors = {"weights": torch.ones(3)}
    if how == "zip":
        torch.save(tensors, file)
    elif how == "header":
        file.write_bytes((2**63 - 1).to_bytes(8, "little") + b"{}")
    else:
        save_file(tensors, file)
    sign(checkpoint)
    require_refused(checkpoint)


def test_surplus_files_are_no_matter_and_never_read(checkpoint, tmp_path):
    """As those that a system puts into every folder."""
    (checkpoint / ".DS_Store").write_bytes(b"x")
    (checkpoint / "model.pkl").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    (checkpoint.parent / "step-000000000000000000000000000009").mkdir()
    (checkpoint.parent / "step-../x").parent.mkdir(exist_ok=True)
    train(checkpoint.parents[1], epochs=2)
    assert not (tmp_path / "sprung").exists()


class Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("where", ["metadata", "value", "path"])
def test_a_folder_of_torch_that_runs_code_is_refused(tmp_path, where):
    """As `evenly export --to weights/` and plain torch programs write them."""
    weights = tmp_path / "weights"
    write_weights(f"{weights}/", plain_state(network().state_dict()))
    load_weights(network(), weights)
    metadata = pickle.loads((weights / ".metadata").read_bytes())
    if where == "metadata":
        metadata = Trap(tmp_path / "sprung")
    elif where == "path":
        shutil.move(weights / "__0_0.distcp", tmp_path / "outside")
        for info in metadata.storage_data.values():
            info.relative_path = "../outside"
    else:
        shutil.rmtree(weights)
        write_state(weights, {"model": dict(network().state_dict()), "versions": Trap(tmp_path / "sprung")})
    if where != "value":
        (weights / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"could run code|outside of the folder|Weights only load failed"):
        load_weights(network(), weights)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("ending", [".pt", ".pth"])
def test_weights_that_run_code_are_refused(tmp_path, ending):
    torch.save({"0.weight": Trap(tmp_path / "sprung")}, tmp_path / f"weights{ending}")
    with pytest.raises(CheckpointError):
        load_weights(network(), tmp_path / f"weights{ending}")
    (tmp_path / f"weights{ending}").write_bytes(pickle.dumps(Trap(tmp_path / "sprung"), protocol=2))
    with pytest.raises(CheckpointError):
        load_weights(network(), tmp_path / f"weights{ending}")
    assert not (tmp_path / "sprung").exists()
