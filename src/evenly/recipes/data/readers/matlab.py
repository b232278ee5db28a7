"""Matlab's .mat files -> arrays, by scipy, which only these need."""

from pathlib import Path
from typing import Any

import numpy as np

from evenly.errors import DataError


def read_mat(path: Path, *, title: str) -> dict[str, Any]:
    """Returns the variables of a .mat file, vectors without dimensions of size 1."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise DataError(
            f"{title} was asked for, but its list {path} is a Matlab file, which only scipy can read here. Install it "
            "(pip install scipy), or sort the images into train/<class>/ and test/<class>/ and use the data set "
            "'folder'."
        ) from None
    if not path.is_file():
        raise DataError(f"{title} was asked for, but there is no {path}. Take it from its archive.")
    try:
        return {name: np.atleast_1d(value) for name, value in loadmat(path, squeeze_me=True).items()}
    except Exception as error:  # of a damaged file: scipy raises what its parser meets
        raise DataError(
            f"{title} was asked for, but {path} cannot be read as a Matlab file: {error}. Take it from its archive."
        ) from None
