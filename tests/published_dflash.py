"""The same DFlash drafter by our engine and by the published code: equal tokens and equal accepted lengths.

    python tests/published_dflash.py DRAFTER --prompts P.jsonl --checkout FOLDER

DRAFTER is a folder that train/dflash.py wrote, FOLDER a checkout of github.com/z-lab/dflash (compared at 44947fb),
which runs in this environment. The drafter is exported as models/export.py does it (--to sglang, the published layout)
and loaded by the published class. Both decode the prompts greedily in float32 on the CPU, by chains of a block. Nothing
of the published code is copied. It is given two things in place of its own: a clock that needs no GPU, and a cache
whose ``crop`` takes a length, as in older versions of transformers. It drafts from the target's whole vocabulary: of a
drafter with a draft vocabulary, ours does so here, too.

Exit codes: 0 equal, 1 not equal, 2 wrong usage or bad input. Equal means: the same tokens, and as many of them in every
step but each answer's last, which the limit may cut.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import DynamicCache

from draftsmith.benchmarks.serve_check import of_all_tokens
from draftsmith.common.command import CommandLine, run_command
from draftsmith.inference.commands.prompts import encode_prompts, read_prompts
from draftsmith.inference.drafters.dflash import DFlashDrafter
from draftsmith.inference.drafters.load import read_named
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.verify.tree import chain
from draftsmith.models.artifact import write_drafter
from draftsmith.models.dflash import DFlash
from draftsmith.models.serving.source import open_source
from draftsmith.models.serving.to_servers import export
from draftsmith.models.target import load_target


class Cache(DynamicCache):
    """A cache that is cropped to a length, not by a number of tokens."""

    def crop(self, max_length: int) -> None:
        if surplus := self.get_seq_length() - max_length:
            super().crop(-surplus)


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("drafter", metavar="DRAFTER", help="a DFlash drafter's folder")
    parser.add_argument("--target", help="its target, if it lies elsewhere than the drafter says")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--count", type=int, default=8, help="only the first prompts (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of the published code")
    args = parser.parse_args()
    if not (args.checkout / "dflash/model.py").is_file():
        raise FileNotFoundError(f"--checkout {args.checkout}: no dflash/model.py")
    sys.path.insert(0, str(args.checkout))
    from dflash import model as published  # pyright: ignore[reportMissingImports]

    folder, config, weights = read_named(args.drafter, args.target)
    if config["drafter_type"] != "dflash":
        raise ValueError(f"{args.drafter}: its drafter_type is {config['drafter_type']}; this compares DFlash")
    name = args.target or config["target"]["name_or_path"]
    target = load_target(name, device="cpu", dtype="float32")
    drafter = of_all_tokens(DFlash.from_artifact(config, weights, str(folder)))
    prompts = encode_prompts(read_prompts(args.prompts), target)[: args.count]
    ours = SpeculativeDecoder(target, DFlashDrafter(drafter, chain(drafter.config.num_draft_heads), target)).generate(
        prompts, args.max_new_tokens, batch_size=1
    )
    with tempfile.TemporaryDirectory() as temporary:
        whole = {name: weight.clone() for name, weight in drafter.state_dict().items()}  # of tied norms, too
        write_drafter(Path(temporary) / "mine", "dflash", drafter.config.to_dict(), whole, target, {})
        export(open_source(str(Path(temporary) / "mine"), "sglang"), "sglang", Path(temporary) / "theirs")
        theirs = published.DFlashDraftModel.from_pretrained(Path(temporary) / "theirs", dtype=torch.float32).eval()
    published._cuda_time, published.DynamicCache = time.perf_counter, Cache
    stops = sorted(target.stop_ids)
    same, steps, lengths = 0, 0, [0, 0]
    with target.attention("sdpa"):
        for prompt, mine in zip(prompts, ours, strict=True):
            found = published.dflash_generate(
                theirs, target.model, torch.tensor([prompt]), args.max_new_tokens, stops, 0.0, return_stats=True
            )
            same += found.output_ids[0, len(prompt) :].tolist() == mine.tokens
            steps += found.acceptance_lengths[: len(mine.accepted)][:-1] == mine.accepted[:-1]
            lengths = [lengths[0] + sum(mine.accepted[:-1]), lengths[1] + len(mine.accepted[:-1])]
    counts = {"prompts": len(prompts), "identical_answers": same, "answers_with_equal_steps": steps}
    print(json.dumps(counts | {"mean_accepted_length": lengths[0] / max(1, lengths[1])}, indent=1))
    if min(same, steps) < len(prompts):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
