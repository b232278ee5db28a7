"""A text -> windows of characters with those that follow: `TextData`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from evenly.errors import DataError, SpecError
from evenly.recipes.data.catalogue import dataset_info, find_folder
from evenly.recipes.data.checking import require_known_content
from evenly.recipes.data.text_files import find_text, read_text

TEST_PART = 0.1  # of the text, at its end
Windows = tuple[Tensor, Tensor, Tensor]  # tokens, next tokens, indices


class TextSet(Dataset[Windows]):
    """A text in windows of `context` tokens that do not overlap. A sample is a window, what follows each of its tokens,
    and its index.

    Batches are read whole (`__getitems__`), so give the loader `collate_fn=TextSet.collate`.
    """

    def __init__(self, tokens: Tensor, *, context: int, limit: int | None = None) -> None:
        count = (len(tokens) - 1) // context
        count = min(count, limit or count)
        self.tokens = tokens[: count * context + 1]  # int64
        self.context = context
        self._inputs = self.tokens[:-1].view(count, context)
        self._targets = self.tokens[1:].view(count, context)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> Windows:
        inputs, targets, indices = self.__getitems__([range(len(self))[index]])
        return inputs[0], targets[0], indices[0]

    def __getitems__(self, indices: Sequence[int]) -> Windows:
        """Returns tokens [n, context], next tokens [n, context] and indices [n] of these samples."""
        picked = torch.as_tensor(indices, dtype=torch.int64)
        return self._inputs[picked], self._targets[picked], picked

    @staticmethod
    def collate(batch: Windows) -> Windows:
        """Returns a batch as `__getitems__` made it."""
        return batch


@dataclass(frozen=True)
class TextData:
    """The training and the test part of a text; a token is the index of a character in `vocabulary`."""

    name: str
    train: TextSet
    test: TextSet
    vocabulary: str

    def decode(self, tokens: Sequence[int] | Tensor) -> str:
        """Returns the text of tokens."""
        return "".join(self.vocabulary[int(token)] for token in tokens)


def load_text(
    name: str,
    folder: Path | None,
    *,
    context: int,
    train_limit: int | None = None,
    test_limit: int | None = None,
) -> TextData:
    """Returns a text by characters: its first nine tenths to train with, the rest to test with.

    Args:
        name: One of `DATASETS`.
        folder: Of the text, or the text file itself; None: data/<name>.
        context: Characters of a sample.
        train_limit: Keeps so many samples of the training part, the first ones.
        test_limit: Keeps so many samples of the test part.
    """
    info = dataset_info(name)
    if info.kind != "text":
        raise SpecError(f"text of {name!r} was asked for, but it is {info.kind}. Use load_images.")
    for argument, value in {"context": context, "train_limit": train_limit, "test_limit": test_limit}.items():
        if value is not None and value < 1:
            raise SpecError(f"{argument}={value} was given for {info.title}; it is at least 1. Give 1 or more.")
    path = find_text(info, find_folder(name, folder))
    text = read_text(info, path, verify=require_known_content(info))
    cut = len(text) - int(len(text) * TEST_PART)
    parts = text[:cut], text[cut:]
    if min(map(len, parts)) <= context:
        raise DataError(
            f"context={context} was asked for, but {path} has {len(parts[0])} characters to train and {len(parts[1])} "
            "to test with, of which a sample takes context + 1. Give a shorter context or a longer text."
        )
    vocabulary = "".join(sorted(set(parts[0])))
    _refuse_unseen(path, parts[1], vocabulary)
    train, test = (
        TextSet(_tokens(part, vocabulary), context=context, limit=limit)
        for part, limit in zip(parts, (train_limit, test_limit), strict=True)
    )
    return TextData(name, train, test, vocabulary)


def _refuse_unseen(path: Path, test: str, vocabulary: str) -> None:
    unseen = sorted(set(test) - set(vocabulary))
    if unseen:
        shown = ", ".join(map(repr, unseen[:10]))
        raise DataError(
            f"{path} was to be learnt by characters, but its test part, the last tenth, has {shown}"
            f"{' and others' if len(unseen) > 10 else ''}, which its training part lacks. Remove or replace them."
        )


def _tokens(text: str, vocabulary: str) -> Tensor:
    codes, known = (np.frombuffer(part.encode("utf-32-le"), np.uint32) for part in (text, vocabulary))
    return torch.from_numpy(np.searchsorted(known, codes))  # the vocabulary is sorted
