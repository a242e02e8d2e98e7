"""Pre-train a small causal LM from scratch: the demo's target, and starting points for small speculative models.

    accelerate launch train/lm.py recipes/tiny-lm.yaml [section.field=value ...] [--tiny] [--resume | --restart]

Byte-level BPE tokenizer, Llama architecture, packed rows, stages of growing length. The run folder opens with
``AutoModelForCausalLM`` and ``AutoTokenizer``.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from draftsmith.common.command import before_imports, counted, recipe_parser, run_command
from draftsmith.train.early import reader

PARSER = recipe_parser(
    __doc__, "recipes/tiny-lm.yaml", "stages.0.steps=20", "two steps of every stage with a far smaller model"
)
RECIPE = before_imports(PARSER, reader("lm")) if __name__ == "__main__" else None

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.common.data_sections import Source
from draftsmith.common.files import replacing_folder
from draftsmith.data import packing, sources
from draftsmith.data.bpe import END_OF_TEXT, END_OF_TURN, encode, other_tokenizer, train_tokenizer
from draftsmith.data.rows import rows as rows_of
from draftsmith.models.artifact import write_model
from draftsmith.models.files.locate import ModelFolder, locate
from draftsmith.models.medusa import MedusaConfig, MedusaHeads
from draftsmith.train.dry_run import Plan
from draftsmith.train.launch import console
from draftsmith.train.lm_model import check_beginning, config_of, load_weights, parameters_of
from draftsmith.train.loop import checkpoint_activations, fit
from draftsmith.train.losses import HEAD_DECAY, labels_of, linear_cross_entropy, shifted_labels
from draftsmith.train.memory import language_model, widths
from draftsmith.train.run import Run, digest_of
from draftsmith.train.samples import Batch, Stored, in_turn
from draftsmith.train.script import Script, run_script
from draftsmith.train.sections.lm import LmRecipe, Lookahead
from draftsmith.train.unlikelihood import asked_prompts, continuations


class LanguageModel(nn.Module):
    """Next-token cross-entropy over packed rows; documents follow each other in a row, parted by the end token."""

    unlikelihood = 1.0  # weight of the loss on "written" rows
    output_layers = ("heads.",)  # not for Muon

    def __init__(self, model: LlamaForCausalLM, lookahead: Lookahead | None = None) -> None:
        super().__init__()
        self.model, self.lookahead = model, lookahead
        self.heads: MedusaHeads | None = None
        if lookahead:
            sizes = model.config.hidden_size, model.config.vocab_size
            self.heads = MedusaHeads(MedusaConfig(lookahead.num_heads, 1, "shared", *sizes))

    def few(self, tokens: Tensor) -> int:
        """The number of rows on which the lookahead heads train, the first ones."""
        return max(1, round(len(tokens) * self.lookahead.share)) if self.lookahead else 0

    def labels(self, batch: Batch) -> Tensor:
        """``[1 + K, S, T]``: of the next token over all rows, then of each lookahead head over the first rows."""
        tokens, heads = batch["tokens"], self.lookahead.num_heads if self.lookahead else 0
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        labels = torch.stack([shifted_labels(tokens, everywhere, k + 1) for k in range(heads + 1)])
        labels[1:, self.few(tokens) :] = -100
        return labels

    def count(self, batch: Batch) -> Tensor:
        counts = (labels_of(self, batch) != -100).sum((1, 2))
        return torch.cat([counts, batch["again"].sum()[None]]) if "again" in batch else counts

    def forward(self, batch: Batch, counts: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = batch["tokens"].long()
        hidden = self.model.model(tokens, use_cache=False).last_hidden_state
        labels = labels_of(self, batch)
        lm_head = self.model.lm_head.weight
        total, hits = linear_cross_entropy(hidden, lm_head, labels[0])
        next_token = total / counts[0]
        loss, metrics = next_token, {"next_token_loss": next_token.detach(), "top1": hits / counts[0]}
        if self.heads is not None and self.lookahead and self.training:
            few = self.few(tokens)
            features = self.heads.features(hidden[:few].flatten(0, 1))
            for k, feature in enumerate(features, 1):
                total, hits = linear_cross_entropy(feature, lm_head, labels[k, :few].flatten())
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


def make_tokenizer(run: Run[LmRecipe], start: ModelFolder | None) -> PreTrainedTokenizerFast:
    """The resumed run's tokenizer, that of ``init_from`` (``start``), the recipe's, or one trained on the text; stored
    in the folder."""
    recipe, folder = run.recipe, run.folder
    if run.resume and (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    if recipe.init_from:
        tokenizer = PreTrainedTokenizerFast.from_pretrained((start or locate(recipe.init_from)).path)
    elif recipe.tokenizer:
        tokenizer = other_tokenizer(recipe.tokenizer, recipe.model.vocab_size)
    else:
        m = recipe.model
        console.print("training the tokenizer …")
        tokenizer = train_tokenizer(recipe.data.train, m.vocab_size, m.max_position_embeddings)
    if run.main:
        with replacing_folder(folder) as temporary:
            tokenizer.save_pretrained(temporary)
    return tokenizer


def evaluate(run: Run[LmRecipe], module: nn.Module) -> dict[str, float]:
    """Loss and accuracy of the next token on the held-out rows."""
    assert isinstance(module, LanguageModel)

    def sums(tokens: Tensor, marks: Tensor) -> Tensor:
        batch = {"tokens": tokens.to(run.accelerator.device)}
        count = module.count(batch)
        _, metrics = module(batch, torch.ones_like(count), 0)
        found = torch.stack([metrics["next_token_loss"], metrics["top1"], count[0]]).double()
        return found * bool(marks.any())  # a batch without labels is another process' too

    total, hits, labels = run.held_out_sums(sums).tolist()
    return {"validation_loss": total / labels, "validation_top1": hits / labels}


def train(run: Run[LmRecipe]) -> None:
    """From the tokenizer to the exported model."""
    recipe, folder, m = run.recipe, run.folder, run.recipe.model
    run.save_recipe()
    run.check_room(parameters_of(m))
    start = locate(recipe.init_from) if recipe.init_from and not run.resume else None
    if start:
        check_beginning(start, m)
    tokenizer, most = make_tokenizer(run, start), recipe.data.max_skipped
    corpora = [encode(source, tokenizer, most) for source in recipe.data.train]
    held_out = [encode(source, tokenizer, most) for source in recipe.data.validation]
    for source, ids in zip(recipe.data.train, corpora, strict=True):
        console.print(f"  {source.source} ({source.form}): {len(ids)} documents, {sum(map(len, ids)):,} tokens")

    torch.manual_seed(recipe.run.seed)
    end, end_of_turn = (int(tokenizer.get_vocab()[token]) for token in (END_OF_TEXT, END_OF_TURN))
    model = LlamaForCausalLM(config_of(m, end))
    if start:
        load_weights(model, start)
    if recipe.precision.gradient_checkpointing:
        checkpoint_activations(model)
    module = LanguageModel(model, recipe.lookahead)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{parameters / 1e6:.2f} M parameters, {counted(run.accelerator.num_processes, 'process')}")

    def packed(given: Sequence[Source], texts: Sequence[Sequence[Sequence[int]]], length: int) -> list[Tensor]:
        return [packing.pack(ids, source.label, length, end) for source, ids in zip(given, texts, strict=True)]

    validation = in_turn(packed(recipe.data.validation, held_out, recipe.data.max_length))
    validation = validation[: recipe.evaluate.sequences]
    run.held_out = {"tokens": validation, "supervised": torch.ones_like(validation, dtype=torch.bool)}
    measure = partial(evaluate, run)
    # All stages now: too little text for the last one should not be found out after the first ones.
    for number, stage in enumerate(recipe.stages):
        if stage.unlikelihood:
            asked_prompts(stage.unlikelihood, tokenizer, recipe.run.seed + number)
    rows = [[Stored(tokens=t) for t in packed(recipe.data.train, corpora, stage.max_length)] for stage in recipe.stages]
    run.depends_on["training rows"] = digest_of(part.tensors["tokens"] for parts in rows for part in parts).hex()
    for stage, parts in zip(recipe.stages, rows, strict=True):
        written = continuations(run, stage.name, stage.unlikelihood, model, tokenizer)
        module.unlikelihood = stage.unlikelihood.weight if stage.unlikelihood else 1.0
        # The last weights, not the best: the long stage costs a little on short rows, and is why long ones work.
        fit(run, stage, module, parts, measure, "-validation_loss", beside=written, take_best=False)

    module.to(torch.bfloat16).float()  # the shipped weights, in half the file, are what is measured
    module.eval()
    with torch.no_grad():
        loss = measure(module)["validation_loss"]
    if not run.main:
        return
    module.to(torch.bfloat16)
    model.generation_config.eos_token_id = [end, end_of_turn]
    run.data_sha256 = [rows_of(source)[1] for source in recipe.data.train]
    *earlier, last = run.recipe.stages
    facts = run.facts(
        parameters=parameters,
        init_from=recipe.init_from,
        validation_loss=round(loss, 4),
        # On top of init_from's. Of the last stage the steps that ran: its seconds may have ended it.
        trained_tokens=sum(stage.samples * stage.max_length for stage in earlier)
        + (run.step - run.first) * last.batch.sequences * last.max_length,
        licences={source.source: sources.licence(source.source) for source in recipe.data.train},
    )
    write_model(folder, model, tokenizer, facts)
    if run.dry:
        return
    console.print(
        f"done: {folder} (validation loss {loss:.3f}); try: python inference/decode.py none "
        f"--target {folder} --prompt 'def read('"
    )


def plans(recipe: LmRecipe) -> list[Plan]:
    """What each stage costs: all weights train."""
    parameters, config = parameters_of(recipe.model), config_of(recipe.model, 0)
    losses = 1 + (recipe.lookahead.num_heads if recipe.lookahead else 0)
    layers, (_, queries, *_) = config.num_hidden_layers, widths(config)
    recomputed = recipe.precision.gradient_checkpointing
    costs: dict[str, Any] = {"kept": lambda micro: language_model(config, micro, losses, True, None, recomputed)}
    costs["attended"] = 1.5 * layers * queries
    costs |= {
        "autocast": recipe.precision.autocast == "bfloat16",
        "logits": losses * recipe.model.vocab_size,
        "every_row": False,
    }
    return [Plan(s, s.max_length, parameters, **costs) for s in recipe.stages]


SCRIPT = Script("lm", LmRecipe, train, plans)


def main() -> None:
    run_script(SCRIPT, PARSER, RECIPE)


if __name__ == "__main__":
    run_command(main, resumable=True)
