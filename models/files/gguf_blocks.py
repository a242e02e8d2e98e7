"""The weights of a GGUF file, dequantised straight into a safetensors file: a few rows at a time, by several processes.

Every tensor's place in the safetensors file is known beforehand, so that each process reads rows of quantised blocks
and writes them where they belong; nobody holds a whole tensor. The values are those of the package ``gguf`` in float32,
rounded once to the dtype of the copy. Each process runs this file as a script (:func:`_work`); so it imports neither
torch nor anything of ours, and a program that imports draftsmith needs no ``if __name__ == "__main__"``.
"""

import contextlib
import errno
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader

_PIECE = 1 << 18  # weights that are dequantised at a time; what it takes stays in a core's cache
_WORTH = 16 << 20  # weights for which another process is started
_MOST = 32  # processes; beyond it the disk is the limit
_RECORD = 160  # bytes of a piece's line
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class Piece(NamedTuple):
    """Some rows of a tensor.

    kind: of the blocks, a GGMLQuantizationType.
    source, target: offsets of the first row in the two files, bytes.
    rows, columns: the shape.
    half: half the rows of an attention head whose rotary pairs the file has side by side (Llama's queries and keys):
        row 2i is row i of the model and row 2i + 1 is row half + i; 0: the rows stay where they are.
    """

    kind: int
    source: int
    target: int
    rows: int
    columns: int
    half: int


def plan(
    reader: "GGUFReader", names: Mapping[str, str], heads: Mapping[str, int], dtype: str
) -> tuple[bytes, list[Piece]] | None:
    """The header of the safetensors file, and the pieces to write after it; None: a tensor's blocks are of a kind that
    cannot be dequantised here.
    ``names``: name in the GGUF file → in the safetensors file.
    ``heads``: name in the GGUF file → number of heads whose rows are permuted.
    ``dtype``: torch's name of the copy's dtype."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # an optional package

    size = 2 if dtype.endswith("16") else 4
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    found, at = [tensor for tensor in reader.tensors if tensor.name in names], 0
    for tensor in found:
        shape = [int(length) for length in reversed(tensor.shape)]
        end = at + size * math.prod(shape)
        header[names[tensor.name]] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin, pieces = 8 + len(text), list[Piece]()
    for tensor in found:
        entry = header[names[tensor.name]]
        rows, columns = entry["shape"][0], math.prod(entry["shape"][1:])
        if len(entry["shape"]) == 1 and tensor.name not in heads:
            rows, columns = 1, rows
        kind = GGMLQuantizationType(tensor.tensor_type)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if columns % block or not _known(kind):
            return None
        half = rows // heads[tensor.name] // 2 if tensor.name in heads else 0
        unit = 2 * half or 1  # rows that stay together
        step = max(_PIECE // columns // unit, 1) * unit
        source, target = int(tensor.data_offset), begin + entry["data_offsets"][0]
        row_bytes = columns // block * block_bytes
        for row in range(0, rows, step):
            places = source + row * row_bytes, target + row * columns * size
            pieces.append(Piece(int(kind), *places, min(step, rows - row), columns, half))
    return len(text).to_bytes(8, "little") + text, pieces


def _known(kind: "GGMLQuantizationType") -> bool:
    """Whether the package dequantises blocks of this kind."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def write(
    file: Path,
    copy: Path,
    header: bytes,
    pieces: Sequence[Piece],
    dtype: str,
    cores: int,
    done: Callable[[int], object],
) -> None:
    """Write the safetensors file.
    ``cores``: processes at most; as few as the weights are worth, and none beside this one for a small model.
    ``done``: called with the number of weights written so far.
    Raises OSError: the disk is full, or a file cannot be read or written. ValueError: a process was killed."""
    weights = sum(piece.rows * piece.columns for piece in pieces)
    size = weights * (2 if dtype.endswith("16") else 4)
    with copy.open("wb") as target:
        target.write(header)
        target.truncate(len(header) + size)
    count = min(cores, weights // _WORTH, _MOST)
    written = 0
    for piece in _in_processes(file, copy, pieces, dtype, count) if count > 1 else _here(file, copy, pieces, dtype):
        written += piece
        done(written)
    if written != weights:
        raise ValueError(f"{file}: a process that converts it was killed, perhaps for want of memory; run it again")


def _here(file: Path, copy: Path, pieces: Sequence[Piece], dtype: str) -> Iterator[int]:
    with file.open("rb", buffering=0) as source, copy.open("r+b", buffering=0) as target:
        for piece in pieces:
            _convert(source, target, piece, dtype)
            yield piece.rows * piece.columns


def _in_processes(file: Path, copy: Path, pieces: Sequence[Piece], dtype: str, count: int) -> Iterator[int]:
    """Numbers of weights, as processes write them.

    All of them read from one open file, whose offset they share: each takes the next piece when it has written one.
    They write a line for each into one pipe, which ends when they have."""
    call = [sys.executable, str(Path(__file__).resolve()), str(file), str(copy), dtype]
    # glibc keeps the memory of one piece for the next, instead of asking the system for pages anew.
    kept = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 30))
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **kept}
    with tempfile.TemporaryFile() as tasks, contextlib.ExitStack() as ends:
        for piece in pieces:
            tasks.write(json.dumps(piece).encode().ljust(_RECORD - 1) + b"\n")
        tasks.flush()
        os.lseek(tasks.fileno(), 0, os.SEEK_SET)
        out, into = os.pipe()
        lines = ends.enter_context(os.fdopen(out, encoding="utf-8"))
        with os.fdopen(into, "wb") as results:
            for _ in range(count):
                process = subprocess.Popen(call, stdin=tasks, stdout=results, env=environment)
                ends.callback(process.wait)
                ends.callback(process.kill)
        for line in lines:
            said = json.loads(line)
            if isinstance(said, list):
                raise OSError(*said)
            yield said


def _work(file: str, copy: str, dtype: str) -> None:
    """Convert pieces until none is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the process that started this one ends it
    try:
        with open(file, "rb", buffering=0) as source, open(copy, "r+b", buffering=0) as target:
            while record := os.read(0, _RECORD):
                piece = Piece(*json.loads(record))
                _convert(source, target, piece, dtype)
                os.write(1, b"%d\n" % (piece.rows * piece.columns))
    except BrokenPipeError:  # the process that started this one is gone
        pass
    except OSError as error:
        place = copy if error.filename is None else error.filename
        os.write(1, json.dumps([error.errno, error.strerror, place]).encode() + b"\n")


def _convert(source: Any, target: Any, piece: Piece, dtype: str) -> None:
    """Dequantise a piece, and write it to its place."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    block, block_bytes = GGML_QUANT_SIZES[kind := GGMLQuantizationType(piece.kind)]
    raw = np.empty((piece.rows, piece.columns // block * block_bytes), np.uint8)
    source.seek(piece.source)
    _whole(source.readinto, raw.data.cast("B"))
    values = dequantize(raw, kind).reshape(piece.rows, piece.columns)
    rounded = _rounded(np.ascontiguousarray(values, np.float32), dtype)
    if piece.half:
        pairs = rounded.reshape(-1, piece.half, 2, piece.columns)
        rounded = np.ascontiguousarray(pairs.swapaxes(1, 2))
    target.seek(piece.target)
    _whole(target.write, rounded.data.cast("B"))


def _whole(transfer: Callable[[memoryview], int | None], view: memoryview) -> None:
    """Read or write all of a buffer; the system may take less at a time."""
    while len(view):
        moved = transfer(view)
        if not moved:
            raise OSError(errno.EIO, "the file ends too early")
        view = view[moved:]


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values in another dtype, to the nearest, ties to even; bfloat16 as its bits."""
    if dtype != "bfloat16":
        return values.astype(dtype, copy=False)
    bits = values.view(np.uint32)
    upper = (bits >> 16) & 1
    upper += bits
    upper += 0x7FFF
    upper >>= 16
    rounded = upper.astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded


if __name__ == "__main__":
    _work(*sys.argv[1:])
