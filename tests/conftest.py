"""For every test: leaks fail it, what the machine lacks skips it, examples are few, torch has one thread."""

import functools
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks are threads or processes already

hypothesis.settings.register_profile("evenly", max_examples=30, deadline=None, derandomize=True)
hypothesis.settings.load_profile("evenly")

SLOW = (  # over ten seconds each on a busy core; `make test-all` runs them
    *(f"shards/test_moving.py::test_training_goes_on_as_on_one_device[{name}]"
      for name in ("vit_small_fused", "mobilenet_v2", "unet", "nanogpt", "densenet_short", "resnet18")),
    *(f"shards/test_properties.py::test_any_network_trains_as_on_one_device[{seed}]" for seed in (0, 1)),
    *(f"shards/test_zoo.py::test_a_network_trains_as_on_one_device[{name}]"
      for name in ("densenet121", "vit_small_module", "vit_small_fused", "convnext_small", "resnext50", "se_resnet34",
                   "resnet50", "googlenet", "vgg16_bn")),
    "shards/test_properties.py::test_layers_may_have_shares_of_their_own_and_ranks_none",
    "shards/test_properties.py::test_any_layout_gives_the_same_numbers[4]",
    "shards/test_changes.py::test_changes_are_followed_one_after_another",
)  # fmt: skip
PATIENCE_S = 2.0  # for threads that are about to end
OF_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # pytest's, and torch's when it first loads its compiler
CACHES = {"__pycache__", ".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".import_linter_cache"}


@pytest.fixture(autouse=True)
def _fail_what_leaks() -> Iterator[None]:
    environ, folder = _environ(), Path.cwd()
    threads, files = set(threading.enumerate()), _files(folder)
    yield
    leaks = [
        *(f"variable {name}" for name in sorted({name for name, _ in _environ().items() ^ environ.items()})),
        *(f"thread {thread.name}" for thread in _threads_left(threads)),
        *(f"file {name}" for name in sorted(_files(folder) - files)),
        *(["an open default process group"] if _close_group() else []),
    ]
    for name in _environ().keys() | environ.keys():  # the next test is not to blame
        os.environ.pop(name, None)
    os.environ.update(environ)
    assert not leaks, f"the test left behind: {', '.join(leaks)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what takes long."""
    for item in items:
        if item.nodeid.removeprefix("tests/") in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that this machine cannot run, saying what is missing."""
    lack = None
    if item.get_closest_marker("lab") is not None:
        lack = _lab_lacks()
    if item.get_closest_marker("gpu") is not None:
        lack = lack or _gpu_lacks()
    if lack is not None:
        pytest.skip(lack)


@functools.cache
def _lab_lacks() -> str | None:
    from evenly.lab import missing

    return missing()


@functools.cache
def _gpu_lacks() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "The test needs a CUDA device, and torch sees none."


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in OF_OTHERS}


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - CACHES


def _threads_left(before: set[threading.Thread]) -> list[threading.Thread]:
    deadline = time.monotonic() + PATIENCE_S
    while left := [thread for thread in set(threading.enumerate()) - before if _counts(thread)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    return []


def _counts(thread: threading.Thread) -> bool:
    return not thread.daemon or thread.name.startswith("evenly-")


def _close_group() -> bool:
    """Returns whether torch's default group was open, and closes it; a test without torch does not import it."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return False
    dist.destroy_process_group()
    return True
