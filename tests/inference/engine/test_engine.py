"""Greedy decoding equals the target's own, for every family, tree size and accepted length; and the ends of texts."""

import itertools

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.inference.engine import prompts as engine_prompts
from draftsmith.inference.engine import runner as running
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.runner import Runner
from draftsmith.inference.measure.timing import PhaseTimes
from draftsmith.models.target import Target

NONE = frozenset()
PROMPTS = [
    [7, 3, 19, 44, 5, 3, 28, 11, 50, 2, 33],
    [9],
    [58, 1, 30, 12],
    [21, 6, 17, 40, 8, 8, 14, 25, 39, 60, 4, 10, 31, 52, 16, 47, 23],
]
WANTED = 36
DEPTH = {1: 0, 33: 5, 65: 6}
LONGEST = WANTED + max(DEPTH.values()) + 2
LEAN = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "granite")
FAMILIES = (*LEAN, "gpt_neox", "gpt2", "opt", "cohere", "phi", "stablelm")


def decode(target, drafter, prompts, wanted, lean=None, **options):
    results = SpeculativeDecoder(target, drafter, lean=lean).generate(prompts, wanted, stop_ids=NONE, **options)
    for result in results:
        assert len(result.tokens) == 1 + sum(result.accepted)
    return results


@pytest.mark.parametrize(
    ("family", "rows", "nodes", "lean"),
    # By default, and by the models' own modules in place of the lean decoder.
    [*itertools.product(FAMILIES, [1, 4], DEPTH, [None]), *itertools.product(LEAN, [4], [1, 65], [False])],
)
def test_output_is_the_targets_own(written, scripted, family, rows, nodes, lean):
    target, truth = written(family)
    prompts, truth = PROMPTS[:rows], truth[:rows]
    drafter = scripted(target, prompts, truth, [WANTED] * rows, nodes, DEPTH[nodes])
    results = decode(target, drafter, prompts, WANTED, lean)
    assert [r.tokens for r in results] == [t[:WANTED] for t in truth]
    assert [r.accepted for r in results] == drafter.accepted
    assert {r.finish_reason for r in results} == {"length"}
    drafter.assert_every_length_occurred()
    assert running._of_pass.get(None) is None, "no mask is kept after its pass"
    if lean is False:
        decode(target, None, PROMPTS[:1], 2, lean=True)  # these families have a lean decoder


@pytest.mark.parametrize("rows", [1, 4])
def test_trees_of_changing_size(written, scripted, rows):
    """A drafter's node count and depth are upper bounds; the root alone is also a tree."""
    target, truth = written("llama")
    drafter = scripted(target, PROMPTS[:rows], truth[:rows], [WANTED] * rows, 65, 6)
    drafter.sizes = [1, 33, 2, 65, 64]
    results = decode(target, drafter, PROMPTS[:rows], WANTED)
    assert [r.tokens for r in results] == [t[:WANTED] for t in truth[:rows]]
    assert [r.accepted for r in results] == drafter.accepted


def test_a_step_is_kept_for_fewer_and_longer_texts(written):
    """So that a remainder of a batch, or the next turn of a conversation, captures no graphs anew."""
    target, truth = written("llama")
    decoder = SpeculativeDecoder(target)
    decoder.generate(PROMPTS, 4, batch_size=4, stop_ids=NONE)
    step = decoder._step
    (result,) = decoder.generate(PROMPTS[:1], WANTED, batch_size=4, stop_ids=NONE)
    assert result.tokens == truth[0][:WANTED] and decoder._step is step
    decoder.generate(PROMPTS[:1], 4, stop_ids=NONE)
    assert decoder.rows == 1, "all of one prompt"


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "opt"])
@pytest.mark.parametrize("chunk", [1, 4, 11])
def test_prefill_in_chunks(written, scripted, monkeypatch, family, chunk):
    """Prompts that end in different chunks; those of 4 and 11 tokens at the end of a chunk."""
    monkeypatch.setattr(Runner, "bitwise", False)  # prompts begin together, as on a GPU
    target, truth = written(family)
    monkeypatch.setattr(engine_prompts, "PREFILL_CHUNK", chunk)
    drafter = scripted(target, PROMPTS, truth, [14] * 4, 33, 5)
    results = decode(target, drafter, PROMPTS, 14)
    assert [r.tokens for r in results] == [t[:14] for t in truth]
    for row, prompt in enumerate(PROMPTS):
        own = [(part.start, tokens) for part, tokens in drafter.prefilled if part.row == row]
        assert own == [(start, prompt[start : start + chunk]) for start in range(0, len(prompt), chunk)]


def test_token_id_0_is_not_the_padding(make_target, greedy_texts, scripted):
    """0 ("!" in many vocabularies) is the true next token after a tree's short path, and also the padding's id."""
    target = make_target("llama")
    before = greedy_texts(target, PROMPTS, WANTED + 8)
    common = max(range(1, 61), key=lambda token: min(row.count(token) for row in before))
    swap = {common: 0, 0: common}
    for weight in (target.model.get_input_embeddings().weight, target.lm_head.weight):
        weight[[0, common]] = weight[[common, 0]].clone()
    prompts = [[swap.get(token, token) for token in prompt] for prompt in PROMPTS]
    truth = [[swap.get(token, token) for token in row] for row in before]
    assert truth == greedy_texts(target, prompts, WANTED + 8)
    assert all(0 in row[:WANTED] for row in truth)
    for seed in range(4):
        drafter = scripted(target, prompts, truth, [WANTED] * 4, 33, 5, seed)
        results = decode(target, drafter, prompts, WANTED)
        assert [r.tokens for r in results] == [t[:WANTED] for t in truth]
        assert [r.accepted for r in results] == drafter.accepted


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("end", [0, 7, 8, 9, 10, 11, 12, 13])
def test_stop_ids_end_a_row(written, scripted, monkeypatch, rows, end):
    """The text ends with the stop id, anywhere in an accepted path; the other rows continue."""
    monkeypatch.setattr(Runner, "bitwise", False)  # rows begin together, as on a GPU
    target, truth = written("llama")
    truth, stop = truth[:rows], truth[0][end]
    wanted = [row[:WANTED].index(stop) + 1 if stop in row[:WANTED] else WANTED for row in truth]
    drafter = scripted(target, PROMPTS[:rows], truth, wanted, 33, 5, seed=end)
    stops = frozenset(range(61)) - frozenset(token for row in truth for token in row) | {stop}
    results = SpeculativeDecoder(target, drafter).generate(PROMPTS[:rows], WANTED, stop_ids=stops)
    assert [r.tokens for r in results] == [t[:n] for t, n in zip(truth, wanted, strict=True)]
    assert [r.accepted for r in results] == drafter.accepted
    assert results[0].finish_reason == "stop"
    for result, count, row in zip(results, wanted, truth, strict=True):
        assert result.finish_reason == ("stop" if row[count - 1] == stop else "length")
        assert len(result.tokens) == 1 + sum(result.accepted)


def test_stop_ids_are_the_targets_own_if_left_out(make_target, written):
    _, truth = written("llama")
    target = make_target("llama", eos_token_id=truth[0][9])
    (result,) = SpeculativeDecoder(target).generate(PROMPTS[:1], WANTED)
    assert result.finish_reason == "stop"
    assert result.tokens == truth[0][: truth[0].index(truth[0][9]) + 1]


@pytest.mark.parametrize("nodes", [1, 33, 65])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_context_limit(make_target, greedy_texts, scripted, family, nodes):
    """Rows reach the target's last position, also of learned position embeddings, at different steps."""
    context = 30
    size = {"n_positions" if family == "gpt2" else "max_position_embeddings": context}
    target = make_target(family, **size)
    assert target.context == context
    room = [context - len(prompt) for prompt in PROMPTS]
    truth = [greedy_texts(target, [prompt], count)[0] for prompt, count in zip(PROMPTS, room, strict=True)]
    drafter = scripted(target, PROMPTS, truth, room, nodes, DEPTH[nodes])
    results = decode(target, drafter, PROMPTS, 1000)
    assert [r.tokens for r in results] == truth
    assert [r.accepted for r in results] == drafter.accepted
    assert {r.finish_reason for r in results} == {"context"}
    # If the limit and the context end at the same token, the reason is the limit.
    assert decode(target, None, PROMPTS[:1], room[0])[0].finish_reason == "length"


def test_prompt_of_the_whole_context_but_one(make_target, greedy_texts):
    target = make_target("gpt2", n_positions=18)
    (result,) = decode(target, None, PROMPTS[3:], 5)
    assert (result.tokens, result.finish_reason) == (greedy_texts(target, PROMPTS[3:], 1)[0], "context")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1, 2], []], "prompt 2 is empty; give it at least one token"),
        ([[1] * 256], "prompt 1 has 256 tokens; the target's context holds 256 with the answer; shorten it"),
        ([[1], [1] * 300], "prompt 2 has 300 tokens; the target's context holds 256 with the answer; shorten it"),
    ],
)
def test_prompts_that_cannot_be_decoded(written, prompts, message):
    target, _ = written("llama")
    with pytest.raises(ValueError) as error:
        SpeculativeDecoder(target).generate(prompts, 4)
    assert str(error.value) == message


def test_each_token_is_reported_once(written, scripted):
    target, truth = written("llama")
    reported = [[] for _ in PROMPTS]
    drafter = scripted(target, PROMPTS, truth, [WANTED] * 4, 33, 5)
    decoder = SpeculativeDecoder(target, drafter)
    so_far = [[] for _ in PROMPTS]
    hooks = {
        "on_tokens": lambda row, new: reported[row].append(new),
        "on_step": lambda row, result: so_far[row].append((list(result.tokens), list(result.drafted_by))),
    }
    times = PhaseTimes(target.device)
    results = decoder.generate(PROMPTS, WANTED, stop_ids=NONE, observe=times, **hooks)
    assert [[token for part in parts for token in part] for parts in reported] == [t[:WANTED] for t in truth]
    assert [[len(part) for part in parts[1:]] for parts in reported] == drafter.accepted
    for parts, steps, result in zip(reported, so_far, results, strict=True):
        ends = [*itertools.accumulate(map(len, parts))]
        assert steps == [(result.tokens[:end], result.drafted_by[:end]) for end in ends]
        whole = [0, *(bit for length in result.accepted for bit in [1] * (length - 1) + [0])]
        assert result.drafted_by[:-1] == whole[:-1], "the last step may be cut short, before the target's own token"
    assert all(seconds > 0 for seconds in times.seconds.values())


FOREIGN = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},  # ALiBi; its attention cannot be replaced
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2},  # no keys
    # chunks of attention
    "llama4_text": {"hidden_size": 32, "intermediate_size": 16, "intermediate_size_mlp": 16, "num_hidden_layers": 4,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2},
    "gpt_oss": {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},  # sinks
    "deepseek_v3": {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1,
                    "n_routed_experts": 4, "num_experts_per_tok": 2},  # values narrower than keys
    "doge": {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2},  # a mask that depends on the values
    "bert-generation": {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
                        "num_attention_heads": 4},  # attends to later tokens
}  # fmt: skip


@pytest.mark.parametrize("model_type", FOREIGN)
def test_families_that_would_be_decoded_wrongly_are_refused(model_type):
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(model_type, vocab_size=61, **ids, **FOREIGN[model_type])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(ValueError, match="not support"):
        SpeculativeDecoder(Target(model, None, "foreign", "")).generate([[1, 2, 3]], 4)
