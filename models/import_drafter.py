"""Import a drafter that was published for another program: EAGLE-1, EAGLE-3, DFlash or Medusa, a folder or Hub id.

    python models/import_drafter.py USER/EAGLE3-NAME --target T --out runs/imported
    python models/import_drafter.py USER/MEDUSA-NAME --target T --out runs/imported --allow-pickle

The folder written is a drafter like those that training writes: decode.py, calibrate.py, export.py and `init_from` of a
recipe take it. Formats are those of EAGLE, SGLang, vLLM, ModelOpt, speculators, z-lab, Medusa and TGI
(models/serving/layouts.py). A tensor or a field that is not known here is refused, and so is a drafter of a target of
another width or vocabulary.
What target it was trained for is not stored in such a folder: what whole trees of it accept (decode.py --all-nodes)
shows whether --target is the one.
"""

# ruff: noqa: E402

import argparse
from pathlib import Path

from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.common.files import check_whole, json_object
from draftsmith.models.files.locate import known_folder


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("published", metavar="PUBLISHED", help="the folder or Hub id of a published drafter")
    parser.add_argument("--target", required=True, help="the folder or Hub id of its target")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the drafter's folder to write")
    parser.add_argument("--revision", help="branch, tag or commit of the Hub id PUBLISHED")
    parser.add_argument(
        "--allow-pickle", action="store_true", help="read pickled weights (.bin, .pt), as tensors only, if need be"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the target")
    return parser


def check(args: argparse.Namespace) -> None:
    """What can be known to be wrong before torch is imported. Raises FileNotFoundError, ValueError: one line."""
    out: Path = args.out
    check_whole("--out", out, "imported_from")
    known_folder(args.target)
    folder = known_folder(args.published)
    if folder is not None and (folder / "config.json").exists():
        if "drafter_type" in json_object(folder / "config.json"):
            raise ValueError(f"{folder}: already a drafter of draftsmith; there is nothing to import")
        if args.revision:
            raise ValueError(f"--revision {args.revision}: {folder} is a folder on this machine; leave it out")


if __name__ == "__main__":
    before_imports(parser(), check)

import shlex
import sys

from draftsmith.common.files import check_folder
from draftsmith.models.files.locate import published_folder
from draftsmith.models.serving.from_published import chain_of, load_stored, read_published, write_imported


def main() -> None:
    args = parser().parse_args()
    check(args)
    folder = published_folder(args.published, args.revision, args.allow_pickle)
    target = load_stored(args.target, trust_remote_code=args.trust_remote_code)
    imported = read_published(folder, target, args.allow_pickle)
    check_folder("--out", args.out)
    command = f"python models/import_drafter.py {shlex.join(sys.argv[1:])}"
    write_imported(args.out, imported, target, folder, args.published, args.revision, command)
    for note in imported.notes:
        print(note)
    size = sum(weight.numel() for weight in imported.weights.values()) / 1e6
    chain = chain_of(imported)
    print(
        f"{args.out}: {imported.drafter_type}, {size:,.2f} M parameters; it drafts a chain of {chain} until calibrated"
    )
    own = shlex.quote(str(args.out))
    print(
        f"does it fit this target? python inference/decode.py {own} --prompts FILE.jsonl --all-nodes (τ well above 1)"
    )
    print(f"next: python inference/calibrate.py {own} --prompts FILE.jsonl")


if __name__ == "__main__":
    run_command(main)
