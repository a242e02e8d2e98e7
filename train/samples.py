"""The samples of a run: the rows of its sources, and which of them each step sees."""

import glob
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor, nn

from draftsmith.common.command import counted
from draftsmith.common.data_sections import Source
from draftsmith.common.files import locked, read_json, write_json
from draftsmith.common.progress import ProgressBar
from draftsmith.common.sections import DrafterRecipe
from draftsmith.data import sources
from draftsmith.data.packing import Rows, Sample, Tokenized
from draftsmith.data.prompts import prompts
from draftsmith.data.rows import rows as rows_of_source
from draftsmith.data.streaming import StreamedRows
from draftsmith.data.tokenized import template_for, tokenized
from draftsmith.inference.engine.answers import answer
from draftsmith.models.files.identity import was_asked
from draftsmith.models.target import Target
from draftsmith.train import checkpoint, sharded
from draftsmith.train.chat_answers import answer_chats
from draftsmith.train.features import Kept
from draftsmith.train.launch import console

Batch = dict[str, Tensor]
HELD_OUT = 256  # rows of each validation source that are kept


class Batches(Protocol):
    """Rows of one source, of at most ``length`` tokens. A streamed source has no ``len``."""

    length: int

    def batch(self, numbers: Sequence[int], length: int | None = None) -> Batch:
        """The rows of these numbers as tensors ``[S, T]``, padded to ``length``."""
        ...


class Stored:
    """Rows of one source as tensors ``[S, T, …]``, by name."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors, self.length = tensors, next(iter(tensors.values())).shape[1]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def batch(self, numbers: Sequence[int], length: int | None = None) -> Batch:
        return {name: part[list(numbers)] for name, part in self.tensors.items()}


class WithHidden:
    """Rows with the target's features ``[S, T, F]`` beside them, as ``hidden`` of a batch: its last hidden states, then
    the inputs of captured layers, if there are any."""

    def __init__(self, rows: Rows, hidden: Tensor | Kept) -> None:
        self.rows, self.hidden, self.length = rows, hidden, rows.length

    def __len__(self) -> int:
        return len(self.rows)

    def longest(self, numbers: Sequence[int]) -> int:
        return self.rows.longest(numbers)

    def batch(self, numbers: Sequence[int], length: int | None = None) -> Batch:
        length = length or self.length
        hidden = torch.stack([self.hidden[number, :length] for number in numbers])  # no copy of what is cut off
        hidden = nn.functional.pad(hidden, (0, 0, 0, length - hidden.shape[1]))
        return {**self.rows.batch(numbers, length), "hidden": hidden}


class Sampler:
    """Which row of which source each sample of a run is: a pure function of the arguments and the sample's number.

    A source is drawn by weight for each sample; its rows are walked in a fresh permutation per epoch, those of a
    streamed source in the order in which they arrive. Sample n does not depend on how many are drawn: a resumed run
    needs only the step it had reached, and more steps change no earlier sample.

    Args:
        rows: by source.
        names: of the sources, for messages.
    """

    def __init__(self, rows: Sequence[Batches], weights: Sequence[float], seed: int, names: Sequence[str]) -> None:
        assert len(rows) == len(weights) == len(names)
        self.rows, self.weights, self.seed, self.names = rows, weights, seed, names

    def order(self, count: int) -> np.ndarray:
        """``[count, 2]`` int64: (source, row) of the first samples."""
        share = np.cumsum(np.asarray(self.weights, dtype=np.float64))
        draws = np.random.default_rng([self.seed, 0]).random(count) * share[-1]
        order = np.empty((count, 2), dtype=np.int64)
        order[:, 0] = np.minimum(np.searchsorted(share, draws, side="right"), len(share) - 1)
        for source, rows in enumerate(self.rows):
            places = np.flatnonzero(order[:, 0] == source)
            if not hasattr(rows, "__len__"):
                order[places, 1] = np.arange(len(places))
                continue
            size = len(cast(Rows, rows))
            epochs = np.tile(np.arange(size), (-(-len(places) // size), 1))
            # The numbers of permutation(size) epoch by epoch, so that further epochs change no earlier one.
            np.random.default_rng([self.seed, 1 + source]).permuted(epochs, axis=1, out=epochs)
            order[places, 1] = epochs.ravel()[: len(places)]
        return order

    def stage(self, count: int, before: int = 0, beside: Mapping[str, Tensor] | None = None) -> "StageSamples":
        """The ``count`` samples of a stage, after the ``before`` samples of the stages before it.

        Args:
            beside: tensors whose rows are added to the batches, in turn.
        """
        return StageSamples(self.rows, self.order(before + count)[before:], self.names, beside or {})


class StageSamples:
    """The samples of one stage, numbered from 0: a pure function of their numbers, so that a resumed run sees what the
    uninterrupted one would have seen, and any worker may make them. Calling it with a range of numbers makes their
    batch, padded to the longest of its own rows where each holds one sample.

    sequential: a source is streamed, whose windows every worker would read.
    """

    def __init__(
        self, rows: Sequence[Batches], order: np.ndarray, names: Sequence[str], beside: Mapping[str, Tensor]
    ) -> None:
        self.rows, self.order, self.names, self.beside = rows, order, names, beside
        self.sequential = not all(hasattr(part, "__len__") for part in rows)

    def __call__(self, numbers: range) -> Batch:
        chosen = self.order[numbers.start : numbers.stop].tolist()
        runs = [(self.rows[at], [row for _, row in run]) for at, run in itertools.groupby(chosen, itemgetter(0))]
        longest = max(rows.longest(run) if isinstance(rows, Rows | WithHidden) else rows.length for rows, run in runs)
        parts = [rows.batch(run, longest) for rows, run in runs]
        # A server's features stand beside stored rows alone: beside streamed ones they are asked for later.
        common = [key for key in parts[0] if all(key in part for part in parts)]
        batch = parts[0] if len(parts) == 1 else {key: torch.cat([part[key] for part in parts]) for key in common}
        return batch | {key: rows[[n % len(rows) for n in numbers]] for key, rows in self.beside.items()}

    def labels(self, first: int) -> int | None:
        """The number of labels in the first samples, those of a row again each time it comes; None if a source is
        streamed, or its rows are no texts."""
        counted = 0
        for source, rows in enumerate(self.rows):
            texts = rows.rows if isinstance(rows, WithHidden) else rows
            if not isinstance(texts, Rows):
                return None
            before = np.concatenate([[0], np.cumsum(texts.samples.supervised)])
            by_sample = np.diff(before[texts.samples.starts])
            chosen = self.order[:first][self.order[:first, 0] == source, 1]
            times = np.bincount(chosen, minlength=len(texts.rows)).tolist()
            counted += sum(int(by_sample[row].sum()) * n for row, n in zip(texts.rows, times, strict=True) if n)
        return counted

    def describe(self, numbers: range) -> str:
        """Where samples come from, for messages: ``stdlib rows 3, 17; package:torch row 4``."""
        rows: dict[str, list[int]] = {}
        for source, row in self.order[numbers.start : numbers.stop]:
            rows.setdefault(self.names[int(source)], []).append(int(row))
        return "; ".join(f"{name} row{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for name, r in rows.items())


def answered(
    source: Source, target: Target, seed: int, folder: Path, template: str | None, max_skipped: float = 0.0
) -> Tokenized:
    """The target's continuations of prompts cut from a source, which end where the recipe's chat template, if it has
    one, ends an answer; of a file or data set, its answers to the conversations there (:func:`answer_chats`). They are
    kept in ``folder`` with the request, so that a resumed run trains on the same ones and a changed recipe on its own.
    One process makes them, the others wait."""
    ask = source.answers
    assert ask is not None and target.tokenizer is not None
    request: dict[str, Any] = {"target": target.fingerprint, "seed": seed}
    request |= {"source": source.model_dump(exclude={"weight"})}
    request |= {"quantized": True} if target.quantized else {}
    own = target.tokenizer.chat_template
    target.tokenizer.chat_template = template or own
    if template and target.template_end:
        request["ends"] = sorted(target.template_end)
    if not source.installed:
        request |= {"rows": rows_of_source(source)[1], "template": target.tokenizer.chat_template}
    request_file = folder / "asked.json"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if (folder / "model.safetensors").exists() and was_asked(request_file, request, target.older_fingerprint):
            made = checkpoint.read_tensors(folder)
        elif sharded.spreads():
            raise ValueError(
                f"data source '{source.source}': a target that is spread over processes answers no prompts; let it "
                "answer before, with train/distill.py, and name the shards as the source"
            )
        else:
            request_file.unlink(missing_ok=True)
            quiet, console.quiet = console.quiet, False  # whichever process makes them says so
            if target.end_warning:
                console.print(target.end_warning, style="yellow")
            what = "prompt" if source.installed else "conversation"
            what = f"the target answers {counted(ask.prompts, what)} from {source.label}"
            with ProgressBar(what, ask.prompts, console) as bar:
                if source.installed:
                    split = cast(sources.Split, source.split)
                    found = prompts(source.source, split, ask.prompts, ask.prompt_tokens, target.tokenizer, seed)
                    made = answer(target, [p.tokens for p in found], ask.new_tokens, ask.batch_size, bar)
                else:
                    made = answer_chats(target, source, max_skipped, bar)
            console.quiet = quiet
            checkpoint.write_tensors(folder, made)
            write_json(request_file, request)
    target.tokenizer.chat_template = own
    lengths = (made["supervised"].long() * torch.arange(1, made["supervised"].shape[1] + 1)).amax(1)
    return Tokenized.of(
        Sample(tokens[:length].tolist(), marks[:length].tolist())
        for tokens, marks, length in zip(made["tokens"], made["supervised"], lengths.tolist(), strict=True)
    )


def _wrote(file: Path) -> str | None:
    """The fingerprint of the target that wrote a file's answers, if it or the manifest beside it says so."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        if file.suffix != ".parquet":
            return read_json(file.with_name("manifest.json"))["decides"]["target.fingerprint"]
        from pyarrow import parquet  # a third of a second

        return parquet.read_schema(file).metadata[b"target.fingerprint"].decode()
    return None


def whose_answers(source: Source, target: Target) -> str:
    """What is known of who wrote the answers of a held-out source, as a line for the user; empty where the target
    did."""
    if source.answers is not None:
        return ""
    files = glob.glob(source.source) if source.is_file else ()
    if files and all(target.is_known_as(_wrote(Path(file))) for file in files):
        return ""
    return (
        f"{source.label}: its answers are not known to be this target's own. Checkpoints are selected by the simulated "
        "τ of decoding that text, which is the target's τ only if it writes such answers; answers: {…} in this source "
        "of data.validation has the target answer its prompts"
    )


def rows_of(recipe: DrafterRecipe, which: Literal["train", "validation"], target: Target) -> list[Rows | StreamedRows]:
    """The rows of each source. Validation rows hold one sample each."""
    rows: list[Rows | StreamedRows] = []
    assert target.tokenizer is not None
    template = template_for(recipe.data, target.tokenizer)
    for number, source in enumerate(getattr(recipe.data, which)):
        if source.streaming and which == "train":
            state = recipe.run.folder / "streams" / f"{number}.json"
            keep = PartialState().is_main_process
            streamed = StreamedRows(source, recipe.data, target.tokenizer, recipe.run.seed, state, keep=keep)
            rows.append(streamed)
            lines = streamed.skipped.lines()
            check_context(target, source, "may have", recipe.data.max_length)
            console.print(f"  {which}: {source.label}: streamed{'; in its first window:' if lines else ''}")
            for line in lines:
                console.print(f"    {line}")
            continue
        if source.answers is not None:
            folder = recipe.run.folder / "answers" / f"{which}-{number}"
            samples = answered(source, target, recipe.run.seed, folder, template, recipe.data.max_skipped)
        else:
            samples = tokenized(source, recipe.data, target.tokenizer)
            if (largest := int(samples.tokens.max(initial=0))) >= target.vocab_size:
                raise ValueError(
                    f"data source '{source.label}': token id {largest} is outside the target's vocabulary of "
                    f"{target.vocab_size}; its token_ids are another model's, leave them out"
                )
        check_context(target, source, "has", int(np.diff(samples.starts).max(initial=0)))
        labels = int(samples.supervised.sum())
        console.print(
            f"  {which}: {source.label}: {len(samples)} samples, {len(samples.tokens):,} tokens, "
            f"{labels / max(1, len(samples.tokens)):.0%} supervised"
        )
        for line in samples.skipped.lines():
            console.print(f"  {which}: {source.label}: {line}")
        if which == "validation" and (line := whose_answers(source, target)):
            console.print(f"  validation: {line}", style="yellow")
        rows.append(Rows(samples, recipe.data.max_length, share=recipe.data.packing and which == "train"))
    return rows


def check_context(target: Target, source: Source, has: str, longest: int) -> None:
    """Raises ValueError: a sample of the source has, or may have, more tokens than the target's positions."""
    if longest > target.longest:
        raise ValueError(
            f"data source '{source.label}': a sample {has} {longest:,} tokens, and the target has {target.longest:,} "
            f"positions; set data.max_length={target.longest}, or lower"
        )


def held_out_rows(recipe: DrafterRecipe, target: Target) -> Batch:
    """``tokens`` and ``supervised`` ``[S, T]`` of the validation sources in turn, at most :data:`HELD_OUT` rows of
    each, or as many as evaluations use."""
    rows = [rows for rows in rows_of(recipe, "validation", target) if isinstance(rows, Rows)]
    longest = max(part.length for part in rows)
    most = max(HELD_OUT, recipe.evaluate.sequences)
    for source, part in zip(recipe.data.validation, rows, strict=True):
        if len(part) > most:
            console.print(f"  validation: {source.label}: the first {most:,} of {len(part):,} rows are used")
    parts = [part.batch(range(min(len(part), most)), longest) for part in rows]
    return {key: in_turn([part[key] for part in parts]) for key in ("tokens", "supervised")}


def seen_in_training(held_out: Batch, rows: Sequence[object]) -> int:
    """The number of held-out samples whose tokens are those of a training sample, of sources that are not streamed."""

    def known(tokens: np.ndarray) -> bytes:  # without padding
        return hashlib.blake2b(np.trim_zeros(tokens.astype(np.int32), "b").tobytes(), digest_size=16).digest()

    samples = (part.samples for part in rows if isinstance(part, Rows))
    trained = {known(each) for part in samples for each in np.split(part.tokens, part.starts[1:-1])}
    return sum(known(tokens) in trained for tokens in held_out["tokens"].numpy())


def in_turn(parts: Sequence[Tensor]) -> Tensor:
    """The rows ``[S, …]`` of several sources as one tensor, one of each in turn, so that its first ones are of all."""
    numbers = torch.cat([torch.arange(len(part)) for part in parts])
    return torch.cat(list(parts))[numbers.argsort(stable=True)]


def prompts_of(held_out: Mapping[str, Tensor]) -> list[list[int]]:
    """What precedes each held-out row's first label: prompts to decode."""
    rows = zip(held_out["tokens"].tolist(), held_out["supervised"].tolist(), strict=True)
    return [tokens[: marks.index(True)] for tokens, marks in rows if not marks[0] and any(marks)]
