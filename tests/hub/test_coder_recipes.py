"""The recipes for Qwen2.5-Coder, whose target is on the Hub by one field of their comments."""

import json

import pyarrow.parquet
import pytest
from recipe_runs import (
    ANSWERS,
    ROOT,
    World,
    check_requests,
    finish,
    first_line,
    held_out_command,
    hub_id,
    shards,
    succeed,
    supervised,
    train,
)

pytestmark = pytest.mark.whole_runs


CODER = ["drafter.draft_vocab_size=200"]
COMMITTED = ["data.train.0.limit=60", "data.validation.0.limit=24"]  # of the answers in data/
FEW_SEEDS = ["data.seeds.0.limit=8", "data.written=0"]  # a random target writes no message that could be used


@pytest.fixture(scope="module")
def coder_eagle3(world: World) -> str:
    """The target's Hub id, after the EAGLE-3 recipe for it was run."""
    target = hub_id("qwen2.5-coder-0.5b-eagle3")
    train(world, "qwen2.5-coder-0.5b-eagle3", f"target.name={target}", *CODER, *COMMITTED, "drafter.unroll=2")
    return target


def test_coder_eagle3(world, coder_eagle3):
    """A recipe for the folder of `make coder` takes its target from the Hub by one field. What is supervised of the
    committed answers is the answers."""
    name = "qwen2.5-coder-0.5b-eagle3"
    check_requests(world, coder_eagle3)
    config = json.loads((world.root / "runs" / name / "config.json").read_text())
    assert config["fc_norm"] and config["norm_output"]
    rows = supervised(world, name, coder_eagle3)
    committed = pyarrow.parquet.read_table(ROOT / "data/coder-held-out.parquet").to_pylist()[:24]
    for answers, chat in zip(rows, committed, strict=True):  # a long question leaves none of its answer, here
        assert all(chat["messages"][1]["content"].startswith(text.rstrip("\ufffd")) for text in answers)
    assert sum(map(len, rows)) > 12 and max(map(len, rows)) == 1
    finish(world, name, target=coder_eagle3)


@pytest.mark.parametrize("family", ["medusa", "dflash"])
def test_coder_heads_and_blocks(world, family):
    name = f"qwen2.5-coder-0.5b-{family}"
    target = hub_id(name)
    train(world, name, f"target.name={target}", *CODER, *COMMITTED)
    finish(world, name, target=target)


def test_coder_peagle(world, coder_eagle3):
    """It begins with the EAGLE-3 drafter."""
    name = "qwen2.5-coder-0.5b-peagle"
    train(world, name, f"target.name={coder_eagle3}", *CODER, *COMMITTED, "drafter.unroll=2")
    finish(world, name, target=coder_eagle3)


def test_coder_dynaspec(world, coder_eagle3):
    """On the EAGLE-3 drafter, whose draft vocabulary is dropped."""
    name = "qwen2.5-coder-0.5b-dynaspec"
    sizes = ["drafter.num_clusters=8", "drafter.router_width=16", "drafter.positions=400"]
    train(world, name, f"target.name={hub_id(name)}", *COMMITTED, *sizes)
    finish(world, name, ["model.safetensors", "drafter/model.safetensors"], coder_eagle3)
    config = json.loads((world.root / "runs" / name / "config.json").read_text())
    assert config["outputs"] == config["vocab_size"], "all tokens"


def test_coder_distillation(world):
    """Both recipes for answers; the 1.5B's two drafters on such, by the commands in their comments."""
    target = hub_id("qwen2.5-coder-1.5b-distill")
    for name in ("qwen2.5-coder-0.5b-distill", "qwen2.5-coder-1.5b-distill"):
        words = [*first_line(name)[1:], f"target.name={hub_id(name)}", *ANSWERS, *FEW_SEEDS, "data.seeds.1.limit=8"]
        succeed(world.python(*words))
        chats, failed = shards(world, name), (world.root / "runs" / name / "failures.jsonl")
        empty = failed.read_text().count('"empty answer"') if failed.exists() else 0  # random weights may write nothing
        assert len(chats) == 16 - empty > 12
        assert all([m["role"] for m in chat] == ["user", "assistant"] for chat in chats)
    commands = [held_out_command(f"qwen2.5-coder-1.5b-{family}") for family in ("medusa", "eagle3")]
    assert commands[0] == commands[1]
    succeed(world.python(*commands[0], f"target.name={target}", *ANSWERS, *FEW_SEEDS))
    for family, more in (("medusa", []), ("eagle3", ["drafter.unroll=2"])):
        name = f"qwen2.5-coder-1.5b-{family}"
        train(world, name, f"target.name={target}", *CODER, *more)
        check_requests(world, target)
        assert supervised(world, name, target) == [
            [chat[-1]["content"].strip()] for chat in shards(world, "qwen2.5-coder-1.5b-held-out")
        ]
        finish(world, name, target=target)
