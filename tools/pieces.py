"""Cut a large file into pieces, and join them again: for machines to which only so much can be sent at a time.

    python tools/pieces.py cut models/qwen2.5-coder-1.5b/FILE.gguf --out pieces --mb 62
    python tools/pieces.py join pieces --out FILE.gguf [--sha256 HEX]

Pieces are NAME.000, NAME.001, …, and beside them NAME.pieces.json has their number, the file's size and its SHA-256,
which joining checks. Needs Python alone: the machine that joins may have nothing installed. A piece that is missing,
cut short or of another file ends it with one line; nothing is written then. Exit codes: 0 done, 2 bad input.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

if __name__ == "__main__":  # .types/ holds draftsmith/ with a link for each folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".types"))

from draftsmith.common.files import check_file, replacing

BLOCK = 1 << 22


def cut(file: Path, out: Path, size: int) -> list[Path]:
    """Write pieces of ``size`` bytes at most, and their description; returns the pieces."""
    if size < 1:
        raise ValueError("--mb: must be above 0")
    digest, pieces, total = hashlib.sha256(), list[Path](), 0
    out.mkdir(parents=True, exist_ok=True)
    with file.open("rb") as source:
        while block := source.read(size):
            digest.update(block)
            total += len(block)
            pieces.append(out / f"{file.name}.{len(pieces):03d}")
            pieces[-1].write_bytes(block)
    facts = {"name": file.name, "pieces": len(pieces), "bytes": total, "sha256": digest.hexdigest()}
    (out / f"{file.name}.pieces.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    return pieces


def join(folder: Path, out: Path, sha256: str | None = None) -> None:
    """Join the pieces of the one file in ``folder``. ``sha256``: of the file, in place of what the description says.
    Raises ValueError: a piece is missing, or what is joined is another file; FileNotFoundError: no description."""
    described = sorted(folder.glob("*.pieces.json"))
    if len(described) != 1:
        raise FileNotFoundError(f"{folder}: {len(described)} files *.pieces.json; one is needed")
    try:
        facts = json.loads(described[0].read_text(encoding="utf-8"))
        name, count, wanted = facts["name"], range(facts["pieces"]), sha256 or facts["sha256"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{described[0]}: not what cut wrote; copy it again, or cut the file again") from None
    pieces = [folder / f"{name}.{number:03d}" for number in count]
    if missing := [piece.name for piece in pieces if not piece.is_file()]:
        raise ValueError(f"{folder}: {len(missing)} of {len(pieces)} pieces are missing: {', '.join(missing[:4])}")
    digest = hashlib.sha256()
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as unfinished:
        with unfinished.open("wb") as target:
            for piece in pieces:
                with piece.open("rb") as source:
                    while block := source.read(BLOCK):
                        digest.update(block)
                        target.write(block)
        if digest.hexdigest() != wanted:
            raise ValueError(f"{out}: what was joined is another file (SHA-256 {digest.hexdigest()}); it was not kept")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("cut", "join"), help="cut: a file into pieces; join: pieces into the file")
    parser.add_argument("path", type=Path, help="the file to cut, or the folder of the pieces")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pieces, or the file")
    parser.add_argument("--mb", type=float, default=62, help="cut: of a piece, at most, in 10^6 bytes (default 62)")
    parser.add_argument("--sha256", help="join: of the file; what cut wrote if left out")
    args = parser.parse_args()
    try:
        if args.command == "cut":
            pieces = cut(args.path, args.out, int(args.mb * 1e6))
            print(f"{args.out}: {len(pieces)} pieces of {args.path}")
        else:
            check_file("--out", args.out, args.out.suffix)
            join(args.path, args.out, args.sha256)
            print(f"{args.out}: joined")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
