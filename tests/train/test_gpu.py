"""The runner of the GPU parts: results written at once, resumed, time limits, what is missing. Its real parts run in
`make gpu-rehearsal`."""

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.common.recipe import read_recipe
from draftsmith.inference.drafters.dynamic import DynamicShape, read_dynamic
from draftsmith.train import gpu
from draftsmith.train.gpu import Finding, Part

# Never imports draftsmith: a process of its own costs little then.
DO = "python -c "


def part(name, script, limit=20, judge=lambda out, rehearsal: Finding("measured", True), **more):
    """A part of one Python line; ``{out}`` is the folder of all results."""
    command = DO + shlex.quote(script).replace("OUT", "{out}")
    return Part(name, f"goal of {name}", limit, (command,), (command,), judge, needs=more.pop("needs", ()), **more)


@pytest.fixture(autouse=True)
def same_sources(monkeypatch):
    """Files of the checkout may change while the tests run."""
    monkeypatch.setattr(gpu, "fingerprint", lambda device, installed: device)


def run(out, *parts, **more):
    options = {"rehearsal": False, "minutes": 1, "again": False, "device": "a device"} | more
    return gpu.run_all(parts, out, **options)


def counted(name, **more):
    """A part that notes each of its runs."""
    return part(name, f"open('OUT/{name}.runs', 'a').write('x')", **more)


def runs(out, name):
    return len((out / f"{name}.runs").read_text()) if (out / f"{name}.runs").exists() else 0


def alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def gone(pid):
    for _ in range(100):
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


def test_a_failing_part_does_not_stop_the_rest(tmp_path):
    def broken(out, rehearsal):
        raise KeyError("rows")

    results = run(
        tmp_path,
        part("fails", "print('so far'); raise SystemExit('no memory')"),
        part("unreadable", "pass", judge=broken),
        part("slow", "pass", judge=lambda out, rehearsal: Finding("2 ms | 3 ms", False)),
        part("wrong", "pass", judge=lambda out, rehearsal: [][0]),
        counted("good"),
        part("late", "pass", after=("good", "fails")),
    )  # fmt: skip
    assert [(r.part, r.result, r.value) for r in results] == [
        ("fails", "fail", "exit code 1: no memory; measured"), ("unreadable", "fail", "KeyError: 'rows'"),
        ("slow", "fail", "2 ms | 3 ms"), ("wrong", "fail", "IndexError: list index out of range"),
        ("good", "pass", "measured"), ("late", "not run", "needs fails, which has not passed"),
    ]  # fmt: skip
    assert json.loads((tmp_path / "good" / "result.json").read_text())["result"] == "pass"
    assert (tmp_path / "fails" / "log.txt").read_text().splitlines()[1:] == ["so far", "no memory"]
    table = (tmp_path / "table.md").read_text()
    assert "| slow | goal of slow | 2 ms \\| 3 ms | fail | " in table and table.count("\n|") == 2 + 6
    assert "a device; python " in table


def test_goals_of_speed_are_not_judged_in_a_rehearsal(tmp_path):
    (result,) = run(tmp_path, part("slow", "pass", judge=lambda *_: Finding("9 ms", False)), rehearsal=True)
    assert (result.result, result.value) == ("pass", "9 ms")

    def wrong(out, rehearsal):
        raise ValueError("3 mismatches")

    (result,) = run(tmp_path, part("wrong", "pass", judge=wrong), rehearsal=True)
    assert (result.result, result.value) == ("fail", "3 mismatches")


def test_results_are_kept(tmp_path):
    failing = part("failing", "open('OUT/failing.runs', 'a').write('x'); raise SystemExit(1)")
    missing = part("missing", "pass", needs=("no_such_package_at_all",))
    for _ in range(2):
        results = run(tmp_path, counted("first"), failing, missing)
        assert [r.result for r in results] == ["pass", "fail", "not run"]
        assert (tmp_path / "table.md").read_text().count("\n|") == 2 + 3
    assert results[2].value == "not installed: no_such_package_at_all"
    assert (runs(tmp_path, "first"), runs(tmp_path, "failing")) == (1, 1)
    run(tmp_path, counted("first"), again=True)
    assert runs(tmp_path, "first") == 2
    run(tmp_path, counted("first"), device="another device, or other sources")
    assert runs(tmp_path, "first") == 3
    (tmp_path / "first" / "result.json").write_text("{")
    run(tmp_path, counted("first"))
    assert runs(tmp_path, "first") == 4


def test_the_time_limit_kills_children(tmp_path):
    """Also one in a session of its own, whose parent has ended."""
    child = tmp_path / "child.py"
    child.write_text("import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(60)")
    start = f"subprocess.Popen([sys.executable, {str(child)!r}, "
    script = (
        f"import subprocess, sys, time; {start}'OUT/a.pid']); {start}'OUT/b.pid'], start_new_session=True); "
        "print('half of it', flush=True); time.sleep(60)"
    )
    orphan = f"import subprocess, sys, time; {start}'OUT/c.pid'], start_new_session=True); time.sleep(1)"

    def nothing(out, rehearsal):
        raise FileNotFoundError("step.json")

    results = run(
        tmp_path, part("long", script, limit=3, judge=nothing),
        part("half", script, limit=3, judge=lambda *_: Finding("2 of 4 rows", False)), part("orphan", orphan),
    )  # fmt: skip
    assert [r.result for r in results] == ["cut short", "cut short", "pass"]
    assert [r.value for r in results[:2]] == ["killed after 3 s: half of it", "killed after 3 s; 2 of 4 rows"]
    assert all(2.9 < r.seconds < 8 for r in results[:2])
    for name in "abc":
        assert gone(int((tmp_path / f"{name}.pid").read_text() or 0)), name


def test_counts_of_tests_outlive_the_limit(tmp_path):
    """What pytest had printed until it was killed; a failure seen by then is a failure."""
    results = []
    for name, word in (("fine", "PASSED"), ("bad", "FAILED")):
        lines = f"tests/a.py::test_one PASSED [ 1%]#tests/a.py::test_two[1 2] {word} [ 2%]#tests/a.py::test_three"
        script = f"import time; print({lines!r}.replace('#', chr(10)), flush=True); time.sleep(60)"
        results += run(tmp_path, part(name, script, limit=2, judge=gpu.tests_of(name)))
    assert [(r.result, r.value) for r in results] == [
        ("cut short", "killed after 2 s; 2 passed, 0 failed, 0 skipped"),
        ("fail", "killed after 2 s; 1 passed, 1 failed, 0 skipped; a.py::test_two[1 2]"),
    ]


def test_what_no_longer_fits_is_left_out(tmp_path):
    results = run(
        tmp_path, counted("short", limit=2), counted("long", limit=900), counted("last", limit=3), minutes=0.2
    )
    assert [r.result for r in results] == ["pass", "not run", "pass"]
    assert results[1].value.startswith("left out: 1") and results[1].value.endswith("it may take 900 s")
    assert runs(tmp_path, "long") == 0
    run(tmp_path, counted("long", limit=900), minutes=10)
    assert runs(tmp_path, "long") == 1, "in a later run"
    assert run(tmp_path, counted("long", limit=900), minutes=0.2, again=True)[0].result == "not run"
    assert run(tmp_path, counted("long", limit=900), minutes=0.2)[0].result == "pass", "the result is still there"


RUNNER = """
import sys
from pathlib import Path
from draftsmith.common.command import run_command
from draftsmith.train import gpu

out = Path(sys.argv[1])
seconds = {"one": 0, "two": 0 if (out / "two.pid").exists() else 60, "three": 0}  # the first time it hangs
script = "import os, time; open('{out}/NAME.pid', 'a').write(f'{os.getpid()} '); time.sleep(SECONDS)"
gpu.PARTS = tuple(
    gpu.Part(
        name, "a goal", 60, (), (f'python -c "{script}"'.replace("NAME", name).replace("SECONDS", str(seconds[name])),),
        lambda out, rehearsal: gpu.Finding("measured"), ()
    )
    for name in seconds
)
gpu.fingerprint = lambda device, installed: device
sys.argv = ["gpu.py", "--rehearsal", "--out", str(out), *sys.argv[2:]]
run_command(gpu.main)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_goes_on(tmp_path, how):
    """The part that ran has no result and is run again; what it left behind is ended first."""
    command = [sys.executable, "-c", RUNNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as runner:
        for _ in range(600):
            if (tmp_path / "two.pid").exists() and (tmp_path / "two.pid").read_text():
                break
            time.sleep(0.05)
        runner.send_signal(how)
        said = runner.communicate(timeout=30)[1]
    (left,) = map(int, (tmp_path / "two.pid").read_text().split())
    if how == signal.SIGTERM:
        assert runner.returncode == 2 and said == "error: interrupted; files already written are whole\n"
        assert gone(left)
    else:
        assert alive(left)
    assert (tmp_path / "one" / "result.json").exists() and not (tmp_path / "two" / "result.json").exists()
    assert "| one |" in (tmp_path / "table.md").read_text()
    only = [*command, "--only", "one"]  # starts nothing: there is its result
    done = subprocess.run(only, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "one: pass already" in done.stdout, done.stderr
    assert gone(left)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "one: pass already" in done.stdout and "two: pass after" in done.stdout and "three: pass" in done.stdout
    assert [len((tmp_path / f"{name}.pid").read_text().split()) for name in ("one", "two", "three")] == [1, 2, 1]


def test_missing_packages_are_said(capsys):
    installed = {name: "1" for name in gpu.PACKAGES if name not in ("pydantic", "bitsandbytes")}
    gpu.say_missing(gpu.PARTS, installed)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("missing: pydantic (recipes); not run for that: target, medusa, decode,")
    assert said[1] == (
        "missing: bitsandbytes (8-bit AdamW and quantised targets, not measured here); not run for that: nothing"
    )
    assert len(said) == 2
    assert {name for part in gpu.PARTS for name in part.needs} <= set(gpu.PACKAGES)


def test_every_command_can_be_typed(run_main, tmp_path):
    """Each names files of this repository, and its options exist; parts come after those that they need."""
    before: set[str] = set()
    for one in gpu.PARTS:
        assert set(one.after) <= before
        before.add(one.name)
        for command in (*gpu.commands_of(one, tmp_path, False), *gpu.commands_of(one, tmp_path, True)):
            assert not re.search(r"\{(out|target|drafter|ssms|eagle|dynaspec)\}", command)
            python, script, *words = gpu.words_of(command)[1]
            assert python == "python"
            for word in (script, *words):
                if word.startswith(("tests/", "recipes/")) or word.endswith(".py"):
                    assert (gpu.ROOT / word).exists(), word
            if script not in ("-m", "-c", "data/prompts.py"):  # whose options the rehearsal gives in the same way
                module = importlib.import_module("draftsmith." + script.removesuffix(".py").replace("/", "."))
                options = getattr(module, "PARSER", None) or module.parser()
                asked = options.parse_intermixed_args(words)
                kinds = {"train/lm.py": "LmRecipe", "train/medusa.py": "MedusaRecipe", "train/ssm.py": "SsmRecipe",
                         "train/eagle.py": "EagleRecipe", "train/dynaspec.py": "DynaspecRecipe"}  # fmt: skip
                if script in kinds:
                    read_recipe(gpu.ROOT / asked.recipe, getattr(module, kinds[script]), asked.overrides)
    code, printed, _ = run_main(gpu.main, "--list", "--only", "step", "--out", tmp_path)
    assert code == 0 and printed.startswith("step: plain step ≤ 1.15") and "--graphs" in printed
    first = ("kernels", "products", "profile", "step", "target", "medusa", "decode", "engine")
    assert tuple(one.name for one in gpu.PARTS)[: len(first)] == first
    assert sum(one.limit for one in gpu.PARTS if one.name in first) <= 1500, "they fit, however long each one takes"


def step_row(shape, context, nodes, projection, median, ratio):
    return {"shape": shape, "context": context, "nodes": nodes, "projection": projection, "median": median,
            "ratio": ratio, "bytes": 16e9}  # fmt: skip


def test_goals_of_steps(tmp_path):
    """16 GB at 4 TB/s: 4 ms."""
    out = tmp_path / "step" / "step.json"
    out.parent.mkdir()

    def judged(plain, at_1k, llama2_at_16k, llama3_at_16k):
        rows = []
        for shape, at_16k in (("llama2-7b", llama2_at_16k), ("llama3-8b", llama3_at_16k)):
            for context, ratio in ((1024, at_1k), (16384, at_16k)):
                rows += [
                    step_row(shape, context, 1, None, plain, 1.0),
                    step_row(shape, context, 16, "shared", plain * 9, 9.0),  # no goal
                    step_row(shape, context, 64, "shared", plain * ratio, ratio),
                    step_row(shape, context, 64, "own", plain * 9, 9.0),
                ]
        limits = {shape: {"copy_bandwidth": 4e12} for shape in ("llama2-7b", "llama3-8b")}
        out.write_text(json.dumps({"rows": rows, "limits": limits}))
        return gpu.judge_step("step", 8)(tmp_path, False)

    found = judged(4.52e-3, 1.09, 1.14, 1.34)
    assert found.met and "llama3-8b at 16384: plain 4.52 ms = 1.13 × bound; 64 nodes 1.34 × plain" in found.value
    assert not judged(4.7e-3, 1.09, 1.14, 1.34).met
    assert not judged(4.5e-3, 1.11, 1.14, 1.34).met
    assert not judged(4.5e-3, 1.09, 1.16, 1.34).met
    assert not judged(4.5e-3, 1.09, 1.14, 1.36).met
    report = json.loads(out.read_text())
    out.write_text(json.dumps(report | {"rows": report["rows"][:4]}))
    found = gpu.judge_step("step", 8)(tmp_path, False)
    assert not found.met and found.value.endswith("; 6 of 8 figures are missing")

    lean = tmp_path / "lean" / "step.json"
    lean.parent.mkdir()
    ours = report["rows"][:2]
    for more, met in ((1.1e-3, True), (0.9e-3, False)):  # of one node; of 16 nodes any gain will do
        theirs = [ours[0] | {"median": ours[0]["median"] + more}, ours[1] | {"median": ours[1]["median"] + 1e-5}]
        lean.write_text(json.dumps({"rows": theirs}))
        assert gpu.judge_lean(tmp_path, False).met is met
    lean.write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match="no step was measured both ways"):
        gpu.judge_lean(tmp_path, False)
    compiled = tmp_path / "compile" / "step.json"
    compiled.parent.mkdir()
    for times, met in (((1.0, 1.0), True), ((1.5, 0.99), True), ((1.5, 0.97), False)):
        rows = [row | {"median": row["median"] * time} for row, time in zip(ours, times, strict=True)]
        compiled.write_text(json.dumps({"rows": rows}))
        assert gpu.judge_compile(tmp_path, False).met is met


def test_goal_of_kernels_in_a_step(tmp_path):
    """15 in each of 32 layers and 40 around them."""
    out = tmp_path / "profile" / "step.json"
    out.parent.mkdir()
    for kernels, met in ((520, True), (521, False)):
        rows = [{"nodes": 1, "median": 4e-3, "profile": {"kernels": n, "seconds": 3e-3}} for n in (100, kernels)]
        out.write_text(json.dumps({"rows": rows}))
        found = gpu.judge_profile(tmp_path, False)
        assert found.met is met and f"1 nodes: {kernels}, 3.00 ms in them, step 4.00 ms" in found.value


def test_goals_of_kernels(tmp_path):
    """K and V of 4 GB at 4 TB/s: 1 ms; products of 1 T at 1 P/s: 1 ms."""
    out = tmp_path / "kernel-bench" / "kernels.json"
    out.parent.mkdir()

    def row(way, nodes, ms, difference=0.01, context=8192):
        shape = {"B": 1, "L": context} | ({"N": nodes} if nodes else {"T": 512})
        return {"kernel": "attention", "way": way, "shape": shape, "median_us": ms * 1e3,
                "moved": 4e9, "operations": 1e12, "difference": difference}  # fmt: skip

    def judged(*rows):
        out.write_text(json.dumps({"rows": rows, "copy_bandwidth": 4e12, "matmul_rate": 1e15}))
        return gpu.judge_kernels(tmp_path, False)

    few = [row("SDPA", 16, 1.3), row("flex_attention", 16, 1.4), row("plan", 16, 9.0)]
    many = [row("SDPA", 64, 2.0), row("flex_attention", 64, 1.85), row("flashinfer", 64, 1.7)]
    short = [row("SDPA", 16, 5.0, context=1024), row("triton", 16, 4.0, context=1024)]  # no share is asked for
    chunk = [row("SDPA, chunk", 0, 2.0), row("triton, chunk", 0, 1.6)]
    found = judged(*few, row("triton", 16, 1.16), *many, row("triton", 64, 1.65), *short, *chunk)
    assert found.met and found.value.startswith(
        "86%–86% of the bandwidth; 61%–62% of the matrix rate; below the goal in 0"
    )
    ragged = [row("SDPA, ragged", 16, 1.0), row("triton, ragged", 16, 1.1)]
    found = judged(*few, row("triton", 16, 1.19), *many, row("triton", 64, 1.75), *ragged)
    assert not found.met and found.facts == {
        "below": ["B=1 L=8192 N=16 (84% of the bandwidth)", "B=1 L=8192 N=64 (57% of the matrix rate)"],
        "slower": ["B=1 L=8192 N=64 (1.03 ×)", "B=1 L=8192 N=16 ragged (1.10 ×)"],
    }
    for wrong in (3.0, float("nan")):
        with pytest.raises(ValueError, match="attention, triton, .*: difference"):
            judged(*few, row("triton", 16, 1.2, wrong))


def test_goals_of_training_and_decoding(tmp_path):
    out = tmp_path / "train-step" / "train.json"
    out.parent.mkdir()
    for shares, hours, met in (
        ((0.51, 0.46), 0.9, True), ((0.49, 0.46), 0.9, False), ((0.51, 0.44), 0.9, False), ((0.51, 0.46), 1.1, False)
    ):  # fmt: skip
        rows = [
            {"stage": stage, "of_matmul_rate": share, "hours_per_70M_tokens": hours * more, "peak_memory_bytes": 4e10}
            for stage, share, more in zip(("medusa-1", "medusa-2"), shares, (1, 9), strict=True)
        ]
        out.write_text(json.dumps({"results": rows}))
        assert gpu.judge_training(tmp_path, False).met is met
    report = {
        "drafter": "draft_model:a/b+ngram", "execution": "cuda graph, lean decoder", "speedup": 1.5,
        "mean_accepted_length": 2.0, "lossless": {"passed": True, "checked": 99, "near_ties": 1, "mismatches": 0},
    }  # fmt: skip
    file = tmp_path / "decode" / "x" / "report.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(report))
    judge = gpu.judge_decode("decode")
    assert judge(tmp_path, False).value == (
        "b+ngram: τ 2.00, 1.50 × plain, cuda graph, lean decoder, 99 tokens checked, 1 near-ties"
    )
    for wrong, message in (
        ({"execution": "eager: no"}, r"b\+ngram: steps ran eager: no"),
        ({"lossless": {**report["lossless"], "passed": False, "mismatches": 3}}, "3 mismatches in 99 tokens"),
    ):
        file.write_text(json.dumps(report | wrong))
        with pytest.raises(ValueError, match=message):
            judge(tmp_path, False)


def test_goals_of_ssms(tmp_path):
    report = {
        "drafter": "draft_model:a", "execution": "cuda graph, lean decoder", "mean_accepted_length": 2.0,
        "lossless": {"passed": True, "checked": 99, "near_ties": 0, "mismatches": 0},
    }  # fmt: skip

    def write(place, **more):
        file = tmp_path / place / "report.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report | more))

    for two, one, met in ((120.0, 100.0, True), (99.0, 100.0, False)):
        write("ssm-streams/two", tokens_per_second=two)
        write("ssm-streams/one", tokens_per_second=one)
        assert gpu.judge_streams(tmp_path, False).met is met
    write("ssm-streams/one", tokens_per_second=100.0, execution="eager: no")
    with pytest.raises(ValueError, match="a: steps ran eager: no"):
        gpu.judge_streams(tmp_path, False)
    for alone, with_ngram, offloaded, met in ((1.4, 1.5, 2.6, True), (1.4, 1.49, 3.0, False), (1.6, 1.6, 2.5, False)):
        write("ssm/a", speedup=alone)
        write("ssm/b", speedup=with_ngram, drafter="draft_model:b")
        write("ssm-claim", speedup=offloaded, execution="eager, transformers decoder")
        found = gpu.judge_ssm_claim(tmp_path, False)
        assert found.met is met
    assert found.value == "target on the device: 1.60 × plain, τ 2.00; target in CPU memory: 2.50 × plain, τ 2.00"


def test_goals_of_eagle(tmp_path):
    """Both trees are the target's own text, in CUDA graphs; seven unrolled steps are as fast, and smaller."""
    report = {
        "drafter": "a/eagle", "execution": "cuda graph, lean decoder", "mean_accepted_length": 2.0, "speedup": 1.5,
        "lossless": {"passed": True, "checked": 99, "near_ties": 1, "mismatches": 0},
    }  # fmt: skip

    def write(tree, **more):
        file = tmp_path / "eagle" / tree / "report.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report | more))

    run = tmp_path / "models" / "eagle" / "metrics.jsonl"
    run.parent.mkdir(parents=True)
    run.write_text('{"tokens_per_second": 9000, "loss": 1}\n{"simulated_tau": 2.5}\n')
    write("fixed")
    with pytest.raises(ValueError):
        gpu.judge_eagle(tmp_path, False)  # nothing was decoded with the dynamic tree
    write("dynamic", speedup=1.25)
    found = gpu.judge_eagle(tmp_path, False)
    assert found.met is None and found.value == (
        "simulated τ 2.50, 9,000 tokens/s in training; fixed tree: τ 2.00, 1.50 × plain, cuda graph, lean decoder, 99 "
        "tokens checked, 1 near-ties; dynamic tree: τ 2.00, 1.25 × plain, cuda graph, lean decoder, 99 tokens checked, "
        "1 near-ties"
    )
    write("dynamic", execution="eager: no")
    with pytest.raises(ValueError, match="eagle: steps ran eager: no"):
        gpu.judge_eagle(tmp_path, False)

    out = tmp_path / "eagle-unroll" / "unroll.json"
    out.parent.mkdir()

    def judged(*rows):
        results = [
            {"steps": steps, "ratio": ratio, "seconds": {"draftsmith": 0.1 * ratio, "dense": 0.1},
             "peak_memory_bytes": {"draftsmith": memory, "dense": 2e9 if memory else None}}
            for steps, ratio, memory in rows
        ]  # fmt: skip
        out.write_text(json.dumps({"results": results}))
        return gpu.judge_unroll(tmp_path, False)

    found = judged((1, 1.4, 3e9), (7, 1.0, 1.9e9))
    assert found.met and found.value == (
        "1 steps: 140.0 ms = 1.40 × dense attention's, 3.0 GB instead of 2.0; 7 steps: 100.0 ms = 1.00 × dense "
        "attention's, 1.9 GB instead of 2.0"
    )
    for wrong in ((7, 1.01, 1.9e9), (7, 0.9, 2e9), (4, 0.5, 1e9), (7, 0.5, None)):
        assert not judged(wrong).met


def test_goals_of_shortlists(tmp_path):
    """A fifth of the rows, 0.2 GB at 4 TB/s: 50 µs."""
    folder = tmp_path / "shortlist"
    folder.mkdir()

    def row(way, vocabulary, nodes, microseconds, difference=0.01):
        return {"kernel": "shortlist", "way": way, "shape": {"V": vocabulary, "n": nodes}, "difference": difference,
                "median_us": microseconds, "moved": 2e8 if way == "shortlist" else 1e9}  # fmt: skip

    def judged(microseconds, full=300.0, vocabularies=((128256, 262144), (49152,)), rehearsal=False, **more):
        for name, numbers in zip(("4096", "576"), vocabularies, strict=True):
            rows = [
                row(way, vocabulary, nodes, time, **more)
                for vocabulary in numbers for nodes in (1, 8)
                for way, time in (
                    ("full head", full), ("shortlist", microseconds if (vocabulary, nodes) == (49152, 8) else 60.0),
                    ("shortlist, topk", 999.0),
                )
            ]  # fmt: skip
            (folder / f"{name}.json").write_text(json.dumps({"rows": rows, "copy_bandwidth": 4e12}))
        return gpu.judge_shortlist(tmp_path, rehearsal)

    found = judged(62.0)
    assert found.met and found.value.startswith("128256 × 4096, 1 nodes: 0.20 × full, 83% of the bandwidth; ")
    assert found.value.endswith("; 49152 × 576, 8 nodes: 0.21 × full, 81% of the bandwidth") and found.facts is not None
    assert len(found.facts["medians"]) == 18 and found.facts["medians"][2]["way"] == "shortlist, topk"
    found = judged(63.0)
    assert not found.met and found.value.endswith("0.21 × full, 79% of the bandwidth")
    assert judged(62.0, full=178.0).met and not judged(62.0, full=176.0).met
    found = judged(62.0, vocabularies=((128256,), (49152,)))  # the larger one did not fit into memory
    assert not found.met and found.value.endswith("; 2 of 6 figures are missing")
    for wrong, rehearsal in ((0.06, False), (float("nan"), False), (2e-3, True)):
        with pytest.raises(ValueError, match=r"full head, \{'V': 128256, 'n': 1\}: difference"):
            judged(62.0, difference=wrong, rehearsal=rehearsal)


def test_goals_of_dynaspec(tmp_path):
    """The shortlists, the drafter that they are for, and the shortlists on one stream: all their target's text."""
    folder = gpu.model_folder(tmp_path, "dynaspec", False)
    folder.mkdir(parents=True)
    (folder / "provenance.json").write_text('{"simulated_tau": 2.4, "whole_simulated_tau": 2.5}')
    report = {
        "execution": "cuda graph, lean decoder", "mean_accepted_length": 2.0, "speedup": 1.5,
        "lossless": {"passed": True, "checked": 99, "near_ties": 1, "mismatches": 0},
    }  # fmt: skip

    def write(place, drafter, **more):
        file = tmp_path / "dynaspec" / place / "report.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report | {"drafter": str(drafter)} | more))

    base = gpu.model_folder(tmp_path, "eagle", False)
    write("two/eagle", base, tokens_per_second=500.0, mean_accepted_length=2.1, speedup=1.75)
    write("two/dynaspec", folder, tokens_per_second=98.0)
    with pytest.raises(ValueError):
        gpu.judge_dynaspec(tmp_path, False)  # nothing was decoded on one stream
    for one, met in ((80.0, True), (101.0, True), (102.0, False)):
        write("one", folder, tokens_per_second=one)
        found = gpu.judge_dynaspec(tmp_path, False)
        assert found.met is met
    assert found.value == (
        "simulated τ 2.40, with the whole LM head 2.50; shortlists: τ 2.00, 1.50 × plain, cuda graph, lean decoder, 99 "
        "tokens checked, 1 near-ties; whole LM head: τ 2.10, 1.75 × plain, cuda graph, lean decoder, 99 tokens "
        "checked, 1 near-ties; shortlists on one stream: τ 2.00, 1.50 × plain, cuda graph, lean decoder, 99 tokens "
        "checked, 1 near-ties; 98 tokens/s with a stream for the router, 102 without (0.96 ×)"
    )
    write("one", folder, tokens_per_second=98.0, execution="eager: no")
    with pytest.raises(ValueError, match="dynaspec: steps ran eager: no"):
        gpu.judge_dynaspec(tmp_path, False)
    write("one", folder, tokens_per_second=98.0)
    write("two/eagle", base, tokens_per_second=500.0, lossless={**report["lossless"], "passed": False, "mismatches": 3})
    with pytest.raises(ValueError, match="eagle: 3 mismatches in 99 tokens"):
        gpu.judge_dynaspec(tmp_path, False)


def test_trees_of_eagle(tmp_path):
    """The command between calibration and decoding: the fixed tree without the dynamic one beside it, and the other."""
    folder = gpu.model_folder(tmp_path, "eagle", False)
    folder.mkdir(parents=True)
    (folder / "tree.json").write_text('{"paths": [[0], [0, 0]], "dynamic": {"top_k": 1, "depth": 2, "nodes": 2}}')
    (tmp_path / "eagle").mkdir()
    (one,) = (one for one in gpu.PARTS if one.name == "eagle")
    (command,) = (each for each in gpu.commands_of(one, tmp_path, False) if each.startswith("python -c"))
    subprocess.run([sys.executable, *gpu.words_of(command)[1][1:]], check=True)
    assert json.loads((tmp_path / "eagle" / "fixed.json").read_text()) == {"paths": [[0], [0, 0]]}
    assert read_dynamic(tmp_path / "eagle" / "dynamic.json") == DynamicShape(4, 6, 32)


def test_variables_before_a_command(tmp_path):
    """NAME=VALUE is the command's alone."""
    script = "import os; open('OUT/seen', 'a').write(os.environ.get('DRAFTSMITH_X', '-'))"
    plain = part("one", script)
    (command,) = plain.commands
    run(tmp_path, replace(plain, commands=("DRAFTSMITH_X='a b' " + command, command)))
    assert (tmp_path / "seen").read_text() == "a b-"


def test_bad_input(run_main, tmp_path):
    code, _, err = run_main(gpu.main, "--minutes", 0)
    assert (code, err) == (2, "error: --minutes 0.0: must be above 0 and at most 1440\n")


def test_without_installing(tmp_path):
    """`python train/gpu.py` from elsewhere, with an interpreter that has no draftsmith: the checkout is on the path."""
    code = (
        "import runpy, sys\n"
        "sys.meta_path = [f for f in sys.meta_path if '__editable__' not in repr(f)]\n"
        f"sys.argv = ['gpu.py', '--list', '--only', 'kernels']\nrunpy.run_path({str(gpu.ROOT / 'train/gpu.py')!r}, "
        "run_name='__main__')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("kernels: "), done.stderr
    there = gpu.environment(gpu.PARTS[0], "mark", tmp_path, False)
    asked = "import draftsmith.common.files as f, draftsmith.kernels.backend; print(f.__file__)"
    code = "import sys; sys.meta_path = [f for f in sys.meta_path if '__editable__' not in repr(f)]; " + asked
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=there, check=False
    )  # fmt: skip
    assert Path(done.stdout.strip()).resolve() == gpu.ROOT / "common" / "files.py", done.stderr


def test_serving(tmp_path):
    """Every sentence is reported; texts are plain decoding's, and steps run in graphs."""
    out = tmp_path / "serving" / "serving.json"
    out.parent.mkdir()
    right = {
        "batches": [{"sentences": ["1 row: pays"]}, {"sentences": ["8 rows: does not"]}],
        "texts": {"eagle": {"mismatches": 0}}, "execution": {"eagle": "cuda graph, lean decoder"},
    }  # fmt: skip
    out.write_text(json.dumps(right))
    assert gpu.judge_serving(tmp_path, False).value == "1 row: pays; 8 rows: does not"
    for wrong, message in (
        ({"texts": {"eagle": {"mismatches": 2}}}, "2 mismatches"), ({"execution": {"eagle": "eager: no"}}, "eager: no")
    ):  # fmt: skip
        out.write_text(json.dumps(right | wrong))
        with pytest.raises(ValueError, match=message):
            gpu.judge_serving(tmp_path, False)


def test_goals_around_the_products(tmp_path):
    """Sampling verification by vocabulary; the other kernels' gains are reported."""
    out = tmp_path / "around" / "kernels.json"
    out.parent.mkdir()

    def row(kernel, way, vocabulary, us, nodes=64):
        shape = {"B": 1, "N": nodes, "V": vocabulary}
        return {"kernel": kernel, "way": way, "shape": shape, "median_us": us, "difference": 0.0}

    def judged(small, large, *more):
        rows = [
            row("verify", f"{way}, {kind}", vocabulary, us * (1 if way == "triton" else 10), nodes)
            for vocabulary, us in ((32000, small), (128256, large))
            for kind in ("one-hot", "one-hot, top-k and top-p")
            for nodes in (16, 64)
            for way in ("plain PyTorch", "triton")
        ]
        fused = [row("fused", "plain PyTorch, gated", 1, 30.0), row("fused", "triton, gated", 1, 10.0)]
        out.write_text(json.dumps({"rows": [*rows, *fused, *more]}))
        return gpu.judge_around(tmp_path, False)

    found = judged(59.0, 149.0, row("verify", "triton, drawn", 32000, 500.0))
    assert found.met and "one-hot, top-k and top-p, V = 128256: 149 µs (goal 150)" in found.value
    assert found.value.endswith("verify 10.0–10.0 × PyTorch; gated 3.0–3.0 × PyTorch")
    assert not judged(61.0, 149.0).met and not judged(59.0, 151.0).met
    out.write_text(json.dumps({"rows": [row("verify", "triton, one-hot", 32000, 5.0)]}))
    found = gpu.judge_around(tmp_path, False)
    assert not found.met and found.value.endswith("3 of 4 figures are missing")
