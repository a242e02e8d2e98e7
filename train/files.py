"""Files, read and written so that nothing is lost and every failure is one line. A leaf that any command may import.

Written: under a temporary name, then renamed; a write that fails leaves what stood there before, and no temporary file.
Read: UTF-8 text with or without a byte order mark, JSON, JSON lines; what is wrong is said with its place.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file whole or not at all: inside, write to the yielded path; it becomes ``path`` when the block ends.

    Raises:
        OSError: it cannot be written, or the disk is full; its ``filename`` is ``path``.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary), temporary):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from None
        raise


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """The same for several files at once: inside, fill the yielded folder; then each of its files replaces the one of
    its name in ``folder``, which is made if need be; its other files stay.

    Raises:
        OSError: as :func:`replacing`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".new.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            os.replace(file, folder / file.name)
    except OSError as error:
        place = folder if not error.filename else folder / Path(error.filename).name
        raise OSError(error.errno, error.strerror or str(error), str(place)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text whole or not at all. Half of a surrogate pair, which UTF-8 cannot hold, becomes ``?``."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", "replace"))


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_text(path: Path, what: str = "file") -> str:
    """UTF-8 text; a byte order mark at its beginning is no part of it.

    Args:
        what: the file's role, for the error: «there is no such …».

    Raises:
        FileNotFoundError, ValueError: there is no such file, it is a folder, or not UTF-8.
        OSError: it cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such {what}") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: this is a folder; a {what} is needed") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start}); a {what} is needed") from None


def parse_json(text: str | bytes, where: str) -> Any:
    """A JSON value.

    Args:
        where: file, or file and line, for the error.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or one of its strings holds half of a surrogate pair.
    """
    try:
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{where}: JSON nested too deeply") from None
    if (b"\\u" if isinstance(text, bytes) else "\\u") in text:  # type: ignore[operator]
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(f"{where}: a \\u escape that is half of a surrogate pair is no text") from None
    return value


def read_json(path: Path, what: str = "file") -> Any:
    """The JSON value of a file; raises what :func:`read_text` and :func:`parse_json` do."""
    return parse_json(read_text(path, what), str(path))


def json_object(path: Path, what: str = "file") -> dict[str, Any]:
    """The JSON object of a file; raises what :func:`read_json` does, and ValueError where it is no object."""
    value = read_json(path, what)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is needed, got {type(value).__name__}")
    return value
