"""Self-distillation data: the target itself answers seed prompts (arXiv 2401.10774 §2.3.2), to train a drafter on.

    python train/distill.py recipes/tiny-distill.yaml [section.field=value ...] [--dry-run] [--tiny] [--restart]

The user's messages of each seed are sent one by one; the answers in the seed are dropped, the target's are kept. The
target may also write the user's messages itself (``data.written``, ``self_talk``). The run's folder gets
shard-00000.jsonl, …, which a training recipe names as a source, failures.jsonl and manifest.json. The same command,
after a kill too, goes on where it stopped and sends the failed prompts again, with another number of processes too:

    accelerate launch --multi_gpu --num_processes 8 train/distill.py RECIPE    # a GPU each; torchrun also works

Exit codes: 0 done, 1 no answers, 2 wrong usage or bad input, or interrupted.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftsmith.common.command import before_imports, counted, recipe_parser, run_command
from draftsmith.train.early import reader

PARSER = recipe_parser(
    __doc__,
    "recipes/tiny-distill.yaml",
    "self_talk=1",
    "a few answers of a small random target",
    resume="go on where it stopped; it does so anyway",
    restart="begin anew, deleting this run's answers",
    dry_run="show what would be sent; send and write nothing",
    machine=False,
)
RECIPE = before_imports(PARSER, reader("distill")) if __name__ == "__main__" else None

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which others import, would look for one and warn


from draftsmith.common.files import json_object
from draftsmith.common.progress import ProgressBar
from draftsmith.common.recipe import read_recipe, write_recipe
from draftsmith.data.chat import encode_prompt
from draftsmith.data.endpoint import check_server
from draftsmith.data.rows import Skipped, UnusableRow
from draftsmith.data.seeds import (
    CUT_THINKING,
    REJECTIONS,
    TOO_LONG,
    Conversation,
    Seed,
    WrittenTurns,
    read_seeds,
    written_seeds,
)
from draftsmith.data.shards import Shards, open_shards
from draftsmith.data.tokenized import read_template, template_for
from draftsmith.models.artifact import provenance, write_json
from draftsmith.models.files.copies import with_safetensors
from draftsmith.models.files.identity import fingerprint, older_fingerprint, unhashed
from draftsmith.models.files.locate import ModelFolder, locate
from draftsmith.models.options import choose_device
from draftsmith.models.precision import DTYPES, describe
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.train import folders
from draftsmith.train.backends import TEMPLATE, Backend, by_endpoint, by_engine, check_has_template
from draftsmith.train.launch import command_line, console, dtype_of
from draftsmith.train.ranks import Ranks, Share
from draftsmith.train.sections.distill import DistillRecipe
from draftsmith.train.tiny import SAMPLES, tiny_target, valid, write_target

OF_THE_PROMPT = (TOO_LONG, TEMPLATE, *REJECTIONS)  # reasons that do not count towards endpoint.give_up
MANIFEST_EVERY = 30.0  # seconds
INTERRUPTED = 10.0  # seconds that the first process waits for the others after Ctrl-C
THINKING = "a larger decoding.max_new_tokens, or data.template_arguments={enable_thinking: false}, lets it answer"


class GivenUpError(Exception):
    """``endpoint.give_up`` prompts in a row got no answer."""


def dry(recipe: DistillRecipe, seeds: list[Seed]) -> None:
    """Print how much would be sent, and the first prompt."""
    d, turns = recipe.decoding, sum(seed.turns for seed in seeds)
    answers, written = turns + recipe.self_talk * len(seeds), recipe.self_talk * len(seeds) + recipe.data.written
    asked = f" and {written:,} messages of the user of {d.user_tokens:,}" if written else ""
    tokens = answers * d.max_new_tokens + written * d.user_tokens
    console.print(
        f"{counted(len(seeds), 'prompt')} with {counted(turns, 'turn')} of the user, {recipe.self_talk} more of "
        f"self-talk each: at most {answers:,} answers of {d.max_new_tokens:,} tokens{asked}, {tokens:,} tokens in all, "
        f"{d.mode}, by "
        f"{recipe.backend}.{' The first prompt:' if seeds[0].messages else ''}"
    )
    if not seeds[0].messages:
        return console.print("The target writes the user's messages, the first one too.")
    first = Conversation(seeds[0], 0).pending or []
    if recipe.target is None or recipe.backend == "endpoint":
        console.print_json(json.dumps(first))
        return
    t = recipe.target
    try:
        tokenizer = load_tokenizer(t.name, t.revision, t.trust_remote_code)
    except (OSError, ValueError) as error:
        console.print(f"not rendered: {error}")
        return
    template = template_for(recipe.data, tokenizer)
    check_has_template(tokenizer, template)
    try:
        ids = encode_prompt(first, tokenizer, template)
    except UnusableRow as error:
        raise ValueError(f"the chat template refuses the first prompt: {error}") from None
    console.print(tokenizer.decode(ids))


def small(recipe: DistillRecipe) -> DistillRecipe:
    """``--tiny``: eight bundled chats, and two that the target begins where the recipe has such; sixteen tokens a
    message, by a small random target of the same family."""
    content: dict[str, Any] = recipe.model_dump()
    content["run"]["name"] += "-tiny"
    folder = Path(recipe.run.output_dir) / content["run"]["name"]
    target = content["target"] or {"name": "", "model_type": "llama"}
    content |= {"backend": "engine", "endpoint": None, "target": tiny_target(target, folder)}
    content["engine"] |= {"drafter": "none", "batch_size": 4, "max_length": 512}
    content["data"] |= {"seeds": [{"source": str(SAMPLES), "limit": 8}], "written": min(recipe.data.written, 2)}
    content["decoding"] |= {"max_new_tokens": 16, "user_tokens": 16}
    return valid(DistillRecipe, content)


def with_dtype(recipe: DistillRecipe, model: ModelFolder | None, folder: Path, restart: bool) -> DistillRecipe:
    """The recipe with ``target.dtype: auto`` resolved, for a run that goes on as it was; printed in a line, with a
    second one if it is slow here. ``model``: the target; None if it is not ours to run."""
    t, manifest = recipe.target, folder / "manifest.json"
    if t is None or model is None:
        return recipe
    began = None
    with suppress(ValueError, OSError, LookupError, TypeError):  # open_shards refuses a damaged one
        began = None if restart else json_object(manifest)["decides"]["target.dtype"]
    device = choose_device(None)
    began = began if began in DTYPES else None
    weights = 0
    if t.dtype == "auto" and not began and device == "cpu":  # as decoding chooses
        files = with_safetensors(model.path).glob("*.safetensors")
        weights = sum(file.stat().st_size for file in files)
    chosen = dtype_of(t, torch.device(device), began, weights)
    for line in describe(device, chosen):
        console.print(line, style="yellow" if line.startswith("warning") else None)
    return recipe.model_copy(update={"target": t.model_copy(update={"dtype": chosen.value})})


def decides_of(recipe: DistillRecipe, model: ModelFolder | None) -> dict[str, Any]:
    """All settings that the answers depend on, by field. Those of speed and the server's address may change between
    two commands that fill the same folder. ``model``: the target, where our own engine runs it."""
    own = recipe.self_talk or recipe.data.written
    unused = {"logprobs", "logprobs_mode"} if recipe.decoding.logprobs is None else set[str]()
    fields = {
        f"decoding.{name}": value
        for name, value in recipe.decoding.model_dump(mode="json", exclude=unused).items()
        if (own or not name.startswith("user_")) and (name != "top_k" or value)  # older manifests have no top_k
    }
    fields |= {"run.seed": recipe.run.seed, "backend": recipe.backend, "self_talk": recipe.self_talk}
    fields |= {"data.seeds": recipe.data.model_dump(mode="json")["seeds"]}  # not 'written': more of them change none
    if recipe.data.template_arguments:
        fields |= {"data.template_arguments": recipe.data.template_arguments}
    if recipe.backend == "endpoint":
        assert recipe.endpoint is not None
        return {**fields, "endpoint.model": recipe.endpoint.model}
    assert recipe.target is not None and model is not None
    # Not its name: the same weights may be in another folder.
    fields |= {f"target.{name}": getattr(recipe.target, name) for name in ("dtype", "quantize", "trust_remote_code")}
    fields["target.fingerprint"] = fingerprint(model.path)
    fields |= {"data.template": read_template(recipe.data.template), "engine.max_length": recipe.engine.max_length}
    return fields


def seeds_of(recipe: DistillRecipe) -> tuple[list[Seed], Skipped]:
    """The seeds, and the rows that were skipped, which are printed."""
    seeds, skipped = read_seeds(recipe.data.seeds, recipe.data.max_skipped) if recipe.data.seeds else ([], Skipped())
    if skipped.count:
        console.print(f"seeds: {skipped}")
    return [*seeds, *written_seeds(recipe.data.written)], skipped


def main() -> None:
    args = PARSER.parse_intermixed_args()
    if args.resume and args.restart:
        raise ValueError("--resume and --restart exclude each other; pass one")
    recipe = RECIPE or read_recipe(args.recipe, DistillRecipe, args.overrides)
    recipe = small(recipe) if args.tiny else recipe
    alone = args.dry_run or recipe.backend == "endpoint"
    launched, ranks = Ranks(), Ranks(alone)
    if alone and not launched.main:
        return
    if args.dry_run:
        return dry(recipe, seeds_of(recipe)[0])
    if launched.count > ranks.count:
        console.print(f"backend: endpoint: one process asks the servers; the other {launched.count - 1} end")
    with ranks, folders.held(recipe.run.folder, "distill", ranks.main):
        if ranks.main:
            recipe, seeds, shards, facts = begin(recipe, args, ranks.count)
            ranks.publish("recipe", recipe.model_dump(mode="json"))
        else:
            recipe = DistillRecipe.model_validate(ranks.wait_for("recipe"))
            seeds, shards, facts = seeds_of(recipe)[0], Shards(recipe.run.folder, ranks.rank, ranks.count), {}
        distill(recipe, seeds, shards, facts, by_engine if recipe.backend == "engine" else by_endpoint, ranks)


def begin(
    recipe: DistillRecipe, args: argparse.Namespace, processes: int
) -> tuple[DistillRecipe, list[Seed], Shards, dict[str, Any]]:
    """Prepare a run's folder for so many processes. Returns the recipe with its target's dtype, the seeds, the
    conversations so far and the manifest's facts."""
    folder, command, anew = recipe.run.folder, command_line("distill"), args.restart or args.tiny
    seeds, skipped = seeds_of(recipe)
    if args.tiny and recipe.target:
        write_target(recipe.target)
    t = recipe.target if recipe.backend == "engine" else None
    model = locate(t.name, t.revision) if t else None
    recipe = with_dtype(recipe, model, folder, anew)
    if model and (size := unhashed(model.path)):
        console.print(f"hashing the target's weights ({size / 1e9:.1f} GB), once …")
    decides = decides_of(recipe, model)
    older = {"target.fingerprint": older_fingerprint(model.path)} if model else {}
    shards = open_shards(folder, decides, anew, older, processes)
    shards.tidy()  # failures of several processes that were killed
    began = json_object(folder / "manifest.json") if (folder / "manifest.json").exists() else {}
    rows_skipped = {reason: count for count, reason, _ in skipped.table()}
    facts = {"rows_skipped": rows_skipped, "decides": decides, **provenance(command=command, recipe=args.recipe)}
    facts |= {"not_sent": began["not_sent"]} if "not_sent" in began else {}
    write_json(folder / "manifest.json", facts)  # first of all: it marks the folder as this run's
    write_recipe(recipe, folder / "recipe.yaml", command)
    return recipe, seeds, shards, facts


def summed(began: Any, parts: Sequence[Any]) -> Any:
    """Counts of all processes, from those at the beginning and what each has now, in dictionaries of the same form."""
    if len(parts) == 1:
        return parts[0]
    if not isinstance(parts[0], dict):
        return sum(parts) - began * (len(parts) - 1)
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: summed(began.get(name, 0), [part.get(name, 0) for part in parts]) for name in names}


def distill(
    recipe: DistillRecipe, seeds: list[Seed], shards: Shards, facts: dict[str, Any], backend: Backend, ranks: Ranks
) -> None:
    """Get the answers that are missing, together with the launch's other processes, and keep the manifest with its
    ``facts`` up to date.

    Raises:
        ValueError: the processes read different seeds.
        ConnectionError: no server listens at the endpoint.
        SystemExit: no answers (code 1).
        KeyboardInterrupt: the user stopped it; the answers so far are kept.
    """
    # A turn that was rejected would be written again, word for word.
    rejected = {id for id, line in shards.failures.items() if line["reason"] in REJECTIONS}
    todo = [seed for seed in seeds if seed.id not in shards.answers and seed.id not in rejected]
    wanted = {seed.id: seed.turns + recipe.self_talk for seed in seeds}
    # All have read the folder before one of them writes.
    if not ranks.agree("todo", hashlib.sha256("\n".join(seed.id for seed in todo).encode()).hexdigest()):
        raise ValueError("data.seeds: the processes read different prompts; give all of them the same files")

    def counts_of(shards: Shards) -> dict[str, Any]:
        return {"counts": shards.counts(wanted), "finish_reasons": dict(shards.finish_reasons)}

    def write_manifest(counts: dict[str, Any]) -> None:
        write_json(shards.folder / "manifest.json", {**counts, **facts})

    at_first = counts_of(shards)
    if ranks.main:
        write_manifest(at_first)
    if todo and recipe.endpoint and recipe.backend == "endpoint":
        for url in recipe.endpoint.urls:
            check_server(url)
    together = f" in {ranks.count} processes" if ranks.count > 1 else ""
    what = f"{len(todo):,} of {len(seeds):,} prompts to answer, by {recipe.backend}{together}"
    bar, share = ProgressBar(what, len(todo), console, disable=not ranks.main), Share(todo, ranks)
    answered, failed_in_a_row, unreached, saved = 0, 0, 0, time.monotonic()

    def show(ended: int) -> None:
        nonlocal saved
        bar(ended)
        if time.monotonic() - saved > MANIFEST_EVERY:
            ranks.publish(f"counts/{ranks.rank}", counts_of(shards))
            if ranks.main:
                parts = [ranks.find(f"counts/{rank}", at_first) for rank in range(ranks.count)]
                write_manifest(summed(at_first, parts))
            saved = time.monotonic()

    def conversation(seed: Seed) -> Conversation:
        return Conversation(seed, recipe.self_talk, written)

    def all_ended() -> bool:
        show(ranks.add("ended", 0))
        return all(ranks.find(f"over/{rank}") for rank in range(ranks.count))

    def end(conversation: Conversation) -> None:
        nonlocal answered, failed_in_a_row, unreached
        seed, why = conversation.seed, conversation.failure
        if why is None:
            answers = (conversation.messages, conversation.finish_reasons)
            shards.add(seed.id, *answers, seed.source, conversation.token_ids)
            answered, failed_in_a_row = answered + 1, 0
        else:
            shards.fail(seed.id, seed.source, why.reason, why.detail)
            failed_in_a_row += why.reason not in OF_THE_PROMPT
            unreached += why.retry or why.reason.startswith("http")
        show(share.ended())
        asks = recipe.endpoint if recipe.backend == "endpoint" else None
        if asks and failed_in_a_row >= asks.give_up:
            raise GivenUpError

    stopped: BaseException | None = None
    written = WrittenTurns(shards.first_turns, ranks.is_first)
    try:
        if todo:
            with bar:
                backend(recipe, map(conversation, share), end, facts)
                ranks.publish(f"counts/{ranks.rank}", counts_of(shards))
                ranks.publish(f"over/{ranks.rank}", True)
                if ranks.main:
                    ranks.wait(all_ended)
    except (GivenUpError, KeyboardInterrupt) as error:
        stopped = error
        ranks.publish(f"over/{ranks.rank}", True)
        if ranks.main and not ranks.wait(all_ended, INTERRUPTED):
            raise KeyboardInterrupt("stopped; the same command goes on") from None
    if not ranks.main:
        return sys.exit(2) if stopped else None
    if isinstance(stopped, KeyboardInterrupt) or ranks.count > 1:
        # Those of all processes; and Ctrl-C may have come between writing a line and counting it.
        shards = Shards(shards.folder)
    shards.tidy()
    found = counts_of(shards)
    write_manifest(found)
    report(found["counts"], shards, stopped, stopped is not None or (unreached > 0 and not answered))


def report(counts: dict[str, Any], shards: Shards, stopped: BaseException | None, unanswered: bool) -> None:
    """Print how the command ended. Raises SystemExit: ``unanswered``, or no prompt at all has an answer."""
    summary = f"{counts['done']:,} of {counts['prompts']:,} prompts are answered in {shards.folder}"
    if isinstance(stopped, KeyboardInterrupt):
        raise KeyboardInterrupt(f"stopped: {summary}; the same command goes on")
    if counts["failed"]:
        reasons = ", ".join(f"{reason} {count:,} times" for reason, count in counts["failed"].items())
        again = "the same command sends these again, but for user's turns that were not used"
        summary += f"; failed: {reasons} (see failures.jsonl; {again})"
        if CUT_THINKING in counts["failed"]:
            summary += f"; {CUT_THINKING}: {THINKING}"
    if unanswered or not counts["done"]:
        detail = list(shards.failures.values())[-1]["detail"]
        why = "no more answers" if counts["done"] else "no answers"
        why += ", endpoint.give_up prompts in a row" if stopped else ""
        print(f"error: {why}: {summary}{f': {detail}' if detail else ''}", file=sys.stderr, flush=True)
        raise SystemExit(1)
    console.print(f"done: {summary}")


if __name__ == "__main__":
    run_command(main, resumable=True)
