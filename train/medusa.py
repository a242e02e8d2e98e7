"""Train Medusa heads on a target (arXiv 2401.10774 §2.2).

    accelerate launch train/medusa.py recipes/tiny-medusa.yaml [section.field=value ...] [--tiny] [--resume | --restart]
    accelerate launch train/medusa.py recipes/tiny-medusa2.yaml

    Medusa-1   the target is frozen:     L_heads = Σ_k 0.8^k · CE(head_k(h_t), x_{t+k+1}),  h_t its last hidden state
    Medusa-2   then both train together: L_LM + λ0 · L_heads, the target by LoRA (the recipe's ``joint``)

The heads train on the target's own continuations, and the checkpoint with the highest simulated τ on held-out ones
is exported. Then: inference/calibrate.py, inference/decode.py.
"""

import copy
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

from draftsmith.common.command import before_imports, run_command, training_parser

PARSER = training_parser(
    __doc__, "recipes/tiny-medusa.yaml", "optim.lr=1e-3", "two steps on a small random target and bundled samples"
)
if __name__ == "__main__":
    before_imports(PARSER)

import torch
from accelerate import Accelerator, PartialState
from pydantic import Field, model_validator
from torch import Tensor, nn

from draftsmith.common.files import json_object, locked
from draftsmith.common.progress import ProgressBar
from draftsmith.common.recipe import Section, read_recipe, write_recipe
from draftsmith.common.sections import Layers, Name, Recipe, Source, Stage, Target
from draftsmith.data import packing, sources
from draftsmith.data.packing import Rows, Sample, Tokenized
from draftsmith.data.prompts import prompts
from draftsmith.data.streaming import StreamedRows
from draftsmith.data.tokenized import read_template, tokenized
from draftsmith.inference.answers import answer
from draftsmith.inference.calibrate import best_tree, head_ranks, simulate
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine import SpeculativeDecoder
from draftsmith.inference.tree import Topology, chain
from draftsmith.models.adapter import FOLDER as ADAPTER
from draftsmith.models.adapter import add_lora, merge_adapter, write_adapter
from draftsmith.models.artifact import (
    check_target,
    provenance,
    push,
    read_drafter,
    read_json,
    write_drafter,
    write_json,
    write_model,
)
from draftsmith.models.medusa import MedusaConfig, MedusaHeads
from draftsmith.models.stored import fingerprint, resolve_folder
from draftsmith.models.target import Target as LoadedTarget
from draftsmith.models.target import load_target
from draftsmith.train import checkpoint, dry_run, folders, loop, sharded
from draftsmith.train.expect import training_seconds
from draftsmith.train.features import hidden_states
from draftsmith.train.medusa_loss import Joint, Medusa1, Medusa2
from draftsmith.train.tiny import tiny, write_target
from draftsmith.train.track import Trackers

HELD_OUT = 256  # rows of each validation source that are kept
SIMULATED_NODES = 16  # size of the tree whose τ chooses the best checkpoint
DECODED_TOKENS = 64  # for each prompt of evaluate.decode


class Heads(Section):
    num_draft_heads: Layers = 5
    num_layers: Layers = 1
    projection: Literal["own", "shared"] = "own"


class MedusaRecipe(Recipe, Stage):
    target: Target
    drafter: Heads
    init_from: Name | None = Field(default=None, description="a drafter of the same target whose heads to begin with")
    joint: Joint | None = Field(default=None, description="Medusa-2: a second stage in which the target trains too")
    cache_hidden: Literal["none", "memory", "disk"] = Field(
        default="none",
        description="run the frozen target once over the rows and keep its hidden states, in memory or in the run's "
        "folder; how much room that takes is said before",
    )

    @model_validator(mode="after")
    def _answers(self) -> "MedusaRecipe":
        if self.optim.name != "adamw":
            raise ValueError(
                f"optim.name={self.optim.name}: Muon is for matrices, and the heads are stacks of them; use adamw"
            )
        if self.precision.gradient_checkpointing and not self.joint:
            raise ValueError("precision.gradient_checkpointing: a frozen target keeps no activations; leave it off")
        if self.joint and self.target.quantize != "none":
            raise ValueError(f"target.quantize={self.target.quantize}: joint training changes the weights; use none")
        if self.joint and "lm_head" in self.joint.lora.modules and self.drafter.projection == "shared":
            raise ValueError(
                "joint.lora.modules: lm_head would move the matrix that all heads share; drop it, or use "
                "drafter.projection=own"
            )
        if self.joint and self.precision.compile:
            raise ValueError("precision.compile: joint training changes its loss at every step; leave it off")
        if self.export.merged and not self.joint:
            raise ValueError("export.merged: there is nothing to merge without a joint stage")
        if self.cache_hidden != "none" and any(source.streaming for source in self.data.train):
            raise ValueError("cache_hidden keeps every row's hidden states, and a streamed source has no end; drop one")
        for source in [*self.data.train, *self.data.validation]:
            answers, heads = source.answers, self.drafter.num_draft_heads
            if answers is None:
                continue
            if answers.new_tokens < heads + 2:
                raise ValueError(f"answers.new_tokens must exceed drafter.num_draft_heads + 1 = {heads + 1}")
            if answers.prompt_tokens + answers.new_tokens > self.data.max_length:
                raise ValueError(
                    f"data.max_length={self.data.max_length} is less than the {answers.prompt_tokens} + "
                    f"{answers.new_tokens} tokens of a prompt and its answer"
                )
        return self


def answered(source: Source, target: LoadedTarget, seed: int, folder: Path) -> Tokenized:
    """The target's continuations of prompts cut from a source; kept in ``folder`` with what was asked, so that a
    resumed run trains on the same and a changed recipe on its own. One process makes them, the others wait."""
    ask = source.answers
    assert ask is not None and target.tokenizer is not None
    asked = {"target": target.fingerprint, "seed": seed, "source": source.model_dump(exclude={"weight"})}
    note_of_it = folder / "asked.json"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if (folder / "model.safetensors").exists() and note_of_it.exists() and read_json(note_of_it) == asked:
            made = checkpoint.read_tensors(folder)
        elif sharded.spreads():
            raise ValueError(
                f"data source '{source.source}': a target that is spread over processes answers no prompts; let it "
                "answer before, with train/distill.py, and name the shards as the source"
            )
        else:
            note_of_it.unlink(missing_ok=True)
            split = cast(sources.Split, source.split)
            found = prompts(source.source, split, ask.prompts, ask.prompt_tokens, target.tokenizer, seed)
            what = f"the target answers {len(found)} prompts from {source.source} ({split})"
            with ProgressBar(what, len(found), loop.console) as bar:
                made = answer(target, [p.tokens for p in found], ask.new_tokens, ask.batch_size, bar)
            checkpoint.write_tensors(folder, made)
            write_json(note_of_it, asked)
    lengths = (made["supervised"].long() * torch.arange(1, made["supervised"].shape[1] + 1)).amax(1)
    return Tokenized.of(
        Sample(tokens[:length].tolist(), marks[:length].tolist())
        for tokens, marks, length in zip(made["tokens"], made["supervised"], lengths.tolist(), strict=True)
    )


def rows_of(
    recipe: MedusaRecipe, which: Literal["train", "validation"], target: LoadedTarget
) -> list[Rows | StreamedRows]:
    """The rows of each source. Validation rows hold one sample each."""
    found: list[Rows | StreamedRows] = []
    for number, source in enumerate(getattr(recipe.data, which)):
        if source.streaming and which == "train":
            assert target.tokenizer is not None
            note = recipe.run.folder / "streams" / f"{number}.json"
            keep = PartialState().is_main_process
            streamed = StreamedRows(source, recipe.data, target.tokenizer, recipe.run.seed, note, keep=keep)
            found.append(streamed)
            odd = f"; in its first window {streamed.skipped}" if streamed.skipped.count else ""
            loop.console.print(f"  {source.source} ({source.split}): streamed{odd}")
            continue
        if source.answers is not None:
            samples = answered(source, target, recipe.run.seed, recipe.run.folder / "answers" / f"{which}-{number}")
        else:
            assert target.tokenizer is not None
            samples = tokenized(source, recipe.data, target.tokenizer)
        labels = int(samples.supervised.sum())
        loop.console.print(
            f"  {source.source} ({source.split}): {len(samples)} samples, {len(samples.tokens):,} tokens, "
            f"{labels / max(1, len(samples.tokens)):.0%} supervised"
        )
        if samples.skipped.count:
            loop.console.print(f"  {source.source} ({source.split}): {samples.skipped}")
        found.append(Rows(samples, recipe.data.max_length, share=recipe.data.packing and which == "train"))
    return found


def check_beginning(recipe: MedusaRecipe) -> None:
    """Refuse a drafter to begin with by its config alone, before the target is loaded; its weights are checked later.

    Raises:
        FileNotFoundError, ValueError: there is none, or it has another shape.
    """
    assert recipe.init_from is not None
    folder = resolve_folder(recipe.init_from)
    where = f"init_from={recipe.init_from}"
    if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"{where}: no drafter there (config.json and model.safetensors)")
    config = json_object(folder / "config.json")
    if config.get("drafter_type") != "medusa":
        raise ValueError(f"{where}: its drafter_type is {config.get('drafter_type')!r}; Medusa heads are needed")
    for name, wanted in recipe.drafter.model_dump().items():
        if config.get(name) != wanted:
            raise ValueError(
                f"{where}: its {name} is {config.get(name)!r}, the recipe's {wanted!r}; set drafter.{name}"
            )


def begin_with(heads: MedusaHeads, name: str, target: LoadedTarget) -> None:
    """Copy a stored drafter's heads.

    Raises:
        FileNotFoundError, ValueError: there is none, or it has another target or shape.
    """
    folder, config, weights = read_drafter(name)
    check_target(folder, config, target)
    stored = MedusaHeads.from_artifact(config, weights, str(folder))
    if stored.config != heads.config:
        raise ValueError(f"init_from={name}: its heads are {stored.config}, the recipe's {heads.config}")
    heads.load_state_dict(stored.state_dict())


def decoded_tau(target: LoadedTarget, heads: MedusaHeads, tree: Topology, prompts: Sequence[list[int]]) -> float:
    """The real τ: what the engine accepts per step when it decodes with the heads as they are."""
    drafter = MedusaDrafter(copy.deepcopy(heads), tree, target)  # it casts its heads to the target's dtype
    with torch.autocast(target.device.type, enabled=False):
        done = SpeculativeDecoder(target, drafter).generate(prompts, DECODED_TOKENS)
    accepted = [count for result in done for count in result.accepted]
    return sum(accepted) / len(accepted) if accepted else 1.0


def guarded(trained: Medusa2, tau: float, drift: dict[str, float]) -> dict[str, float]:
    """What the joint stage is judged by: τ while the target has moved no further than it may, else how far it has.

    Raises:
        FloatingPointError: it has moved further, and the recipe says to stop then.
    """
    bound, kl = trained.joint.max_kl, drift["kl"]
    if not kl <= bound:  # nor if it is no number
        said = f"the target has moved by {kl:.4f} nats per token, beyond joint.max_kl={bound:g}"
        if trained.joint.on_drift == "stop":
            raise FloatingPointError(f"{said}; lower joint.optim.lr or joint.head_weight, then --resume or --restart")
        loop.console.print(f"  {said}; weights that moved less go before these", style="yellow")
    return {**drift, "guarded_tau": tau if kl <= bound else -kl if kl == kl else -math.inf}


def write_merged(folder: Path, wanted: Target, target: LoadedTarget) -> None:
    """The target with its adapter merged in, as a model folder of its own, for servers that take no adapter."""
    base = load_target(
        wanted.name, revision=wanted.revision, dtype=wanted.dtype, trust_remote_code=wanted.trust_remote_code
    )
    merged = merge_adapter(base, folder / ADAPTER)
    (folder / "target").mkdir(exist_ok=True)
    write_model(folder / "target", merged.model, merged.tokenizer, provenance(merged_from=wanted.name))
    target.merged_fingerprint = fingerprint(folder / "target")


def stages_of(recipe: MedusaRecipe) -> list[tuple[str, Stage]]:
    """The stages in order: the heads alone, then both together."""
    stages: list[tuple[str, Stage]] = []
    if not recipe.joint or recipe.joint.heads_first:
        stages.append(("medusa-1", recipe))
    if recipe.joint:
        stages.append(("medusa-2", recipe.joint))
    return stages


def dry(recipe: MedusaRecipe, command: str) -> None:
    """Print what the recipe would do and cost, then export and decode untrained heads on its tiny form."""
    accelerator = loop.make_accelerator(recipe.precision)
    if not accelerator.is_main_process:
        return
    t, d = recipe.target, recipe.drafter
    try:
        parameters, width, vocab_size, rank = dry_run.target_shape(t, recipe.joint.lora.modules if recipe.joint else ())
    except ValueError as error:
        loop.console.print(f"no sizes: {error}")
    else:
        with torch.device("meta"):
            heads = MedusaHeads(MedusaConfig(d.num_draft_heads, d.num_layers, d.projection, width, vocab_size))
        own = sum(p.numel() for p in heads.parameters())
        used = d.num_draft_heads * width * vocab_size if d.projection == "shared" else 0
        recipe = loop.with_precision(recipe, accelerator)
        held = dry_run.BYTES[recipe.target.dtype if t.quantize == "none" else t.quantize]
        if sharded.spreads():  # all but the LM head
            whole = width * vocab_size / parameters
            held *= whole + (1 - whole) / accelerator.num_processes
        plans: list[dry_run.Plan] = []
        for name, stage in stages_of(recipe):
            positions = stage.batch.sequences * recipe.data.max_length
            trained, passes = own, 1
            if isinstance(stage, Joint):
                trained, passes = own + rank * stage.lora.r, 3 if stage.loss == "kl" else 2
            plans.append(
                dry_run.Plan(name, parameters, trained, held, stage.optim, stage.steps, positions, used, passes)
            )
        dry_run.show(recipe, plans, accelerator.device, accelerator.num_processes)
    small = tiny(recipe, "dry-run")
    folder, facts = small.run.folder, {"command": command, "steps": 0}
    with folders.held(folder, "medusa"):
        write_target(small.target)
        target = load_target(small.target.name)
        untrained = MedusaHeads.for_target(target, d.num_draft_heads, d.num_layers, d.projection)
        write_drafter(folder, "medusa", untrained.config.to_dict(), untrained.state_dict(), target, provenance(**facts))
        drafter = MedusaDrafter(untrained, chain(d.num_draft_heads), target)
        said = dry_run.decode_a_little(target, drafter)
    loop.console.print(f"untrained heads for a tiny {target.config.model_type} written to {folder}: {said}")


def main() -> None:
    args = PARSER.parse_intermixed_args()
    command = "accelerate launch train/medusa.py " + shlex.join(sys.argv[1:])
    recipe = read_recipe(args.recipe, MedusaRecipe, args.overrides)
    if args.dry_run:
        return dry(recipe, command)
    if args.tiny:
        recipe = tiny(recipe)
    accelerator = loop.make_accelerator(recipe.precision)
    for name, stage in stages_of(recipe):
        loop.micro_batch(stage, name, accelerator.num_processes)
    if sharded.spreads() and (recipe.target.quantize != "none" or recipe.precision.compile):
        raise ValueError(
            "a target that is spread over processes is not quantised or compiled: target.quantize=none, "
            "precision.compile=false"
        )
    folders.check(recipe, [stage for _, stage in stages_of(recipe)])
    with folders.held(recipe.run.folder, "medusa", accelerator.is_main_process):
        with accelerator.main_process_first():
            resume = folders.begin(
                recipe.run.folder, args.resume, args.restart or args.tiny, accelerator.is_main_process
            )
            if args.tiny and accelerator.is_main_process:
                write_target(recipe.target)
        train(loop.with_precision(recipe, accelerator, resume), accelerator, resume, command)


def train(recipe: MedusaRecipe, accelerator: Accelerator, resume: bool, command: str) -> None:
    """From the target to the exported drafter.

    Args:
        resume: there is a checkpoint to go on from.
    """
    folder, t = recipe.run.folder, recipe.target
    if recipe.init_from and not resume:
        check_beginning(recipe)
    device = str(accelerator.device)
    with sharded.placing(accelerator, t.dtype) as place:
        target = load_target(
            t.name, revision=t.revision, dtype=t.dtype, device=device, quantize=t.quantize,
            trust_remote_code=t.trust_remote_code, place=place,
        )  # fmt: skip
    d = recipe.drafter
    if accelerator.is_main_process:
        write_recipe(recipe, folder / "recipe.yaml", command)
        with torch.device("meta"):
            planned = MedusaHeads(MedusaConfig(
                d.num_draft_heads, d.num_layers, d.projection, target.hidden_size, target.vocab_size
            ))  # fmt: skip
        folders.check_room(folder, sum(p.numel() for p in planned.parameters()), recipe, stages_of(recipe)[0][1])

    sources_of_all = [*recipe.data.train, *recipe.data.validation]
    asked_for = [source.answers for source in sources_of_all if source.answers is not None]
    if len(asked_for) == len(sources_of_all) and not (resume or recipe.joint) and accelerator.num_processes == 1:
        heads = MedusaHeads.for_target(target, d.num_draft_heads, d.num_layers, d.projection)
        to_train = [source.answers for source in recipe.data.train if source.answers is not None]
        cached = sum(ask.prompts for ask in to_train) if recipe.cache_hidden != "none" else 0
        with loop.autocast(accelerator, recipe.precision):
            parts = training_seconds(target, heads, asked_for, cached, recipe, recipe.evaluate)
        if parts and sum(parts.values()) > 10:
            each = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts.items())
            loop.console.print(f"this takes about {sum(parts.values()) / 60:.1f} min here: {each}")

    if recipe.data.packing:
        target.check_packing()
    rows_by_source = rows_of(recipe, "train", target)
    held_out_rows = [rows for rows in rows_of(recipe, "validation", target) if isinstance(rows, Rows)]
    longest = max(rows.length for rows in held_out_rows)
    parts = [rows.batch(range(min(len(rows), HELD_OUT))) for rows in held_out_rows]
    held_out = {
        key: torch.cat([nn.functional.pad(part[key], (0, longest - part[key].shape[1])) for part in parts])
        for key in ("tokens", "supervised")
    }
    if accelerator.is_main_process:
        checkpoint.write_tensors(folder / "held_out", held_out)  # what calibrate.py counts on
    held_out = {key: value[: recipe.evaluate.sequences] for key, value in held_out.items()}
    hidden: list[Tensor] = []
    plan = stages_of(recipe)
    newest = checkpoint.checkpoints(folder / "checkpoints")
    begins = checkpoint.read_state(newest[-1])["stage"] if resume else plan[0][0]
    if recipe.cache_hidden != "none" and begins == "medusa-1":
        dtype = torch.bfloat16 if recipe.precision.autocast == "bfloat16" else target.dtype
        for number, rows in enumerate(rows_by_source):
            assert isinstance(rows, Rows)
            stored = folder / "features" / f"{number}.bin" if recipe.cache_hidden == "disk" else None
            with torch.no_grad(), loop.autocast(accelerator, recipe.precision):
                hidden.append(hidden_states(target, rows, dtype, accelerator, stored))

    torch.manual_seed(recipe.run.seed)
    heads = MedusaHeads.for_target(target, d.num_draft_heads, d.num_layers, d.projection)
    if recipe.init_from and not resume:
        begin_with(heads, recipe.init_from, target)
    module: Medusa1 = Medusa1(target, heads)
    loop.console.print(
        f"{d.num_draft_heads} heads, {sum(p.numel() for p in heads.parameters()) / 1e6:.2f} M parameters to train "
        f"beside a frozen target of {sum(map(sharded.size, target.model.parameters())) / 1e6:.2f} M"
    )

    asked = [  # what comes before each sample's first label
        row[: marks.index(True)]
        for row, marks in zip(held_out["tokens"].tolist(), held_out["supervised"].tolist(), strict=True)
        if not marks[0] and any(marks)
    ]

    def evaluate(trained: nn.Module) -> dict[str, float]:
        ranks = head_ranks(target, heads, held_out["tokens"], held_out["supervised"])
        labelled = ranks >= 0
        metrics = {"simulated_tau": simulate(best_tree(ranks, SIMULATED_NODES), ranks)}
        for k in range(d.num_draft_heads):
            for top in (1, 5):
                right = ((ranks[..., k] < top) & labelled[..., k]).sum() / labelled[..., k].sum()
                metrics[f"head{k + 1}_held_out_top{top}"] = float(right)
        e = recipe.evaluate
        if e.decode and job.step % e.decode == 0 and asked and not sharded.spreads():
            metrics["tau"] = decoded_tau(target, heads, best_tree(ranks, SIMULATED_NODES), asked[: e.prompts])
        if isinstance(trained, Medusa2):
            drift = trained.drift(held_out["tokens"], held_out["supervised"])
            metrics |= guarded(trained, metrics["simulated_tau"], drift)
        return metrics

    job = loop.Job(
        folder, accelerator, recipe.checkpoint, recipe.evaluate, resume, evaluate, "simulated_tau",
        [name for name, _ in plan], recipe.precision,
        Trackers(recipe.track, folder, recipe.model_dump(mode="json")) if accelerator.is_main_process else None,
        target.fingerprint, t.dtype,
    )  # fmt: skip
    weights = [source.weight for source in recipe.data.train]
    sizes = [len(rows) if isinstance(rows, Rows) else None for rows in rows_by_source]
    needed = sum(stage.steps * stage.batch.sequences for _, stage in plan)
    order = whole_order = packing.schedule(sizes, weights, needed, recipe.run.seed)  # one stage after the other

    def samples(numbers: range) -> loop.Batch:
        chosen = order[numbers.start : numbers.stop].tolist()
        longest = max(rows_by_source[source].length for source, _ in chosen)
        parts = [rows_by_source[source].batch([row], longest) for source, row in chosen]
        batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        if hidden and not isinstance(module, Medusa2):
            kept = [hidden[source][row] for source, row in chosen]
            batch["hidden"] = torch.stack([nn.functional.pad(h, (0, 0, 0, longest - len(h))) for h in kept])
        return batch

    def describe(numbers: range) -> str:
        return packing.describe([source.source for source in recipe.data.train], order[numbers.start : numbers.stop])

    for name, stage in plan:
        begun = job.step
        if isinstance(stage, Joint):
            torch.manual_seed(recipe.run.seed + 1)  # for the adapters, however the run came here
            lora = stage.lora
            add_lora(target, lora.r, lora.alpha, lora.dropout, lora.modules)
            if recipe.precision.gradient_checkpointing:
                loop.checkpoint_activations(target.model)
            hidden.clear()
            module = Medusa2(target, heads, stage, lambda begun=begun: job.step - begun)
            job.best, job.best_on = -math.inf, "guarded_tau"
        needed = stage.steps * stage.batch.sequences
        order, whole_order = whole_order[:needed], whole_order[needed:]
        loop.fit(job, module, samples, stage, name, describe)
        module.load_state_dict(loop.best_weights(job, name), strict=False)
    facts = {
        "command": command,
        "simulated_tau": job.best,
        "steps": sum(stage.steps for _, stage in plan),
        "init_from": recipe.init_from,
        "data_sha256": [rows.samples.sha256() if isinstance(rows, Rows) else "streamed" for rows in rows_by_source],
        "target_fingerprint": target.fingerprint,
        "dtype": t.dtype,
        "autocast": recipe.precision.autocast,
    }
    if isinstance(module, Medusa2):
        module.eval()
        with torch.no_grad(), loop.autocast(accelerator, recipe.precision):
            found = evaluate(module)
        kept = ("simulated_tau", "kl", "perplexity", "original_perplexity", "perplexity_ratio")
        facts |= {name: found[name] for name in kept}
    tree: Topology | None = None
    if recipe.export.push_to_hub:  # what is uploaded has to decode; a tree that calibrate.py measured stays
        module.eval()
        with torch.no_grad(), loop.autocast(accelerator, recipe.precision):
            tree = best_tree(head_ranks(target, heads, held_out["tokens"], held_out["supervised"]), SIMULATED_NODES)
    if accelerator.is_main_process:
        if isinstance(module, Medusa2):
            write_adapter(folder, target)
            if recipe.export.merged:
                write_merged(folder, t, target)
        write_drafter(
            folder, "medusa", heads.config.to_dict(), heads.state_dict(), target, provenance(**facts),
            read_template(recipe.data.template),
        )  # fmt: skip
        if job.trackers:
            job.trackers.close()
        if recipe.export.push_to_hub:
            if tree is not None and not (folder / "tree.json").exists():
                write_json(folder / "tree.json", {"paths": [list(path) for path in tree.paths]})
            loop.console.print(f"uploading to {recipe.export.push_to_hub} …")
            push(folder, recipe.export.push_to_hub, recipe.export.private)
        tau = facts["simulated_tau"]
        loop.console.print(f"done: {folder}, simulated τ {tau:.2f}; next: python inference/calibrate.py {folder}")


if __name__ == "__main__":
    run_command(main, resumable=True)
