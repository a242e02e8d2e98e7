"""The command decode.py: prompts, baselines, what it prints, and what it says to bad input."""

import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.inference import calibrate, decode
from draftsmith.inference.decode import Prompt, read_prompts
from draftsmith.inference.engine import Generation, SpeculativeDecoder
from draftsmith.models.artifact import write_json
from draftsmith.models.target import load_target

ROOT = Path(__file__).parents[2]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "import os"}\n{"prompt": "def f(x):"}\n')
    return path


# ---- prompts


def test_read_prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    lines = [
        '{"prompt": "a\u2028b\x85c\u2029 \\n d", "source": "x"}',  # line breaks to Python, but not to JSON Lines
        "",
        json.dumps({"messages": [*chat, {"role": "user", "content": "Bye"}]}),
        json.dumps({"id": "7", "messages": chat, "finish_reason": ["stop"]}),  # what distill.py writes
        '{"turns": ["first", "second"]}\r',
    ]
    path.write_bytes("\n".join(lines).encode())
    assert read_prompts(path) == [
        Prompt("a\u2028b\x85c\u2029 \n d"),
        Prompt("", [*chat, {"role": "user", "content": "Bye"}]),
        Prompt("", chat[:1]),
        Prompt("", [{"role": "user", "content": "first"}]),
    ]


def test_prompts_are_encoded_as_the_target_does(target):
    tokenizer = target.tokenizer
    assert Prompt("x = 1").encode(target) == tokenizer("x = 1")["input_ids"]
    chat = [{"role": "user", "content": "Hello"}]
    text = tokenizer.decode(Prompt("", chat).encode(target))
    assert text == "<|user|>\nHello<|end|>\n<|assistant|>\n"


# ---- baselines


def test_transformers_ends_where_the_engine_does(target):
    """At a stop id, at the limit, at the end of the context: all methods count the same tokens."""
    torch.manual_seed(1)
    prompts = [torch.randint(5, 300, (n,)).tolist() for n in (250, 240, 20)]
    ours = SpeculativeDecoder(target).generate(prompts, 14)
    assert [len(result.tokens) for result in ours] == [6, 14, 14]
    theirs = decode.transformers_method(target, 14)
    assert theirs(prompts) == [result.tokens for result in ours]
    stopping = load_target(target.name)
    stopping.model.generation_config.eos_token_id = [ours[1].tokens[7], ours[2].tokens[3]]
    stopped = SpeculativeDecoder(stopping).generate(prompts, 14)
    assert {result.finish_reason for result in stopped} >= {"stop"}
    assert decode.transformers_method(stopping, 14)(prompts) == [result.tokens for result in stopped]


def test_methods_take_turns():
    calls = []
    methods = {name: lambda batch, name=name: calls.append((name, batch)) or batch for name in "ab"}
    prompts, short = [[*range(20)], [3, 4]], [[1]]
    timed = decode.run_rounds(methods, prompts, 2, short)
    warm_up, rest = calls[:2], calls[2:]
    assert warm_up == [(name, short) for name in "ab"]
    assert rest == [(name, prompts) for _ in range(2) for name in "ab"]
    assert timed["a"].outputs == [[*range(20)], [3, 4]]
    assert len(timed["a"].seconds) == len(timed["a"].cpu_seconds) == 2
    timed["a"].seconds = [2.0, 1.0, 44.0]
    assert timed["a"].tokens_per_second == 11


# ---- what is printed


@pytest.mark.parametrize("cut", [0, 1])
def test_streamed_text_is_the_text(target, monkeypatch, cut):
    text = "d[:x:] [red]naïve[/red] " + "long " * 60 + "日本🙂"
    tokens = target.tokenizer(text)["input_ids"]
    tokens = tokens[: len(tokens) - cut]

    def generate(prompts, limit, on_tokens):
        on_tokens(0, tokens[:1])
        for start in range(1, len(tokens), 3):
            on_tokens(0, tokens[start : start + 3])
        return [Generation(tokens, [3] * (len(tokens) // 3), "length")]

    out = io.StringIO()
    monkeypatch.setattr(decode.console, "_file", out)
    decode.stream(
        SimpleNamespace(target=target, generate=generate), [1], SimpleNamespace(max_new_tokens=9, mode="greedy")
    )
    assert out.getvalue().startswith(target.tokenizer.decode(tokens) + "\n")
    assert f"{len(tokens)} tokens in" in out.getvalue() and "ended by length" in out.getvalue()


def test_one_prompt(run_main, drafter, target):
    code, out, err = run_main(decode.main, drafter, "--prompt", "def f(", "--max-new-tokens", 9, "--threads", 1)
    (result,) = SpeculativeDecoder(target).generate([target.tokenizer("def f(")["input_ids"]], 9)
    assert (code, err) == (0, "")
    assert out.startswith(target.tokenizer.decode(result.tokens) + "\n")


def test_interactive(run_main, drafter, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a = 1\nb = 2\n"))  # ended by the end of the file
    code, out, err = run_main(decode.main, drafter, "--interactive", "--max-new-tokens", 5, "--threads", 1)
    assert (code, err, out.count("tokens in")) == (0, "", 2)


def test_two_drafters_two_reports(run_main, drafter, prompts, tmp_path):
    prompts.write_text(json.dumps({"prompt": "d[:x:]"}) + "\n" + json.dumps({"prompt": "é" * 125}))  # 250 tokens of 256
    code, out, err = run_main(
        decode.main, drafter, "none", "--prompts", prompts, "--max-new-tokens", 8, "--batch-size", 2, "--threads", 1,
        "--check-lossless", "--show", 1, "--report", tmp_path / "out",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "\nd[:x:]" in out, "no markup, no emoji"
    heads, none = (json.loads((tmp_path / "out" / name / "report.json").read_text()) for name in ("heads", "none"))
    assert (heads["drafter"], heads["tree_nodes"], heads["batch_size"]) == (str(drafter), 6, 2)
    assert (none["drafter"], none["mean_accepted_length"], none["acceptance_per_position"]) == ("none", 1.0, [])
    assert heads["lossless"]["identical"] and none["lossless"]["identical"]
    assert heads["new_tokens"] == none["new_tokens"] == heads["lossless"]["checked"] == 8 + 6


def test_a_mismatch_fails_the_command(run_main, drafter, prompts, tmp_path, monkeypatch):
    """All reports are written first."""
    generate = SpeculativeDecoder.generate

    def wrong(self, *arguments, **options):
        results = generate(self, *arguments, **options)
        if self.drafter.num_nodes > 1:
            results[0].tokens[3] = (results[0].tokens[3] + 1) % 300
        return results

    monkeypatch.setattr(SpeculativeDecoder, "generate", wrong)
    code, _, _ = run_main(
        decode.main, drafter, "none", "--prompts", prompts, "--max-new-tokens", 8, "--threads", 1, "--check-lossless",
        "--report", tmp_path / "out",
    )  # fmt: skip
    assert code == 1
    heads, none = (json.loads((tmp_path / "out" / name / "report.json").read_text()) for name in ("heads", "none"))
    assert heads["lossless"]["mismatches"] >= 2 and none["lossless"]["identical"]


# ---- bad input


def one_line(result, *parts):
    code, _, err = result
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "prompts.jsonl: there is no such prompts file"),
        ("", "prompts.jsonl: holds no prompt"),
        ("\n \n", "prompts.jsonl: holds no prompt"),
        ('{"prompt": "a"}\n\n{"prompt": "b"\n', "prompts.jsonl:3: not a prompt; write"),
        ('{"prompt": "a"}\n"prompt"\n', "prompts.jsonl:2: not a prompt"),
        ('{"text": "a"}\n', "prompts.jsonl:1: not a prompt"),
        ('{"messages": "hello"}\n', "prompts.jsonl:1: not a prompt"),
        ('{"messages": [{"role": "user"}]}\n', "prompts.jsonl:1: not a prompt"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "prompts.jsonl:1: not a prompt"),
        ('{"turns": []}\n', "prompts.jsonl:1: not a prompt"),
        (b"\xff\xfe\x00", "prompts.jsonl: not a text file"),
        ('{"prompt": "a"}\n{"prompt": ""}\n', "prompts.jsonl: prompt 2 has 0 tokens; give it at least one"),
    ],
)
def test_bad_prompts(run_main, drafter, tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    one_line(run_main(decode.main, drafter, "--prompts", path, "--threads", 1), message)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["/nowhere/at/all"], "'/nowhere/at/all': there is no such folder"),
        (["none"], "'none' is no drafter and knows no target: pass --target"),
        (["MODEL"], "this is a model, not a drafter; to decode with it alone: none --target"),
        (["none", "--target", "DRAFTER"], "this is a drafter, not a target; pass it as DRAFTER"),
        (["DRAFTER", "DRAFTER"], "two of the drafters have the same name"),
        (["DRAFTER", "--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1"),
        (["DRAFTER", "--batch-size", "-1"], "--batch-size -1: must be at least 1"),
        (["DRAFTER", "--threads", "0"], "--threads 0: must be at least 1"),
        (["DRAFTER", "--tree", "/nowhere/tree.json"], "/nowhere/tree.json: there is no such tree"),
        (["DRAFTER", "--report", "FILE"], "cannot write or read here (File exists); choose another folder"),
        (["DRAFTER", "--report", "FILE/x"], "cannot write or read here (Not a directory); choose another folder"),
        (["DRAFTER", "--target", "OTHER"], "same shape, other weights (fingerprint"),
    ],
)
def test_bad_arguments(run_main, drafter, prompts, tiny_lm, tmp_path, arguments, message):
    (tmp_path / "file").touch()
    other = shutil.copytree(tiny_lm, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] = 2
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    places = {"DRAFTER": drafter, "MODEL": tiny_lm, "OTHER": other}
    arguments = [str(places.get(a, a)).replace("FILE", str(tmp_path / "file")) for a in arguments]
    one_line(run_main(decode.main, "--threads", 1, *arguments, "--prompts", prompts), message)


def edit(**fields):
    def damage(folder):
        config = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", config | fields)

    return damage


def truncate(name, size):
    def damage(folder):
        with (folder / name).open("r+b") as file:
            file.truncate(size)

    return damage


@pytest.mark.parametrize(
    "damage, parts",
    [
        (truncate("model.safetensors", 5000), ["model.safetensors: truncated (5,000 of ", "fetch or write it again"]),
        (truncate("model.safetensors", 50), ["model.safetensors: not a safetensors file, or truncated"]),
        (truncate("model.safetensors", 0), ["model.safetensors: not a safetensors file, or truncated"]),
        (truncate("config.json", 20), ["config.json: not valid JSON"]),
        (truncate("tree.json", 9), ["tree.json: neither JSON"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["no model.safetensors here"]),
        (lambda folder: (folder / "tree.json").unlink(), ["has no tree.json yet; run: python inference/calibrate.py"]),
        (edit(hidden_size=31), ["was trained for target", "hidden_size 31 ≠ 32"]),
        (edit(vocab_size=301), ["vocab_size 301 ≠ 300"]),
        (edit(num_draft_heads=2), ["its tensors are", "config.json promises"]),
        (edit(drafter_type="eagle"), ["drafter_type 'eagle' is not known to this version; known: medusa"]),
    ],
)
def test_damaged_drafters(run_main, drafter, prompts, tmp_path, damage, parts):
    folder = shutil.copytree(drafter, tmp_path / "drafter")
    damage(folder)
    one_line(run_main(decode.main, folder, "--prompts", prompts, "--threads", 1), str(folder), *parts)


def test_damaged_targets(run_main, drafter, prompts, tiny_lm, tmp_path):
    for name, size, message in [("model.safetensors", 50_000, "truncated (50,000 of"), ("config.json", 9, "not valid")]:
        folder = shutil.copytree(tiny_lm, tmp_path / name)
        truncate(name, size)(folder)
        result = run_main(decode.main, drafter, "--target", folder, "--prompts", prompts, "--threads", 1)
        one_line(result, str(folder / name), message)


def test_damaged_answers(run_main, drafter, tmp_path):
    folder = shutil.copytree(drafter, tmp_path / "drafter")
    (folder / "held_out").mkdir(parents=True)
    stored = folder / "held_out/model.safetensors"
    save_file({"tokens": torch.zeros(9, 9), "supervised": torch.zeros(9, 9)}, stored)
    truncate(stored.relative_to(folder), 400)(folder)
    one_line(run_main(calibrate.main, folder), f"{stored}: truncated (400 of")


# ---- the real command: libraries have nothing to add


def command(*arguments):
    return [sys.executable, "inference/decode.py", *map(str, arguments)]


def test_a_prompt_longer_than_the_context(drafter, prompts):
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "x = 1\n" * 300}) + "\n")
    done = subprocess.run(command(drafter, "--prompts", prompts), cwd=ROOT, capture_output=True, text=True)
    one_line((done.returncode, done.stdout, done.stderr), f"{prompts}: prompt 3 has ", "the target's context of 256")
    assert done.stdout == "", "known before anything is decoded"


def test_interrupted(drafter, prompts, tmp_path):
    report = tmp_path / "report.json"
    report.write_text("from before")
    process = subprocess.Popen(
        command(drafter, "--prompts", prompts, "--threads", 1, "--repeat", 100_000, "--report", tmp_path),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background has it ignored
    )  # fmt: skip
    while "decoding" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (2, "error: interrupted; files already written are whole\n")
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "report.json"}
    assert report.read_text() == "from before"


# ---- modes


def test_sampling_by_command(drafter, prompts, tmp_path, run_main):
    options = ["--mode", "sample", "--temperature", "0.8", "--top-p", "0.9", "--seed", "3", "--max-new-tokens", "12",
               "--threads", "1", "--check-lossless", "--baseline", "all"]  # fmt: skip
    reports = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        code, out, err = run_main(decode.main, drafter, "--prompts", prompts, *options, "--report", folder)
        assert code == 0, err
        reports.append(json.loads((folder / "report.json").read_text()))
    report = reports[0]
    assert "sampled tokens have the target's law" in out
    assert report["mode"] == "sample" and report["lossless"]["mode"] == "sample" and "lossy" not in report
    assert report["sampling"]["temperature"] == 0.8 and report["sampling"]["seed"] == 3
    assert report["lossless"]["passed"] and report["lossless"]["p_value"] > 1e-6
    assert report["lossless"]["checked"] == 2 * 2 * 256
    assert report["accepted_length_histogram"] == reports[1]["accepted_length_histogram"], (
        "the same seed, the same text"
    )


def test_typical_says_that_it_is_lossy(drafter, prompts, tmp_path, run_main):
    code, out, err = run_main(
        decode.main, drafter, "--prompts", prompts, "--mode", "typical", "--max-new-tokens", "12", "--report", tmp_path
    )
    assert code == 0, err
    assert "lossy" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["mode"] == "typical" and report["lossy"] is True and report["lossless"] is None


@pytest.mark.parametrize(
    "options, message",
    [
        (["--temperature", "0.5"], "--temperature needs --mode sample"),
        (["--mode", "sample", "--top-p", "1.5"], "top_p 1.5: has to be above 0 and at most 1"),
        (["--mode", "typical", "--check-lossless"], "--mode typical is lossy by design"),
        (["--interactive", "--check-lossless"], "--interactive measures nothing"),
    ],
)
def test_modes_that_cannot_be(drafter, run_main, options, message):
    what = [] if "--interactive" in options else ["--prompt", "x"]
    code, _, err = run_main(decode.main, drafter, *what, *options)
    assert code == 2 and err.startswith("error: ") and message in err and err.count("\n") == 1


def test_one_prompt_is_measured_when_asked(drafter, tmp_path, run_main):
    code, out, err = run_main(
        decode.main, drafter, "--prompt", "import os", "--max-new-tokens", "8", "--check-lossless", "--report", tmp_path
    )
    assert code == 0, err
    assert "identical to plain greedy decoding" in out
    assert json.loads((tmp_path / "report.json").read_text())["prompts"] == 1
