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
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.benchmarks.gpu import closure as gpu_closure
from draftsmith.benchmarks.gpu import judges as gpu_judges
from draftsmith.benchmarks.gpu import processes, results
from draftsmith.benchmarks.gpu import run as gpu
from draftsmith.benchmarks.gpu.closure import behind, fingerprint, installed_in, needs_of
from draftsmith.benchmarks.gpu.coder import PIECES
from draftsmith.benchmarks.gpu.judges import Finding
from draftsmith.benchmarks.gpu.parts import BUNDLES, PACKAGES, PARTS, UNUSED, Part, seconds_of, with_needed
from draftsmith.common.recipe import read_recipe

pytestmark = pytest.mark.measurement

# Never imports draftsmith: a process of its own costs little then.
DO = "python -c "


def part(name, script, limit=20, judge=lambda out, rehearsal: Finding("measured", True), **more):
    """A part of one Python line; ``{out}`` is the folder of all results."""
    command = DO + shlex.quote(script).replace("OUT", "{out}")
    return Part(name, f"goal of {name}", limit, (command,), (command,), judge, **more)


@pytest.fixture(autouse=True)
def same_sources(monkeypatch):
    """Files of the checkout may change while the tests run."""
    monkeypatch.setattr(gpu, "fingerprint", lambda part, device, installed: device)


def run(work, *parts, **more):
    options = {"rehearsal": False, "minutes": 1, "again": False, "device": "a device"} | more
    return gpu.run_all(parts, work, **options)


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
    )
    assert [(r.part, r.result, r.value) for r in results] == [
        ("fails", "fail", "exit code 1: no memory; measured"),
        ("unreadable", "fail", "KeyError: 'rows'"),
        ("slow", "fail", "2 ms | 3 ms"),
        ("wrong", "fail", "IndexError: list index out of range"),
        ("good", "pass", "measured"),
        ("late", "not run", "needs fails, which has not passed"),
    ]
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
    missing = part("missing", "pass", uses=("no_such_package_at_all",))
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
        tmp_path,
        part("long", script, limit=3, judge=nothing, timed=False),
        part(
            "half",
            script.replace(".pid", ".pid2"),
            limit=3,
            judge=lambda *_: Finding("2 of 4 rows", False),
            timed=False,
        ),
        part("orphan", orphan, timed=False),
        workers=3,
    )
    assert [r.result for r in results] == ["cut short", "cut short", "pass"]
    assert [r.value for r in results[:2]] == ["killed after 3 s: half of it", "killed after 3 s; 2 of 4 rows"]
    assert all(2.9 < r.seconds < 8 for r in results[:2])
    for name in ("a.pid", "b.pid", "a.pid2", "b.pid2", "c.pid"):
        assert gone(int((tmp_path / name).read_text() or 0)), name


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
from draftsmith.benchmarks.gpu import run as gpu, parts as gpu_parts

out = Path(sys.argv[1])
seconds = {"one": 0, "two": 0 if (out / "two.pid").exists() else 60, "three": 0}  # the first time it hangs
script = "import os, time; open('{out}/NAME.pid', 'a').write(f'{os.getpid()} '); time.sleep(SECONDS)"
gpu.PARTS = gpu_parts.PARTS = tuple(
    gpu.Part(
        name, "a goal", 60, (f'python -c "{script}"'.replace("NAME", name).replace("SECONDS", str(seconds[name])),) * 2,
        (f'python -c "{script}"'.replace("NAME", name).replace("SECONDS", str(seconds[name])),),
        lambda out, rehearsal: gpu.Finding("measured"), after={"two": ("one",), "three": ("two",)}.get(name, ())
    )
    for name in seconds
)
gpu.BUNDLES = {"all": tuple(seconds)}
gpu.fingerprint = lambda part, device, installed: device
sys.argv = ["gpu.py", "--rehearsal", "--work", str(out), *sys.argv[2:]]
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


# ---- packages and files behind a part

WITHOUT_PYDANTIC = set(
    "products profile step lean kernels decode same-bits medusa-dynamic draft-model smollm2 kernel-bench around "
    "shortlist eagle-unroll switches eagle-decode budget magicdec ssm-decode ssm-streams ssm-claim".split()
)
IMAGE = Path(__file__).with_name("gpu_image.txt")  # of a rented GPU, as `pip list` prints it
CARRIED = "pydantic 2.14.3\npydantic-core 2.50.4\nannotated-types 0.8.0\ntyping-inspection 0.4.5\ngguf 0.19.0\n"


def test_packages_of_each_part():
    """What its commands import when they start, tests and the fixtures that they ask for too."""
    assert {one.name for one in PARTS if "pydantic" not in needs_of(one)} == WITHOUT_PYDANTIC
    needs = {one.name: needs_of(one) for one in PARTS}
    assert needs["kernel-bench"] == ["torch", "triton"]
    assert needs["eagle-unroll"] == ["numpy", "psutil", "rich", "safetensors", "scipy", "torch", "transformers", "yaml"]
    assert "hypothesis" in needs["kernels"] and "sklearn" in needs["dynaspec"] and "peft" in needs["train-step"]
    assert {name for names in needs.values() for name in names} == set(PACKAGES)


def test_every_import_is_declared():
    """Those in functions are needed by the part, or by other parts of the project, or by none."""
    for one in PARTS:
        found = behind(one)
        assert found.packages | found.optional <= set(PACKAGES) | set(UNUSED), one.name
        assert not found.packages & set(UNUSED), one.name


def test_which_parts_can_run(run_main, tmp_path):
    """All on the image, with six wheels that it lacks."""
    code, said, _ = run_main(gpu.main, "--packages", IMAGE)
    assert code == 1 and "serving: cannot run, missing: pydantic\n" in said
    assert "smollm2: cannot run, missing: gguf\n" in said, "that one needs the file's format only"
    assert said.endswith(f"\n{len(WITHOUT_PYDANTIC) - 1} of {len(PARTS)} parts can run\n")
    (tmp_path / "list").write_text("Package Version\n------- -------\n" + IMAGE.read_text() + CARRIED)
    code, said, _ = run_main(gpu.main, "--packages", tmp_path / "list")
    assert code == 0 and said.endswith(f"\n{len(PARTS)} of {len(PARTS)} parts can run\n")
    assert installed_in("PyYAML==6.0\nscikit_learn   1.7\ntorchvision 0.26\n") == {"yaml": "6.0", "sklearn": "1.7"}


def test_results_depend_on_the_files_behind_them(monkeypatch):
    """A changed file makes only those results invalid whose commands import it, or that name it as a recipe."""
    monkeypatch.undo()
    installed = {"python": "3", "pydantic": "2"}
    before = {one.name: fingerprint(one, "a device", installed) for one in PARTS}

    def changed(**more):
        options = {"device": "a device", "installed": installed} | more
        return {one.name for one in PARTS if fingerprint(one, **options) != before[one.name]}

    def changed_by(name):
        hash_of = gpu_closure.hash_of
        with monkeypatch.context() as patch:
            other = lambda path: b"" if path == gpu_closure.ROOT / name else hash_of(path)  # noqa: E731
            patch.setattr(gpu_closure, "hash_of", other)
            return changed()

    everything = set(before)
    assert changed() == set() and changed(device="another") == everything
    assert changed_by("kernels/backend.py") == everything, "every command loads the kernels"
    assert changed_by("train/ssm.py") == {"ssm"} and changed_by("recipes/tiny-medusa.yaml") == {"medusa"}
    timed = set("products profile step lean kernel-bench around shortlist switches".split())
    assert changed_by("benchmarks/kernel_timing.py") == timed
    assert changed_by("benchmarks/serving.py") == {"serving"}
    assert changed_by("tests/inference/drafters/test_ngram.py") == {"drafters"}
    assert changed_by("README.md") == set() == changed_by("benchmarks/gpu/run.py")
    assert changed(installed=installed | {"pydantic": "3"}) == everything - WITHOUT_PYDANTIC
    ours = replace(PARTS[0], commands=(PARTS[0].commands[0] + " --level 2",))
    assert fingerprint(ours, "a device", installed) != before[ours.name]


def test_undeclared_packages_are_hidden_in_a_rehearsal(tmp_path):
    """Also from `find_spec`, by which libraries ask; the commands of a real run see everything."""
    script = "import importlib.util as u; print(u.find_spec('scipy')); import scipy"
    found = run(
        tmp_path, part("undeclared", script), part("declared", script, uses=("scipy",)), rehearsal=True, workers=2
    )
    assert [one.result for one in found] == ["fail", "pass"]
    assert "None\n" in (tmp_path / "undeclared" / "log.txt").read_text() and "'scipy'" in found[0].value
    assert run(tmp_path, part("undeclared", script), again=True)[0].result == "pass"


# ---- bundles


def test_bundles():
    """Nine minutes at most, the Coder's ten, with all that their parts need; every part is in one of them."""
    assert {name for names in BUNDLES.values() for name in names} | {"target"} == {one.name for one in PARTS}
    for names in BUNDLES.values():
        needed = with_needed(names)
        assert sum(one.limit for one in needed) <= seconds_of(needed) <= (590 if names[0].startswith("coder") else 540)
        for number, one in enumerate(needed):
            assert set(one.after) <= {other.name for other in needed[:number]}, "self-sufficient"
    assert list(BUNDLES)[2:4] == ["steps", "tests"], (
        "neither needs a carried wheel nor the target's training, but tests"
    )
    assert [one.name for one in with_needed(["serving"])] == ["target", "eagle", "serving"]


def test_documents_have_the_bundles_as_they_are():
    """benchmarks/AWAITING.md's table; elsewhere bundles are named, since their numbers change."""
    root = gpu_closure.ROOT
    text = (root / "benchmarks/AWAITING.md").read_text()
    rows = re.findall(r"(?m)^\| (\d+) `(\S+)` \| (.+) \| (\d+) s \|$", text)
    expected = []
    for number, (name, names) in enumerate(BUNDLES.items(), 1):
        needed = with_needed(names)
        expected.append((str(number), name, [one.name for one in needed], str(sum(one.limit for one in needed))))
    assert [(*row[:2], re.findall(r"`(\S+)`", row[2]), row[3]) for row in rows] == expected
    assert f"all limits together are {sum(one.limit for one in PARTS) / 60:.0f} minutes" in text
    pages = [path for folder in (".", "benchmarks", "docs") for path in (root / folder).glob("*.md")]
    named = {}
    for path in (*pages, root / "benchmarks/published.py", root / "Makefile"):
        named |= dict.fromkeys(re.findall(r"BUNDLE=([\w-]+)", path.read_text()), path)
    assert len(named) >= 5 and {*named} <= {*BUNDLES}, named


def test_a_bundle_by_number_or_name(run_main, tmp_path):
    assert gpu.choose_bundles(["3", "tests"]) == ["steps", "tests"]
    code, _, err = run_main(gpu.main, "--bundle", "99", "--work", tmp_path)
    assert code == 2 and err.startswith("error: --bundle 99: unknown; use a number from 1 to ")
    code, said, _ = run_main(gpu.main, "--list", "--bundle", "8", "--work", tmp_path)
    assert code == 0 and "bundle 8, serving: target, eagle, serving (at most 540 s)" in said
    assert re.findall(r"(?m)^(\S+): .*\(at most", said) == ["target", "eagle", "serving"]
    code, said, _ = run_main(gpu.main, "--list", "--bundle", "8", "eagle", "lean", "--work", tmp_path)
    assert code == 2
    code, said, _ = run_main(gpu.main, "--list", "--bundle", "8", "eagle", "--work", tmp_path)
    assert re.findall(r"(?m)^(\S+): .*\(at most", said) == ["target", "eagle", "serving", "eagle-decode"]


def test_a_part_that_is_killed_says_what_failed(tmp_path):
    """What pytest had printed until then; a failure seen by then is a failure."""
    test = "import time\ndef test_a(): assert 3 == WANTED, 'the reason'\ndef test_b(): time.sleep(60)\n"
    parts = []
    for name, wanted in (("bad", 4), ("fine", 3)):
        (tmp_path / f"test_{name}.py").write_text(test.replace("WANTED", str(wanted)))
        command = (f"python -m pytest -v -p no:cacheprovider {tmp_path}/test_{name}.py",)
        parts.append(Part(name, "", 12, command, command, gpu_judges.tests_of(name), timed=False))
    bad, fine = run(tmp_path, *parts, workers=2)
    assert bad.result == "fail" and bad.value.startswith("killed after 12 s; 0 passed, 1 failed")
    assert (fine.result, fine.value) == ("cut short", "killed after 12 s; 1 passed, 0 failed, 0 skipped")
    assert "AssertionError: the reason" in (tmp_path / "bad" / "log.txt").read_text()


def test_a_trial_runs_timed_parts_side_by_side_and_counts_for_nothing(tmp_path):
    """What others need first; a missed goal passes, a broken part does not."""
    note = "import time; f = open('OUT/order', 'a'); f.write('+NAME '); f.flush(); time.sleep(1); f.write('-NAME ')"
    slow = part("D", note.replace("NAME", "D"), after=("C",), judge=lambda out, rehearsal: Finding("too slow", False))
    parts = [*(part(name, note.replace("NAME", name)) for name in "ABC"), slow, part("E", "raise SystemExit(1)")]
    assert [one.result for one in run(tmp_path, *parts, workers=2, trial=True)] == ["pass"] * 4 + ["fail"]
    order = (tmp_path / "order").read_text().split()
    assert sorted(order[:2]) == ["+A", "+C"] and order.index("+B") > 2
    assert run(tmp_path, slow)[0].result == "fail" and (tmp_path / "order").read_text().count("+D") == 2


def test_only_what_is_not_timed_runs_side_by_side(tmp_path):
    note = "import time; f = open('OUT/order', 'a'); f.write('+NAME '); f.flush(); time.sleep(1); f.write('-NAME ')"
    parts = [part(name, note.replace("NAME", name), timed=name in "CD") for name in "ABCDEF"]
    assert [one.result for one in run(tmp_path, *parts, workers=3)] == ["pass"] * 6
    order = (tmp_path / "order").read_text().split()
    assert sorted(order[:2]) == ["+A", "+B"] and sorted(order[2:4]) == ["-A", "-B"]
    assert order[4:8] == ["+C", "-C", "+D", "-D"] and sorted(order[8:10]) == ["+E", "+F"]


def test_parts_whose_products_are_gone_run_again(tmp_path):
    """Where another part needs them; results that were taken along from another machine count otherwise."""
    first = counted("first", makes=("{out}/first.runs",))
    second = counted("second", after=("first",), makes=("{out}/second.runs",))
    third = counted("third", after=("second",))
    everything = (first, second, third)
    run(tmp_path, *everything)
    for name in ("first", "second"):
        (tmp_path / f"{name}.runs").unlink()
    assert [one.result for one in run(tmp_path, *everything)] == ["pass"] * 3
    assert not (tmp_path / "first.runs").exists(), "nothing needs it: all have their results"
    (tmp_path / "third" / "result.json").unlink()
    run(tmp_path, *everything)
    assert [runs(tmp_path, name) for name in ("first", "second", "third")] == [1, 1, 2]
    (tmp_path / "second.runs").unlink()
    (tmp_path / "first.runs").unlink()
    run(tmp_path, second, counted("late", after=("second",)), wanted=["late"])
    assert runs(tmp_path, "second") == 1 == runs(tmp_path, "late") and runs(tmp_path, "first") == 0
    other, missing = counted("unasked"), part("real", "1", files=("models/no-such",))
    assert [one.part for one in run(tmp_path, other, counted("asked"), wanted=["asked"])] == ["asked"]
    (result,) = run(tmp_path, missing)
    assert (result.result, result.value.split(" (")[0]) == ("not run", "missing here: models/no-such")


def test_the_archive(tmp_path):
    """Every result and log, no model, below its limit, and the weights that a part brings; unpacked elsewhere, the
    results count. The table is short, however much is said."""
    work, out, there = tmp_path / "work", tmp_path / "out", tmp_path / "there"
    out.mkdir()
    script = (
        "import os; os.makedirs('OUT/models/m'); open('OUT/models/m/model.safetensors', 'w').write('x' * 9); "
        "open('OUT/one/step.json', 'w').write('{}'); open('OUT/one/large.json', 'w').write('x' * 2_000_000); "
        "open('OUT/models/m/tokenizer.json', 'w').write('{}'); open('OUT/models/m/tree.json', 'w').write('{}'); "
        "print('x' * 3_000_000, 'end')"
    )
    one = part("one", script, judge=lambda *_: Finding("µ" * 3000), brings=("{out}/models/m/model.safetensors",))
    found = run(work, one, part("two", "raise SystemExit(3)"), out=out, name="gpu-x")
    assert {path.name for path in out.iterdir()} == {"gpu-x.tar.gz", "table.md", "one-model.safetensors"}
    with tarfile.open(out / "gpu-x.tar.gz") as packed:
        names = set(packed.getnames())
        packed.extractall(there, filter="data")
    kept = "one/result.json one/step.json one/log.txt two/result.json two/log.txt models/m/tree.json"
    assert names == set(kept.split())
    log = (there / "one" / "log.txt").read_text()
    assert len(log) == 1_000_000 and log.endswith("xxx end\n"), "the end of it"
    again = part("one", "raise SystemExit(9)")
    assert run(there, again)[0].result == "pass", "it has its result"
    table = results.table_of(found[:1] * 23)
    assert len(table.encode()) <= 8000 and table.count("\n|") == 2 + 22 + 1 and "µµµ" in table


def test_figures_that_are_missing(tmp_path):
    """Of a part that was killed they are counted; a part that ended without them has failed."""
    judge = lambda out, rehearsal: Finding("2 ms", True, missing="3 of 4 are missing")  # noqa: E731
    killed = part("killed", "import time; time.sleep(60)", limit=1, judge=judge)
    assert [(r.result, r.value) for r in run(tmp_path, killed, part("ended", "pass", judge=judge))] == [
        ("cut short", "killed after 1 s; 2 ms; 3 of 4 are missing"),
        ("fail", "2 ms; 3 of 4 are missing"),
    ]


# ---- commands and goals


def test_files_that_come_back():
    """At most eight of a bundle, its table and its archive among them; of weights all that one packs."""
    for names in BUNDLES.values():
        brought = [name for one in PARTS if one.name in names for name in one.brings]
        assert len(brought) + 2 <= 8
        if any("coder" in name for name in names):
            assert len(brought) == PIECES + 1


def test_every_command_can_be_typed(run_main, tmp_path):
    """Each names files of this repository, and its options exist; parts come after those that they need."""
    before: set[str] = set()
    for one in PARTS:
        assert set(one.after) <= before
        before.add(one.name)
        for command in (*processes.commands_of(one, tmp_path, False), *processes.commands_of(one, tmp_path, True)):
            assert not re.search(r"\{(out|target|drafter|ssms|eagle|dynaspec|parallel)\}", command)
            python, script, *words = gpu_closure.words_of(command)[1]
            assert python == "python"
            for word in (script, *words):
                if word.startswith(("tests/", "recipes/")) or word.endswith(".py"):
                    assert (gpu_closure.ROOT / word.partition("::")[0]).exists(), word
            if script not in ("-m", "-c", "data/prompts.py"):  # whose options the rehearsal gives in the same way
                module = importlib.import_module("draftsmith." + script.removesuffix(".py").replace("/", "."))
                options = getattr(module, "PARSER", None) or module.parser()
                asked = options.parse_intermixed_args(words)
                if script.startswith("train/"):
                    recipe = getattr(module, f"{Path(script).stem.capitalize()}Recipe")
                    read_recipe(gpu_closure.ROOT / asked.recipe, recipe, asked.overrides)
    code, printed, _ = run_main(gpu.main, "--list", "--only", "step", "--work", tmp_path)
    assert code == 0 and "\nstep: every step within" in printed and "--graphs" in printed


def test_variables_before_a_command(tmp_path):
    """NAME=VALUE is the command's alone."""
    plain = part("one", "import os; open('OUT/seen', 'a').write(os.environ.get('DRAFTSMITH_X', '-'))")
    (command,) = plain.commands
    run(tmp_path, replace(plain, commands=("DRAFTSMITH_X='a b' " + command, command)))
    assert (tmp_path / "seen").read_text() == "a b-"


def test_without_installing(tmp_path):
    """`python benchmarks/gpu/run.py` from elsewhere, by an interpreter without draftsmith: the checkout is found."""
    code = (
        "import runpy, sys\n"
        "sys.meta_path = [f for f in sys.meta_path if '__editable__' not in repr(f)]\n"
        "sys.argv = ['gpu.py', '--list', '--only', 'kernels']\n"
        f"runpy.run_path({str(gpu_closure.ROOT / 'benchmarks/gpu/run.py')!r}, "
        "run_name='__main__')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0 and "\nkernels: " in done.stdout, done.stderr
    there = processes.environment(PARTS[0], tmp_path, False)
    asked = "import draftsmith.common.files as f, draftsmith.kernels.backend; print(f.__file__)"
    code = "import sys; sys.meta_path = [f for f in sys.meta_path if '__editable__' not in repr(f)]; " + asked
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=there, check=False
    )
    assert Path(done.stdout.strip()).resolve() == gpu_closure.ROOT / "common" / "files.py", done.stderr
