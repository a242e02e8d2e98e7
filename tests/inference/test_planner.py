"""The planner's formulas against their definitions; its command, and decode.py by a plan."""

import itertools
import json
import re

import pytest
import torch
from faults import error_of

from draftsmith.inference import planner
from draftsmith.inference.drafters.compressed import CompressedDrafter
from draftsmith.inference.engine import cache as caches
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.runner import engine_attention
from draftsmith.inference.measure import context_costs as costs
from draftsmith.inference.measure import planning
from draftsmith.inference.measure.context_costs import ContextCosts, context_costs
from draftsmith.inference.measure.planning import (
    Measured,
    Setting,
    drafter_of,
    expected_tokens,
    measure_undisturbed,
    plan,
    predict,
)
from draftsmith.inference.measure.prefilled import Prefilled, by_depth
from draftsmith.inference.measure.step_costs import StepCosts
from draftsmith.models.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def accept_noise(monkeypatch):
    """Times of these tiny steps are not tested, however busy the machine is."""
    monkeypatch.setattr(planning, "DISTURBED", float("inf"))


# A row's products 1 ms; a cached token of a row 1 µs, and 0.1 µs more for each node.
COSTS = StepCosts({1: 0.011, 65: 0.075}, per_key=1e-6, per_key_and_node=1e-7)


def t(batch, cached, nodes):
    """COSTS by hand."""
    return 0.010 + 0.001 * batch * nodes + (cached - 128) * batch * (1e-6 + 1e-7 * nodes)


def test_expected_tokens():
    """(1 − α^{γ+1}) / (1 − α) of equal probabilities; by enumeration of others."""
    for alpha in (0.0, 0.3, 0.9):
        assert expected_tokens([alpha] * 4) == pytest.approx((1 - alpha**5) / (1 - alpha))
    assert expected_tokens([0.5, 0.2]) == pytest.approx(0.5 * 1 + 0.5 * 0.8 * 2 + 0.5 * 0.2 * 3)
    assert expected_tokens([]) == 1


@pytest.mark.parametrize(("selector", "share"), [("snapkv", 1 / 256), ("topk", 0)])
def test_predictions_are_the_formula(selector, share):
    """share: of a selection, for each token; 0: one in each step."""
    setting, alphas = Setting(selector, 256, 3), [0.9, 0.8, 0.7, 0.1]
    found = predict(COSTS.seconds, 8, 3000, setting, alphas, 0.003, 0.0004, -0.0002, 0.0003)
    tokens = 1 + 0.9 + 0.9 * 0.8 + 0.9 * 0.8 * 0.7
    draft = sum(t(8, 256 + 128 + depth, 1) - 0.0002 for depth in range(3))
    select = 8 * 0.003 * (tokens * share if share else 1)
    verify = t(8, 3000, 4) + 0.0004
    plain = t(8, 3000, 1) + 0.0003
    assert found.tokens == pytest.approx(tokens)
    assert found.draft == pytest.approx(draft / plain) and found.verify == pytest.approx(verify / plain)
    assert found.select == pytest.approx(select / plain)
    assert found.speedup == pytest.approx(tokens * plain / (draft + verify + select))
    cost = found.draft + found.verify + found.select
    if found.least_alpha < 1:
        assert expected_tokens([found.least_alpha] * 3) == pytest.approx(cost, abs=1e-3)
    else:
        assert found.least_alpha == pytest.approx(cost, abs=1e-3) and cost > 4


@pytest.mark.parametrize("beyond", [(-1.0, 0.0, 0.0), (0.0, -1.0, 0.0), (0.0, 0.0, 0.5)])
def test_no_speed_up_is_above_the_tokens_of_a_step(beyond):
    """However wrong a time beyond the costs of steps is: 0.5 s of a plain step of 46 ms once made 8.84 of E = 1.70."""
    found = predict(COSTS.seconds, 1, 256, Setting("snapkv", 64, 2), [0.5, 0.4], 0.0, *beyond)
    assert found.verify >= 1 and found.draft >= 0 and found.speedup <= found.tokens == pytest.approx(1.7)


@pytest.mark.parametrize(("plains", "used"), [([10.0, 1.2], 1), ([0.1, 10.0, 0.9], 2), ([10.0, 4.0, 0.3], None)])
def test_a_disturbed_plain_step_is_measured_again(monkeypatch, plains, used):
    """plains: times of a plain step, in those by the step costs. used: the measurement that counts; None: refused."""
    monkeypatch.setattr(planning, "DISTURBED", 3.0)
    calculated, left = t(1, 260, 1), iter(plains)

    def measure():
        return {("snapkv", 64): Measured([0.9], 0.0, 0.0, 0.0, (next(left) - 1) * calculated)}, 0.1

    options = measure, 256, calculated
    if used is None:
        with pytest.raises(ValueError, match="a plain step took 3.3 ms, .* it takes 11.1 ms, .* run again while"):
            measure_undisturbed(*options)
    else:
        found, _ = measure_undisturbed(*options)
        assert found["snapkv", 64].per_plain == pytest.approx((plains[used] - 1) * calculated)
        assert len([*left]) == len(plains) - used - 1


def measured_of(known, batches, lengths, of=t):
    return ContextCosts(known, {(b, s, n): of(b, s, n) for b in batches for s in lengths for n in (1, 5)})


def test_costs_between_lengths_and_nodes():
    """Exact where costs are linear, beyond the longest too; each batch size as it was measured."""
    found = measured_of(StepCosts({1: 0.011, 65: 0.075}), (1, 8), (100, 1000, 2000))
    for batch, cached, nodes in itertools.product((1, 8), (50, 100, 700, 1000, 1900, 2600), (1, 2, 5, 9)):
        assert found.seconds(batch, cached, nodes) == pytest.approx(t(batch, cached, nodes))
    bent = measured_of(StepCosts({1: 1.0, 9: 9.0}), (1, 4), (10, 20, 30), lambda b, s, n: b * n + b * max(s - 20, 0))
    assert [bent.seconds(4, s, 1) for s in (15, 20, 25, 30)] == pytest.approx([4, 4, 24, 44])


def test_the_inflection_is_where_keys_cost_what_products_do():
    """n nodes of a row take n · 1 ms, and a cached token 1.1 µs; above it the speed-up grows with the batch, below it
    falls, if what a step takes at least is left out."""
    assert measured_of(COSTS, (1, 8), (100, 3000)).inflection(2) == pytest.approx(2000 / 1.1)
    assert measured_of(COSTS, (1, 8), (100, 3000), lambda b, s, n: 1.0).inflection(2) is None
    steep = StepCosts({1: 0.002, 65: 0.066}, per_key=1e-6)
    speeds = {
        (batch, cached): predict(steep.seconds, batch, cached, Setting("streamingllm", 128, 1), [0.8]).speedup
        for batch in (1, 64)
        for cached in (300, 20_000)
    }
    assert speeds[64, 20_000] > speeds[1, 20_000] and speeds[64, 300] < speeds[1, 300]


def test_plans_say_where_plain_decoding_is_the_fastest():
    weak, good, better = (Measured([alpha] * 8, 1e-3, 1e-4, 1e-4, 1e-4) for alpha in (0.3, 0.9, 0.95))
    measured = {128: {("snapkv", 64): weak}, 8192: {("snapkv", 64): good, ("streamingllm", 64): better}}
    known = measured_of(COSTS, (1, 16), (100, 2000, 8000))
    short, long, *_ = plan(known, measured, {128: 0.1, 8192: 6.0}, [16], 64)
    assert short["drafter"] == "none" and short["speedup"] < 1 < short["least_alpha"] / short["alpha"][0]
    assert long["drafter"].startswith("streamingllm:64@1,1") and long["speedup"] > 1.2
    assert 1 < long["speedup_with_prefill"] < long["speedup"]


@pytest.mark.parametrize("new_tokens", [64, 300])
@pytest.mark.parametrize("selector", ["snapkv", "topk"])
def test_plans_count_selections_within_the_steps(selector, new_tokens):
    """The first one stands beside the prefill; only topk makes others within 256 new tokens."""
    own = Measured([0.9] * 8, 1e-3, 1e-4, 1e-4, 1e-4)
    known = measured_of(COSTS, (1, 16), (100, 2000, 8000))
    (cell,) = plan(known, {8000: {(selector, 64): own}}, {8000: 6.0}, [16], new_tokens)
    setting = Setting(selector, 64, len(cell["alpha"]))
    tokens, again = expected_tokens(cell["alpha"]), {("snapkv", 64): 0, ("snapkv", 300): 1 / 256}
    plain = t(16, 8000 + new_tokens / 2, 1) + 1e-4
    select = 16 * 1e-3 * tokens * again.get((selector, new_tokens), 1 / tokens)
    draft = sum(t(16, 64 + min(new_tokens, 256) / 2 + depth, 1) + 1e-4 for depth in range(setting.drafts))
    verify = t(16, 8000 + new_tokens / 2, setting.drafts + 1) + 1e-4
    assert cell["speedup"] == pytest.approx(tokens * plain / (draft + verify + select), abs=1e-4)
    decoded = new_tokens * plain
    whole = (96 + decoded) / (96 + 16e-3 + decoded / cell["speedup"])
    assert cell["speedup_with_prefill"] == pytest.approx(whole, abs=1e-4)


def test_counts_by_depth():
    assert by_depth([[1, 3, 4], [2]], 3) == [[4, 3], [3, 2], [2, 1]]


@torch.inference_mode()
def test_a_batch_that_was_read_once_goes_on_as_it_would(make_target):
    """Plain and drafted continuations are those of the engine, each time anew."""
    target = make_target("llama")
    texts = [[(3 * n * n + row) % 61 for n in range(40)] for row in range(2)]
    expected = SpeculativeDecoder(target).generate(texts, 12, stop_ids=frozenset())
    batch = Prefilled(target, texts, 8)
    drafter = drafter_of(target, Setting("streamingllm", 16, 2))
    step = batch.step(drafter)
    with engine_attention([target]):
        for one in (batch.plain, step, batch.plain, step):
            committed = batch.run(one).committed
            assert batch.new_tokens * 2 <= sum(map(sum, committed)) < batch.new_tokens * 2 + 2 * 3
            roots = one.state.root.tolist()
            for row, own in enumerate(committed):
                assert roots[row] == expected[row].tokens[sum(own)]
    assert isinstance(drafter, CompressedDrafter)


def test_steps_are_measured_at_lengths_and_batches(make_target, monkeypatch):
    target = make_target("llama", max_position_embeddings=4096)
    monkeypatch.setattr(costs, "step_costs", lambda *args: StepCosts({1: 0.011, 65: 0.075}))
    times = itertools.count()

    def seconds(step, cached):
        return t(step.rows, cached, step.drafter.num_nodes) + 1e-3 * (next(times) % 7)

    monkeypatch.setattr(costs, "step_seconds", seconds)
    found = context_costs(target, [1000, 2000], [3])
    assert {*found.measured} == {(b, s, n) for b in (1, 3) for s in (128, 500, 1000, 1500, 2000) for n in (1, 5)}
    assert found.seconds(3, 1234, 4) == pytest.approx(t(3, 1234, 4)), "the shortest one of each"


@pytest.fixture
def long_prompts(tmp_path):
    rows = [{"prompt": ("for name in names: print(name, len(name)); " * 3)[number:][:90]} for number in (3, 5)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "long.jsonl"


def test_the_command_and_decoding_by_its_plan(run_main, run_decode, tiny_lm, long_prompts, tmp_path):
    out = tmp_path / "plan.json"
    sizes = "--contexts 48 64 --batch-sizes 1 2 --entries 36 40 --texts 2 --new-tokens 8 --threads 1 --device cpu"
    options = f"--target {tiny_lm} {sizes} --prompts {long_prompts} --out {out}"
    code, said, err = run_main(planner.main, *options.split(), script="inference/planner.py")
    assert code == 0 and "longer than S*" in said, err
    facts = json.loads(out.read_text())
    assert [(cell["batch"], cell["context"]) for cell in facts["cells"]] == [(1, 48), (1, 64), (2, 48), (2, 64)]
    assert len(facts["measured"]) == 2 * 2 * 2 and len(facts["costs"]) == 2 * 5 * 2
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for cell in facts["cells"]:
        cell["drafter"] = "snapkv:40@1,1" if cell["batch"] == 2 else "none"
    out.write_text(json.dumps(facts))

    def decoded(plan, options=""):
        given = f"--plan {plan} --target {tiny_lm} --prompts {long_prompts} --max-new-tokens 12 --device cpu"
        return run_decode(f"{given} --check-lossless --report {tmp_path / 'report'} {options}")

    code, _, err = decoded(out, "--batch-size 2")
    assert code == 0 and "plan for 2 rows of 64 tokens: snapkv:40@1,1, " in err
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["drafter"] == "snapkv:40@1,1" and report["lossless"]["passed"]
    code, _, err = decoded(out)
    assert code == 0 and re.search("plan for 1 row of 64 tokens: none; used here for 1 row of [0-9]+ tokens\n", err)
    facts["target"]["fingerprint"] = "another"
    out.write_text(json.dumps(facts))
    assert "is for target" in decoded(out)[2]
    for damaged in ("{}", '{"cells": [{"batch": 1}], "target": {}}'):
        out.write_text(damaged)
        assert "is no plan" in decoded(out)[2]
    assert "there is no such file" in decoded(tmp_path / "missing.json")[2]
    assert "not both" in error_of(run_decode(f"ngram --plan {out} --target {tiny_lm} --prompt a"))


def test_refused_before_anything_is_measured(run_main, tiny_lm, long_prompts, monkeypatch):
    monkeypatch.setattr(planner, "make_plan", lambda *args: pytest.fail("it measured"))
    for options, said in (
        (
            f"--contexts 100 --entries 64 --batch-sizes 1 --prompts {long_prompts}",
            "its longest text has [0-9]+ tokens, too few for",
        ),
        ("--contexts 64 --entries 40 --batch-sizes 1 100000000", "--batch-sizes 100000000: memory for at most"),
        ("--contexts 64 --entries 64 --batch-sizes 1", "give one below 64"),
    ):
        given = f"--target {tiny_lm} --device cpu {options}"
        assert re.search(said, error_of(run_main(planner.main, *given.split(), script="inference/planner.py")))


def test_planned_now(report_of, tiny_lm, long_prompts):
    options = "--max-new-tokens 8 --batch-size 2 --device cpu --check-lossless"
    _, err = report_of(f"--plan auto --target {tiny_lm} --prompts {long_prompts} {options}")
    assert "plan for 2 rows of " in err and "used here" not in err


def test_a_target_whose_sinks_cannot_be_rotated(run_main, report_of, make_target, tiny_lm, long_prompts, tmp_path):
    """It is planned for without streamingllm, which is said, unless that was named."""
    folder, given = tmp_path / "gpt2", f"--target {tmp_path / 'gpt2'} --prompts {long_prompts} --device cpu"
    make_target("gpt2", vocab_size=300, n_positions=256).model.save_pretrained(folder)
    load_tokenizer(str(tiny_lm)).save_pretrained(folder)
    left_out = f"left out: streamingllm: model '{folder}': sinks cannot be rotated"
    _, err = report_of(f"--plan auto {given} --max-new-tokens 8")
    assert left_out in err and re.search("plan for 1 row of [0-9]+ tokens: (none|snapkv)", err)
    sizes = "--contexts 48 --batch-sizes 1 --entries 40 --texts 1 --new-tokens 8 --threads 1"
    for selectors, code, said in (("", 0, left_out), ("--selectors streamingllm", 2, f"error: {left_out[10:]}")):
        result = run_main(planner.main, *f"{given} {sizes} {selectors}".split(), script="inference/planner.py")
        assert result[0] == code and said in result[2], result


def test_bounded_drafts(report_of, run_decode, tiny_lm, long_prompts):
    """--max-draft-nodes bounds each step's drafts; 0 is plain decoding."""
    given = f"snapkv:120@1,1,1,1 --target {tiny_lm} --prompts {long_prompts} --max-new-tokens 16 --device cpu"
    for most in (0, 2):
        report, _ = report_of(f"{given} --all-nodes --check-lossless --max-draft-nodes {most}")
        assert (report["mean_accepted_length"] == 1) == (most == 0)
        assert report["mean_accepted_length"] <= 1 + most
    for options, said in (
        ("--max-draft-nodes -1", "must be at least 0"),
        ("--max-draft-nodes 1 --verify mss", "depend on it"),
        ("--plan auto", "not both"),
    ):
        assert said in error_of(run_decode(f"ngram --target {tiny_lm} --prompt a {options}"))


def test_a_cache_that_does_not_fit_says_what_would(make_target, monkeypatch):
    target = make_target("llama")
    row = sum(2 * heads * 100 * width * 4 for heads, width in target.kv_shapes)
    monkeypatch.setattr(caches, "free_bytes", lambda device: 5 * row + 1)
    KVCache(target, 5, 100)
    with pytest.raises(ValueError, match="6 texts of 100 tokens need .* at most 5 at a time; take a smaller batch"):
        KVCache(target, 6, 100)
