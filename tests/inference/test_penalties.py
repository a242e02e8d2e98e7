"""Penalties, biases and several samples, as users ask for them: n-grams whose drafts are banned, and decode.py."""

import json
from dataclasses import replace

import pytest

from draftsmith.inference.commands.prompts import Prompt
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.text import answer_text, decode_text
from draftsmith.inference.measure import timing
from draftsmith.inference.verify.sampling import Sampling

NONE = frozenset()
REPEATED = [7, 3, 19, 44] * 5 + [7, 3]
BAN = {19: -100.0}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.0), Sampling(1.2, seed=3), Sampling(0.0, frequency_penalty=0.4)],
    ids=["greedy", "1.2", "counts"],
)
def test_a_banned_token_that_ngrams_draft(make_target, sampling, static):
    """It follows in the text each time, so that it is drafted in the first step, and is in no text. In its batch, a
    text without a bias is what it is alone, its steps too."""
    target = make_target("llama")
    prompts = [REPEATED, REPEATED, REPEATED[1:]]
    samplings = [
        replace(sampling, logit_bias=BAN),
        Sampling(0.9, seed=5),
        replace(sampling, logit_bias=BAN | {44: 100}),
    ]
    modes = ("sample",) if sampling.temperature == 0 else ("sample", "mss")
    for mode in modes:
        drafter, proposed = NgramDrafter(target, min_match=1, depth=4), []
        propose = drafter.propose

        def noting(state, propose=propose, proposed=proposed):
            tree = propose(state)
            proposed.append(tree.tokens[:, 1:][tree.valid[:, 1:]].tolist())
            return tree

        if not static:
            drafter.propose = noting
        decoder = SpeculativeDecoder(target, drafter, static=static)
        results = decoder.generate(prompts, 24, mode=mode, sampling=samplings, stop_ids=NONE)
        assert static or (19 in proposed[0] and any(result.accepted != [1] * 23 for result in results))
        assert all(19 not in results[row].tokens for row in (0, 2)) and results[2].tokens == [44] * 24
        assert results[0].tokens != results[1].tokens
        alone = SpeculativeDecoder(target, NgramDrafter(target, min_match=1, depth=4), static=static)
        (second,) = alone.generate(prompts[1:2], 24, mode=mode, sampling=samplings[1], stop_ids=NONE)
        assert (second.tokens, second.accepted) == (results[1].tokens, results[1].accepted)
        if mode == "sample":
            plain = SpeculativeDecoder(target).generate(prompts, 24, mode=mode, sampling=samplings, stop_ids=NONE)
            assert [result.tokens for result in results] == [result.tokens for result in plain]


def test_greedy_texts_with_a_bias_by_command(run_decode, drafter, target, prompts, report_of):
    """Without a mode, or in mode greedy, the likeliest token after biases and penalties. A token by its text."""
    prompt = Prompt("def f(").encode(target)
    (free,) = SpeculativeDecoder(target).generate([prompt], 9)
    banned = free.tokens[1]
    sampling = Sampling(0.0, presence_penalty=0.5, logit_bias={banned: -100})
    (wanted,) = SpeculativeDecoder(target).generate([prompt], 9, mode="sample", sampling=sampling)
    assert banned not in wanted.tokens and wanted.tokens[0] == free.tokens[0]
    line = f"{drafter} --prompt 'def f(' --raw --max-new-tokens 9 --presence-penalty 0.5"
    for mode in ("", "--mode greedy"):
        code, out, err = run_decode(f"{line} {mode} --logit-bias {banned}=-100")
        assert (code, out) == (0, decode_text(target.tokenizer, wanted.tokens)), err
    code, out, err = run_decode(f"{line} --logit-bias '\" the\"=100'")
    assert (code, out) == (0, " the" * 9), err
    options = "--frequency-penalty 0.3 --presence-penalty 0.2 --logit-bias 44=1.5 --max-new-tokens 12 --check-lossless"
    report, _ = report_of(f"{drafter}+ngram --prompts {prompts} {options}")
    assert report["lossless"]["passed"] and report["sampling"]["temperature"] == 0
    assert report["sampling"]["logit_bias"] == {"44": 1.5} and report["sampling"]["frequency_penalty"] == 0.3
    mss, _ = report_of(f"{drafter} --prompts {prompts} {options} --verify mss --temperature 1.1 --baseline none")
    assert mss["lossless"]["passed"] and mss["lossless"]["mode"] == "mss"
    assert (
        "presence_penalty" not in report_of(f"ngram --target {target.name} --prompts {prompts} --seed 3")[0]["sampling"]
    )


def test_the_transformers_baseline_has_penalty_and_bias(target):
    """At temperature 0, beside our engine's sampling at temperature 0."""
    given = "sample", Sampling(temperature=0.0, repetition_penalty=1.7, logit_bias={40: 6.0, 5: -100})
    prompts = [target.tokenizer("import os")["input_ids"]]
    ours = SpeculativeDecoder(target).generate(prompts, 30, **timing.engine_options(*given, prompts))[0].tokens
    assert timing.transformers_method(target, 30, **timing.generate_options(*given))(prompts) == [ours]
    assert 40 in ours and ours != SpeculativeDecoder(target).generate(prompts, 30)[0].tokens


def test_several_samples(run_decode, drafter, target, prompts, tmp_path):
    """Each is the text of its own seed, as it is alone; printed, live and in an answers file."""

    def alone(text, seed):
        return run_decode(f"{drafter} --prompt '{text}' --raw --temperature 1.5 --max-new-tokens 9 --seed {seed}")[1]

    texts = [[alone(text, seed) for seed in (4, 5, 6)] for text in ("import os", "def f(x):")]
    assert len({text for each in texts for text in each}) == 6
    options = "--temperature 1.5 --max-new-tokens 9 --seed 4 --samples 3"
    code, out, err = run_decode(f"{drafter} --prompt 'import os' --raw {options}")
    assert (code, out) == (0, "\n".join(texts[0])), err
    assert [line[:16] for line in err.splitlines() if line.startswith("sample ")] == [
        "sample 1, seed 4",
        "sample 2, seed 5",
        "sample 3, seed 6",
    ]
    code, out, err = run_decode(f"{drafter} --prompts {prompts} --live {options}")
    assert (code, out) == (0, "\n".join(texts[0] + texts[1])) and "6 answers: " in err, err
    answers = tmp_path / "answers.jsonl"
    code, _, err = run_decode(f"{drafter} --prompts {prompts} {options} --baseline none --answers {answers}")
    assert code == 0, err
    for line, wanted in zip(answers.read_text().splitlines(), texts, strict=True):
        choices = json.loads(line)["choices"]
        assert [choice["turns"] for choice in choices] == [[text] for text in wanted]
        assert [(choice["index"], choice["seed"]) for choice in choices] == [(0, 4), (1, 5), (2, 6)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--logit-bias 5", "--logit-bias 5: must be ID=NUMBER, or"),
        ("--logit-bias x=1", "--logit-bias x=1: must be ID=NUMBER, or"),
        ("--logit-bias 5=much", "--logit-bias 5=much: must be ID=NUMBER, or"),
        ("--logit-bias 5=101", "logit_bias {5: 101.0}: must be a token id and a number from −100 to 100"),
        ("--logit-bias 300=1", "--logit-bias 300: the target's vocabulary has 300 tokens, from 0"),
        ("--logit-bias '\"a b c\"=1'", '--logit-bias "a b c": the text is'),
        ("--presence-penalty 3", "presence_penalty 3.0: must be from −2 to 2 (0: off)"),
        ("--frequency-penalty 1 --baseline all --check-lossless", "transformers.generate has no presence and no"),
        ("--mode greedy --logit-bias 5=1 --seed 3", "needs --mode sample (or typical)"),
        ("--samples 0", "--samples 0: must be at least 1"),
        ("--samples 2 --mode greedy", "--samples 2: all would be the same text; give --mode sample and a temperature"),
        ("--samples 2 --temperature 0", "--samples 2: all would be the same text"),
        (
            "--samples 2 --check-lossless",
            "--samples is for --prompt and --live, which measure nothing, and for --answers",
        ),
    ],
)
def test_what_is_refused(run_decode, drafter, options, message):
    code, out, err = run_decode(f"{drafter} --prompt x --raw {options}")
    assert code == 2 and out == "" and message in err and "Traceback" not in err


def test_samples_are_one_text_with_drafts_or_without(target):
    """From Python: requests with one prompt and a seed each."""
    prompt = target.tokenizer("import os")["input_ids"]
    seeds = [Sampling(1.1, seed=seed, presence_penalty=0.3) for seed in range(4)]
    decoders = SpeculativeDecoder(target), SpeculativeDecoder(target, NgramDrafter(target))
    texts = [
        [
            answer_text(target, result.tokens)
            for result in decoder.generate([prompt] * 4, 12, mode="sample", sampling=seeds)
        ]
        for decoder in decoders
    ]
    assert texts[0] == texts[1] and len({*texts[0]}) == 4
