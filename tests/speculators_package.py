"""An EAGLE-3 or DFlash drafter, exported and loaded by the package speculators: its logits beside our own.

    python -m venv VENV && VENV/bin/pip install speculators
    python tests/speculators_package.py DRAFTER --python VENV/bin/python

DRAFTER is a folder that train/eagle.py or train/dflash.py wrote, for example runs/tiny-eagle3. It is exported as
models/export.py does it (--to speculators), with the target's folder as verifier. The environment is one of its own,
because speculators (0.9.0: Python 3.11, transformers up to 5.19, torch up to 2.14) excludes versions that draftsmith
needs; where its torchvision does not belong to its torch, uninstall torchvision and torchaudio, which neither uses
here. Nothing is installed or downloaded by this script.

The package's own class loads the folder and runs its training forward: all positions of a random text with random
features, then further tokens of a draft, each step on the last one's state; of DFlash, a block behind every position.
Ours is Eagle.unroll or DFlash.draft on the same text. For EAGLE-3 the package counts positions from 1 and we from 0,
which rotary positions do not distinguish. Both compute in float32 on the CPU.

Exit codes: 0 equal, 1 not equal, 2 wrong usage or bad input. Equal means: every tensor of the folder is in the loaded
model as it was written, both draft the same ids, and no logit differs by more than 1e-4 times the largest one.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TOLERANCE = 1e-4  # of logits, times the largest one


# ---- the package, in its own environment


def run_package(folder: Path, attention: str, steps: int) -> None:
    """From ``inputs.safetensors`` beside the folder to ``outputs.safetensors`` there, logits ``step.N [T, S]`` and the
    ids of the S tokens; what was loaded, as a line of JSON on stdout."""
    answer, sys.stdout = sys.stdout, sys.stderr
    from importlib.metadata import version

    # This package exists in that environment alone.
    from speculators import SpeculatorModel, SpeculatorModelConfig  # pyright: ignore[reportMissingImports]

    config = SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = attention
    model = SpeculatorModel.from_pretrained(str(folder), config=config, dtype=torch.float32).eval()
    loaded, stored = model.state_dict(), load_file(folder / "model.safetensors")
    float32 = {name: w.float() if w.is_floating_point() else w for name, w in stored.items()}
    lost = [name for name, w in float32.items() if name not in loaded or not torch.equal(loaded[name], w)]
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0].contiguous()))
    inputs = load_file(folder.parent / "inputs.safetensors")
    tokens, documents = inputs["tokens"][None, 1:], torch.zeros(1, len(inputs["features"]), dtype=torch.long)
    with torch.no_grad():
        if model.config.speculators_model_type == "dflash":
            begins = torch.ones_like(tokens)
            begins[:, 0] = 0  # a block has a feature before it; none begins at the last places
            last, blocks = inputs["features"][None, :, : model.hidden_size], len(tokens[0]) - 1 - model.block_size
            model._backbone_forward(inputs["features"][None], tokens, begins, last, documents, max_anchors=blocks)
        else:
            model(inputs["features"][None], tokens, documents, ttt_steps=steps)
    offsets = torch.zeros(model.draft_vocab_size, dtype=torch.long) if model.d2t is None else model.d2t
    ids = torch.arange(model.draft_vocab_size) + offsets
    outputs = {"ids": ids, **{f"step.{i}": each for i, each in enumerate(logits)}}
    save_file(outputs, folder.parent / "outputs.safetensors")
    versions = {name: version(name) for name in ("speculators", "transformers", "torch")}
    found = {
        "class": type(model).__name__,
        "versions": versions,
        "not_loaded": sorted(lost),
        "layers": list(getattr(model.config, "eagle_aux_hidden_state_layer_ids", None) or model.target_layer_ids),
    }
    print(json.dumps(found), file=answer)


# ---- the comparison


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Export, load by the package, and compare; returns what is printed.

    Raises:
        ValueError: there is no such interpreter, the drafter cannot be exported, or the package failed.
    """
    from draftsmith.models.dflash import DFlash
    from draftsmith.models.files.locate import locate
    from draftsmith.models.serving.source import open_source
    from draftsmith.models.serving.to_servers import export

    if shutil.which(args.python) is None:
        raise ValueError(f"--python {args.python}: there is no such interpreter")
    source = open_source(args.drafter, "speculators", args.target)
    drafter, target = source.drafter, source.loaded()
    c, random = drafter.config, torch.Generator().manual_seed(args.seed)
    features = torch.randn(args.length, c.hidden_size * (1 + len(c.captured_layers)), generator=random)
    tokens = torch.randint(c.vocab_size, (args.length + 1,), generator=random)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "exported"
        read_back = export(source, "speculators", folder, str(locate(source.target_name).path.resolve()))
        captured = features[:, c.hidden_size :].contiguous()
        save_file({"features": captured, "tokens": tokens}, folder.parent / "inputs.safetensors")
        worker = [str(Path(__file__).resolve()), "--worker", str(folder), args.attention, str(args.steps)]
        done = subprocess.run(
            [str(Path(args.python).absolute()), *worker], stdout=subprocess.PIPE, text=True, check=False, cwd=temporary
        )
        if done.returncode:
            raise ValueError(f"the package failed (exit code {done.returncode}); see its messages above")
        found, theirs = json.loads(done.stdout), load_file(folder.parent / "outputs.safetensors")

    embed, head = target.model.get_input_embeddings(), drafter.draft_head(target.lm_head).float()
    pairs = list[tuple[torch.Tensor, torch.Tensor]]()  # ours and theirs, by token of the draft
    with torch.no_grad():
        if isinstance(drafter, DFlash):
            anchors = torch.arange(1, args.length - c.block_size)
            out = drafter.draft(features[None], embed, tokens[None, 1:], anchors[None])[0]
            blocks = theirs["step.0"].unflatten(0, (-1, c.block_size))
            pairs = [(head(out[:, k]), blocks[:, k + 1]) for k in range(c.num_draft_heads)]
        else:
            # Ours pairs position t with token t + 1; features of the last token are there for the shape alone.
            padded = torch.cat((features, features[:1]))[None]
            for step, out in enumerate(drafter.unroll(padded, embed, tokens[None], args.steps)):
                count = args.length - step  # positions whose draft lies in the text
                pairs.append((head(out[0, :count]), theirs[f"step.{step}"][:count]))
    apart = [float((ours - their).abs().max()) for ours, their in pairs]
    largest = max(float(ours.abs().max()) for ours, _ in pairs)
    same_ids = torch.equal(theirs["ids"], drafter.tokens(torch.arange(c.outputs)).long())
    equal = same_ids and not found["not_loaded"] and max(apart) <= TOLERANCE * largest
    return {
        **found,
        "tensors_in_float32_from": str(source.dtype).removeprefix("torch."),
        "attention": args.attention,
        "positions": args.length,
        "draft_vocab_size": c.outputs,
        "vocab_size": c.vocab_size,
        "same_ids": same_ids,
        "largest_logit": largest,
        "max_difference_by_step": apart,
        "max_difference_read_back": read_back,
        "equal": equal and list(c.captured_layers) == found["layers"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", metavar="DRAFTER", help="an EAGLE-3 or DFlash drafter's folder or Hub id")
    parser.add_argument("--target", help="its target, if it lies elsewhere than the drafter says")
    parser.add_argument("--python", required=True, help="the interpreter of an environment with speculators")
    parser.add_argument(
        "--attention", default="eager", choices=("eager", "simple_flex_attention"), help="the package's"
    )
    parser.add_argument("--length", type=int, default=64, help="positions of the text (default 64)")
    parser.add_argument("--steps", type=int, default=4, help="tokens of EAGLE-3's draft (default 4)")
    parser.add_argument("--seed", type=int, default=0)
    found = compare(parser.parse_args())
    print(json.dumps(found, indent=1))
    if not found["equal"]:
        raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:  # that environment has no draftsmith
        run_package(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        from draftsmith.common.command import run_command

        run_command(main)
