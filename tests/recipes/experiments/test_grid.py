"""The TOML file of an experiment says which runs there are."""

from pathlib import Path

import pytest

from evenly.errors import SpecError
from evenly.recipes.experiments import experiment_names, load_experiment, planned_runs

GRID = """
recipe = "fashion"
seeds = 2
[settings]
epochs = 7
lr = 0.3
[cases.width]
narrow = { "network.width" = 4 }
wide = { network = { width = 32 }, nodes = "2,1" }
[grid]
every = ["global", "10"]
[quick]
epochs = 1
"""


def experiment(folder: Path, text: str = GRID):
    (folder / "grid.toml").write_text(text)
    return load_experiment(str(folder / "grid.toml"))


def test_all_combinations_of_cases_and_grid_with_every_seed(tmp_path):
    runs = planned_runs(experiment(tmp_path))
    assert [str(run.folder) for run in runs[:4]] == [
        "width-narrow_every-global/seed-0",
        "width-narrow_every-10/seed-0",
        "width-wide_every-global/seed-0",
        "width-wide_every-10/seed-0",
    ]
    assert [run.seed for run in runs] == [0] * 4 + [1] * 4
    assert [run.nodes for run in runs[:4]] == ["1,1", "1,1", "2,1", "2,1"]
    assert [run.config.network["width"] for run in runs[:4]] == [4, 4, 32, 32]
    assert {(run.config.epochs, run.config.lr, run.config.momentum) for run in runs} == {(7, 0.3, 0.9)}
    assert [run.config.seed for run in runs] == [run.seed for run in runs]


def test_folders_of_runs_stay_in_that_of_the_experiment(tmp_path):
    text = GRID.replace("[cases.width]", '[cases."../../width"]').replace("narrow", '"/etc/../.."')
    folders = [run.folder for run in planned_runs(experiment(tmp_path, text))]
    assert str(folders[0]) == "..-..-width-etc-..-.._every-global/seed-0"
    assert all(len(folder.parts) == 2 for folder in folders)


def test_quick_settings_changes_and_seeds(tmp_path):
    runs = planned_runs(experiment(tmp_path), seeds=3, changes=["lr=0.5", "width=2"], quick=True)
    assert len(runs) == 12
    assert {(run.config.epochs, run.config.lr, run.config.network["width"]) for run in runs} == {(1, 0.5, 2)}


@pytest.mark.parametrize(
    ("only", "count"),
    [(["every=10"], 4), (["every=10,global"], 8), (["width=wide", "every=10"], 2), (["seed=1"], 4)],
)
def test_only_some_of_the_runs(tmp_path, only, count):
    assert len(planned_runs(experiment(tmp_path), only=only)) == count


def test_values_with_a_comma_are_given_alone():
    runs = planned_runs(load_experiment("cifar"), only=["nodes=1,1", "every=10,50"], seeds=1)
    assert [str(run.folder) for run in runs] == ["nodes-1-1_every-10/seed-0", "nodes-1-1_every-50/seed-0"]


@pytest.mark.parametrize(
    ("only", "told"),
    [
        ("every=20", "every is one of: 10, global"),
        ("widht=wide", r"do not differ in 'widht'\. Did you mean 'width'\?"),
        ("wide", "takes KEY=VALUE"),
        ("seed=9", "no run of the experiment fits"),
    ],
)
def test_a_wrong_choice_is_refused(tmp_path, only, told):
    with pytest.raises(SpecError, match=told):
        planned_runs(experiment(tmp_path), only=[only])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (GRID.replace("seeds = 2", "seed = 2"), r"entry 'seed', which no experiment has\. Did you mean 'seeds'\?"),
        (GRID.replace("epochs = 7", "epoch = 7"), r"no setting 'epoch'\. Did you mean 'epochs'\?"),
        (GRID.replace('"fashion"', '"fashon"'), r"Did you mean 'fashion'\?"),
        (GRID.replace("seeds = 2", "seeds = 0"), "seeds: .*given 0"),
        (GRID.replace("lr = 0.3", "lr = -1"), "lr: .*given -1"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, told):
    with pytest.raises(SpecError, match=told):
        planned_runs(experiment(tmp_path, text))


def test_an_unknown_experiment_is_refused_with_the_nearest_name():
    with pytest.raises(SpecError, match=r"'cifr' was asked for.*Did you mean 'cifar'\?"):
        load_experiment("cifr")


@pytest.mark.parametrize("name", experiment_names())
def test_every_experiment_has_a_baseline_and_valid_settings_for_all_its_runs(name):
    loaded = load_experiment(name)
    columns = {**loaded.grid, **{key: tuple(cases) for key, cases in loaded.cases.items()}}
    for quick in (False, True):
        assert len(planned_runs(loaded, quick=quick)) >= 3
    for key, value in loaded.baseline.items():
        assert value in columns[key]
