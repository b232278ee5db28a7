"""Checkpoint folders through accidents: replaced, set aside, merged, named alike."""

import hashlib

import pytest
import torch

from evenly.checkpoints import folder
from evenly.checkpoints.manifest import file_names, read_manifest
from evenly.checkpoints.merge import merge
from evenly.comm.nested_state import flatten, restore
from evenly.errors import CheckpointError


def seal(root, name, value=1):
    partial = root / f".{name}.abcd"
    partial.mkdir(parents=True)
    digests = dict.fromkeys(file_names([[0]]), "0" * 64)
    digests |= folder.write_part(partial, folder.copied("rank-0", {"value": value}))
    manifest = {"step": int(name[5:]), "epoch": 1, "nodes": [[0]], "models": {}, "files": digests}
    folder.seal(partial, root / name, manifest)


def names(root):
    return [path.name for path in folder.checkpoints(root)]


def test_a_checkpoint_killed_while_it_was_replaced_is_found_again(tmp_path):
    seal(tmp_path, "step-000000005")
    (tmp_path / "step-000000005").rename(tmp_path / ".step-000000005.old")  # as far as a killed replacement gets
    assert names(tmp_path) == []
    folder.recover(tmp_path)
    assert names(tmp_path) == ["step-000000005"]


def test_a_checkpoint_can_be_saved_again_at_the_same_step(tmp_path):
    seal(tmp_path, "step-000000005", 1)
    seal(tmp_path, "step-000000005", 2)
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "step-000000005").iterdir()
    }
    assert folder.read_part(tmp_path / "step-000000005", "rank-0", files) == {"value": 2}
    assert not list(tmp_path.glob(".*"))


def test_earlier_checkpoints_are_set_aside_and_not_mixed_with_new_ones(tmp_path):
    for step in (900, 1000):
        seal(tmp_path, f"step-{step:09d}")
    folder.set_aside(tmp_path)
    seal(tmp_path, "step-000000010")
    folder.clear(tmp_path, keep=1)
    assert names(tmp_path) == ["step-000000010"]
    assert sorted(path.name for path in (tmp_path / "earlier-1").iterdir()) == ["step-000000900", "step-000001000"]


def test_what_was_set_aside_is_never_overwritten(tmp_path):
    """The number follows the largest there is: some of those before may have been removed."""
    for number in (1, 2, 3):
        seal(tmp_path, f"step-{number:09d}")
        folder.set_aside(tmp_path)
    (tmp_path / "earlier-1").rename(tmp_path.parent / "elsewhere")
    seal(tmp_path, "step-000000004")
    folder.set_aside(tmp_path)
    assert {path.name: names(path) for path in tmp_path.glob("earlier-*")} == {
        f"earlier-{number}": [f"step-{number:09d}"] for number in (2, 3, 4)
    }


@pytest.mark.parametrize("change", ["value", "key", "list", "nested", "text"])
def test_a_changed_manifest_is_damage(tmp_path, change):
    seal(tmp_path, "step-000000005")
    file = tmp_path / "step-000000005" / "manifest.json"
    text = {
        "value": file.read_text().replace('"epoch": 1', '"epoch": 2'),
        "key": file.read_text().replace('"epoch"', '"epoche"'),
        "list": "[]",
        "nested": "[" * 100_000,
        "text": "\x00\xff",
    }[change]
    assert read_manifest(file.parent)["epoch"] == 1
    file.write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json was to be read, but it is damaged"):
        read_manifest(file.parent)


def test_merging_leaves_alone_what_is_the_same_or_no_float():
    def node(weight):
        optimizer = {"state": {0: {"momentum": torch.tensor([weight])}}, "param_groups": []}
        parameters = {
            "weight": torch.tensor([weight]),
            "frozen": torch.tensor([0.1]),
            "table": torch.tensor([7], dtype=torch.int32),
        }
        return {"m": {"parameters": parameters, "optimizer": optimizer, "pending": []}}

    def rank(samples, mean):
        state = {"buffers": {"mean": torch.tensor([mean])}, "agreed": {}, "feed": None, "exchanges": {"trips": []}}
        progress = {"step": 9, "since": [3], "exchanges": 2, "samples": [samples], "counts": [2]}
        return {"trainees": {"m": {**state, "progress": progress}}, "tracked": {}, "random": {}}

    merged, local = merge([node(1.0), node(4.0)], [rank(10.0, 0.0), rank(10.0, 3.0), rank(40.0, 6.0)], [[0, 1], [2]])
    parameters = merged["m"]["parameters"]
    torch.testing.assert_close(parameters["weight"], torch.tensor([3.0]))  # (20 * 1 + 40 * 4) / 60
    torch.testing.assert_close(merged["m"]["optimizer"]["state"][0]["momentum"], torch.tensor([3.0]))
    assert torch.equal(parameters["frozen"], torch.tensor([0.1]))
    assert torch.equal(parameters["table"], torch.tensor([7], dtype=torch.int32))
    torch.testing.assert_close(local["trainees"]["m"]["buffers"]["mean"], torch.tensor([4.5]))
    assert local["trainees"]["m"]["progress"]["since"] == [0]


def test_merging_lands_what_was_under_way_first():
    """Nodes had 90 and 10 samples before the snapshot, and as many since it: both periods are weighted by their own."""

    def node(snapshot, since):
        change = 2.0 - snapshot  # the nodes agreed on 2
        piece = {"home": "weight", "label": "weight[1:2]", "slot": "", "rows": [1, 2], "value": torch.tensor([change])}
        slot = {"home": "weight", "label": "0.m", "slot": "m", "rows": None, "value": torch.tensor([1.0, 1.0])}
        optimizer = {"state": {0: {"m": torch.zeros(2)}}, "param_groups": []}
        weight = torch.tensor([5.0, snapshot + since])
        return {"m": {"parameters": {"weight": weight}, "optimizer": optimizer, "pending": [[piece, slot]]}}

    def rank(samples, mean):
        seen, counted = torch.tensor([5]).to(torch.uint16), torch.tensor([3]).to(torch.uint16)
        pending_exchange = {"buffers": {"mean": torch.tensor([4.0]), "seen": seen}}
        pending_exchange["snapshot"] = buffers = {"mean": torch.tensor([mean]), "seen": counted}
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        state = {"buffers": buffers, "agreed": {}, "feed": None, "exchanges": {"trips": [pending_exchange]}}
        progress = {"step": 9, "since": [3], "exchanges": 2, "samples": [samples], "counts": [2]}
        return {"trainees": {"m": {**state, "progress": progress}}, "tracked": {}, "random": {}}

    merged, local = merge([node(1.0, 0.5), node(11.0, 1.5)], [rank(30.0, 1.0), rank(10.0, 7.0)], [[0], [1]])
    torch.testing.assert_close(merged["m"]["parameters"]["weight"], torch.tensor([5.0, 2.75]))
    torch.testing.assert_close(merged["m"]["optimizer"]["state"][0]["m"], torch.ones(2))
    torch.testing.assert_close(local["trainees"]["m"]["buffers"]["mean"], torch.tensor([4.0]))
    assert local["trainees"]["m"]["buffers"]["seen"].tolist() == [5]


def test_names_with_dots_do_not_collide():
    value = {"a.b": torch.tensor([1.0]), "a": {"b": torch.tensor([2.0])}}
    tensors: dict[str, torch.Tensor] = {}
    back = restore(flatten(value, "x", tensors), tensors)
    assert (float(back["a.b"]), float(back["a"]["b"])) == (1.0, 2.0)
