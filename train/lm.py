"""Pre-train a small causal LM from scratch: the demo's target, and starting points for small speculative models.

    accelerate launch train/lm.py recipes/tiny-lm.yaml [section.field=value ...] [--tiny] [--resume | --restart]

Byte-level BPE tokenizer, Llama architecture, packed rows, stages of growing length. The run folder opens with
``AutoModelForCausalLM`` and ``AutoTokenizer``.
"""

import copy
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

from draftsmith.common.command import before_imports, recipe_parser, run_command
from draftsmith.common.content import check_recipe

PARSER = recipe_parser(
    __doc__, "recipes/tiny-lm.yaml", "stages.0.steps=20", "two steps of every stage with a far smaller model"
)
if __name__ == "__main__":
    before_imports(PARSER, check_recipe)

import torch
from pydantic import Field, model_validator
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.common.files import json_object, replacing_folder
from draftsmith.common.progress import ProgressBar
from draftsmith.common.recipe import Section
from draftsmith.common.sections import (
    TINY_LENGTH,
    Factor,
    Layers,
    Name,
    Share,
    Source,
    Stage,
    Tokens,
    TrainingRecipe,
)  # fmt: skip
from draftsmith.data import packing, sources
from draftsmith.data.chat import apply_template
from draftsmith.data.formats import Completion, read_sample
from draftsmith.data.prompts import prompts
from draftsmith.data.rows import Skipped, usable
from draftsmith.data.rows import rows as rows_of
from draftsmith.inference.engine.answers import answer
from draftsmith.models.artifact import write_model
from draftsmith.models.medusa import MedusaConfig, MedusaHeads
from draftsmith.models.stored import resolve_folder
from draftsmith.models.target import Target, load_target
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.train import checkpoint, loop
from draftsmith.train.dry_run import Plan
from draftsmith.train.losses import HEAD_DECAY, linear_cross_entropy, shifted_labels
from draftsmith.train.run import Run, Script, run_script

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|end|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>\n"
    "{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


Width = Annotated[int, Field(gt=0, le=1 << 18)]


class Model(Section):
    tiny: ClassVar[dict[str, Any]] = {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48,
        "max_position_embeddings": 512, "vocab_size": 512,
    }  # fmt: skip

    vocab_size: int = Field(
        default=4096, ge=256 + 2 + len(ROLES), le=1 << 20, description="at least the bytes and special tokens"
    )
    hidden_size: Width
    num_layers: int = Field(gt=0, le=1024)
    num_heads: int = Field(gt=0, le=1024)
    num_kv_heads: int = Field(gt=0, le=1024)
    head_dim: int = Field(default=32, gt=0, le=4096, multiple_of=2, description="rotary embeddings turn pairs")
    intermediate_size: Width
    max_position_embeddings: Tokens = 4096
    rope_theta: float = Field(default=100000.0, ge=1, le=1e12)

    @model_validator(mode="after")
    def _grouped(self) -> "Model":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        return self


class Lookahead(Section):
    """Extra heads that predict tokens further ahead from the same hidden state while the LM trains, and are then thrown
    away (multi-token prediction, arXiv 2404.19737): they leave a hidden state that drafter heads can read more from."""

    num_heads: Layers
    weight: Factor = Field(default=0.3, description="of head k's loss: weight × 0.8^k")
    share: Share = Field(default=0.25, gt=0, description="share of the rows they are trained on")


class Unlikelihood(Section):
    """Beside the text, continuations that the model itself writes when the stage begins: tokens that complete an n-gram
    for the second time become less likely (sequence-level unlikelihood, arXiv 1908.04319 §5.2). Small models decoded
    greedily fall into loops; this gets them out."""

    source: Source = Field(description="what to continue, with 'answers'; one continuation accompanies each row")
    ngram: Tokens = 6
    weight: Factor = 1.0

    @model_validator(mode="after")
    def _answers(self) -> "Unlikelihood":
        if self.source.answers is None:
            raise ValueError("source needs 'answers'")
        return self


class LmStage(Stage):
    tiny: ClassVar[dict[str, Any]] = {"max_length": TINY_LENGTH}

    max_length: Tokens
    unlikelihood: Unlikelihood | None = None


class LmRecipe(TrainingRecipe):
    tiny: ClassVar[dict[str, Any]] = {"init_from": None, "tokenizer": None}  # another tokenizer has more entries

    model: Model
    init_from: Name | None = Field(default=None, description="a folder whose weights and tokenizer to begin with")
    tokenizer: Name | None = Field(
        default=None, description="a folder whose tokenizer to use; left out, init_from's, or one trained on the text"
    )
    lookahead: Lookahead | None = None
    stages: list[LmStage] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_tokenizer(self) -> "LmRecipe":
        if self.init_from and self.tokenizer:
            raise ValueError("init_from brings its tokenizer; leave out one of 'init_from' and 'tokenizer'")
        return self

    @model_validator(mode="after")
    def _finite(self) -> "LmRecipe":
        if self.export.push_to_hub:
            raise ValueError("export.push_to_hub uploads drafters; upload a model with: hf upload USER/NAME FOLDER")
        if self.export.licence:
            raise ValueError("export.licence is for the model card of a drafter, which a model has not; leave it out")
        if self.export.dtype != "float32":
            raise ValueError("export.dtype is for drafters; a model's dtype is that of its training: leave it out")
        for source in self.data.train:
            if source.streaming and source.limit is None:
                raise ValueError(
                    f"source {source.source!r} is streamed; this script reads all its text first: set 'limit'"
                )
        return self


class LanguageModel(nn.Module):
    """Next-token cross-entropy over packed rows; documents follow each other in a row, parted by the end token."""

    unlikelihood = 1.0  # weight of the loss on "written" rows
    output_layers = ("heads.",)  # not for Muon

    def __init__(self, model: LlamaForCausalLM, lookahead: Lookahead | None = None) -> None:
        super().__init__()
        self.model, self.lookahead = model, lookahead
        self.heads: MedusaHeads | None = None
        if lookahead:
            config = model.config
            self.heads = MedusaHeads(
                MedusaConfig(lookahead.num_heads, 1, "shared", config.hidden_size, config.vocab_size)
            )

    def _labels(self, tokens: Tensor) -> list[Tensor]:
        """Of the next token over all rows, then of each head over the first rows."""
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        labels = [shifted_labels(tokens, everywhere, 1)]
        if self.lookahead:
            few = max(1, round(len(tokens) * self.lookahead.share))
            labels += [
                shifted_labels(tokens[:few], everywhere[:few], k + 1) for k in range(1, self.lookahead.num_heads + 1)
            ]
        return labels

    def count(self, batch: loop.Batch) -> Tensor:
        counts = [(labels != -100).sum() for labels in self._labels(batch["tokens"])]
        return torch.stack([*counts, batch["again"].sum()] if "again" in batch else counts)

    def forward(self, batch: loop.Batch, counts: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = batch["tokens"].long()
        hidden = self.model.model(tokens, use_cache=False).last_hidden_state
        labels = self._labels(tokens)
        lm_head = self.model.lm_head.weight
        total, hits = linear_cross_entropy(hidden, lm_head, labels[0])
        next_token = total / counts[0]
        loss, metrics = next_token, {"next_token_loss": next_token.detach(), "top1": hits / counts[0]}
        if self.heads is not None and self.lookahead and self.training:
            few = len(labels[1])
            features = self.heads.features(hidden[:few].flatten(0, 1))
            for k, feature in enumerate(features, 1):
                total, hits = linear_cross_entropy(feature, lm_head, labels[k].flatten())
                loss = loss + self.lookahead.weight * HEAD_DECAY**k * total / counts[k]
                metrics[f"head{k}_top1"] = hits / counts[k]
        if "again" in batch:
            again = batch["again"][:, 1:]
            written = batch["written"].long()
            hidden = self.model.model(written, use_cache=False).last_hidden_state[:, :-1]
            logits = self.model.lm_head(hidden).float()
            chosen = logits.gather(-1, written[:, 1:, None]).squeeze(-1)
            probability = (chosen - logits.logsumexp(-1)).exp().clamp(max=1 - 1e-6)
            total = -(torch.log1p(-probability) * again).sum()
            repetition = total / counts[-1].clamp(min=1)
            loss = loss + self.unlikelihood * repetition
            metrics["repetition_loss"] = repetition.detach()
        return loss, metrics


def repeated(tokens: Tensor, supervised: Tensor, n: int) -> Tensor:
    """Positions that complete an n-gram for the second time.

    Args:
        tokens, supervised: ``[S, T]`` as :func:`draftsmith.inference.engine.answers.answer` returns them.

    Returns:
        ``[S, T]`` bool, True at the last token of each n-gram that the same continuation already held.
    """
    again = torch.zeros_like(supervised)
    for i, (row, marks) in enumerate(zip(tokens.tolist(), supervised.tolist(), strict=True)):
        seen: set[tuple[int, ...]] = set()
        places = [t for t, mark in enumerate(marks) if mark]
        for t in places[n - 1 :]:
            gram = tuple(row[t - n + 1 : t + 1])
            again[i, t] = gram in seen
            seen.add(gram)
    return again


def write_continuations(
    module: LanguageModel, tokenizer: PreTrainedTokenizerFast, ask: Unlikelihood, seed: int
) -> loop.Batch:
    """Greedy continuations by the model as it is: ``written [S, T]`` and ``again [S, T]`` of :func:`repeated`."""
    source, wanted = ask.source, ask.source.answers
    assert wanted is not None
    split = cast(sources.Split, source.split)
    found = prompts(source.source, split, wanted.prompts, wanted.prompt_tokens, tokenizer, seed)
    target = Target(copy.deepcopy(module.model).eval(), tokenizer, "the model in training", "")
    with ProgressBar(f"the model continues {len(found)} prompts from {source.source}", len(found), loop.console) as bar:
        rows = answer(target, [p.tokens for p in found], wanted.new_tokens, wanted.batch_size, bar)
    again = repeated(rows["tokens"], rows["supervised"], ask.ngram)
    loop.console.print(f"  {float(again.sum() / rows['supervised'].sum()):.0%} of it repeats {ask.ngram}-grams")
    return {"written": rows["tokens"], "again": again}


def load_weights(model: LlamaForCausalLM, folder: Path) -> None:
    """Copy a stored model's weights.

    Raises:
        ValueError: it has another shape.
    """
    stored = load_target(str(folder), device="cpu").model.state_dict()
    own = model.state_dict()
    different = [name for name in own if name not in stored or own[name].shape != stored[name].shape]
    if different or stored.keys() != own.keys():
        raise ValueError(f"init_from={folder}: its shape is not the recipe's model ({', '.join(different[:3])} …)")
    model.load_state_dict(stored)


def texts(source: Source, tokenizer: PreTrainedTokenizerFast | None, skipped: Skipped | None = None) -> Iterator[str]:
    """The documents of a source; chats are rendered by the template (without a tokenizer, their plain contents). Rows
    that cannot be used are left out and noted in ``skipped``."""

    def read(row: Mapping[str, Any]) -> list[str]:
        content = read_sample(row)
        if isinstance(content, str):
            return [content]
        if isinstance(content, Completion):
            return [content.prompt + content.completion]
        if tokenizer is None:
            return [message["content"] for message in content]
        return [str(apply_template(content, tokenizer, None, tokenize=False))]

    for _, found in usable(itertools.islice(rows_of(source)[0], source.limit), read, skipped or Skipped()):
        yield from found


def train_tokenizer(corpus: list[Source], vocab_size: int, max_position: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of ``vocab_size`` entries (fewer if the text has no more), with the chat template."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, END_OF_TURN, *ROLES]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=loop.console.is_terminal
    )
    bpe.train_from_iterator((text for source in corpus for text in texts(source, None)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT,
        extra_special_tokens=[END_OF_TURN, *ROLES], clean_up_tokenization_spaces=False, model_max_length=max_position,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def encode(source: Source, tokenizer: PreTrainedTokenizerFast, max_skipped: float) -> list[list[int]]:
    """The token ids of each document.

    Raises:
        ValueError: more than a share of ``max_skipped`` of the rows cannot be used.
    """
    skipped = Skipped()
    documents, found = list(texts(source, tokenizer, skipped)), list[list[int]]()
    skipped.check(source.source, max_skipped)
    if skipped.count:
        loop.console.print(f"  {source.source} ({source.split}): {skipped}")
    with ProgressBar(f"tokenizing {source.source} ({source.split})", len(documents), loop.console) as bar:
        for begin in range(0, len(documents), 256):
            encodings = tokenizer.backend_tokenizer.encode_batch_fast(documents[begin : begin + 256])
            found += [encoding.ids for encoding in encodings]
            bar(len(found))
    return found


def config_of(m: Model, end: int) -> LlamaConfig:
    """The architecture of a recipe's ``model`` section; ``end`` is the end token's id."""
    return LlamaConfig(
        vocab_size=m.vocab_size, hidden_size=m.hidden_size, num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_heads, num_key_value_heads=m.num_kv_heads, head_dim=m.head_dim,
        intermediate_size=m.intermediate_size, max_position_embeddings=m.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": m.rope_theta}, tie_word_embeddings=True,
        bos_token_id=end, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip


def parameters_of(m: Model) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in LlamaForCausalLM(config_of(m, 0)).parameters())


def check_beginning(recipe: LmRecipe) -> None:
    """Check ``init_from`` by its config and tokenizer, before any text is read; its weights are checked later.

    Raises:
        FileNotFoundError, ValueError: there is none, it has another shape, or its tokenizer lacks our end tokens.
    """
    where, folder = f"init_from={recipe.init_from}", resolve_folder(str(recipe.init_from))
    if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{where}: no model with its tokenizer there (config.json, tokenizer.json)")
    stored, own = json_object(folder / "config.json"), config_of(recipe.model, 0).to_dict()
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                 "intermediate_size"):  # fmt: skip
        if stored.get(name) != own[name]:
            raise ValueError(f"{where}: its shape is not the recipe's model: {name} {stored.get(name)} ≠ {own[name]}")
    check_ends(where, load_tokenizer(folder).get_vocab())


def check_ends(where: str, vocabulary: Collection[str]) -> None:
    """Refuse a tokenizer without our end tokens.

    Raises:
        ValueError: its vocabulary lacks one.
    """
    missing = {END_OF_TEXT, END_OF_TURN} - set(vocabulary)
    if missing:
        raise ValueError(
            f"{where}: its tokenizer has no {' and no '.join(sorted(missing))}; begin with a model of train/lm.py"
        )


def other_tokenizer(recipe: LmRecipe) -> PreTrainedTokenizerFast:
    """The tokenizer that the recipe names, of another model.

    Raises:
        FileNotFoundError, ValueError: there is none, it lacks our end tokens, or the model has no room for all of it.
    """
    where, folder = f"tokenizer={recipe.tokenizer}", resolve_folder(str(recipe.tokenizer))
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{where}: no tokenizer there (tokenizer.json)")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    check_ends(where, tokenizer.get_vocab())
    if len(tokenizer) > recipe.model.vocab_size:
        raise ValueError(f"{where}: it has {len(tokenizer)} entries; set model.vocab_size={len(tokenizer)}")
    return tokenizer


class Packed:
    """Rows of one source: documents that follow each other, ``[S, T]`` int32."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.length = rows, rows.shape[1]

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, numbers: Sequence[int], length: int | None = None) -> loop.Batch:
        return {"tokens": self.rows[list(numbers)]}


def make_tokenizer(run: Run[LmRecipe]) -> PreTrainedTokenizerFast:
    """The resumed run's tokenizer, ``init_from``'s, the recipe's, or one trained on the text; stored in the folder."""
    recipe, folder = run.recipe, run.folder
    if run.resume and (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    if recipe.init_from:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve_folder(recipe.init_from))
    elif recipe.tokenizer:
        tokenizer = other_tokenizer(recipe)
    else:
        m = recipe.model
        loop.console.print("training the tokenizer …")
        tokenizer = train_tokenizer(recipe.data.train, m.vocab_size, m.max_position_embeddings)
    if run.main:
        with replacing_folder(folder) as temporary:
            tokenizer.save_pretrained(temporary)
    return tokenizer


def evaluate(validation: Tensor, device: torch.device, module: nn.Module) -> dict[str, float]:
    """Loss and accuracy of the next token on rows ``[S, T]``."""
    assert isinstance(module, LanguageModel)
    total, hits, labels = 0.0, 0.0, 0
    for rows in validation.split(16):
        batch = {"tokens": rows.to(device)}
        count = module.count(batch)
        _, metrics = module(batch, torch.ones_like(count), 0)
        total, hits = total + float(metrics["next_token_loss"]), hits + float(metrics["top1"])
        labels += int(count[0])
    return {"validation_loss": total / labels, "validation_top1": hits / labels}


def continuations(
    run: Run[LmRecipe], stage: LmStage, module: LanguageModel, tokenizer: PreTrainedTokenizerFast
) -> loop.Batch:
    """Continuations for a stage's unlikelihood loss, written once by one process; empty without ``unlikelihood``."""
    if stage.unlikelihood is None:
        return {}
    module.unlikelihood = stage.unlikelihood.weight
    folder = run.folder / "answers" / stage.name
    with run.accelerator.main_process_first():
        if run.main and not (run.resume and (folder / "model.safetensors").exists()):
            seed = run.recipe.run.seed + run.recipe.stages.index(stage)
            checkpoint.write_tensors(folder, write_continuations(module, tokenizer, stage.unlikelihood, seed))
    return checkpoint.read_tensors(folder)


def train(run: Run[LmRecipe]) -> None:
    """From the tokenizer to the exported model."""
    recipe, folder, m = run.recipe, run.folder, run.recipe.model
    run.save_recipe()
    run.check_room(parameters_of(m))
    if recipe.init_from and not run.resume:
        check_beginning(recipe)
    tokenizer, most = make_tokenizer(run), recipe.data.max_skipped
    corpora = [encode(source, tokenizer, most) for source in recipe.data.train]
    held_out = [ids for source in recipe.data.validation for ids in encode(source, tokenizer, most)]
    for source, ids in zip(recipe.data.train, corpora, strict=True):
        loop.console.print(f"  {source.source} ({source.form}): {len(ids)} documents, {sum(map(len, ids)):,} tokens")

    torch.manual_seed(recipe.run.seed)
    end, end_of_turn = (int(tokenizer.get_vocab()[token]) for token in (END_OF_TEXT, END_OF_TURN))
    model = LlamaForCausalLM(config_of(m, end))
    if recipe.init_from and not run.resume:
        load_weights(model, resolve_folder(recipe.init_from))
    if recipe.precision.gradient_checkpointing:
        loop.checkpoint_activations(model)
    module = LanguageModel(model, recipe.lookahead)
    parameters = sum(p.numel() for p in model.parameters())
    loop.console.print(f"{parameters / 1e6:.2f} M parameters, {run.accelerator.num_processes} process(es)")
    validation = packing.pack(held_out, recipe.data.max_length, end)[: recipe.evaluate.sequences]
    measure = partial(evaluate, validation, run.accelerator.device)
    # All stages now: too little text for the last one's rows should not be found out after the first ones.
    rows = [[Packed(packing.pack(ids, stage.max_length, end)) for ids in corpora] for stage in recipe.stages]
    for stage, packed in zip(recipe.stages, rows, strict=True):
        written = continuations(run, stage, module, tokenizer)
        # The last weights, not the best: the long stage costs a little on short rows, and is why long ones work.
        run.fit(stage, module, packed, measure, "-validation_loss", beside=written, take_best=False)

    module.to(torch.bfloat16).float()  # the shipped weights, in half the file, are what is measured
    module.eval()
    with torch.no_grad():
        loss = measure(module)["validation_loss"]
    if not run.main:
        return
    module.to(torch.bfloat16)
    model.generation_config.eos_token_id = [end, end_of_turn]
    run.data_sha256 = [rows_of(source)[1] for source in recipe.data.train]
    facts = run.facts(
        parameters=parameters, init_from=recipe.init_from, validation_loss=round(loss, 4),
        trained_tokens=sum(s.samples * s.max_length for s in run.recipe.stages),  # on top of init_from's
        licences={source.source: sources.licence(source.source) for source in recipe.data.train},
    )  # fmt: skip
    write_model(folder, model, tokenizer, facts)
    if run.dry:
        return
    loop.console.print(f"done: {folder} (validation loss {loss:.3f}); try: python inference/decode.py none "
                       f"--target {folder} --prompt 'def read('")  # fmt: skip


def plans(recipe: LmRecipe) -> list[Plan]:
    """What each stage costs: all weights train."""
    parameters = parameters_of(recipe.model)
    return [
        Plan(s.name, 0, parameters, 0.0, s.optim, s.steps, s.batch.sequences * s.max_length, epochs=s.epochs)
        for s in recipe.stages
    ]


SCRIPT = Script("lm", LmRecipe, train, plans)


def main() -> None:
    run_script(SCRIPT, PARSER)


if __name__ == "__main__":
    run_command(main, resumable=True)
