"""Rules for the source code: what is imported, read, printed, and how long things are."""

import ast
import functools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import evenly

ROOT = Path(evenly.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


@functools.cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in FILES]


@functools.cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """All that the files consist of; to walk through the trees takes longer than to look at it."""
    return [(path, node) for path, tree in trees() for node in ast.walk(tree)]


def spot(path: Path, node: ast.stmt | ast.expr) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def test_root_names_are_few_and_importable() -> None:
    assert len(evenly.__all__) <= 24
    assert len(set(evenly.__all__)) == len(evenly.__all__)
    for name in evenly.__all__:
        assert getattr(evenly, name) is not None
        assert name in dir(evenly)
    with pytest.raises(AttributeError, match="no_such_name"):
        evenly.no_such_name  # noqa: B018


def test_what_needs_no_torch_starts_without_it() -> None:
    """One process runs the statements in turn and tells after which of them torch is there."""
    lines = [
        "import evenly",
        "import evenly.spec",
        "import evenly.reports",
        "import evenly.coordination",
        "import evenly.cli",
        "evenly.Plan, evenly.EvenlyError, evenly.report",
        "from typer.testing import CliRunner; from evenly.cli import app; CliRunner().invoke(app, '--help')",
    ]
    code = "import sys\nfor line in sys.argv[1:]:\n    exec(line)\n    print(line, 'torch' in sys.modules, sep=': ')"
    done = subprocess.run([sys.executable, "-c", code, *lines], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"{line}: False" for line in lines], done.stderr


def test_the_source_keeps_its_rules(subtests: pytest.Subtests) -> None:
    """In one test, so that one process parses the source."""
    for rule in (
        only_launch_reads_the_environment,
        only_the_command_line_prints,
        no_bare_assert,
        only_one_package_touches_private_names_of_others,
        only_one_package_patches_torch_or_counts_references,
        only_comm_calls_collectives_of_torch,
        nothing_is_pickled,
        class_names_are_unique,
        folders_do_not_import_each_other,
    ):
        with subtests.test(rule.__name__):
            assert rule() == []


def only_launch_reads_the_environment() -> list[str]:
    return [
        spot(path, node)
        for path, node in nodes()
        if isinstance(node, ast.Attribute | ast.ImportFrom) and _of_os(node) and package_of(path) != "launch"
    ]


def _of_os(node: ast.Attribute | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(name.name in ENVIRONMENT for name in node.names)
    return isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr in ENVIRONMENT


def only_the_command_line_prints() -> list[str]:
    return [
        spot(path, node)
        for path, node in nodes()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        if package_of(path) != "cli"
    ]


def no_bare_assert() -> list[str]:
    return [spot(path, node) for path, node in nodes() if isinstance(node, ast.Assert)]


def only_one_package_touches_private_names_of_others() -> list[str]:
    """Names with one underscore are this library's own, in the package whose classes have them."""
    found = []
    for path, tree in trees():
        if package_of(path) == "_torch":
            continue
        own = _own_names(package_of(path)) | PYTHONS | SHARED.get(package_of(path), set())
        for node in ast.walk(tree):
            found += [f"{spot(path, node)} {name}" for name in _private_names(node) if name not in own]
    return found


PYTHONS = {"_fields", "_getframe", "_abc_impl", "_hooks"}  # of named tuples, sys and abc; how names of hooks end
SHARED = {
    # Of a cut network, which gives them no public names:
    "session": {"_all_ranks_group", "_program", "_shapes", "_source"},
    "checkpoints": {"_all_ranks_group", "_source"},
    "graph": {"_softmax", "_patched"},  # an operator, which has no other name; and a name in code that is written here
    "shards": {"_foreach_", "_to_copy", "_unsafe_view"},  # operators
}


def _private_names(node: ast.AST) -> Iterator[str]:
    """Yields names with one underscore that a node reads of an object that is not `self`, writes as text or imports."""
    if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
        yield from [node.attr] if _is_private(node.attr) else []
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        yield from [node.value] if _is_private(node.value) and not node.value.startswith("_evenly") else []
    elif isinstance(node, ast.Import | ast.ImportFrom):
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        names = [f"{module}.{alias.name}" for alias in node.names]
        foreign = [name for name in names if not name.startswith(("evenly.", "__future__."))]
        yield from [name for name in foreign if any(map(_is_private, name.split(".")))]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


@functools.cache
def _own_names(place: str) -> set[str]:
    """Returns the private names of a package's classes, but for those that torch's classes have too."""
    names: set[str] = set()
    for path, tree in trees():
        if package_of(path) == place:
            names |= {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
            for kind in [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]:
                names |= set(_members(kind))
    return names - _names_of_torch()


def _members(kind: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(kind):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


@functools.cache
def _names_of_torch() -> set[str]:
    module = torch.nn.Linear(1, 1)
    kinds = (
        torch.nn.Module,
        torch.Tensor,
        torch.optim.Optimizer,
        torch.amp.GradScaler,
        torch.fx.Tracer,
        torch.fx.Graph,
    )
    objects = (module, torch.nn.parallel.DistributedDataParallel, torch.optim.SGD(module.parameters()))
    names = {name for thing in (*kinds, *objects) for name in dir(thing)}
    return {name for name in names if _is_private(name)}


def only_one_package_patches_torch_or_counts_references() -> list[str]:
    return [
        spot(path, node)
        for path, node in nodes()
        if isinstance(node, ast.Attribute) and package_of(path) != "_torch" and _is_trick(node)
    ]


def _is_trick(node: ast.Attribute) -> bool:
    """Whether references are counted by hand, an object gets another class, or something of torch is replaced."""
    if isinstance(node.ctx, ast.Load):
        return node.attr in ("getrefcount", "pythonapi", "py_object")
    return node.attr == "__class__" or _root(node) in ("torch", "nn", "fx", "F", "dist")


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


COLLECTIVES = {"all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "gather"}
COLLECTIVES |= {"all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather_object", "reduce"}
COLLECTIVES |= {"irecv", "isend", "recv", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send"}
COLLECTIVES |= {"batch_isend_irecv", "monitored_barrier", "scatter_object_list"}
OF_PROCESS_GROUPS = {"allreduce", "allgather", "_allgather_base", "alltoall", "alltoall_base", "allreduce_coalesced"}
DISTRIBUTED = ("dist", "distributed", "torch.distributed", "torch.distributed.distributed_c10d", "c10d")


def only_comm_calls_collectives_of_torch() -> list[str]:
    return [spot(path, node) for path, node in nodes() if package_of(path) != "comm" and _is_collective(node)]


def _is_collective(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module in DISTRIBUTED and any(alias.name in COLLECTIVES for alias in node.names)
    if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
        return ast.unparse(node.value) in DISTRIBUTED
    return isinstance(node, ast.Attribute) and node.attr in OF_PROCESS_GROUPS


PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "copyreg"}
PICKLED_OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
PICKLED_OBJECTS |= {"send_object_list", "recv_object_list"}  # of torch.distributed
WEIGHTS = "checkpoints/weight_files.py"  # writes `.pt` files for other programs; weights_only=True loads them
OF_TORCH_CHECKPOINTS = {"checkpoints/dcp.py", "_torch/checkpoint_folders.py"}  # torch.distributed.checkpoint
LISTED = "_torch/checkpoint_folders.py"  # reads the metadata of such a folder, of which it looks up listed names only


def nothing_is_pickled() -> list[str]:
    """No pickle is written or read, but for weights that are exchanged with other programs, in three files."""
    return [spot(path, node) for path, node in nodes() if _pickles(node, str(path.relative_to(ROOT)))]


def _pickles(node: ast.AST, file: str) -> bool:
    modules: list[str] = []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        modules = [f"{node.module}.{alias.name}" for alias in node.names]
    if file == LISTED and modules == ["pickle"]:
        return False
    if any(module.split(".")[0] in PICKLES or module.split(".")[-1] in PICKLED_OBJECTS for module in modules):
        return True
    if file not in OF_TORCH_CHECKPOINTS and any(
        f"{module}.".startswith("torch.distributed.checkpoint.") for module in modules
    ):
        return True
    if isinstance(node, ast.Attribute) and (
        node.attr in PICKLED_OBJECTS or ast.unparse(node) in ("pickle.load", "pickle.loads")
    ):
        return True
    return isinstance(node, ast.Call) and _calls_pickle(node, file)


def _calls_pickle(node: ast.Call, file: str) -> bool:
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    name = ast.unparse(node.func)
    if name == "torch.load":
        return given.get("weights_only") != "True"
    return given.get("allow_pickle", "False") != "False" or (name == "torch.save" and file != WEIGHTS)


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        ("import pickle", True),
        ("from pickle import loads", True),
        ("import torch.distributed.checkpoint as dcp", True),
        ("from torch.distributed.checkpoint.filesystem import FileSystemReader", True),
        ("torch.load(file)", True),
        ("torch.load(file, weights_only=False)", True),
        ("torch.load(file, map_location='cpu', weights_only=True)", False),
        ("torch.save(state, file)", True),
        ("numpy.load(file, allow_pickle=True)", True),
        ("dist.all_gather_object(rows, value)", True),
        ("json.load(file)", False),
    ],
)
def test_the_rule_about_pickles(line: str, is_refused: bool) -> None:
    assert any(_pickles(node, "session/session.py") for node in ast.walk(ast.parse(line))) is is_refused


def class_names_are_unique() -> list[str]:
    homes: dict[str, list[str]] = {}
    for path, node in nodes():
        if isinstance(node, ast.ClassDef):
            homes.setdefault(node.name, []).append(spot(path, node))
    return [f"{name}: {', '.join(spots)}" for name, spots in homes.items() if len(spots) > 1]


def folders_do_not_import_each_other() -> list[str]:
    """A folder may import what lies deeper in it, and folders that do not import it."""
    arrows: dict[str, set[str]] = {}
    for path, tree in trees():
        own = str(path.parent.relative_to(ROOT))
        if path.name == "__init__.py" or path.parent == ROOT:
            continue  # these only pass names on
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("evenly."):
                target = ROOT.joinpath(*(node.module or "").split(".")[1:])
                folder = str((target if target.is_dir() else target.parent).relative_to(ROOT))
                if folder not in (own, "."):  # errors.py lies at the root
                    arrows.setdefault(own, set()).add(folder)
    return [" -> ".join(cycle) for cycle in _cycles(arrows)]


def _cycles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Returns paths along arrows that lead back to where they began, one for each folder on one."""
    found = []
    for start in arrows:
        paths, seen = [[start]], set[str]()
        while paths:
            path = paths.pop()
            for folder in arrows.get(path[-1], ()):
                if folder == start:
                    found.append([*path, start])
                    paths = []
                    break
                if folder not in seen:
                    seen.add(folder)
                    paths.append([*path, folder])
    return found


def test_sizes_are_told(record_property: Callable[[str, object], None]) -> None:
    """Sizes are an aim, not a limit: what is larger is only listed."""
    for path, tree in trees():
        lines = len(path.read_text().splitlines())
        if lines > (300 if path.name == "session.py" else 400):
            record_property(str(path.relative_to(ROOT)), lines)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 60:
                    record_property(f"{spot(path, node)} {node.name}", length)


def test_packages_import_only_lower_levels() -> None:
    program = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    if program is None:
        pytest.skip("The contracts need lint-imports; pip install import-linter.")
    settings = ROOT.parents[1] / "pyproject.toml"
    if not settings.is_file():
        pytest.skip("The contracts are in pyproject.toml, and evenly is not installed from its sources here.")
    done = subprocess.run([program, "--config", str(settings)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
