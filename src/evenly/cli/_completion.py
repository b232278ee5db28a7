"""What the shell offers for a word that is being typed: recipes, networks, data sets, runs, emulated clusters."""

from collections.abc import Iterator
from pathlib import Path

OF_RECIPES = ("fashion", "cifar", "mnist")  # names of recipes that `evenly measure` and `evenly plan` take for networks
DEPTH = 2  # folders below the one that is typed
MOST_FOLDERS = 2000  # looked at for one word


def recipes(incomplete: str) -> list[str]:
    """Returns the recipes that begin like this.

    >>> recipes("fa")
    ['fashion']
    """
    return _shipped("recipes/settings", incomplete)


def experiments(incomplete: str) -> list[str]:
    """Returns the experiments that begin like this.

    >>> experiments("ci")
    ['cifar']
    """
    return _shipped("recipes/experiments/grids", incomplete)


def networks(incomplete: str) -> list[str]:
    """Returns the networks that begin like this; those of recipes have their names too.

    >>> networks("c")
    ['cifar', 'convmixer', 'cait']
    """
    from evenly.recipes.networks import NETWORKS

    return [name for name in (*OF_RECIPES, *NETWORKS) if name.startswith(incomplete)]


def datasets(incomplete: str) -> list[str]:
    """Returns the names of the data sets that begin like this.

    >>> datasets("cifar")
    ['cifar10', 'cifar100']
    """
    from evenly.recipes.data.catalogue import DATASETS

    return [name for name in DATASETS if name.startswith(incomplete)]


def clusters(incomplete: str) -> list[str]:
    """Returns the names of the emulated clusters that come with evenly and begin like this.

    >>> clusters("de")
    ['demo']
    """
    return _shipped("lab/clusters", incomplete)


def runs(incomplete: str) -> list[str]:
    """Returns the run folders whose path begins like this; if there is none, the shell offers files."""
    folder, slash, name = incomplete.rpartition("/")
    found: list[str] = []
    budget = iter(range(MOST_FOLDERS))
    for path in _folders(Path(folder + slash), name):
        _collect(path, found, budget, depth=DEPTH)
    return found


def _collect(path: Path, found: list[str], budget: Iterator[int], *, depth: int) -> None:
    """Adds `path` if it is a run, else the runs below it."""
    if next(budget, None) is None:
        return
    if (path / "run.jsonl").is_file():
        found.append(str(path))
    elif depth:
        for below in _folders(path, ""):
            _collect(below, found, budget, depth=depth - 1)


def _folders(folder: Path, name: str) -> list[Path]:
    """Returns the folders in `folder` whose name begins with `name`, in order; hidden ones only if asked for."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.startswith(name) and path.is_dir())
    except OSError:
        return []
    return [path for path in paths if not path.name.startswith(".") or name.startswith(".")]


def _shipped(folder: str, incomplete: str) -> list[str]:
    """Returns the names of the TOML files in a folder of the package that begin like this."""
    files = (Path(__file__).parents[1] / folder).glob("*.toml")
    return sorted(file.stem for file in files if file.stem.startswith(incomplete))
