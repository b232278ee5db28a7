"""Data sets of the published experiments: readers, sets, augmentation, and what can be fetched.

Names are loaded when first used: the catalogue and `evenly data` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenly.recipes.data.augmentation import AUGMENTATIONS, Augmentation
    from evenly.recipes.data.catalogue import DATASETS, DatasetInfo, find_folder
    from evenly.recipes.data.checking import FoundData, check_data, look_for
    from evenly.recipes.data.fetching import fetch_data
    from evenly.recipes.data.image_files import FileImageSet
    from evenly.recipes.data.loading import load_images
    from evenly.recipes.data.sets import ImageData, ImageSet
    from evenly.recipes.data.text import TextData, TextSet, load_text

_MODULE_OF = {
    "AUGMENTATIONS": "augmentation",
    "DATASETS": "catalogue",
    "Augmentation": "augmentation",
    "DatasetInfo": "catalogue",
    "FileImageSet": "image_files",
    "FoundData": "checking",
    "ImageData": "sets",
    "ImageSet": "sets",
    "TextData": "text",
    "TextSet": "text",
    "check_data": "checking",
    "fetch_data": "fetching",
    "find_folder": "catalogue",
    "load_images": "loading",
    "load_text": "text",
    "look_for": "checking",
}

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "Augmentation",
    "DatasetInfo",
    "FileImageSet",
    "FoundData",
    "ImageData",
    "ImageSet",
    "TextData",
    "TextSet",
    "check_data",
    "fetch_data",
    "find_folder",
    "load_images",
    "load_text",
    "look_for",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'evenly.recipes.data' has no attribute {name!r}")
    value = getattr(import_module(f"evenly.recipes.data.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
