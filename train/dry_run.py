"""``--dry-run``: what a recipe would do, before it does it: sizes, memory, time per step, with ``--verbose`` all
fields. Then the same recipe's tiny form runs through the real command, is decoded and deleted, so that nothing fails
for the first time after a day."""

import itertools
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate import Accelerator, PartialState
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.common.command import first_line, make_console
from draftsmith.common.files import json_object
from draftsmith.common.sections import DrafterRecipe, Optim, R, Source, Stage, TargetSection, TrainingRecipe
from draftsmith.data import sources
from draftsmith.data.formats import read_sample
from draftsmith.data.rows import Skipped, rows, usable
from draftsmith.data.tokenized import check, encoded, template_for
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.models.files.locate import locate
from draftsmith.models.precision import matmul_rate
from draftsmith.models.sizes import BYTES
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.train import sharded
from draftsmith.train.launch import with_precision
from draftsmith.train.losses import LOGITS

console = make_console()
HEAD = 200  # rows of a source that are looked at
# TFLOP/s of bfloat16 without sparsity and GB of memory, by NVIDIA's data sheets.
GPUS = {
    "H200": (989, 141),
    "H100": (989, 80),
    "A100": (312, 80),
    "L40S": (362, 48),
    "RTX 4090": (165, 24),
    "L4": (121, 24),
}
REACHED = 0.4  # share of it that training is taken to reach


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a target, by its config alone.

    rank: parameters of an adapter of rank 1 on the named layers.
    config: its text config.
    """

    parameters: int
    hidden_size: int
    vocab_size: int
    rank: int
    config: Any


def target_shape(target: TargetSection, adapted: Sequence[str] = ()) -> TargetShape:
    """The sizes of a recipe's target, or where it is not here and ``model_type`` is set, those that transformers' own
    config of that family has by default, with a line about it; ``adapted``: names of layers that get an adapter."""
    remote = target.trust_remote_code
    try:
        try:
            model = locate(target.name, target.revision, weights=False)
            model.target_config()  # raises if it is a drafter's
            config = AutoConfig.from_pretrained(model.path, trust_remote_code=remote)
        except FileNotFoundError as error:
            if target.model_type is None:
                raise
            config = AutoConfig.for_model(target.model_type)
            console.print(
                f"{first_line(error)}: the sizes are those of transformers' default {target.model_type} "
                f"({config.num_hidden_layers} layers, hidden size {config.hidden_size})"
            )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=remote)
    except Exception as error:  # transformers and the Hub's client raise a dozen unrelated types
        reason = first_line(error, 160)
        raise ValueError(f"target '{target.name}': its config cannot be read ({reason})") from None
    vocab_size, width = model.get_output_embeddings().weight.shape
    layers = [layer for name, layer in model.named_modules() if name.rpartition(".")[2] in adapted]
    rank = sum(sum(layer.weight.shape) for layer in layers if isinstance(layer, torch.nn.Linear))
    parameters = sum(p.numel() for p in model.parameters())
    return TargetShape(parameters, width, vocab_size, rank, config.get_text_config())


@dataclass(frozen=True)
class Plan:
    """What one stage costs. ``frozen`` and ``trained`` parameters, labels' ``positions`` per step; ``projected``: how
    many of the frozen ones heads multiply with once more (a shared projection), in all; ``copied``: how many are held
    twice (the LM head's rows of a draft vocabulary); ``unrolled``: passes through what trains."""

    name: str
    frozen: int
    trained: int
    frozen_bytes: float  # per parameter
    optim: Optim
    steps: int | None
    positions: int
    projected: int = 0
    passes: int = 1  # through what is frozen: forward (not with kept hidden states), teacher, backward to adapters
    copied: int = 0
    unrolled: int = 1
    epochs: float | None = None  # in place of steps, whose number the rows will say

    @classmethod
    def of(cls, recipe: DrafterRecipe, stage: Stage, shape: TargetShape, trained: int, **costs: int) -> "Plan":
        """A stage beside a frozen target; ``costs``: projected, passes, copied, unrolled. Under ZeRO-3 and FSDP a
        process holds its part of all but the LM head."""
        t = recipe.target
        frozen = 2 * shape.hidden_size * shape.vocab_size if t.features else shape.parameters  # a server has the layers
        held = BYTES[t.dtype if t.quantize == "none" else t.quantize]
        if sharded.spreads():
            whole = shape.hidden_size * shape.vocab_size / shape.parameters
            held *= whole + (1 - whole) / PartialState().num_processes
        positions = stage.batch.sequences * recipe.data.max_length
        sizes = (held, stage.optim, stage.steps, positions)
        return cls(stage.name, frozen, trained, *sizes, epochs=stage.epochs, **costs)

    @property
    def memory(self) -> float:
        """Bytes: weights, gradients and moments, and the logits that are alive at a time; no activations."""
        moments = 2.0 if self.optim.eight_bit else 8.0  # Muon has 4 for matrices, AdamW does the rest
        return (self.frozen + self.copied) * self.frozen_bytes + self.trained * (8 + moments) + 6.0 * LOGITS["cuda"]

    @property
    def operations(self) -> float:
        """Floating-point operations of a step: passes through what is frozen, forward and backward of the rest."""
        frozen = self.frozen * self.passes + 2 * self.projected  # forward, and backward to the heads
        return self.positions * (2.0 * frozen + 6.0 * self.trained * self.unrolled)


def delete(folder: Path, above: Sequence[Path]) -> None:
    """Delete a run's folder, and those ``above`` it that are empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    for one in above:
        if one.is_dir() and not any(one.iterdir()):
            one.rmdir()


def look_at_sources(recipe: TrainingRecipe) -> tuple[int | None, int | None]:
    """Read the first rows of every source and print what becomes of them. Of a target that is not here, only the format
    of rows is checked, and no data set of the Hub is looked at, which is not reached then either.

    Returns:
        The number of training rows, and the length of the longest sample; None if they are not known.

    Raises:
        FileNotFoundError, ValueError: training would refuse a source.
    """
    data, target, tokenizer, template = recipe.data, getattr(recipe, "target", None), None, None
    if target is not None:
        with suppress(FileNotFoundError):
            tokenizer = load_tokenizer(target.name, target.revision, target.trust_remote_code)
            template = template_for(data, tokenizer)
    counts, longest = list[float | None](), list[int | None]()  # of training sources
    for number, source in enumerate([*data.train, *data.validation]):
        which, count, most = "train" if number < len(data.train) else "validation", None, None
        if source.installed:
            sources.root_of(source.source)
        elif target is not None and tokenizer is None and not source.is_file:
            console.print(f"  {which}: {source.label}: not looked at, since the target is not here")
        elif head := _head_of(source):
            placed, more = head
            of = 0 if more == 0 else 1000 * HEAD  # a part says nothing of the share of all
            if tokenizer is None:
                skipped, size = Skipped(), 1.0
                found = len(list(usable(placed, read_sample, skipped)))
                skipped.check(source.source, data.max_skipped, of if found else 0)
            else:
                samples = encoded(placed, source, data, tokenizer, template)
                found, skipped = len(check(samples, source, data, of if len(samples) else 0)), samples.skipped
                size = len(samples.tokens) / data.max_length / found if data.packing else 1.0
                most = int(np.diff(samples.starts).max()) if more == 0 and not data.packing else None
            count = None if more is None else size * found / len(placed) * (len(placed) + more)
            part = "" if more == 0 else "the first "
            for line in (f"{part}{len(placed):,} rows are {found:,} samples", *skipped.lines()):
                console.print(f"  {which}: {source.label}: {line}")
        counts, longest = [*counts, count], [*longest, most]
    known, sizes = counts[: len(data.train)], longest[: len(data.train)]
    total = math.ceil(sum(count or 0 for count in known)) if None not in known else None
    return total, max(size or 0 for size in sizes) if None not in sizes else None


def _head_of(source: Source) -> tuple[list[tuple[str, Any]], int | None] | None:
    """The first rows of a source, and how many there are besides: None of a data set of the Hub. None alone: that
    cannot be reached, as is printed."""
    hub = {} if source.is_file else {"streaming": True, "split": source.split.partition("[")[0]}
    try:
        stream = itertools.islice(rows(source.model_copy(update=hub))[0], source.limit)
        head = list(itertools.islice(stream, HEAD))
    except ValueError as error:
        if source.is_file:
            raise
        console.print(f"  not looked at: {error}")
        return None
    return head, None if hub else sum(1 for _ in stream)


def show(recipe: R, plans: Callable[[R], list[Plan]], accelerator: Accelerator, verbose: bool = False) -> None:
    """Print the table of a recipe's stages, for each process; with ``verbose`` the resolved recipe before it."""
    stages, problem, any_dtype = list[Plan](), "", getattr(getattr(recipe, "target", None), "dtype", "") == "auto"
    rows_there, longest = look_at_sources(recipe)
    try:
        recipe = with_precision(recipe, accelerator)
        shorter = {"max_length": longest} if longest else {}
        stages = plans(recipe.model_copy(update={"data": recipe.data.model_copy(update=shorter)}))
    except (OSError, ValueError) as error:
        if _target_is_here(recipe):
            raise
        problem = f"no sizes: {error}"
    if verbose:
        console.print(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
    if problem:
        console.print(problem)
        return
    device, processes = accelerator.device, accelerator.num_processes
    kept = getattr(recipe, "cache_hidden", "none") != "none"  # not every recipe has it
    half = recipe.precision.autocast == "bfloat16"
    rate = matmul_rate(device, torch.bfloat16 if half else torch.float32)
    table = Table("stage", "frozen", "trained", "memory", "tokens a step", "a step", "all steps")
    for plan in stages:
        seconds = plan.operations / rate / processes
        whole = f"{plan.epochs:g} epochs" if plan.steps is None else f"{seconds * plan.steps / 3600:,.1f} h"
        sizes = (f"{plan.frozen / 1e6:,.1f} M", f"{plan.trained / 1e6:,.1f} M", f"{plan.memory / 1e9:,.1f} GB")
        table.add_row(plan.name, *sizes, f"{plan.positions:,}", f"{seconds:,.2f} s", whole)
    console.print(table)
    for stage, plan in zip(recipe.stages, stages, strict=True):
        if rows_there and plan.steps is not None:
            epochs = stage.samples / rows_there
            console.print(f"{plan.name}: {stage.samples:,} rows in all are {epochs:,.1f} epochs of {rows_there:,}")
    console.print(
        "Memory: weights, gradients, moments and logits; activations come on top. Time: as if each token of a row were "
        f"a label, at the {rate / 1e12:,.2f} TFLOP/s that a matrix product reaches on this device ({device})."
        + (" The pass that keeps the target's hidden states comes before." if kept else "")
        + (f" {processes} processes share the work; the memory is each one's." if processes > 1 else "")
    )
    if stepped := [p for p in stages if p.steps is not None]:
        held = max((replace(p, frozen_bytes=min(p.frozen_bytes, 2.0)) if any_dtype else p).memory for p in stages) / 1e9
        hours = sum(plan.operations * (plan.steps or 0) for plan in stepped) / processes / (REACHED * 3600e12)
        fits = [f"{name} {hours / peak:,.2f} h" for name, (peak, memory) in GPUS.items() if memory > held]
        console.print(
            f"In bfloat16, if {REACHED:.0%} of a GPU's peak by its data sheet are reached (an assumption): "
            + (", ".join(fits) or "none of those that it knows has the memory")
        )
    if any(plan.steps is None for plan in stages):
        console.print("How many steps an epoch has is known once the rows are read; training prints it then.")


def _target_is_here(recipe: TrainingRecipe) -> bool:
    """Whether the sizes of the recipe's target are its own."""
    target = getattr(recipe, "target", None)
    try:
        return target is None or locate(target.name, target.revision, weights=False) is not None
    except FileNotFoundError:
        return False


def decode_a_little(folder: Path) -> str:
    """Decode eight tokens with the exported drafter, compared with plain decoding; with the model alone, if the folder
    holds a model. Returns what was decoded, as text."""
    if "drafter_type" in json_object(folder / "config.json"):
        target, drafter = load_drafter(str(folder), device="cpu")
    else:
        target, drafter = load_drafter("none", target_name=str(folder), device="cpu")
    assert target.tokenizer is not None
    prompt = list(target.tokenizer("import os")["input_ids"])
    (result,) = SpeculativeDecoder(target, drafter).generate([prompt], 8)
    decoded = f"decoded {len(result.tokens)} tokens in {len(result.accepted)} steps"
    if drafter is None:
        return decoded
    (plain,) = SpeculativeDecoder(target).generate([prompt], 8)
    if result.tokens != plain.tokens:
        raise ValueError("the exported drafter changed the tiny target's output; please report this")
    return f"{decoded}, identical to plain decoding"
