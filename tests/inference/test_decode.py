"""The command decode.py: prompts, baselines, what it prints, and what it says to bad input."""

import fcntl
import io
import itertools
import json
import math
import os
import pty
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import termios
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from draws import occurs
from faults import config, error_of, truncate, without
from safetensors.torch import load_file, save_file
from scipy.stats import t as t_distribution

from draftsmith.inference import calibrate
from draftsmith.inference.commands import interactive, terminal
from draftsmith.inference.commands.prompts import Prompt
from draftsmith.inference.drafters import load
from draftsmith.inference.drafters.load import MERGED_NODES
from draftsmith.inference.drafters.names import short_name
from draftsmith.inference.engine.engine import Generation, Request, SpeculativeDecoder
from draftsmith.inference.engine.step import Step
from draftsmith.inference.engine.text import answer_text, decode_text
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure import evaluation, timing
from draftsmith.inference.measure import report as reporting
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.verify import Verifier
from draftsmith.kernels import cpu
from draftsmith.models.artifact import write_json
from draftsmith.models.target import load_target

ROOT = Path(__file__).parents[2]


# ---- baselines


def test_transformers_ends_where_the_engine_does(target):
    """At a stop id, at the limit, at the end of the context: all methods count the same tokens."""
    torch.manual_seed(1)
    prompts = [torch.randint(5, 300, (n,)).tolist() for n in (250, 240, 20)]
    ours = SpeculativeDecoder(target).generate(prompts, 14)
    assert [len(result.tokens) for result in ours] == [6, 14, 13]
    theirs = timing.transformers_method(target, 14)
    assert theirs(prompts) == [result.tokens for result in ours]
    stopping = load_target(target.name)
    stopping.model.generation_config.eos_token_id = [ours[1].tokens[7], ours[2].tokens[3]]
    stopped = SpeculativeDecoder(stopping).generate(prompts, 14)
    assert {result.finish_reason for result in stopped} >= {"stop"}
    assert timing.transformers_method(stopping, 14)(prompts) == [result.tokens for result in stopped]


def test_methods_take_turns():
    """On each group of prompts, each first as often, in every round the same groups."""
    calls = []
    methods = {name: lambda batch, name=name: calls.append((name, batch)) or batch for name in "ab"}
    prompts, short = [[*range(20)], [3, 4], [5]], [[1]]
    timed = timing.run_rounds(methods, prompts, 2, short)
    assert calls[:2] == [(name, short) for name in "ab"]
    turns = [calls[i : i + 2] for i in range(2, len(calls), 2)]
    assert all(mine[1] == theirs[1] and len(mine[1]) == 1 for mine, theirs in turns)
    assert ["".join(name for name, _ in turn) for turn in turns] == ["ab", "ba"] * 3
    groups = [turn[0][1][0] for turn in turns]
    assert groups[:3] == groups[3:] and sorted(groups[:3]) == sorted(prompts)
    a = timed["a"]
    assert [a.outputs[n] for n in range(3)] == prompts and sorted(a.tokens) == [1, 2, 20]
    assert [len(rounds) for rounds in [*a.seconds, *a.cpu_seconds]] == [2] * 6
    a.tokens, a.seconds = [10, 12], [[2.0, 1.0, 44.0], [3.0, 2.0]]  # the last round was cut short
    assert a.tokens_per_second == 22 / 4.5
    assert a.summary()["seconds"] == [5.0, 3.0, 44.0]


@pytest.mark.parametrize(
    "count, batch_size, size, groups", [(40, 1, 1, 40), (65, 1, 2, 33), (9, 4, 4, 3), (600, 8, 16, 38)]
)
def test_groups_of_prompts(count, batch_size, size, groups):
    sizes = []
    timing.run_rounds({"a": lambda some: sizes.append(len(some)) or some}, [[1]] * count, 1, [[1]], batch_size)
    del sizes[0]  # the warm-up
    assert len(sizes) == groups and max(sizes) == size and sum(sizes) == count


def test_timing_ends_when_it_may(monkeypatch):
    """After ``seconds`` or once ``settled``, but not before MIN_GROUPS."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def method(some):
        now[0] += 1
        return some

    def groups(**options):
        timed = timing.run_rounds({"a": method, "b": method}, prompts, 1, [], **options)
        return [len(each.seconds) for each in timed.values()]

    prompts = [[1]] * 30
    assert groups() == [30, 30]
    assert groups(seconds=50.0) == [25, 25]
    assert groups(seconds=3.0) == [timing.MIN_GROUPS] * 2
    assert groups(settled=lambda timed: True) == [timing.MIN_GROUPS] * 2
    assert groups(settled=lambda timed: len(timed["a"].seconds) == 20) == [20, 20]
    monkeypatch.setattr(timing, "MIN_GROUPS", 40)
    timed = timing.run_rounds({"a": method}, prompts, 2, [], seconds=1.0)
    assert sum(map(len, timed["a"].seconds)) == 40, "the second round was cut short"


# ---- speed-ups and their intervals


def timed(tokens, seconds):
    return timing.Timed({}, list(tokens), [[s] for s in seconds], [[s] for s in seconds])


def test_the_interval_of_a_known_case():
    """Times with little noise: by the delta method the ratio of totals of n pairs has the standard error s/√n, where s
    is the standard deviation of (y − R x) / mean(x)."""
    rng = random.Random(0)
    for groups in (12, 40, 200):
        fast = [1 + rng.gauss(0, 0.1) for _ in range(groups)]
        slow = [2 * f + rng.gauss(0, 0.1) for f in fast]
        found = timing.speedup(timed([100] * groups, fast), timed([100] * groups, slow))
        ratio = sum(slow) / sum(fast)
        assert found.ratio == pytest.approx(ratio)
        rest = [(s - ratio * f) / statistics.mean(fast) for f, s in zip(fast, slow, strict=True)]
        error = statistics.stdev(rest) / groups**0.5 * t_distribution.ppf(0.975, groups - 1)
        low, high = found.interval
        assert low == pytest.approx(ratio - error, abs=0.12 * error)
        assert high == pytest.approx(ratio + error, abs=0.12 * error)
        assert found.interval == timing.speedup(timed([100] * groups, fast), timed([100] * groups, slow)).interval


def test_the_interval_holds_the_truth_95_times_of_100():
    rng = random.Random(1)
    held = 0
    for _ in range(400):
        fast = [rng.lognormvariate(0, 0.3) for _ in range(12)]
        slow = [rng.lognormvariate(1, 0.3) for _ in range(12)]
        low, high = timing.speedup(timed([9] * 12, fast), timed([9] * 12, slow)).interval
        held += low <= math.e <= high
    assert 370 <= held <= 392


def test_a_slow_group_slows_all_methods_alike():
    """A group that all methods decode three times as slowly leaves the ratio; one more method that is slow by itself
    moves no other's."""
    spell = [1.0] * 20 + [3.0] * 10
    fast, slow = timed([100] * 30, [0.5 * s for s in spell]), timed([100] * 30, spell)
    found = timing.speedup(fast, slow)
    assert found.ratio == pytest.approx(2) and found.interval == pytest.approx((2, 2)) and found.narrow
    hiccup = timed([100] * 30, [1.0] * 29 + [9.0])
    assert timing.speedup(fast, slow) == found
    assert not timing.speedup(fast, hiccup).narrow
    hiccup.seconds = [[1.0, 1.0, second] for (second,) in hiccup.seconds]
    assert timing.speedup(timed([100] * 30, [0.5] * 30), hiccup).ratio == pytest.approx(2), "the median of the rounds"


def test_too_few_pairs_have_no_interval():
    few, enough = ([1.0] * count for count in (timing.MIN_PAIRS - 1, timing.MIN_PAIRS))
    found = timing.speedup(timed(few, few), timed(few, few))
    assert (found.ratio, found.interval, found.narrow) == (1, None, False)
    assert timing.speedup(timed(enough, enough), timed(enough, enough)).interval == pytest.approx((1, 1))
    assert timing.speedup_fields("speedup", None) == {"speedup": None, "speedup_interval": None}


@pytest.fixture
def nine(tmp_path, monkeypatch):
    """A file of nine prompts, of which six are timed."""
    monkeypatch.setattr(timing, "MIN_GROUPS", 6)
    path = tmp_path / "nine.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"a{n} = "}) + "\n" for n in range(9)))
    return path


@pytest.fixture
def batches(monkeypatch):
    """Of each call of the engine, but those of the phases' times and the page: with drafts or not, prompts, rows."""
    calls, generate = [], SpeculativeDecoder.generate

    def watched(self, prompts, *arguments, **options):
        results = generate(self, prompts, *arguments, **options)
        if "observe" not in options:
            calls.append((self.drafter.num_nodes > 1, len(prompts), self.rows))
        return results

    monkeypatch.setattr(SpeculativeDecoder, "generate", watched)
    return calls


CHECKED = "--max-new-tokens 8 --check-lossless --seconds 1e-9"


def test_fewer_prompts_are_timed_than_checked(report_of, drafter, nine, batches):
    report, err = report_of(f"{drafter} --prompts {nine} {CHECKED} --baseline all --all-nodes")
    assert (report["timed_prompts"], report["pairs"], report["prompts"], report["counted_prompts"]) == (6, 6, 9, 9)
    assert batches[-2:] == [(True, 3, 3), (False, 3, 3)] and all(rows == 1 for *_, rows in batches[:-2])
    assert report["lossless"]["identical"] and report["lossless"]["checked"] == report["new_tokens"] == 9 * 8
    assert report["lossless"]["bitwise"] == (cpu.library() is not None)
    for name in ("speedup", "speedup_vs_transformers", "speedup_vs_prompt_lookup"):
        low, high = report[f"{name}_interval"]
        assert low <= report[name] <= high and f"{low:.2f}–{high:.2f}" in err
    plain = report["baselines"]["engine"]
    assert report["speedup"] == pytest.approx(report["tokens_per_second"] / plain["tokens_per_second"], rel=1e-2)
    low, high = plain["speedup_vs_transformers_interval"]
    assert low <= plain["speedup_vs_transformers"] <= high
    said = "3 prompts not timed, and 3 without the drafter to compare (up to 8 tokens each): at most about "
    assert err.count(" here, judged from the first prompt") == err.count(said) == 1
    assert err.index(said) < err.index("decoding by the target alone, 3 at a time") < err.index("checking")


def test_assisted_generation_is_timed_beside_a_draft_model(run_decode, drafter, tiny_lm, nine, tmp_path):
    """transformers' own speculative decoding, by the draft model that stands alone; beside others there is none."""
    model = f"draft_model:{tiny_lm}@1,1"
    options = f"--target {tiny_lm} --prompts {nine} --max-new-tokens 8 --baseline all --report {tmp_path}"
    code, _, err = run_decode(f"{drafter} {model} {options}")
    assert code == 0, err
    for report in reports_of(tmp_path, ("heads", short_name(model))):
        assert report["baselines"]["assisted"]["draft_model"] == str(tiny_lm)
        low, high = report["speedup_vs_assisted_interval"]
        assert low <= report["speedup_vs_assisted"] <= high and f"{low:.2f}–{high:.2f}" in err
    assert "assisted generation" in err
    for others in (f"{drafter} {model}+ngram", f"{model} --batch-size 3", f"draft_model:{tiny_lm},snapkv:64"):
        code, _, err = run_decode(f"{others} {options}")
        assert code == 0 and "assisted generation" not in err, err
        report = json.loads((tmp_path / "report.json").read_text())
        assert "assisted" not in report["baselines"] and report["speedup_vs_assisted"] is None


@pytest.mark.parametrize(("module", "function"), [(evaluation, "check_texts"), (reporting, "print_texts")])
def test_figures_outlive_what_comes_after(run_decode, drafter, nine, tmp_path, monkeypatch, module, function):
    """An interrupted check; a pipe that was closed."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, function, interrupted)
    run_decode(f"{drafter} ngram --prompts {nine} {CHECKED} --report {tmp_path} --show 1")
    for report in reports_of(tmp_path, ("heads", "ngram")):
        assert report["timed_prompts"] == 6 and report["speedup"] > 0
        assert (report["lossless"] is None) == (module is evaluation)


def test_times_of_answers_are_those_of_the_batch_size(run_decode, drafter, nine, batches, tmp_path):
    """Also of the prompts that were not timed."""
    code, _, err = run_decode(f"{drafter} --prompts {nine} {CHECKED} --answers {tmp_path / 'answers.jsonl'}")
    assert code == 0, err
    assert batches[-2:] == [(True, 3, 1), (False, 3, 1)]


@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_a_defect_of_batches_alone_is_found(run_decode, drafter, nine, tmp_path, monkeypatch, mode):
    """In the texts that were not timed: their rows are given each other's tokens."""
    likeliest, coupled = Step._likeliest, Verifier.coupled

    def rolled(found, nodes):
        return found if nodes == 1 else tuple(part.roll(1, 0) for part in found)

    monkeypatch.setattr(Step, "_likeliest", lambda self, hidden: rolled(likeliest(self, hidden), hidden.shape[1]))
    monkeypatch.setattr(
        Verifier, "coupled", lambda self, tree, *more: rolled(coupled(self, tree, *more), tree.tokens.shape[1])
    )
    options = f"{CHECKED} --mode {mode} --all-nodes --report {tmp_path}"
    for seconds, code in ((" --seconds 600 --repeat 1", 0), ("", 1)):  # at batch 1 there is no other row
        assert run_decode(f"{drafter} --prompts {nine} {options}{seconds}")[0] == code
    lossless = json.loads((tmp_path / "report.json").read_text())["lossless"]
    assert lossless["checked"] > 6 * 8 and 3 <= lossless["mismatches"] <= 3 * 8 and lossless["mode"] == mode


def test_steps_that_choose_count_at_the_timed_batch_size(run_decode, drafter, nine, tmp_path, monkeypatch):
    """τ is that of the timed prompts, where the size of a tree depends on the texts beside it; all are checked."""
    monkeypatch.setattr(Step, "prunes_nodes", property(lambda step: step.drafter.num_nodes > 1))
    rows = [json.loads(line) | {"kind": "some" if n < 8 else "one"} for n, line in enumerate(nine.open())]
    nine.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(timing, "group_prompts", lambda kinds, size: [[n] for n in range(9)])
    code, _, err = run_decode(f"{drafter} none --prompts {nine} {CHECKED} --all-nodes --report {tmp_path}")
    assert code == 0 and ": τ of 6 prompts, the timed ones, not of 3 others, decoded in larger batches" in err, err
    heads, none = reports_of(tmp_path, ("heads", "none"))
    assert (heads["counted_prompts"], heads["new_tokens"], heads["lossless"]["checked"]) == (6, 6 * 8, 9 * 8)
    assert (none["counted_prompts"], none["new_tokens"], none["lossless"]["checked"]) == (9, 9 * 8, 9 * 8)
    assert sum(heads["per_prompt"]["steps"]) == heads["steps"] and heads["per_prompt"]["steps"][6:] == [0] * 3
    assert heads["per_prompt"]["new_tokens"] == [8] * 9
    assert heads["kinds"]["one"]["counted_prompts"] == 0 and heads["kinds"]["one"]["mean_accepted_length"] is None


@pytest.mark.parametrize(("device", "most"), [("cpu", evaluation.CHECK_ROWS), ("cuda", evaluation.CHECK_ROWS_ON_GPU)])
def test_rows_of_what_is_not_timed(target, monkeypatch, device, most):
    """Half of the free memory, and on a CPU no more nodes than leave the bits of a row as they are."""
    free = [1 << 40]
    monkeypatch.setattr(evaluation, "free_bytes", lambda place: free[0])
    looks = SimpleNamespace(**{name: getattr(target, name) for name in ("vocab_size", "context", "kv_shapes", "dtype")})
    looks.device, looks.kv_devices = torch.device(device), [torch.device(device)] * len(target.kv_shapes)

    def rows(nodes, least=1):
        drafter = SimpleNamespace(num_nodes=nodes, max_depth=3, models=())
        decoder = SimpleNamespace(target=looks, drafter=drafter)
        return evaluation.rows_untimed(decoder, [[1], [1, 2]], 8, least)

    assert (rows(1), rows(6), rows(6, 64)) == (most, most, 64)
    assert rows(200) == (2 if device == "cpu" else most)
    slots = 2 + 8 + 6 + 2 * 4 + 256
    token = sum(2 * heads * width * target.dtype.itemsize for heads, width in target.kv_shapes)
    free[0] = 2 * 5 * (slots * token + 6 * target.vocab_size * 4 * evaluation.LOGITS)
    assert (rows(6), rows(6, 7)) == (5, 7)
    free[0] -= 1
    assert rows(6) == 4


# ---- what is printed


@pytest.mark.parametrize("cut", [0, 1])
def test_streamed_text_is_the_text(target, capsys, cut):
    text = "d[:x:] [red]naïve[/red] \x1b[1m\r" + "long " * 60 + "日本🙂"
    tokens = target.tokenizer(text)["input_ids"]
    tokens = tokens[: len(tokens) - cut]

    def generate(prompts, on_tokens, on_step):
        for end in range(1, len(tokens) + 3, 3):
            shown = tokens[:end]
            result = Generation(shown, [3] * (end // 3), ([0] + [1, 1, 0] * end)[: len(shown)], "length")
            on_step(0, result)
        return [result]

    interactive.stream(SimpleNamespace(target=target, generate=generate), [1], {})
    out, err = capsys.readouterr()
    assert out == decode_text(target.tokenizer, tokens)
    assert f"{len(tokens)} tokens in" in err and "ended by length" in err


def user(text):
    return Prompt([{"role": "user", "content": text}])


@pytest.fixture(scope="module")
def plain_target(tiny_lm, tmp_path_factory):
    """The target without a chat template."""
    folder = shutil.copytree(tiny_lm, tmp_path_factory.mktemp("models") / "plain")
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("measured", [True, False])
def test_one_prompt(run_decode, drafter, target, tmp_path, raw, measured):
    """The text and nothing else on stdout; a message for the template, or raw."""
    options = "--raw " * raw + f"--report {tmp_path} --baseline none --check-lossless" * measured
    code, out, err = run_decode(f"{drafter} --prompt 'def f(' --max-new-tokens 9 {options}")
    prompt = (Prompt("def f(") if raw else user("def f(")).encode(target)
    (result,) = SpeculativeDecoder(target).generate([prompt], 9)
    assert (code, out) == (0, decode_text(target.tokenizer, result.tokens))
    assert ("tokens in" in err) != measured and (f"wrote {tmp_path / 'report.html'}, report.json" in err) == measured
    if measured:
        assert json.loads((tmp_path / "report.json").read_text())["prompts"] == 1
        assert "identical to plain greedy decoding" in err


@pytest.mark.parametrize("options", ["", "--baseline none --check-lossless"])
def test_a_stop_tokens_text_is_not_written(run_decode, target, tiny_lm, tmp_path, options):
    """Be it special or not."""
    (full,) = SpeculativeDecoder(target).generate([Prompt("def f(").encode(target)], 9)
    place = next(place for place in range(3, 9) if full.tokens[place] not in full.tokens[:place])
    folder = shutil.copytree(tiny_lm, tmp_path / "target")
    config = json.loads((folder / "generation_config.json").read_text())
    config["eos_token_id"].append(full.tokens[place])
    (folder / "generation_config.json").write_text(json.dumps(config))
    code, out, err = run_decode(f"ngram --target {folder} --prompt 'def f(' --raw --max-new-tokens 9 {options}")
    assert (code, out) == (0, decode_text(target.tokenizer, full.tokens[:place])), err


def test_an_answer_ends_where_the_template_ends_it(run_decode, tiny_lm, tmp_path):
    """Though the generation config has another end token; in a line that says so."""
    folder = shutil.copytree(tiny_lm, tmp_path / "target")
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    given = "--prompt 'def f(' --max-new-tokens 400 --mode sample --temperature 2 --seed 13"
    _, wanted, said = run_decode(f"ngram --target {tiny_lm} {given}")
    _, out, err = run_decode(f"ngram --target {folder} {given}")
    assert out == wanted and "warning" not in said
    assert err.count("warning: the chat template ends an answer with <|end|>, which is no eos_token_id") == 1
    target = load_target(str(tiny_lm))
    prompt = Prompt([{"role": "user", "content": "def f("}]).encode(target)
    sampled = timing.engine_options("sample", Sampling(temperature=2.0, seed=13), [prompt])
    (whole,) = SpeculativeDecoder(target).generate([prompt], 400, stop_ids=frozenset([0]), **sampled)
    occurs(1 in whole.tokens, "the text would go on")
    assert out.rstrip("\n") == decode_text(target.tokenizer, whole.tokens[: whole.tokens.index(1)]).rstrip("\n")


def test_a_target_without_a_template_continues_text(run_decode, target, plain_target):
    code, out, _ = run_decode(f"none --target {plain_target} --prompt 'def f(' --max-new-tokens 9")
    (result,) = SpeculativeDecoder(target).generate([Prompt("def f(").encode(target)], 9)
    assert (code, out) == (0, decode_text(target.tokenizer, result.tokens))


# ---- texts as they are decoded


def test_live_texts(run_decode, drafter, target, prompts):
    """Those of plain decoding on stdout, the prompts and what the answers took on stderr."""
    prompts.write_text(prompts.read_text() + '{"messages": [{"role": "user", "content": "say [b]\\nx"}]}\n')
    other = prompts.with_name("other.jsonl")
    other.write_text('{"prompt": "x = "}\n')
    given = [Prompt("import os"), Prompt("def f(x):"), user("say [b]\nx"), Prompt("x = ")]
    results = SpeculativeDecoder(target).generate([prompt.encode(target) for prompt in given], 9)
    code, out, err = run_decode(f"{drafter}+ngram --prompts {prompts} --prompts {other} --live --max-new-tokens 9")
    assert (code, out) == (0, "\n".join(decode_text(target.tokenizer, result.tokens) for result in results))
    asked = [line[2:] for line in err.splitlines() if line.startswith("> ")]
    assert asked == ["import os", "def f(x):", "say [b]", "x", "x = "]
    total = sum(len(result.tokens) for result in results)
    assert f"4 answers: {total} tokens in " in err and "drafted by" not in err, "no colours, no legend"


def test_logprobs_are_shown_below_a_text(run_decode, drafter, target):
    """A line for each token, to stderr."""
    (result,) = SpeculativeDecoder(target).generate([Prompt("import os").encode(target)], 9, logprobs=2)
    code, out, err = run_decode(f"{drafter} --prompt 'import os' --raw --max-new-tokens 9 --logprobs 2")
    assert (code, out) == (0, decode_text(target.tokenizer, result.tokens))
    a_token = re.compile(r" +-\d+\.\d{4}  \"")
    lines = [*filter(a_token.match, err.splitlines())]
    assert len(lines) == len(result.tokens) and result.logprobs
    for line, own, top in zip(lines, result.logprobs.token_logprobs, result.logprobs.top_logprobs, strict=True):
        numbers = [float(number) for number in re.findall(r"(?<!\S)-\d+\.\d{4}(?!\S)", line)]
        assert numbers == pytest.approx([own, *top], abs=1e-4)
    code, _, err = run_decode(f"{drafter} --prompt 'import os' --raw --max-new-tokens 9 --logprobs 2 --samples 2")
    total = re.search(r"(\d+) tokens in", err)
    assert code == 0 and total and len([*filter(a_token.match, err.splitlines())]) == int(total[1]) > len(lines)


def test_each_token_has_the_sources_that_drafted_it(drafter):
    """As many by source as are counted, and none where a step ended."""
    target, both = load_drafter(f"ngram+{drafter}")
    both.clock = None  # both draft at each step, whatever it costs
    decoder = SpeculativeDecoder(target, both, static=True)
    (result,) = decoder.generate([[5, 6, 7]], 120, stop_ids=frozenset())
    by_source = [sum(bits >> source & 1 for bits in result.drafted_by) for source in range(2)]
    assert by_source == result.accepted_from and by_source[1] > 0
    ends = [*itertools.accumulate(result.accepted, initial=1)]
    drafted = [place for place, bits in enumerate(result.drafted_by) if bits]
    assert [place for place in range(119) if place + 1 not in ends] == [place for place in drafted if place < 119]


# ---- interactive


@pytest.fixture
def talk(run_decode, monkeypatch):
    """``talk(given, line)`` → the result of decode.py --interactive with these bytes on stdin."""

    def run(given, line):
        monkeypatch.setattr(sys, "stdin", given and io.TextIOWrapper(io.BytesIO(given)))
        return run_decode(f"{line} --interactive")

    return run


def converse(target, lines, limit):
    """The answers of a conversation, each turn rendered by the template and decoded by the engine alone."""
    chat, answers = [], []
    for line in lines:
        chat.append({"role": "user", "content": line})
        (result,) = SpeculativeDecoder(target).generate([Prompt(chat).encode(target)], limit)
        answers.append(decode_text(target.tokenizer, result.tokens))
        chat.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_a_conversation_keeps_its_history(talk, drafter, target):
    """An empty line is no message; behind /reset nothing is left of what was said; behind /exit nothing is read. Spaces
    after a command are no part of it."""
    given = "a = é\r\n\nb = 2\n/help \n/foo bar\n/reset \nb = 2\n/exit\t\nnever sent".encode()
    code, out, err = talk(given, f"{drafter} --max-new-tokens 5")
    first, second = converse(target, ["a = é", "b = 2"], 5)
    (alone,) = converse(target, ["b = 2"], 5)
    assert alone != second, "the history matters"
    assert (code, out, err.count("tokens in")) == (0, "\n".join([first, second, alone]), 3)
    assert err.count("/reset begins a new conversation") == 2 and err.count("a new conversation begins") == 1
    assert err.count("this line was not sent: /foo is no command (/reset begins") == 1


def test_two_turns_with_the_bundled_target(talk):
    """Piped lines, ended by the end of the input."""
    folder, lines = ROOT / "models/tiny-lm", ["Write a function that adds two numbers.", "Add a docstring."]
    code, out, err = talk("\n".join(lines).encode(), f"ngram --target {folder} --max-new-tokens 24")
    assert (code, out) == (0, "\n".join(converse(load_target(str(folder)), lines, 24))), err


@pytest.mark.parametrize("raw", [True, False])
def test_without_a_template_lines_are_texts_of_their_own(talk, target, tiny_lm, plain_target, raw):
    given = b"a = 1\n" + b"y" * 5000 + b"\n/reset\nb = 2\n"
    given_target = f"{tiny_lm} --raw" if raw else plain_target
    code, out, err = talk(given, f"none --target {given_target} --max-new-tokens 5")
    prompts = [Prompt(line).encode(target) for line in ("a = 1", "/reset", "b = 2")]
    wanted = [decode_text(target.tokenizer, r.tokens) for r in SpeculativeDecoder(target).generate(prompts, 5)]
    assert (code, out, err.count("tokens in")) == (0, "\n".join(wanted), 3)
    why = "--raw" if raw else "the target has no chat template"
    assert err.count(f"Each line is continued by itself ({why})") == 1 and "; shorten it\n" in err


def test_what_does_not_fit_is_not_sent(talk, drafter, target):
    """The conversation stays as it was, until /reset."""
    fits = "x" * 75  # twice, not three times, in a context of 256
    given = b"\n".join([b"y" * 5000, b"\xff\xfe", *[fits.encode()] * 3, b"x", b"/reset", fits.encode()])
    code, out, err = talk(given, f"{drafter} --max-new-tokens 5")
    answers = converse(target, [fits, fits, "x"], 5)
    assert (code, out) == (0, "\n".join([*answers, answers[0]]))
    assert err.count("this line was not sent: it has ") == 1 and "it is not UTF-8 text" in err
    found = re.findall(r"with it the conversation has (\d+) tokens, .*; /reset begins a new conversation\n", err)
    assert len(found) == 1 and int(found[0]) >= target.context


def test_a_template_that_refuses_a_message_ends_nothing(talk, target, tiny_lm, tmp_path):
    folder = shutil.copytree(tiny_lm, tmp_path / "target")
    template = folder / "chat_template.jinja"
    refuse = "{% if messages[-1].content == 'no' %}{{ raise_exception('never say no') }}{% endif %}"
    template.write_text(refuse + template.read_text())
    code, out, err = talk(b"a\nno\nb", f"none --target {folder} --max-new-tokens 5")
    assert (code, out) == (0, "\n".join(converse(target, ["a", "b"], 5)))
    assert "refuses this chat: never say no" in err


def test_ctrl_c_stops_an_answer(talk, drafter, target, monkeypatch):
    """What was written until then is part of the conversation, and the decoder is as good as new."""
    (full,) = converse(target, ["a = 1"], 40)
    write, written = terminal.write_text, []

    def press(text, drafted=0):
        write(text, drafted=drafted)
        written.append(text)
        if len(written) == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(terminal, "write_text", press)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = talk(b"a = 1\nb = 2", f"{drafter} --max-new-tokens 40")
    assert code == 0 and "ended by Ctrl-C" in err and err.count("tokens in") == 2 and "interrupted" not in err
    count = int(re.search(r"(\d+) tokens in", err)[1])
    assert 4 <= count < 40
    stopped = out[: next(n for n in range(1, len(out)) if out[n] == "\n" and full.startswith(out[:n]) and n > 2)]
    chat = [{"role": "user", "content": "a = 1"}, {"role": "assistant", "content": stopped}]
    chat.append({"role": "user", "content": "b = 2"})
    (second,) = SpeculativeDecoder(target).generate([Prompt(chat).encode(target)], 40)
    assert out == f"{stopped}\n{decode_text(target.tokenizer, second.tokens)}"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_stop_string_and_a_system_message(talk, run_decode, drafter, target, plain_target, prompts, monkeypatch):
    """The text ends before the string, in the conversation as on the screen; the system message outlives /reset."""
    system = {"role": "system", "content": "Answer é."}

    def answer(*messages, **options):
        (result,) = SpeculativeDecoder(target).generate([Prompt([system, *messages]).encode(target)], 30, **options)
        return result.text

    def said(text, role="user"):
        return {"role": role, "content": text}

    stop = answer(said("a = 1"))[3:6]
    first = answer(said("a = 1"), stop_strings=[stop])
    second = answer(said("a = 1"), said(first, "assistant"), said("b = 2"), stop_strings=[stop])
    line = f"{drafter} --max-new-tokens 30 --stop never --stop {shlex.quote(stop)}"
    code, out, err = talk(b"a = 1\nb = 2\n/reset\na = 1", f"{line} --system 'Answer \xe9.'")
    assert (code, out) == (0, "\n".join([first, second, first])) and stop not in first, err
    for given, options in (
        (b"a = 1\n", "--prompt - --system 'Answer \xe9.'"),
        ("Answer é.\r\n".encode(), "--prompt 'a = 1' --system -"),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        assert run_decode(f"{line} {options}")[:2] == (0, first)
    for given, message in ((b"\n", "--prompt -: standard input is empty"), (b"\xff", "--prompt: not UTF-8 text")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        assert message in error_of(run_decode(f"{drafter} --prompt -"))
    err = error_of(run_decode(f"none --target {plain_target} --prompt x --system y"))
    assert err.startswith("--system: target '") and "has no chat template" in err
    line = f"none --target {target.name} --prompts {prompts} --first 1 --live --max-new-tokens 30"
    _, live, _ = run_decode(line)
    stop = live[2:5]
    code, out, _ = run_decode(f"{line} --stop {shlex.quote(stop)}")
    assert out.rstrip("\n") == live[: live.find(stop)]


def test_closed_stdin(talk, drafter):
    assert error_of(talk(None, drafter)).startswith("--interactive reads stdin, which is closed")


class Terminal:
    """The command on a pseudo terminal; SIGINT comes from its control character."""

    def __init__(self, line):
        self.master, slave = pty.openpty()
        started = {
            "env": {**os.environ, "TERM": "xterm"},
            "start_new_session": True,
            "preexec_fn": lambda: (signal.signal(signal.SIGINT, signal.SIG_DFL), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
        }
        self.process = start(line, stdin=slave, stdout=slave, **started)
        os.close(slave)
        self.seen = b""

    def wait(self, what, count):
        while self.seen.count(what) < count:
            self.seen += os.read(self.master, 1 << 16)

    def type(self, keys):
        os.write(self.master, keys)

    def end(self):
        try:
            _, err = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
            os.close(self.master)
        return self.process.returncode, err


def test_a_conversation_on_a_terminal(drafter):
    """The second line is the first, brought back by the up key; then Ctrl-D."""
    terminal = Terminal(f"{drafter} --interactive --threads 1 --max-new-tokens 40 --all-nodes")
    terminal.wait(b"> ", 1)
    terminal.type(b"import os\n")
    terminal.wait(b"> ", 2)
    terminal.type(b"\x1b[A\n")
    terminal.wait(b"import os\r\n", 2)
    terminal.wait(b"> ", 3)
    terminal.type(b"/help\n")
    terminal.wait(b"> ", 4)
    terminal.type(b"\x04")
    code, err = terminal.end()
    assert code == 0 and err.count("tokens in") == 2 and err.count("/reset begins") == 1, err
    assert b"\x1b[32m" in terminal.seen, "drafted and accepted"


@pytest.mark.whole_runs
def test_control_c_on_a_terminal():
    """During an answer it ends that one; at the prompt it leaves."""
    terminal = Terminal("none --target models/tiny-lm --interactive --raw --threads 1 --max-new-tokens 900")
    terminal.wait(b"> ", 1)
    terminal.type(b"import os\n")
    terminal.wait(b"import os\r\n", 1)
    so_far = len(terminal.seen)
    while len(terminal.seen) < so_far + 40:
        terminal.seen += os.read(terminal.master, 1 << 16)
    terminal.type(b"\x03")
    terminal.wait(b"\n> ", 1)
    for _ in range(60):  # input() misses a signal that comes in the moment before it waits for one
        if terminal.process.poll() is None:
            terminal.type(b"\x03")
            time.sleep(0.5)
    code, err = terminal.end()
    assert (code, err.count("ended by Ctrl-C")) == (0, 1), err
    assert "error" not in err


# ---- reports


def reports_of(folder, names):
    return [json.loads((folder / name / "report.json").read_text()) for name in names]


def paths_of(report):
    """The paths of a report's fields, as docs/fields.md has them: those of a kind of text as those of the report."""
    for key, value in report.items():
        if key in ("kinds", "baselines", "sources"):
            place = "" if key == "kinds" else f"{key}.NAME."
            yield from (place + path for each in value.values() for path in paths_of(each))
        elif isinstance(value, dict) and key not in ("accepted_length_histogram", "logit_bias"):
            yield from (f"{key}.{path}" for path in paths_of(value))
        else:
            yield key


def test_every_field_is_in_the_table(drafter, tiny_lm, prompts, report_of):
    """And the table has no others, but for those of an ensemble, which none of these reports is of."""
    page = (ROOT / "docs/fields.md").read_text()
    tables = {
        part.split("\n")[0].strip("`"): {
            name for row in re.findall(r"^\| (`.*?) \|", part, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)
        }
        for part in page.split("\n## ")[1:]
    }
    prompts.write_text('{"prompt": "import os", "kind": "code"}\n{"prompt": "def f(x):"}\n')
    lines = (
        f"{drafter}+ngram draft_model:{tiny_lm}@1 --target {tiny_lm} --baseline all --check-lossless",
        f"{drafter} --mode sample --presence-penalty 1 --frequency-penalty 1 --logit-bias 5=1 --baseline none",
        f"{drafter} --mode typical --baseline none",
    )
    found = {
        path for line in lines for path in paths_of(report_of(f"{line} --prompts {prompts} --max-new-tokens 4")[0])
    }
    assert {name for name in tables.pop("report.json") if not name.startswith("ssm.")} == found - {"lossless"} | {
        "kinds"
    }
    classes = {"Request": Request, "Sampling": Sampling, "Generation": Generation}
    own = {name: {field.name for field in fields(each)} for name, each in classes.items()}
    own["Generation"].add("text")
    assert tables == own


def test_two_drafters_two_reports(run_decode, drafter, target, prompts, tmp_path):
    prompts.write_text(json.dumps({"prompt": "d[:x:]"}) + "\n" + json.dumps({"prompt": "ü" * 125}))  # 250 tokens of 256
    options = f"--max-new-tokens 8 --batch-size 2 --check-lossless --show 1 --report {tmp_path}"
    code, out, err = run_decode(f"{drafter} none --prompts {prompts} {options}")
    assert code == 0 and "\nd[:x:]\n" in err, "no markup, no emoji"
    encoded = [Prompt(text).encode(target) for text in ("d[:x:]", "ü" * 125)]
    result, other = SpeculativeDecoder(target).generate(encoded, 8)
    assert out == answer_text(target, result.tokens) and len(other.tokens) == 6
    heads, none = reports_of(tmp_path, ("heads", "none"))
    assert (heads["drafter"], heads["tree_nodes"], heads["batch_size"]) == (str(drafter), 6, 2)
    assert (none["drafter"], none["mean_accepted_length"], none["acceptance_per_position"]) == ("none", 1.0, [])
    assert heads["lossless"]["identical"] and none["lossless"]["identical"]
    assert heads["new_tokens"] == none["new_tokens"] == heads["lossless"]["checked"] == len(result.tokens) + 6


@pytest.mark.parametrize("mode", ["greedy", "sample", "mss"])
def test_drafters_without_training(run_decode, drafter, target, tiny_lm, prompts, tmp_path, mode):
    """n-grams, a draft model (the target itself, so that everything it proposes is right
    but random draws) and merges."""
    model = f"draft_model:{tiny_lm}@2,1,1"
    names = ["ngram", "ngram:1-3", model, f"{drafter}+ngram", f"{model}+ngram", f"{drafter}+{model}+ngram"]
    if mode != "greedy":  # one of each kind of draws
        names = [names[0], names[2], names[5]]
    # All nodes, whatever steps cost on this machine.
    how = "--mode sample --verify mss" if mode == "mss" else f"--mode {mode} --all-nodes"
    options = f"--max-new-tokens 12 --check-lossless --baseline none --report {tmp_path}"
    code, _, err = run_decode(f"{' '.join(names)} --target {tiny_lm} --prompts {prompts} {how} {options}")
    assert code == 0, err
    reports = reports_of(tmp_path, map(short_name, names))
    assert json.loads((tmp_path / "report.json").read_text()) == reports[0], "the first one's"
    for name, report in zip(names, reports, strict=True):
        assert report["drafter"] == name and report["lossless"]["passed"] and report["lossless"]["mode"] == mode
        sources, counted = report.get("sources", {}), report["spec_decode"]
        assert list(sources) == ([] if name == model else name.split("+") if "+" in name else ["ngram"])
        for its in sources.values():
            assert 0 <= its["accepted_tokens"] <= its["proposed_nodes"] <= counted["num_draft_tokens"]
        total = sum(its["accepted_tokens"] for its in sources.values())
        assert not sources or counted["num_accepted_tokens"] <= total <= counted["num_accepted_tokens"] * len(sources)
    if mode != "mss":
        steady = [report for report in reports if model in report["drafter"]]
        lengths = [report["mean_accepted_length"] for report in steady]
        assert lengths[0] > 1.5 and min(lengths) > 1, f"what the target itself proposes is right: {lengths}"
        assert reports[-1]["sources"][model]["accepted_tokens"] > 0


def test_the_nodes_of_a_merge_are_those_that_a_step_keeps(report_of, tiny_lm):
    """Not those of its drafters, where these have more."""
    of_model = f"draft_model:{tiny_lm}@8,5"
    for name, nodes in ((of_model, 49), (f"{of_model}+ngram", MERGED_NODES)):
        report, _ = report_of(f"{name} --target {tiny_lm} --prompt 'import os' --max-new-tokens 4 --baseline none")
        assert report["tree_nodes"] == nodes


def test_a_mismatch_fails_the_command(run_decode, drafter, prompts, tmp_path, monkeypatch):
    """All reports are written first."""
    generate = SpeculativeDecoder.generate

    def wrong(self, *arguments, **options):
        results = generate(self, *arguments, **options)
        if self.drafter.num_nodes > 1:
            results[0].tokens[3] = (results[0].tokens[3] + 1) % 300
        return results

    monkeypatch.setattr(SpeculativeDecoder, "generate", wrong)
    options = f"--max-new-tokens 8 --check-lossless --report {tmp_path}"
    assert run_decode(f"{drafter} none --prompts {prompts} {options}")[0] == 1
    heads, none = reports_of(tmp_path, ("heads", "none"))
    assert heads["lossless"]["mismatches"] >= 2 and none["lossless"]["identical"]


# ---- bad input


def test_bad_prompts(run_decode, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": null}\n')
    assert f"{path}:2: it has nothing; needed is" in error_of(run_decode(f"nobody/nothing --prompts {path}"))


@pytest.fixture(scope="module")
def other_weights(tiny_lm, tmp_path_factory):
    """The target with another first weight of its norm."""
    other = shutil.copytree(tiny_lm, tmp_path_factory.mktemp("other") / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] = 2
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    return other


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("/nowhere/at/all", "'/nowhere/at/all': there is no such folder"),
        ("ngram", "'ngram' has no target of its own: pass --target"),
        ("ngram:5", "'ngram:5': for matches of 2 to 10 tokens write ngram:2-10"),
        ("ngram:9-2 --target models/tiny-lm", "min_match 9, max_match 2: must be 1 ≤ min_match ≤ max_match"),
        ("ngram+", "'ngram+': a drafter is missing beside '+'; for example runs/demo+ngram"),
        ("ngram+none", "'ngram+none': 'none' proposes nothing; leave it out"),
        ("ngram+ngram", "'ngram+ngram': the same drafter twice; leave one out"),
        ("draft_model:", "'draft_model:': write draft_model:PATH, or draft_model:PATH@2,2,1"),
        ("draft_model:models/tiny-lm@2,x", "write draft_model:PATH, or draft_model:PATH@2,2,1"),
        ("draft_model:/no/model --target models/tiny-lm", "'/no/model': there is no such folder"),
        ("none", "'none' names no target: pass --target"),
        ("MODEL", "this is a model, not a drafter; to decode with it alone: none --target"),
        ("none --target DRAFTER", "this is a drafter, not a target; its target is"),
        ("DRAFTER DRAFTER", "two of the drafters have the same name"),
        ("DRAFTER --max-new-tokens 0", "--max-new-tokens 0: must be at least 1"),
        ("DRAFTER --batch-size -1", "--batch-size -1: must be at least 1"),
        ("DRAFTER --threads 0", "--threads 0: must be at least 1"),
        ("DRAFTER --tree /nowhere/tree.json", "/nowhere/tree.json: there is no such tree"),
        ("DRAFTER --report FILE", "cannot write here (File exists); choose another folder"),
        ("DRAFTER --report FILE/x", "cannot write here (Not a directory); choose another folder"),
        ("DRAFTER --report LOOP", "cannot write here ("),
        ("DRAFTER --report /proc/x", "--report /proc/x: cannot write here ("),
        ("DRAFTER --batch-size 1000000000000", "--batch-size 1000000000000: must be at most 2147483647"),
        ("DRAFTER --repeat 1000000000000", "--repeat 1000000000000: must be at most 2147483647"),
        ("DRAFTER --threads 1000000", "--threads 1000000: must be at most"),
        ("DRAFTER --seconds 0", "--seconds 0: must be above 0"),
        ("DRAFTER --seconds nan", "--seconds nan: must be above 0"),
        ("DRAFTER --first 0", "--first 0: must be at least 1"),
        ("DRAFTER --show -1", "--show -1: must be at least 0"),
        ("DRAFTER --live --report x", "--live prints the texts of --prompts and measures nothing"),
        ("DRAFTER ngram --live", "--prompt, --interactive and --live take one DRAFTER"),
        ("DRAFTER --raw", "--raw is for --prompt and --interactive"),
        ("DRAFTER --logprobs 3", "--logprobs is shown below texts of --prompt, --interactive and --live"),
        ("DRAFTER --logprobs 21 --live", "--logprobs 21: must be from 0 to 20"),
        ("DRAFTER --logprobs-mode raw_logprobs --live", "--logprobs-mode raw_logprobs needs --logprobs K"),
        ("DRAFTER --stop x", "--stop is for --prompt, --interactive and --live"),
        ("DRAFTER --live --batch-size 2", "--batch-size is for what is measured, --prompts or --report; leave it out"),
        ("DRAFTER --live --stop ''", "--stop: the text is empty"),
        ("DRAFTER --live --baseline all", "--baseline is for what is measured, --prompts or --report; leave it out"),
        ("DRAFTER --system x", "--system is for messages of --prompt and --interactive"),
        ("DRAFTER --device cudda", "device 'cudda'"),
        ("none --target nobody/nothing --device meta", "device 'meta'"),
        ("DRAFTER --target nobody/nothing --tree DEEP", "the tree is 4 deep, but there are 3 draft heads"),
        ("DRAFTER --target nobody/nothing --tree FILE", "file: "),
        ("DRAFTER --mode sample --seed -1", "seed -1: "),
        ("DRAFTER --mode sample --temperature nan", "temperature nan: "),
        ("DRAFTER --mode sample --temperature -1", "temperature -1.0: "),
    ],
)
def test_bad_arguments(run_decode, drafter, prompts, tiny_lm, tmp_path, arguments, message):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    write_json(tmp_path / "deep.json", {"paths": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]})
    places = {"DRAFTER": drafter, "MODEL": tiny_lm, "FILE": tmp_path / "file"}
    places |= {"LOOP": tmp_path / "loop", "DEEP": tmp_path / "deep.json"}
    arguments = re.sub("|".join(places), lambda found: str(places[found[0]]), arguments)
    assert message in error_of(run_decode(f"{arguments} --prompts {prompts}"))


def test_the_target_is_of_the_revision_that_was_trained_for(
    run_main, run_decode, drafter, prompts, tiny_lm, tmp_path, monkeypatch
):
    folder, asked = shutil.copytree(drafter, tmp_path / "of-v1"), []
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"target": config["target"] | {"revision": "v1"}})

    def asked_for(name, **options):
        asked.append(options.get("revision"))
        raise FileNotFoundError("not here")

    for place in (load, calibrate):
        monkeypatch.setattr(place, "load_target", asked_for)
    for command in (
        lambda: run_decode(f"{folder} --prompts {prompts}"),
        lambda: run_main(calibrate.main, folder, "--prompts", prompts),
        lambda: run_decode(f"{folder} --target {tiny_lm} --prompts {prompts}"),
    ):
        with pytest.raises(FileNotFoundError, match="not here"):
            command()
    assert asked == ["v1", "v1", None], "another target has other revisions"


def test_a_target_of_the_same_shape(run_decode, drafter, prompts, other_weights, tmp_path):
    """As a quantised form of the drafter's: the text is that target's own, and a line says so; of another family it is
    refused."""
    words = f"{drafter} --target {other_weights} --prompts {prompts} --max-new-tokens 8 --check-lossless"
    code, _, err = run_decode(words)
    said = "has the same shape, other weights (fingerprint "
    assert code == 0 and err.count(said) == 1 and "output identical to plain" in err and "text is its own" in err, err
    folder = shutil.copytree(drafter, tmp_path / "another")
    config_file = folder / "config.json"
    config_file.write_text(config_file.read_text().replace('"model_type": "llama"', '"model_type": "gpt2"'))
    assert "was trained for target" in error_of(run_decode(words.replace(str(drafter), str(folder))))


@pytest.mark.parametrize(
    "damage, parts",
    [
        (truncate("model.safetensors", 5000), ["model.safetensors: truncated (5,000 of ", "fetch or write it again"]),
        (truncate("model.safetensors", 50), ["model.safetensors: not a safetensors file, or truncated"]),
        (truncate("model.safetensors", 0), ["model.safetensors: not a safetensors file, or truncated"]),
        (truncate("config.json", 20), ["config.json: not valid JSON"]),
        (truncate("tree.json", 9), ["tree.json: neither JSON"]),
        (without("model.safetensors"), ["no model.safetensors here"]),
        (without("tree.json"), ["has no tree.json yet; run: python inference/calibrate.py"]),
        (config(hidden_size=31), ["model.safetensors: its tensors are", "config.json promises"]),
        (config(vocab_size=301), ["vocab_size 301 ≠ 300"]),
        (config(num_draft_heads=4), ["its tensors are", "config.json promises"]),
        (config(drafter_type=["medusa"]), ["drafter_type"]),
        (
            config(drafter_type="hydra"),
            ["drafter_type 'hydra' is not known", "; known: dflash, dynaspec, eagle, medusa"],
        ),
    ],
)
def test_damaged_drafters(run_decode, drafter, prompts, tmp_path, damage, parts):
    folder = shutil.copytree(drafter, tmp_path / "drafter")
    damage(folder)
    said = error_of(run_decode(f"{folder} --prompts {prompts}"))
    assert all(part in said for part in (str(folder), *parts)), said


def test_all_trees_are_looked_for_first(run_decode, drafter, prompts, tmp_path, monkeypatch):
    """Before a target is loaded, that of the drafters before it, too."""
    folder = shutil.copytree(drafter, tmp_path / "drafter")
    (folder / "tree.json").unlink()
    monkeypatch.setattr(load, "load_target", lambda *args, **options: pytest.fail("a target was loaded"))
    for given in (f"{drafter} {folder}", f"{drafter}+{folder}", f"{drafter} ngram+{folder}"):
        assert "has no tree.json yet; run: python" in error_of(run_decode(f"{given} --prompts {prompts}")), given


@pytest.mark.parametrize("device, told", [("NVIDIA H200", True), ("AMD EPYC, 2 cores, 2 threads", False)])
def test_a_tree_for_another_kind_of_device_is_named(run_decode, drafter, prompts, tmp_path, device, told):
    folder = shutil.copytree(drafter, tmp_path / "drafter")
    write_json(
        folder / "tree.json", {**json.loads((folder / "tree.json").read_text()), "calibration": {"device": device}}
    )
    code, _, err = run_decode(f"{folder} --prompts {prompts} --max-new-tokens 2 --baseline none")
    assert code == 0, err
    assert (f"{folder / 'tree.json'}: a tree for NVIDIA H200; python inference/calibrate.py {folder}" in err) == told


def test_damaged_targets(run_decode, drafter, prompts, tiny_lm, tmp_path):
    for name, size, message in [("model.safetensors", 50_000, "truncated (50,000 of"), ("config.json", 9, "not valid")]:
        folder = shutil.copytree(tiny_lm, tmp_path / name)
        truncate(name, size)(folder)
        said = error_of(run_decode(f"{drafter} --target {folder} --prompts {prompts}"))
        assert str(folder / name) in said and message in said


def test_damaged_answers(run_main, drafter, tmp_path):
    folder = shutil.copytree(drafter, tmp_path / "drafter")
    (folder / "held_out").mkdir(parents=True)
    stored = folder / "held_out/model.safetensors"
    save_file({"tokens": torch.zeros(9, 9), "supervised": torch.zeros(9, 9)}, stored)
    truncate(stored.relative_to(folder), 400)(folder)
    assert f"{stored}: truncated (400 of" in error_of(run_main(calibrate.main, folder))


# ---- the real command: libraries have nothing to add


def start(line, **options):
    command = [sys.executable, "inference/decode.py", *line.split()]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **options)


def test_a_prompt_longer_than_the_context(run_decode, drafter, prompts):
    """Known before anything is decoded."""
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "x = 1\n" * 300}) + "\n")
    said = error_of(run_decode(f"{drafter} --prompts {prompts}"))
    assert said.startswith(f"{prompts}:3: this prompt has ") and "the target's context of 256" in said


@pytest.mark.whole_runs
def test_interrupted(drafter, prompts, tmp_path):
    report = tmp_path / "report.json"
    report.write_text('{"drafter": "from before"}')
    process = start(
        f"{drafter} --prompts {prompts} --threads 1 --repeat 100000 --report {tmp_path}",
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background has it ignored
    )
    while "decoding" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (2, "error: interrupted; files already written are whole\n")
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "report.json"}
    assert report.read_text() == '{"drafter": "from before"}'


# ---- modes


@pytest.mark.parametrize("verify", ["coupled", "mss"])
def test_sampling_by_command(drafter, prompts, report_of, run_decode, verify):
    line = f"{drafter} --prompts {prompts} --mode sample --temperature 0.8 --top-p 0.9 --seed 3 --max-new-tokens 12"
    line += " --verify mss" if verify == "mss" else ""  # coupled by default
    other, _ = report_of(line)  # which is not checked
    report, err = report_of(f"{line} --check-lossless --baseline all")
    assert (report["mode"], report["verify"]) == ("sample", verify) and "lossy" not in report
    assert report["sampling"]["temperature"] == 0.8 and report["sampling"]["seed"] == 3
    lossless = report["lossless"]
    assert lossless["passed"] and lossless["mismatches"] == 0 and other["lossless"] is None
    if verify == "mss":
        assert "sampled tokens have the target's distribution" in err
        assert lossless["mode"] == "mss" and lossless["p_value"] > 1e-6 and lossless["checked"] == 2 * 2 * 256
    else:
        assert "output identical to plain sampling by the same seeds" in err
        assert lossless["mode"] == "sample" and lossless["p_value"] is None and lossless["identical"]
        assert lossless["checked"] == report["new_tokens"]
    same = "accepted_length_histogram"
    assert report[same] == other[same], "the same seed, the same text"


def test_another_seed_is_a_mismatch(run_decode, drafter, prompts, tmp_path, monkeypatch):
    """The check of coupled sampling takes each prompt's own seed, and no other."""
    seeds = timing.with_own_seeds
    decoded = SpeculativeDecoder.generate

    def wrong(self, group, *arguments, **options):
        if self.drafter.num_nodes > 1:
            options["sampling"] = seeds(replace(options["sampling"][0], seed=4), group)
        return decoded(self, group, *arguments, **options)

    monkeypatch.setattr(SpeculativeDecoder, "generate", wrong)
    options = f"--mode sample --max-new-tokens 8 --check-lossless --report {tmp_path}"
    code, _, err = run_decode(f"{drafter} --prompts {prompts} {options}")
    assert code == 1 and "mismatches with plain decoding" in err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["lossless"]["mode"] == "sample" and report["lossless"]["mismatches"] > 4


def test_typical_says_that_it_is_lossy(drafter, prompts, report_of):
    report, err = report_of(f"{drafter} --prompts {prompts} --mode typical --max-new-tokens 12")
    assert "lossy" in err
    assert report["mode"] == "typical" and report["lossy"] is True and report["lossless"] is None


@pytest.mark.parametrize(
    "options, message",
    [
        ("--temperature 0.5 --mode greedy", "--temperature needs --mode sample"),
        ("--epsilon 0.1", "--epsilon is the threshold of --mode typical"),
        ("--delta 0.1 --mode sample", "--delta is a threshold of --mode typical"),
        ("--mode sample --top-p 1.5", "top_p 1.5: must be above 0 and at most 1"),
        ("--mode typical --check-lossless", "--mode typical is lossy by design"),
        ("--mode greedy --verify coupled", "--verify coupled needs --mode sample"),
        ("--mode typical --verify mss", "--verify mss needs --mode sample"),
        ("--interactive --check-lossless", "--interactive measures nothing"),
        ("--stop x --check-lossless", "baselines and --check-lossless do not stop there"),
        ("--raw --system x", "--raw has no messages"),
        ("--system ''", "--system: the text is empty"),
        ("--interactive --system -", "--system -: --interactive reads standard input"),
    ],
)
def test_conflicting_modes(drafter, run_decode, options, message):
    what = "" if "--interactive" in options else "--prompt x"
    assert message in error_of(run_decode(f"{drafter} {what} {options}"))


# ---- from Python


def test_the_package_itself(tiny_lm, target, drafter):
    """What the README imports from draftsmith, and a report as decode.py writes it."""
    import draftsmith

    assert draftsmith.load_target(str(tiny_lm)).fingerprint == target.fingerprint
    loaded, heads = draftsmith.load_drafter(str(drafter))
    prompts = [loaded.tokenizer(text)["input_ids"] for text in ("import os", "def f(x):")]
    drafters = {"heads": heads, "none": None}
    reports, results = draftsmith.evaluate(loaded, drafters, prompts, max_new_tokens=9, check_lossless=True)
    assert [report["drafter"] for report in reports] == ["heads", "none"]
    assert all(report["lossless"]["passed"] and report["new_tokens"] == 18 for report in reports)
    plain = draftsmith.SpeculativeDecoder(loaded).generate(prompts, 9)
    assert [r.tokens for r in results[0]] == [r.tokens for r in results[1]] == [r.tokens for r in plain]
    how = {"mode": "sample", "sampling": draftsmith.Sampling(top_k=5), "baseline": "none", "max_new_tokens": 3}
    sampled, _ = draftsmith.evaluate(loaded, drafters, prompts, **how)
    assert sampled[0]["sampling"]["top_k"] == 5 and sampled[0]["baselines"] == {} and sampled[0]["verify"] == "coupled"
    with pytest.raises(ValueError, match="baseline 'theirs': must be one of none, engine, transformers, all"):
        draftsmith.evaluate(loaded, drafters, prompts, baseline="theirs")
    with pytest.raises(AttributeError, match="has no attribute 'decode'; it has: SpeculativeDecoder, "):
        draftsmith.decode  # noqa: B018


# ---- sampling: seeds and the baseline


def test_each_prompt_has_a_seed_of_its_own(target):
    """Of the seed given and the prompt, whatever the other prompts are."""
    first, second = ([5, 6, 7], [5, 6, 8])

    def seeds_of(prompts, **given):
        return [each.seed for each in timing.engine_options("sample", Sampling(**given), prompts)["sampling"]]

    seeds = seeds_of([first, second])
    assert len(set(seeds)) == 2
    assert seeds_of([second, first]) == seeds[::-1]
    assert not set(seeds) & set(seeds_of([first, second], seed=1))


@pytest.mark.parametrize("only", [{"top_p": 1e-6}, {"top_k": 1}, {"min_p": 0.999999}, {"temperature": 1e-40}])
def test_the_transformers_baseline_samples_as_we_do(target, only):
    """Each of these leaves the most likely token alone; without it, at this temperature, the text is another."""
    prompts = [target.tokenizer(text)["input_ids"] for text in ("import os", "def f(x):")]
    theirs = timing.generate_options("sample", Sampling(**{"temperature": 5.0, **only}))
    wanted = [result.tokens for result in SpeculativeDecoder(target).generate(prompts, 12)]
    torch.manual_seed(0)
    assert timing.transformers_method(target, 12, **theirs)(prompts) == wanted
    free = timing.generate_options("sample", Sampling(temperature=5.0))
    assert timing.transformers_method(target, 12, **free)(prompts) != wanted


def test_the_transformers_baseline_ignores_the_stored_generation_config(tiny_lm):
    """Penalties and temperatures that a model is published with are no part of greedy decoding, ours or theirs."""
    target = load_target(str(tiny_lm))
    prompts = [target.tokenizer(text)["input_ids"] for text in ("import os", "def f(x):")]
    wanted = [result.tokens for result in SpeculativeDecoder(target).generate(prompts, 30)]
    stored = target.model.generation_config
    stored.update(repetition_penalty=1.7, no_repeat_ngram_size=2, do_sample=True, temperature=5.0, min_p=0.1)
    stored.suppress_tokens = [wanted[0][0]]
    assert timing.transformers_method(target, 30)(prompts) == wanted
    assert target.model.generation_config is stored and target.stop_ids


def test_lines_are_read_where_python_has_no_readline(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setitem(sys.modules, "readline", None)  # importing it fails
    monkeypatch.setattr(sys, "stdin", Terminal("first\n"))
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert interactive.read_line() == "first"


def test_question_files_with_several_turns(run_decode, target, tmp_path):
    """MT-Bench's and Spec-Bench's format: the second turn is asked after the target's own answer to the first."""
    rows = [{"question_id": n, "category": kind, "turns": ["import os", "def f(x):"]} for n, kind in enumerate("aab")]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "x = 1"}]))
    code, out, err = run_decode(
        f"ngram --target {target.name} --prompts {tmp_path}/q.jsonl --max-new-tokens 6 --baseline none --show 2 "
        f"--report {tmp_path}/out"
    )
    assert code == 0 and "answering 3 prompts, which later turns follow" in err, err
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["prompts"] == 7
    assert {kind: found["prompts"] for kind, found in report["kinds"].items()} == {"a": 4, "b": 2, "other": 1}
    first, second = converse(target, ["import os", "def f(x):"], 6)
    assert out == f"{first}\n{second}", "as in a conversation"
