"""The recipes on a target's own answers, sampled from prompts of three sets of the Hub."""

import json

import pytest
import yaml
from recipe_runs import ANSWERS, RECIPES, check_requests, finish, first_line, held_out_command, succeed, train
from safetensors.torch import load_file

pytestmark = pytest.mark.whole_runs


OWN_ANSWERS = {
    "llama3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "qwen3-8b-thinking": "Qwen/Qwen3-8B",
    "qwen3-8b-non-thinking": "Qwen/Qwen3-8B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
}
THREE_SETS = ["backend=engine", *(f"data.seeds.{n}.split=train[:6]" for n in (1, 2))]


@pytest.mark.parametrize("stem", OWN_ANSWERS)
def test_own_answers(world, stem):
    """Prompts of three sets, answered by our engine in place of a server; then each drafter of the pair, on the token
    ids that the engine sampled."""
    target = OWN_ANSWERS[stem]
    drafters = [name for name in (f"{stem}-eagle3", f"{stem}-medusa") if name in RECIPES]
    drafters += ["qwen3-8b-dflash"] if stem == "qwen3-8b-non-thinking" else []
    commands = {" ".join(held_out_command(name)) for name in drafters}
    assert len(commands) == 1 and len(drafters) >= 2
    distilled = first_line(f"{stem}-distill")[1:]
    succeed(world.python(*distilled, *ANSWERS, *THREE_SETS, "data.seeds.0.split=train_sft[:6]"))
    succeed(world.python(*held_out_command(drafters[0]), *ANSWERS, *THREE_SETS, "data.seeds.0.split=test_sft[:6]"))
    lines = [
        json.loads(line)
        for file in sorted((world.root / "runs" / f"{stem}-held-out").glob("shard-*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert {line["source"] for line in lines} == set(_sources(stem)) and len(lines) == 18
    sizes = {"eagle3": ["drafter.draft_vocab_size=200", "drafter.unroll=2"], "medusa": []}
    sizes["dflash"] = ["drafter.block_size=4", "drafter.captured_layers=null", "drafter.mask_token_id=null"]
    for name in drafters:
        moe = ["drafter.intermediate_size=96"] if name == "qwen3-30b-a3b-eagle3" else []
        out = train(world, name, *sizes[name.rpartition("-")[2]], *moe)
        assert "answers are encoded from their text" not in out and "follow another prompt" not in out
        check_requests(world, target)
        sampled = [ids["answer"] for line in lines for ids in line["token_ids"]]
        held_out = load_file(world.root / "runs" / name / "held_out" / "model.safetensors")
        assert int(held_out["supervised"].sum()) == sum(map(len, sampled))
        finish(world, name)


def _sources(stem: str) -> list[str]:
    return [seed["source"] for seed in yaml.safe_load(RECIPES[f"{stem}-distill"].read_text())["data"]["seeds"]]
