"""Unequal devices on one GPU: a server of CUDA MPS, under which each process may use a percentage of the GPU."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def mps_server() -> Iterator[str]:
    """Yields the folder in which a server of its own listens; it ends with the context."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
        try:
            yield folder
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, check=False)


def rank_variables(folder: str, percent: int) -> dict[str, object]:
    """Returns the environment variables of a rank that may use a percentage of the GPU's multiprocessors."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": folder,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent,
        "OMP_NUM_THREADS": 2,
        "EVENLY_SHARED_MEMORY": "gpu",
    }
