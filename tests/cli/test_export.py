"""`evenly export` as a person types it: one line when it is done, one line when it cannot."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from evenly import Session, load_weights
from evenly.checkpoints import folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one rank with two models, one of them compiled, and checkpoints of steps 2 and 4."""
    path = tmp_path_factory.mktemp("run") / "gan"
    torch.manual_seed(0)
    models = {"painter": torch.compile(nn.Linear(2, 1), backend="eager"), "judge": nn.Linear(2, 1, bias=False)}
    with Session(path, device="cpu", checkpoint_every=None) as session:
        plan = session.plan(batch_size=2)
        optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
        trained = {
            name: session.prepare(model, optimizers[name], plan=plan, name=name)[0] for name, model in models.items()
        }
        for step in range(1, 5):
            for name, model in trained.items():
                model(torch.ones(2, 2)).sum().backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
            if step % 2 == 0:
                session.checkpoint()
    return path, {name: model.state_dict() for name, model in models.items()}


def test_one_line_says_what_was_written(evenly, run, tmp_path):
    path, states = run
    file = tmp_path / "painter.safetensors"
    text = evenly("export", path, "--model", "painter", "--to", file)
    assert text == f"{file}: 2 tensors, 0.0 MB, step 4 of {path}\n"
    network = nn.Linear(2, 1)
    load_weights(network, file)
    assert torch.equal(network.weight, states["painter"]["_orig_mod.weight"])
    evenly("export", path, "--model", "painter", "--step", "2", "--to", file, "--force")
    load_weights(network, file)
    torch.testing.assert_close(network.weight.detach(), states["painter"]["_orig_mod.weight"] + 2 * 0.1 * 2)
    evenly("export", path / "checkpoints" / "step-000000004", "--model", "judge", "--to", f"{tmp_path}/judge/")
    judge = nn.Linear(2, 1, bias=False)
    load_weights(judge, tmp_path / "judge")
    assert torch.equal(judge.weight, states["judge"]["weight"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nowhere", "--to", "x.pt"), "there is no such folder"),
        (("{here}", "--to", "x.pt"), "it holds no complete checkpoint"),
        (("{run}", "--model", "judge", "--to", "x.onnx"), "its ending is '.onnx'"),
        (("{run}", "--model", "judge", "--to", "{here}/old.pt"), "which exists. Use --force to replace it"),
        (("{run}", "--model", "judge", "--to", "{here}/none/x.pt"), "there is no folder"),
        (("{run}", "--to", "x.pt"), "no model was named: it holds 'painter', 'judge'"),
        (("{run}", "--model", "critic", "--to", "x.pt"), "there is no model 'critic'"),
        (("{run}", "--step", "3", "--to", "x.pt"), "has those of steps 2, 4"),
        (("{run}", "--step", "2", "--best", "--to", "x.pt"), "Choose one of the two"),
        (("{run}", "--best", "--to", "x.pt"), "was made without keep_best"),
    ],
)
def test_what_cannot_be_done_is_one_line(fails, run, tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.pt").write_text("")
    assert told in fails("export", *(word.format(run=run[0], here=tmp_path) for word in words))
    assert [path.name for path in tmp_path.iterdir()] == ["old.pt"]


def test_damage_is_said(fails, run, tmp_path):
    shutil.copytree(run[0], tmp_path / "copy")
    newest = folder.checkpoints(tmp_path / "copy" / "checkpoints")[-1]
    file = newest / "node-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    words = ("export", tmp_path / "copy", "--model", "judge", "--to", tmp_path / "x.pt")
    assert "node-0.safetensors was to be read, but it is damaged: its SHA-256 is" in fails(*words)
    file.unlink()
    assert "has no files of node-0. If each node has its own disk" in fails(*words)


def test_help_loads_no_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from evenly.cli import app; "
        "r = CliRunner().invoke(app, ['export', '--help']); print(r.exit_code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "False"]
