"""A text by characters: windows in order, the last tenth for testing, and what is refused."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from evenly.errors import DataError, SpecError
from evenly.recipes.data import TextSet, load_text

VERSE = "Sigh no more, ladies, sigh no more, men were deceivers ever. "
REAL = Path(__file__).parents[3] / "data" / "shakespeare"


def write(folder: Path, text: str, name: str = "shakespeare.txt") -> Path:
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("text", [VERSE * 20, "Grüße, 你好, 🙂! " * 40])
def test_windows_follow_each_other_and_targets_are_one_further(tmp_path, text):
    data = load_text("shakespeare", write(tmp_path, text), context=7)
    assert data.vocabulary == "".join(sorted(set(text)))
    for part, start in ((data.train, 0), (data.test, len(text) - len(text) // 10)):
        for index in range(len(part)):
            tokens, following, number = part[index]
            at = start + 7 * index
            assert data.decode(tokens) == text[at : at + 7]
            assert data.decode(following) == text[at + 1 : at + 8]
            assert int(number) == index
    assert len(data.train) == (len(text) - len(text) // 10 - 1) // 7


def test_batches_are_read_whole(tmp_path):
    data = load_text("shakespeare", write(tmp_path, VERSE * 20), context=5, train_limit=10, test_limit=2)
    assert (len(data.train), len(data.test)) == (10, 2)
    batches = list(DataLoader(data.train, batch_size=4, collate_fn=TextSet.collate))
    assert [tokens.shape for tokens, _, _ in batches] == [(4, 5), (4, 5), (2, 5)]
    tokens, following, indices = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert torch.equal(tokens.flatten()[1:], following.flatten()[:-1])
    assert (tokens.dtype, indices.tolist()) == (torch.int64, list(range(10)))


def test_the_file_itself_or_any_one_text_file_will_do(tmp_path):
    write(tmp_path, VERSE * 20, "input.txt")
    by_folder, by_file = (load_text("shakespeare", path, context=5) for path in (tmp_path, tmp_path / "input.txt"))
    assert torch.equal(by_folder.train.tokens, by_file.train.tokens)
    write(tmp_path, "other", "second.txt")
    with pytest.raises(DataError, match=r"no shakespeare.txt and 2 other text files\. Fetch it"):
        load_text("shakespeare", tmp_path, context=5)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"caf\xe9", "is not UTF-8: byte 3 is 233"),
        (VERSE.encode() * 9 + b"~", r"the last tenth, has '~', which its training part lacks\. Remove"),
        (b"short", "has 5 characters to train and 0 to test with"),
        (b"-" * 5_057_321, "has the md5 sum .*, not 26c44b40"),
    ],
)
def test_other_texts_are_refused(tmp_path, raw, told):
    (tmp_path / "shakespeare.txt").write_bytes(raw)
    with pytest.raises(DataError, match=told):
        load_text("shakespeare", tmp_path, context=5)


def test_a_missing_text_is_told_with_the_way_to_get_it(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"no shakespeare.txt and no text file\. Fetch it \(evenly data fetch shakesp"):
        load_text("shakespeare", tmp_path, context=5)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no folder data/shakespeare\. Fetch it"):
        load_text("shakespeare", None, context=5)


def test_wrong_arguments_are_refused(tmp_path):
    write(tmp_path, VERSE * 20)
    with pytest.raises(SpecError, match="context=0 was given"):
        load_text("shakespeare", tmp_path, context=0)
    with pytest.raises(SpecError, match=r"text of 'mnist' .* Use load_images"):
        load_text("mnist", tmp_path, context=5)


@pytest.mark.skipif(not REAL.is_dir(), reason=f"The real text is not in {REAL}: evenly data fetch shakespeare.")
def test_the_real_works():
    data = load_text("shakespeare", REAL, context=256)
    assert len(data.vocabulary) == 84
    assert data.decode(data.train[0][0]).startswith("ALL'S WELL THAT ENDS WELL")
