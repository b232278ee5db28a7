"""The text file of a data set. No torch."""

from pathlib import Path

from evenly.errors import DataError
from evenly.recipes.data.catalogue import DatasetInfo
from evenly.recipes.data.readers.idx import Verify


def find_text(info: DatasetInfo, folder: Path) -> Path:
    """Returns the file with the text: `folder` itself if it is a file, else the one that is named, or the only one."""
    if folder.is_file():
        return folder
    named = folder / info.files[0][0]
    if named.is_file():
        return named
    texts = sorted(folder.glob("*.txt"))
    if len(texts) == 1:
        return texts[0]
    has = f"{len(texts)} other text files" if texts else "no text file"
    raise DataError(f"{info.title} was asked for, but {folder} has no {named.name} and {has}. {info.get}")


def read_text(info: DatasetInfo, path: Path, *, verify: Verify) -> str:
    """Returns the text of a file; raises `DataError` if it is empty or not UTF-8."""
    try:
        content = path.read_bytes()
        verify(path, content)
        text = content.decode()
    except OSError as error:
        raise DataError(f"the text {path} cannot be read: {error.strerror}. {info.get}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"the text {path} is not UTF-8: byte {error.start} is {error.object[error.start]}. Convert it: "
            "iconv -f latin1 -t utf8."
        ) from None
    if not text.strip():
        raise DataError(f"the text {path} is empty. {info.get}")
    return text
