"""What the shell offers for a word that is being typed: recipes, data sets, run folders, emulated clusters."""

from collections.abc import Iterator
from pathlib import Path

RECIPES = ("fashion", "cifar", "mnist")  # also the networks of `evenly measure` and `evenly plan`
DEPTH = 2  # folders below the one that is typed
MOST_FOLDERS = 2000  # looked at for one word


def recipes(incomplete: str) -> list[str]:
    """Returns the recipes, or the networks of the same names, that begin like this.

    >>> recipes("f")
    ['fashion']
    """
    return [name for name in RECIPES if name.startswith(incomplete)]


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
    files = (Path(__file__).parents[1] / "lab" / "clusters").glob("*.toml")
    return sorted(file.stem for file in files if file.stem.startswith(incomplete))


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
