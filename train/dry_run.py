"""``--dry-run``: what a recipe would do, before it does it: sizes, memory by part, time per step, here or on the GPUs
that ``--as`` names, with ``--verbose`` all fields. Then the same recipe's tiny form runs through the real command, is
decoded and deleted, so that nothing fails for the first time after a day."""

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
from accelerate import Accelerator
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.common.command import first_line, make_console
from draftsmith.common.data_sections import Source
from draftsmith.common.files import json_object
from draftsmith.common.sections import DrafterRecipe, R, Stage, TargetSection, TrainingRecipe
from draftsmith.data import sources
from draftsmith.data.formats import read_sample
from draftsmith.data.rows import Skipped, rows, usable
from draftsmith.data.seeds import read_seed
from draftsmith.data.tokenized import check, encoded, template_for
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.models.files.locate import locate
from draftsmith.models.precision import matmul_rate
from draftsmith.models.sizes import BYTES
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.train.launch import with_micro, with_precision
from draftsmith.train.loop import micro_batch
from draftsmith.train.machine import BANDWIDTH, GPUS, PRODUCTS, Machine
from draftsmith.train.memory import Kept, Micro, widths

console = make_console()
HEAD = 200  # rows of a source that are looked at
SCORE_TRAFFIC = 108  # bytes that attention without a kernel reads and writes for each score: 27 passes in float32
LOGIT_TRAFFIC = 50  # bytes that a loss reads and writes for each logit: about nine passes in float32, four in bfloat16
STEP_TRAFFIC = 28  # of AdamW for each trained parameter: it reads four numbers and writes three
KEPT_TRAFFIC = 4  # times that a kept activation is written or read


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a target, by its config alone.

    active: parameters that a token is multiplied with; of a mixture of experts those of its experts.
    rank: parameters of an adapter of rank 1 on the named layers.
    config: its text config.
    """

    parameters: int
    active: int
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
    parameters, text = sum(p.numel() for p in model.parameters()), config.get_text_config()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    count = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    idle = int(experts * (1 - (getattr(text, "num_experts_per_tok", None) or count) / count))
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    idle += embeddings.numel() if embeddings is not head else 0  # looked up
    return TargetShape(parameters, parameters - idle, width, vocab_size, rank, text)


@dataclass(frozen=True)
class Plan:
    """What one stage costs.

    length: tokens of a row, each of which counts as a label.
    trained, frozen: numbers of parameters; shape: of the frozen target.
    frozen_bytes: of a frozen parameter.
    kept: what a micro-batch takes besides.
    packed, autocast, target_bytes: of :class:`Micro`.
    projected: how many of the frozen parameters heads multiply with once more (a shared projection), in all.
    passes: through what is frozen: forward (not with kept hidden states), teacher, backward to adapters.
    every_row: a stage draws from the samples of all sources as they are, so that their number is an epoch's.
    copied: how many frozen parameters are held twice (the LM head's rows of a draft vocabulary).
    unrolled: passes through what trains, for each token of a row.
    attended: width of the queries of what trains, times its passes, for products with all keys of a row.
    scores: scores of a token that exist in float32, by the length of a row.
    logits: of a token, in all losses.
    features: numbers of a token that ``cache_hidden`` keeps.
    blocks: of :class:`Micro`.
    """

    stage: Stage
    length: int
    trained: int
    frozen: int = 0
    shape: TargetShape | None = None
    frozen_bytes: float = 0.0
    kept: Callable[[Micro], Kept] = lambda micro: Kept(0.0)
    packed: bool = False
    autocast: bool = True
    target_bytes: int = 2
    projected: int = 0
    passes: int = 1
    copied: int = 0
    unrolled: float = 1
    attended: float = 0.0
    scores: int = 0
    logits: int = 0
    features: int = 0
    blocks: bool = False
    every_row: bool = True

    @classmethod
    def of(cls, recipe: DrafterRecipe, stage: Stage, shape: TargetShape, trained: int, **costs: Any) -> "Plan":
        """A stage beside a frozen target; ``costs``: the fields from ``kept`` on."""
        t, data = recipe.target, recipe.data
        held = BYTES[t.dtype if t.quantize == "none" else t.quantize]
        costs |= {"packed": data.packing, "autocast": recipe.precision.autocast == "bfloat16"}
        costs |= {"target_bytes": 4 if t.dtype == "float32" else 2, "blocks": t.attention != "sdpa"}
        here = 2 * shape.hidden_size * shape.vocab_size if t.features else shape.parameters  # a server has the layers
        return cls(stage, data.max_length, trained, here, shape, held, **costs)

    @property
    def positions(self) -> int:
        """Tokens of a step, over all processes."""
        return self.stage.batch.sequences * self.length

    def micro(self, machine: Machine) -> Micro:
        """A process's micro-batch."""
        rows = micro_batch(self.stage, machine.processes)
        product = 2 if self.autocast else 4
        return Micro(rows, self.length, self.packed, product, self.target_bytes, machine.cuda, self.blocks)

    def parts(self, machine: Machine) -> dict[str, float]:
        """Bytes of a process, by part. Where a step has one micro-batch, its gradients take the place of activations,
        which are counted less by as much."""
        kept, count = self.kept(self.micro(machine)), machine.processes
        held = float(self.frozen)
        if machine.spread and self.shape is not None:  # the LM head is whole, for FSDP the embeddings too
            config, matrix = self.shape.config, self.shape.hidden_size * self.shape.vocab_size
            whole = matrix * (2 if machine.strategy == "fsdp" and not config.tie_word_embeddings else 1)
            layers = self.frozen - whole
            held = whole + layers / count + 2 * layers / config.num_hidden_layers  # one runs, the next one is fetched
        moments = 2.0 if self.stage.optim.eight_bit else 8.0  # Muon has 4 for matrices, AdamW does the rest
        gradients = 4.0 * self.trained
        state = 4.0 * self.trained + gradients + moments * self.trained
        if machine.strategy == "zero2":  # its own float32 weights, gradients and moments are spread
            state = 4.0 * self.trained + (state / count)
        once = self.stage.batch.sequences == count * self.micro(machine).rows
        activations = max(0.0, kept.activations - gradients) if once else kept.activations
        return {
            "target": (held + self.copied) * self.frozen_bytes,
            "trained": state,
            "buckets": gradients if count > 1 else 0.0,
            "LM heads' gradients": kept.heads,
            "teacher": kept.teacher,
            "activations": activations,
        }

    @property
    def operations(self) -> float:
        """Floating-point operations of products in a step, over all processes: passes through what is frozen, forward
        and backward of the rest, attention to all keys of a row, or to half of them where no mask is made."""
        active = (self.shape.active if self.shape else 0) * self.passes + 2 * self.projected  # 2: and backward
        attended = self.attended * 4.0 * self.length
        if self.shape:
            _, queries, _, _ = widths(self.shape.config)
            layers = int(self.shape.config.num_hidden_layers)
            attended += self.passes * layers * queries * 4.0 * self.length * (1.0 if self.packed else 0.5)
        return self.positions * (2.0 * active + 6.0 * self.trained * self.unrolled + attended)

    def traffic(self, machine: Machine) -> float:
        """Bytes that a process's operations beside products read and write in a step."""
        own = self.positions / machine.processes
        micro = self.micro(machine)
        kept = self.kept(micro).activations / micro.tokens
        scores = 0 if self.blocks else SCORE_TRAFFIC * self.scores * self.length
        by_token = LOGIT_TRAFFIC * self.logits + scores + KEPT_TRAFFIC * kept
        return own * by_token + STEP_TRAFFIC * self.trained

    def seconds(self, machine: Machine, rate: float | None = None) -> float:
        """Of a step; ``rate``: of products, as :meth:`Machine.seconds` takes it."""
        return machine.seconds(self.operations / machine.processes, self.traffic(machine), rate)


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
            if not placed:
                raise ValueError(f"data source '{source.label}' is empty")
            of = 0 if more == 0 else 1000 * HEAD  # a part says nothing of the share of all
            if tokenizer is None or source.answers:
                skipped, size = Skipped(), 1.0
                found = len(list(usable(placed, read_seed if source.answers else read_sample, skipped)))
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
    """The first rows of a source, and how many there are besides: None of one that is streamed, as a data set of the
    Hub is here. None alone: that cannot be reached, as is printed."""
    hub = {} if source.is_file else {"streaming": True, "split": source.split.partition("[")[0]}
    try:
        stream = itertools.islice(rows(source.model_copy(update=hub))[0], source.limit)
        head = list(itertools.islice(stream, HEAD))
    except ValueError as error:
        if source.is_file:
            raise
        console.print(f"  not looked at: {error}")
        return None
    return head, None if hub or source.streaming else sum(1 for _ in stream)


def on_gpus(recipe: R) -> R:
    """The recipe with what ``precision.autocast: auto`` and ``target.dtype: auto`` are on a GPU, for a target that is
    stored in bfloat16."""
    update: dict[str, Any] = {}
    if recipe.precision.autocast == "auto":
        update["precision"] = recipe.precision.model_copy(update={"autocast": "bfloat16"})
    target = getattr(recipe, "target", None)  # not every recipe has one
    if target is not None and target.dtype == "auto":
        update["target"] = target.model_copy(update={"dtype": "bfloat16"})
    return recipe.model_copy(update=update)


def show(
    recipe: R,
    plans: Callable[[R], list[Plan]],
    accelerator: Accelerator,
    verbose: bool = False,
    asked: str | None = None,
) -> None:
    """Print the tables of a recipe's stages, for each process.

    Args:
        verbose: the resolved recipe first.
        asked: GPUs to compute for, as :meth:`Machine.named` takes them, in place of this launch's devices.

    Raises:
        ValueError: no such GPU is known, or a step's sequences cannot be shared out over them.
    """
    stages, problem, any_dtype = list[Plan](), "", getattr(getattr(recipe, "target", None), "dtype", "") == "auto"
    machine = Machine.named(asked) if asked else Machine.here()
    for stage in recipe.stages:
        micro_batch(stage, machine.processes)
    rows_there, longest = look_at_sources(recipe)
    try:
        unknown = accelerator.device.type == "cuda" and not _target_is_here(recipe)
        recipe = on_gpus(recipe) if asked or unknown else with_precision(recipe, accelerator)
        recipe = with_micro(recipe, plans, machine)
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
    half = recipe.precision.autocast == "bfloat16"
    rate = None if asked else matmul_rate(accelerator.device, torch.bfloat16 if half else torch.float32)
    for table in tables(stages, machine, rate):
        console.print(table)
    for stage in recipe.stages if stages[0].every_row else ():
        if rows_there and stage.steps is not None:
            epochs = stage.samples / rows_there
            console.print(f"{stage.name}: {stage.samples:,} rows in all are {epochs:,.1f} epochs of {rows_there:,}")
    console.print(notes(stages, machine, rate))
    if getattr(recipe, "cache_hidden", "none") != "none":  # not every recipe has it
        each = stages[0].features * (2 if half else stages[0].target_bytes)
        rows = f", {rows_there * stages[0].length * each / 1e9:,.1f} GB in all" if rows_there else ""
        console.print(
            f"The target's kept hidden states take {each / 1e3:,.1f} kB a token{rows}; their pass comes before."
        )
    if not asked and any(stage.steps is not None for stage in recipe.stages):
        console.print(other_gpus(stages, any_dtype))
    if any(stage.steps is None for stage in recipe.stages):
        console.print("How many steps an epoch has is known once the rows are read; training prints it then.")


def tables(stages: Sequence[Plan], machine: Machine, rate: float | None) -> list[Table]:
    """What the stages cost on each device: sizes and times, and the memory by part in GB."""
    costs = Table("stage", "frozen", "trained", "memory", "tokens a step", "a step", "all steps")
    names = list(stages[0].parts(machine))
    memory = Table("GB for", *names, "in all")
    for plan in stages:
        seconds, parts, steps = plan.seconds(machine, rate), plan.parts(machine), plan.stage.steps
        whole = f"{plan.stage.epochs:g} epochs" if steps is None else f"{seconds * steps / 3600:,.1f} h"
        held = sum(parts.values()) / 1e9
        sizes = (f"{plan.frozen / 1e6:,.1f} M", f"{plan.trained / 1e6:,.1f} M", f"{held:,.1f} GB")
        costs.add_row(plan.stage.name, *sizes, f"{plan.positions:,}", f"{seconds:,.2f} s", whole)
        memory.add_row(plan.stage.name, *(f"{parts[name] / 1e9:,.2f}" for name in names), f"{held:,.2f}")
    return [costs, memory]


def notes(stages: Sequence[Plan], machine: Machine, rate: float | None) -> str:
    """What the tables assume, and whether the memory suffices."""
    count, largest = machine.processes, max(sum(plan.parts(machine).values()) for plan in stages) / 1e9
    lines = [
        "Computed, as if each token of a row were a label. Memory: trained are weights, gradients and moments; "
        "evaluations run in the same micro-batches and take no more; the allocator and the driver take some GB besides."
    ]
    if rate is None:
        lines.append(
            f"Time: on {machine.name}, if products reach {PRODUCTS:.0%} of the data sheet's peak in bfloat16 and other "
            f"operations {BANDWIDTH:.0%} of its bandwidth (assumptions)."
        )
    else:
        lines.append(f"Time: of products alone, at the {rate / 1e12:,.2f} TFLOP/s that a large one reaches here.")
    if count > 1:
        lines.append(
            f"{count} processes share the work; the memory is each one's. Exchanging gradients takes more time."
        )
    if machine.gpu and largest > machine.gpu.memory:
        lines.append(f"{largest:,.0f} GB are more than the {machine.gpu.memory:,.0f} GB of one.")
    return " ".join(lines)


def other_gpus(stages: Sequence[Plan], any_dtype: bool) -> str:
    """A line with the time of all steps on one GPU of each kind that has the memory, in bfloat16. ``any_dtype``: the
    target's weights are as well."""
    fits = list[str]()
    if any_dtype:
        stages = [replace(p, autocast=True, target_bytes=2, frozen_bytes=min(p.frozen_bytes, 2.0)) for p in stages]
    for name, gpu in GPUS.items():
        one = Machine(name, 1, gpu=gpu)
        if max(sum(plan.parts(one).values()) for plan in stages) < gpu.memory * 1e9:
            hours = sum(plan.seconds(one) * (plan.stage.steps or 0) for plan in stages) / 3600
            fits.append(f"{name} {hours:,.2f} h")
    return (
        f"On one GPU, if {PRODUCTS:.0%} of its data sheet's products and {BANDWIDTH:.0%} of its bandwidth are reached "
        "(assumptions): " + (", ".join(fits) or "none of those that it knows has the memory")
    )


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
