"""What the engine runs to answer many conversations: steps, passes of prompts, idle rows; counted, not timed.

    python benchmarks/answering.py --batches 384 32
    python benchmarks/answering.py --conversations 500 --turns 3 --batches 32 --out runs/answering.json

A tiny random target answers prompts with the token ids of --data's questions, behind its chat template, by as many
tokens as the recorded answers have: it has no end token. --turns joins that many rows to one conversation, each prompt
beginning with the prompts and answers before it. Queue and steps are the real ones, launched one ahead as on a GPU.
Their clock goes by --step-ms at each step, so that a machine gives the same counts as another one.

steps           launches of a step of the batch
passes          forward passes of prompts
prompt tokens   that these ran
reused          tokens of prompts that the cache held already
idle            share of the rows of all steps in which no text was decoded
"""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from draftsmith.benchmarks.options import check_options, list_option
from draftsmith.common.command import CommandLine, before_imports, make_console, run_command

PARSER = CommandLine(__doc__)
PARSER.add_argument("--data", default="data/coder-train.parquet", help="chats with recorded answers (%(default)s)")
PARSER.add_argument("--tokenizer", default="models/qwen2.5-coder-0.5b", help="the recorded target's (%(default)s)")
PARSER.add_argument("--conversations", type=int, default=2000, help="that are answered (%(default)s)")
PARSER.add_argument("--turns", type=int, default=1, help="of each conversation (%(default)s)")
list_option(PARSER, "--batches", [384, 32], "ROWS", "rows of the engine (%(default)s)")
PARSER.add_argument("--step-ms", type=float, default=4.0, help="milliseconds of a step, for what waits (%(default)s)")
PARSER.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
PARSER.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures there")
if __name__ == "__main__":
    before_imports(PARSER, lambda args: check_options(args, "conversations", "turns", "batches"))

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.common.data_sections import Source
from draftsmith.common.files import write_json
from draftsmith.data.chat import encode_prompt
from draftsmith.data.rows import rows
from draftsmith.inference.engine import queue
from draftsmith.inference.engine.conversations import serve_conversations
from draftsmith.inference.engine.engine import Generation, Request, SpeculativeDecoder
from draftsmith.models.target import Target
from draftsmith.models.tokenizer import load_tokenizer

VOCABULARY = 1024  # ids of the tokenizer are taken modulo this, so that equal prompts stay equal
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
Turn = tuple[list[int], int]  # ids between the answer before and this one, and the tokens of this one


def conversations(data: str, tokenizer: Any, count: int, turns: int) -> list[list[Turn]]:
    """Prompts and lengths of answers of the first conversations of ``turns`` rows each."""
    made: list[list[Turn]] = []
    rest = iter(rows(Source(source=data))[0])
    for _ in range(count):
        own: list[Turn] = []
        for question, answer in (row["messages"][-2:] for _, row in itertools.islice(rest, turns)):
            ids = [token % VOCABULARY for token in encode_prompt([question], tokenizer, None)]
            own.append((ids, len(tokenizer(answer["content"], add_special_tokens=False)["input_ids"]) + 1))
        if len(own) < turns:
            raise ValueError(f"--data {data}: has fewer than {count * turns} rows; lower --conversations or --turns")
        made.append(own)
    return made


def count(asked: list[list[Turn]], batch: int, step_ms: float) -> dict[str, float]:
    """Answer the conversations; the counts, by their names in the table."""
    longest = max(sum(len(ids) + answer for ids, answer in each) for each in asked)
    fields = SHAPE | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model("llama", vocab_size=VOCABULARY, max_position_embeddings=longest, **fields)
    torch.manual_seed(0)
    target = Target(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), None, "tiny", "")
    # Not the lean decoder, whose bits on a CPU ask for each prompt alone.
    decoder = SpeculativeDecoder(target, static=True, lean=False)
    queue.time = SimpleNamespace(perf_counter=lambda: decoder.counts.steps * step_ms / 1e3)

    def next_request(own: SimpleNamespace) -> Request:
        ids, answer = own.turns.pop(0)
        own.text += ids
        return Request(list(own.text), answer, stop_ids=frozenset())

    def on_answer(own: SimpleNamespace, result: Generation) -> bool:
        own.text += result.tokens
        return bool(own.turns)

    texts = iter([SimpleNamespace(turns=list(turns), text=[]) for turns in asked])
    try:
        serve_conversations(decoder, texts, next_request, on_answer, batch, max_length=longest)
    finally:
        queue.time = time
    counts = decoder.counts
    busy = sum(answer - 1 for each in asked for _, answer in each)  # the first token comes from the prompt's pass
    return {
        "steps": counts.steps,
        "passes": counts.prefill_passes,
        "prompt tokens": counts.prefilled_tokens,
        "reused": counts.reused_tokens,
        "idle": counts.idle_row_steps / (counts.idle_row_steps + busy),
    }


def main() -> None:
    args = PARSER.parse_args()
    torch.set_num_threads(args.threads)
    asked = conversations(args.data, load_tokenizer(args.tokenizer), args.conversations, args.turns)
    console, table = make_console(), {}
    console.print(f"{'rows':>5}{'steps':>9}{'passes':>9}{'prompt tokens':>15}{'reused':>10}{'idle':>8}")
    for batch in args.batches:
        found = table[str(batch)] = count(asked, batch, args.step_ms)
        console.print(f"{batch:5}" + "{:9,.0f}{:9,.0f}{:15,.0f}{:10,.0f}{:8.1%}".format(*found.values()))
    if args.out:
        write_json(args.out, {"conversations": args.conversations, "turns": args.turns, "batches": table})


if __name__ == "__main__":
    run_command(main)
