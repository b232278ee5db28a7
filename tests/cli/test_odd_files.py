"""Files, folders and numbers that nothing can be made of: one line that says so, exit code 1, no traceback."""

import json
import subprocess
import sys

import pytest

from evenly import Session
from evenly.cli import main
from evenly.errors import CheckpointError, SpecError
from evenly.lab import load_cluster
from evenly.recipes.config import load_config
from evenly.spec import Cluster, Graph, Plan, Profile, Run

DEEP = ["[" * 100_000, '{"nodes":' * 50_000]
KINDS = {"cluster": Cluster, "profile": Profile, "graph": Graph, "plan": Plan}


@pytest.mark.parametrize("text", DEEP, ids=["lists", "objects"])
@pytest.mark.parametrize("kind", KINDS.values())
def test_a_deeply_nested_file_is_refused(tmp_path, kind, text):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(SpecError, match=f"{kind.__name__} is not valid"):
        kind.load(tmp_path / "file.json")


@pytest.mark.parametrize("name", ["profile", "plan", "graph"])
def test_numbers_without_end_are_refused_wherever_they_stand(files, tmp_path, name):
    text = files[name].read_text()
    document = json.loads(text)
    places = [key for key, value in document.items() if isinstance(value, int) and not isinstance(value, bool)]
    for key in [*places, "devices", "roles", "layers"]:
        if key in document:
            (tmp_path / "file.json").write_text(json.dumps({**document, key: [{"rank": 10**400}]}))
            with pytest.raises(SpecError, match=r"it holds the number 1000.*\(401 digits\)"):
                KINDS[name].load(tmp_path / "file.json")


def test_long_numbers_inside_texts_and_floats_are_no_fault():
    text = "1" * 500
    event = {"event": "failed", "at_s": 1.0, "step": 1, "error": text}
    measured = {"event": "measured", "at_s": float("0.1" + "2" * 10), "step": 1, "values": {}}
    line = json.dumps(measured).replace("0.12222222222", "0." + "1" * 60)
    assert Run.from_lines([json.dumps(event), line]).events[0].error == text


@pytest.mark.parametrize("place", ["steps", "measured", "settings"])
def test_a_run_with_a_number_of_400_digits(tmp_path, place):
    number = 10**400
    cluster = {"nodes": [{"name": "n", "ranks": [0], "devices": [{"kind": "cpu"}]}]}
    lines = [{"event": "started", "at_s": 1.0, "name": "r", "cluster": cluster, "settings": {}}]
    if place == "settings":
        lines[0]["settings"] = {"total_steps": number}
    elif place == "steps":
        lines.append({"event": "steps", "at_s": 1.0, "epoch": 0, "step": number, "samples": number})
    else:
        lines.append({"event": "measured", "at_s": 1.0, "step": 1, "values": {"loss": number}})
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = subprocess.run([sys.executable, "-m", "evenly", "report", tmp_path], capture_output=True, text=True)
    (told,) = done.stderr.splitlines()
    assert "it holds the number 1000" in told
    assert done.returncode == 1
    assert ("unfinished before its first recorded step" in done.stdout) == (place != "settings")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("ranks = 100000000000", "less than or equal to 1024"),
        ("ranks = " + "9" * 400, "more than 40 digits"),
        ("ranks = " + "9" * 5000, "not valid TOML"),
        ('cores = "0-999999999999"', "numbers below 8192"),
        ('cores = "0-999999999"', "numbers below 8192"),
        ('cores = "9000"', "numbers below 8192"),
        (f'cores = "{"9" * 400}"', "numbers below 8192"),
        ("cpu = 1e300", "less than or equal to 8192"),
        ("rate_mbit = 1e300", "less than or equal to 1"),
        ("a." * 5000 + "b = 1", "not valid"),
        ("cpu = " + "[" * 5000, "not valid"),
    ],
)
def test_absurd_lab_clusters(tmp_path, line, told):
    file = tmp_path / "lab.toml"
    file.write_text(f"[[nodes]]\n{line}\n")
    with pytest.raises(SpecError, match=told):
        load_cluster(file)


@pytest.mark.parametrize("text", ["9" * 23, "9" * 400, "9" * 5000, "-" + "9" * 23, "0x" + "f" * 30, "[" * 5000])
def test_a_seed_that_no_generator_takes(fails, text):
    assert "evenly: " in fails("train", "fashion", "--set", f"seed={text}")


def test_a_settings_file_that_nests_without_end(tmp_path):
    (tmp_path / "config.toml").write_text("seed = " + "[" * 5000)
    with pytest.raises(SpecError, match="not valid"):
        load_config("fashion", tmp_path / "config.toml")


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**400, 0.5])
def test_a_seed_of_a_session_that_no_generator_takes(seed):
    with pytest.raises(SpecError, match="seed="):
        Session(seed=seed)


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/nowhere", "run.jsonl is a folder", "name"])
def test_a_run_folder_that_cannot_be_written(tmp_path, folder):
    (tmp_path / "file").touch()
    (tmp_path / "run" / "run.jsonl").mkdir(parents=True)
    given = {"run.jsonl is a folder": tmp_path / "run", "name": tmp_path / ("x" * 300)}.get(folder, tmp_path / folder)
    with pytest.raises(CheckpointError, match="cannot be done"), Session(given):
        pass


def test_a_file_where_checkpoints_should_be(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    with Session(tmp_path / "run") as session, pytest.raises(CheckpointError, match="could not make the folder"):
        session.checkpoint()


def test_train_into_a_file(fails, tmp_path):
    (tmp_path / "file").touch()
    told = fails("train", "fashion", "--run", tmp_path / "file", "--data", tmp_path)
    assert "evenly: " in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.py"], "the script nowhere.py was to be started; there is no such file in"),
        (["x" * 300], "there is no such file"),
        (["-m", "no_such_module.at_all"], "there is no module no_such_module"),
    ],
)
def test_a_script_that_is_not_there(fails, words, told):
    assert told in fails("launch", "--nodes", "2,1", *words)


@pytest.mark.parametrize("words", [["--nodes", "1" * 5000], ["--nodes", "²"], ["--master", "a:" + "1" * 5000]])
def test_numbers_for_launch_that_are_none(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["evenly", "launch", *words, __file__])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_names_of_files_that_no_file_can_have(fails, files, given):
    long = "x" * 300
    assert "File name too long" in fails("report", long)
    assert "File name too long" in fails("plan", *given, "--out", long)
