"""Reading and writing of files: a failed write loses nothing, every error is one line.

Files are written under a temporary name and then renamed; a write that fails leaves the earlier file, and no temporary
one. Text is UTF-8 with or without a byte order mark; errors name the place.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SLICE = re.compile(r"train(?:\[(-?[0-9]{1,12}%?)?:(-?[0-9]{1,12}%?)?\])?")  # of a file's rows, as in ``datasets``
_outputs = set[Path]()  # files that the user named for results, by check_file
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def _named(path: Path, error: BaseException) -> BaseException:
    """The error of a failed write, with the name of the file instead of the temporary one's."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror or str(error), str(path))
    number = re.search(r"\(os error (\d+)\)", str(error))  # of a library that is written in Rust
    if isinstance(error, Exception) and number:
        return OSError(int(number[1]), os.strerror(int(number[1])), str(path))
    return error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file whole or not at all: inside, write to the yielded path; it becomes ``path`` when the block ends.
    Raises OSError: it cannot be written, or the disk is full; its ``filename`` is ``path``."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        os.replace(temporary, path)
        if path.absolute() in _outputs:
            with contextlib.suppress(OSError):
                _record(path).parent.mkdir(parents=True, exist_ok=True)
                _record(path).write_text(_state(path))
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename not in (None, str(temporary), temporary):
            raise  # of another file, which the block read
        raise _named(path, error) from None


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Write several files, all or none: inside, write to the yielded folder; afterwards its files replace those of the
    same name in ``folder``, which is created if missing and keeps its other files.
    Raises OSError: as :func:`replacing`."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".new.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            os.replace(file, folder / file.name)
    except Exception as error:
        name = getattr(error, "filename", None)
        if name and Path(name) != temporary and temporary not in Path(name).parents:
            raise  # of another file, which the block read
        raise _named(folder / Path(name).relative_to(temporary) if name else folder, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def append(path: Path, line: str, sync: bool = False) -> None:
    """Append a line of UTF-8 text; a write that fails leaves the file as it was.
    ``sync``: the line is on the disk when this returns.
    Raises OSError: it cannot be written, or the disk is full; its ``filename`` is ``path``."""
    unwritten = memoryview((line + "\n").encode("utf-8", "replace"))
    try:
        with path.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                while unwritten:  # a write may take less than it was given
                    unwritten = unwritten[file.write(unwritten) :]
                if sync:
                    os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(before)
                raise
    except OSError as error:
        raise _named(path, error) from None


def cache_folder() -> Path:
    """The folder of files that can be computed again: ``$DRAFTSMITH_CACHE``, else ``~/.cache/draftsmith``."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith")


def cached_about(kind: str, path: Path) -> Path:
    """The file of the cache that holds what is known of a path; its folder may be missing."""
    return cache_folder() / kind / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock file, created if missing, for this process alone; it is released when the process ends or is killed.
    ``wait``: until the process that holds it releases it.
    Raises filelock.Timeout: another process holds it, and ``wait`` is False. ValueError: the file system has no locks.
    OSError: the lock file cannot be written."""
    from filelock import FileLock

    try:
        lock = FileLock(path).acquire(blocking=wait)
    except (NotImplementedError, OSError) as error:  # the first is what older versions raise
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise
        raise ValueError(
            f"{path.parent}: its file system cannot lock files, so that two commands could write here at once; choose "
            "a folder on another one"
        ) from None
    with lock:
        yield


def check_folder(option: str, folder: Path | None, own: Mapping[str, str] | None = None) -> None:
    """Make a folder for results and try to write there; None is skipped.
    ``option``: of the command line, for the error.
    ``own``: file that will be written there → a field that it has where this command wrote it. Such a file with another
    content is somebody else's.
    Raises ValueError: it is the current folder, it cannot be made, nothing can be written there, or somebody else's
    file would be overwritten."""
    if folder is not None:
        check_own(option, folder, own or {})
        _check_writable(option, folder)


def check_own(option: str, folder: Path, own: Mapping[str, str]) -> None:
    """The part of :func:`check_folder` that makes nothing.
    Raises ValueError: it is the current folder, or somebody else's file would be overwritten."""
    if folder == Path():
        raise ValueError(f"{option} '{folder}': is the current folder; name one for what is written")
    for name, field in own.items():
        if (folder / name).exists() and field not in object_or_empty(folder / name):
            raise ValueError(
                f"{option} {folder}: there is a {name} that this command did not write, and it would be overwritten; "
                "name another folder"
            )


def check_whole(option: str, folder: Path, field: str) -> None:
    """Check a folder that a command writes as a whole: a new one, an empty one, or one that it wrote before, whose
    provenance.json has a ``field``.
    Raises ValueError: it holds something else."""
    check_own(option, folder, {"provenance.json": field})
    if folder.is_dir() and not (folder / "provenance.json").exists():
        there = sorted(path.name for path in folder.iterdir())
        if there:
            shown = ", ".join(there[:3]) + (", …" if len(there) > 3 else "")
            raise ValueError(f"{option} {folder}: it holds other things ({shown}); name another folder")


def check_file(option: str, file: Path | None, *suffixes: str, beside: str = "") -> None:
    """Make the folder of a file for results and try to write there; None is skipped.
    ``suffixes``: that it may have, so that no file of another kind is replaced; ``.json`` if left out.
    ``beside``: suffix of a second file that is written there.
    Raises ValueError: it is a folder, has another suffix, nothing can be written there, or it is a file with content
    that draftsmith did not write on this machine, or that was changed since."""
    if file is None:
        return
    suffixes = suffixes or (".json",)
    if file.is_dir():
        raise ValueError(f"{option} '{file}': is a folder; name the {suffixes[0]} file to write")
    if file.suffix not in suffixes:
        raise ValueError(f"{option} {file}: name a {' or '.join(suffixes)} file")
    for each in (file, *([file.with_suffix(beside)] if beside else [])):
        ours = _record(each)
        if each.exists() and each.stat().st_size and not (ours.exists() and ours.read_text() == _state(each)):
            raise ValueError(
                f"{option} {each}: there is such a file, which draftsmith did not write here or which was changed "
                "since; name another one, or delete it"
            )
        _outputs.add(each.absolute())
    _check_writable(option, file.parent)


def _record(file: Path) -> Path:
    """Where it is kept in what state draftsmith left a file."""
    return cached_about("written", file)


def _state(file: Path) -> str:
    status = file.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _check_writable(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option} {folder}: cannot write here ({error.strerror}); choose another folder") from None


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text whole or not at all. An unpaired surrogate, which UTF-8 cannot hold, becomes ``?``."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", "replace"))


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_text(path: Path, what: str = "file") -> str:
    """UTF-8 text; a byte order mark at its beginning is no part of it.
    ``what``: the kind of file, for the error: «there is no such …».
    Raises FileNotFoundError, ValueError: there is no such file, it is a folder, or not UTF-8. OSError: it cannot be
    read."""
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
    ``where``: file, or file and line, for the error.
    Raises ValueError: it is no JSON, is nested too deeply, or one of its strings holds half of a surrogate pair."""
    try:
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text (byte {error.start})") from None
    except ValueError as error:  # a JSONDecodeError, or a number of thousands of digits
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


def object_or_empty(path: Path) -> dict[str, Any]:
    """:func:`json_object`; an empty one where there is none that can be read."""
    try:
        return json_object(path)
    except (OSError, ValueError):
        return {}
