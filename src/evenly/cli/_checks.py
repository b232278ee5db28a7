"""The checks of `evenly doctor`: what this machine can do, what is missing, and the command that adds it."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

from evenly import __version__
from evenly.lab import missing
from evenly.recipes.data import DATASETS, DatasetInfo, FoundData, look_for
from evenly.recipes.data.checking import counts_in_words

TORCH_LIMIT_S = 180.0  # for loading torch on a busy machine with a cold disk
EXTRAS = {  # extra: module
    "plot": "matplotlib",
    "images": "PIL",
    "timm": "timm",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "optim": "pytorch_optimizer",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
}
LAUNCHERS = {
    "torchrun": "pip install torch",
    "srun": "apt-get install slurm-client, on a machine of a SLURM cluster",
    "mpirun": "apt-get install openmpi-bin",
    "ray": "pip install 'ray[train]'",
}


@dataclass(frozen=True)
class Check:
    """One line: what was looked for, whether it is there, and the command that adds it.

    `state` is "ok", "missing", "unneeded" (missing, and nothing here would use it) or "broken": without it no training
    is possible.
    """

    name: str
    state: Literal["ok", "missing", "unneeded", "broken"]
    detail: str
    remedy: str = ""


def check_machine(data: Path, facts: Mapping[str, Any]) -> list[Check]:
    """Returns all checks, from the facts of `read_torch_facts`; data sets are looked for in the folder `data`."""
    return [
        Check("python", "ok", f"{platform.python_version()} ({sys.executable}), evenly {__version__}"),
        *torch_checks(facts),
        *gpu_checks(facts, has_driver=has_nvidia_driver()),
        Check("CPU", "ok", _cpu_words()),
        lab_check(missing()),
        *data_checks(data),
        *map(_extra_check, EXTRAS),
        *map(_launcher_check, LAUNCHERS),
    ]


def read_torch_facts() -> dict[str, Any]:
    """Returns what a process that loads torch finds out; `problem` says why training is not possible."""
    command = [sys.executable, "-m", "evenly.cli._torch_facts"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TORCH_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"problem": f"loading torch and training one step took more than {TORCH_LIMIT_S:.0f} s"}
    try:
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        return {"problem": lines[-1] if lines else f"the process that loads torch ended with code {done.returncode}"}
    return facts


def torch_checks(facts: Mapping[str, Any]) -> list[Check]:
    """Returns the checks of torch, of a step of training, and of the backends."""
    problem = facts.get("problem")
    if "version" not in facts:
        return [Check("torch", "broken", str(problem), "pip install 'torch>=2.11'")]
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU only"
    step = Check("training", "ok", "a session trained one step on the CPU")
    if problem:
        mend = "mend what it says; if nothing is wrong there: pip install --force-reinstall evenly 'torch>=2.11'"
        step = Check("training", "broken", str(problem).rstrip("."), mend)
    return [Check("torch", "ok", f"{facts['version']}, {build}"), step, *_backend_checks(facts)]


def _backend_checks(facts: Mapping[str, Any]) -> Iterable[Check]:
    backends, gpus = facts["backends"], len(facts["gpus"])
    another_torch = "install a torch that has it: PyTorch's site gives the command for this machine"
    if backends["gloo"]:
        yield Check("gloo", "ok", "for ranks on CPUs, and on CPUs and GPUs together")
    else:
        yield Check("gloo", "broken", "this torch has no gloo, which every session opens", another_torch)
    if backends["nccl"]:
        yield Check("nccl", "ok", "for ranks on GPUs")
    elif gpus > 1:
        yield Check("nccl", "missing", f"this torch has no NCCL, so {gpus} GPUs communicate by gloo", another_torch)
    else:
        yield Check("nccl", "unneeded", "not in this torch; one GPU or none does not need it")
    note = "there, but evenly does not use it" if backends["mpi"] else "not in this torch, and not needed"
    yield Check("mpi", "ok" if backends["mpi"] else "unneeded", f"{note}: mpirun only starts ranks")


def gpu_checks(facts: Mapping[str, Any], *, has_driver: bool) -> list[Check]:
    """Returns a check for each GPU; without any, whether torch should see one."""
    gpus = facts.get("gpus", [])
    if gpus:
        return [
            Check(f"GPU {index}", "ok", f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.1f} GiB")
            for index, gpu in enumerate(gpus)
        ]
    if not has_driver:
        return [Check("GPU", "unneeded", "none here; training uses the CPU")]
    if "version" in facts and not facts["cuda"]:
        remedy = "install a torch built with CUDA: PyTorch's site gives the command for this machine"
        return [Check("GPU", "missing", "there is an NVIDIA driver, but this torch is built for CPUs only", remedy)]
    return [Check("GPU", "missing", "there is an NVIDIA driver, but torch sees no GPU", "nvidia-smi; it says why")]


def has_nvidia_driver() -> bool:
    """Returns whether the system has a driver for NVIDIA's GPUs."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


def lab_check(lack: str | None) -> Check:
    """Returns the check of the lab, from the sentence of `evenly.lab.missing`."""
    if lack is None:
        return Check("lab", "ok", "root, namespaces, links shaped by tbf, CPU quotas by cgroups")
    problem, _, remedy = lack.rstrip(".").rpartition("; ")
    return Check("lab", "missing", problem or lack, remedy if problem else "")


def data_checks(folder: Path) -> list[Check]:
    """Returns a check for each data set that can be fetched, and for those that were put here by hand."""
    return [
        _data_check(info, found, folder)
        for info in DATASETS.values()
        if info.files
        if (found := look_for(info.name, root=folder)).folder or info.fetch
    ]


def _data_check(info: DatasetInfo, found: FoundData, folder: Path) -> Check:
    fetch = f"evenly data fetch {info.name} --to {folder}" if info.fetch else ""
    if found.folder is None:
        return Check(info.title, "missing", f"not found for evenly train; looked in {folder}", fetch)
    if found.problem:
        return Check(info.title, "missing", found.problem.rstrip("."), fetch)
    return Check(info.title, "ok", f"{found.folder}, {counts_in_words(info, found)}")


def _extra_check(extra: str) -> Check:
    module, install = EXTRAS[extra], f"pip install 'evenly[{extra}]'"
    if extra == "timm":  # it imports torchvision, and one for another torch cannot be imported
        install += ", with a torchvision made for this torch"
    if find_spec(module) is None:
        return Check(extra, "missing", f"{module} is not installed", install)
    return Check(extra, "ok", f"{module} is installed")


def _launcher_check(program: str) -> Check:
    beside_python = str(Path(sys.executable).parent)
    path = shutil.which(program) or shutil.which(program, path=beside_python)
    if path is not None:
        return Check(program, "ok", path)
    return Check(program, "missing", "not found", LAUNCHERS[program])


def _cpu_words() -> str:
    count = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count
    cores = f"{usable} of {count} cores" if usable < count else f"{count} core{'s' if count > 1 else ''}"
    memory = psutil.virtual_memory()
    return f"{cores}, {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB of memory free"
