"""Every command, given what it cannot use: one line on stderr that names the input, exit code 2, in seconds, and not a
file written, neither in the folder where it runs nor in the project's own. test_table.py has inputs one by one."""

import importlib
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 20  # seconds that an answer may take
SCRIPTS = ("medusa", "eagle", "dflash", "ssm", "lm", "dynaspec", "distill")
TRAINING = {f"train.{script}": f"tiny-{script}" for script in SCRIPTS}
TRAINING["train.eagle"] += "3"
# What no recipe may say, and what the answer has to name.
OVERRIDES = [
    ("x=1", "unknown key 'x'"),
    ("run.nam=x", "unknown key 'run.nam'"),
    ("run.name=..", "'run.name'"),
    ("run.name=", "'run.name'"),
    ("run.name=/etc", "'run.name'"),
    ("run.seed=-1", "'run.seed'"),
    ("run.seed=one", "'run.seed'"),
    ("run.seed=.nan", "'run.seed'"),
    ("run=3", "'run'"),
    ("=3", "is no override"),
    ("run.name", "is no override"),
    ("run..name=x", "is no override"),
    ("run.output_dir=/dev/null", "/dev/null"),
    ("run.seed=[", "run.seed=["),
    ("run.seed=!!int 3", "tags"),
    ("run.name.x=1", "is a value, not a section"),
]
RECIPES = [
    ("nowhere.yaml", "nowhere.yaml: there is no such recipe"),
    (".", "this is a folder"),
    ("README.md", "README.md"),
    ("notes.yaml", "a recipe is a mapping"),
    ("", ""),
]
# Commands without a recipe: options that make them complete, and options with values that they cannot use.
NUMBERS = ("-1", "0", "nan", "many")
OTHERS: dict[str, tuple[list[str], dict[str, tuple[str, ...]]]] = {
    "inference.decode": (["none", "--target", "TARGET", "--prompt", "a"], {
        "--max-new-tokens": NUMBERS, "--batch-size": NUMBERS, "--repeat": NUMBERS, "--seconds": NUMBERS,
        "--threads": NUMBERS, "--dtype": ("float8",), "--quantize": ("2bit",), "--device-map": ("tape",),
        "--tree": ("nowhere.json",), "--report": ("", ".", "README.md", "README.md/x"), "--prompts": ("nowhere.jsonl",),
        "--temperature": ("-1", "nan", "hot"), "--top-p": ("0", "2", "nan"), "--min-p": ("-1", "2", "nan"),
        "--top-k": ("-1", "x"), "--repetition-penalty": ("0", "-1", "nan"), "--samples": NUMBERS,
        "--presence-penalty": ("3", "nan"), "--frequency-penalty": ("-3", "x"), "--logit-bias": ("5", "5=nan", "x=1"),
        "--epsilon": ("0.1",), "--delta": ("0.1",),
        "--target": ("",), "--mode": ("sampel",),
        "--baseline": ("vllm",), "--decoder": ("fat",), "--show": ("-1", "x"), "--max-tokens": ("5",),
        "--answers": ("a.jsonl",),  # of one --prompt
        "--num-speculative-tokens": ("5",), "--drafter": ("x",),
    }),
    "inference.calibrate": (["none", "--target", "TARGET"], {
        "--nodes": NUMBERS, "--seconds": NUMBERS, "--max-new-tokens": NUMBERS, "--prompts": ("nowhere.jsonl", "."),
        "--dtype": ("float8",),
    }),
    "benchmarks.typical": (["ngram", "--target", "TARGET", "--prompts", "prompts.jsonl"], {
        "--epsilons": ("-1", "nan", "x"), "--deltas": ("-1", "nan", "x"), "--prompts": ("nowhere.jsonl",),
    }),
    "benchmarks.step_times": (["--target", "TARGET"], {
        "--nodes": NUMBERS, "--contexts": NUMBERS, "--batches": NUMBERS, "--threads": NUMBERS, "--shape": ("gpt9",),
    }),
    "benchmarks.serving": (["none", "--target", "TARGET", "--prompts", "prompts.jsonl"], {
        "--batches": NUMBERS, "--loads": ("-1", "0", "nan"), "--requests": NUMBERS, "--seconds": NUMBERS,
        "--rounds": NUMBERS, "--prompts": ("nowhere.jsonl",),
    }),
    "benchmarks.ensembles": (["nowhere/at/all", "--prompts", "prompts.jsonl"], {
        "--nodes": NUMBERS, "--expansion": NUMBERS, "--prompts": ("nowhere.jsonl",),
    }),
    "benchmarks.shortlist_heads": (["nowhere/at/all", "--prompts", "prompts.jsonl"], {
        "--nodes": NUMBERS, "--depths": NUMBERS, "--prompts": ("nowhere.jsonl",),
    }),
    "benchmarks.shortlist_tasks": (["nowhere/at/all", "--report", "new"], {
        "--nodes": NUMBERS, "--count": NUMBERS, "--schedules": ("free",), "--model": ("gpt9",),
    }),
    "models.export": (["nowhere/at/all", "--to", "vllm", "--out", "served"], {"--to": ("ollama",), "--out": ("",)}),
    "data.prompts": (["stdlib", "--tokenizer", "TARGET", "--out", "new.jsonl"], {
        "--count": NUMBERS, "--prompt-tokens": NUMBERS, "--tokenizer": ("nowhere",), "--out": (".", "README.md"),
        "--split": ("half",),
    }),
    "data.preview": ([f"{ROOT}/recipes/tiny-medusa.yaml"], {"--count": NUMBERS}),
    "benchmarks.tau_by_tokens": (["nowhere/at/all", "--prompts", "prompts.jsonl"], {
        "--first": NUMBERS, "--chains": NUMBERS, "--nodes": NUMBERS, "--batch-size": NUMBERS,
        "--max-new-tokens": NUMBERS}),
    "benchmarks.unroll": ([], {"--shape": ("gpt9",), "--tokens": NUMBERS, "--steps": NUMBERS, "--threads": NUMBERS}),
    "benchmarks.train_step": ([], {"--shape": ("gpt9",), "--tokens": NUMBERS, "--heads": NUMBERS, "--repeat": NUMBERS}),
    "benchmarks.medusa_step": ([], {"--heads": NUMBERS, "--vocab": NUMBERS, "--rows": NUMBERS, "--width": ("65", "0"),
                                  "--repeat": NUMBERS, "--length": (*NUMBERS, "64"), "--layers": NUMBERS,
                                  "--threads": NUMBERS, "--supervised": ("0", "2", "nan")}),
    "benchmarks.medusa_stages": (["--prompts", "prompts.jsonl"], {"--steps": NUMBERS, "--recipe": ("nowhere.yaml",)}),
    "benchmarks.kernel_times": ([], {
        "--nodes": ("nan", "many"), "--batches": ("nan", "many", "0"), "--contexts": ("nan", "many", "-1"),
        "--level": ("0", "x"),
    }),
    "benchmarks.budget": (["ngram", "--target", "TARGET", "--prompts", "prompts.jsonl"], {
        "--max-new-tokens": ("1", "0", "x"), "--fixed": NUMBERS, "--rounds": NUMBERS, "--batch-sizes": NUMBERS,
    }),
    "benchmarks.compressed": (["acceptance", "TARGET"], {
        "--entries": (*NUMBERS, "2000"), "--contexts": NUMBERS, "--drafts": NUMBERS, "--new-tokens": NUMBERS,
    }),
    "benchmarks.gpu.run": ([], {"--bundle": ("99", "x"), "--only": ("x",), "--minutes": ("-1", "nan", "x")}),
}  # fmt: skip

CASES: list[tuple[str, list[str], str]] = []
for name, recipe in TRAINING.items():
    CASES += [(name, [f"{ROOT}/recipes/{recipe}.yaml", given], said) for given, said in OVERRIDES]
    CASES += [(name, [given], said) for given, said in RECIPES]
for name, (complete, options) in OTHERS.items():
    pairs = [(option, value) for option, values in options.items() for value in values]
    CASES += [(name, [*complete, option, value], f"{option} {value}") for option, value in pairs]
    CASES.append((name, [*complete, "--nonsense"], "there is no option --nonsense"))


def names(line: str, said: str) -> bool:
    """Whether an answer says what it has to: this, or of an option with a value the option or the value."""
    option, _, value = said.partition(" ")
    if not said.startswith("--"):
        return said in line
    return option in line or option[2:].replace("-", "_") in line or (value or "''") in line


def tracked() -> dict[str, tuple[int, int]]:
    """Size and time of each file; of a link its own, as Python writes bytecode into the folder that it leads to."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return {name: (os.lstat(ROOT / name).st_size, os.lstat(ROOT / name).st_mtime_ns) for name in names if name}


def files(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def project():
    """The project's own files are as they were, after all of these."""
    before = tracked()
    yield
    assert tracked() == before


@pytest.mark.parametrize("name, given, said", CASES, ids=[f"{name}-{' '.join(given)}" for name, given, _ in CASES])
def test_one_line_and_nothing_written(project, tiny_lm, tmp_path, monkeypatch, run_main, name, given, said):
    here = tmp_path / "here"
    here.mkdir()
    (here / "README.md").write_text("mine\n")
    (here / "notes.yaml").write_text("- a list\n")
    (here / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(here)
    before, began = files(tmp_path), time.monotonic()
    main = importlib.import_module(f"draftsmith.{name}").main
    code, out, err = run_main(main, *(str(tiny_lm) if word == "TARGET" else word for word in given))
    assert code == 2 and time.monotonic() - began < LONGEST, (out, err)
    *above, last = err.splitlines()
    assert last.startswith("error: ") and names(last, said), err
    assert all(line.startswith("precision: ") for line in above), err
    assert files(tmp_path) == before


def test_no_case_is_there_twice():
    assert len({(name, *given) for name, given, _ in CASES}) == len(CASES) > 300


QUICK = [
    ("inference/decode.py", "nowhere", "--prompt", "a"),
    ("inference/decode.py", "ngram", "--prompt", "a"),
    ("inference/decode.py", "ngram", "--target", "nowhere", "--prompt", "a"),
    ("inference/calibrate.py", "nowhere"),
    ("models/export.py", "nowhere", "--to", "vllm", "--out", "x"),
    ("train/medusa.py", "nowhere.yaml"),
    ("models/import_drafter.py", "nowhere", "--target", "models/tiny-lm", "--out", "x"),
    ("models/import_drafter.py", "a/b", "--target", "nowhere", "--out", "x"),
    ("train/eagle.py", "recipes/tiny-eagle3.yaml", "run.name"),
    ("train/ssm.py", "README.md"),
    *((f"{name.replace('.', '/')}.py", f"recipes/{recipe}.yaml", "run.nam=x") for name, recipe in TRAINING.items()),
    ("train/ssm.py", "recipes/tiny-ssm.yaml", "stages.0.optim.lr=-1"),
    ("train/medusa.py", "recipes/tiny-medusa.yaml", "stages.0.optim.learning_rate=1"),
    ("benchmarks/medusa_stages.py", "--prompts", "LICENSE"),
    ("inference/calibrate.py", "ngram", "--target", "models/tiny-lm", "--prompts", "nowhere.jsonl"),
    *(
        tuple(f"benchmarks/{name}".split())
        for name in (
            "typical.py nowhere --prompts README.md",
            "typical.py ngram --target models/tiny-lm --prompts README.md",
            "step_times.py --target nowhere",
            "serving.py none nowhere --target models/tiny-lm --prompts README.md",
            "serving.py none --target models/tiny-lm --prompts nowhere.jsonl",
            "ensembles.py nowhere --prompts README.md",
            "ensembles.py a/b --prompts nowhere.jsonl",
            "shortlist_heads.py nowhere --prompts README.md",
            "shortlist_heads.py a/b --prompts nowhere.jsonl",
            "shortlist_tasks.py nowhere --report /tmp/new",
            "tau_by_tokens.py nowhere=3k --prompts README.md",
            "tau_by_tokens.py models/smollm2-medusa --prompts nowhere.jsonl",
            "coder_table.py nowhere.json",
        )
    ),
    ("benchmarks/medusa_stages.py", "--prompts", "nowhere.jsonl"),
    ("data/prompts.py", "stdlib", "--tokenizer", "nowhere", "--out", "/tmp/new.jsonl"),
    ("data/preview.py", "nowhere.yaml"),
    ("data/preview.py", "recipes/tiny-medusa.yaml", "--tokenizer", "nowhere"),
]


@pytest.mark.parametrize("command", QUICK, ids=[" ".join(command) for command in QUICK])
def test_answered_before_torch_is_imported(command):
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stdout == "False\n", done


SLOW = [
    ("inference/decode.py", "a/b", "--prompt", "a"),
    ("inference/calibrate.py", "a/b"),
    ("models/export.py", "a/b", "--to", "vllm", "--out", "/dev/null/x"),
    ("train/lm.py", "recipes/tiny-lm.yaml"),
    ("data/prompts.py", "stdlib", "--tokenizer", "models/tiny-lm", "--out", "/tmp/new.jsonl"),
    ("models/import_drafter.py", "a/b", "--target", "models/tiny-lm", "--out", "/dev/null/x"),
]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says which libraries a process has loaded")
@pytest.mark.parametrize("command", SLOW, ids=[command[0] for command in SLOW])
def test_a_terminal_is_told_before_imports_that_take_seconds(command):
    """Off a terminal nothing is said: stderr is then for warnings and the error."""
    terminal, other = pty.openpty()
    running = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=other, stderr=other)
    os.close(other)
    try:
        assert os.read(terminal, 100).decode().strip() == "loading …"
        maps = Path(f"/proc/{running.pid}/maps").read_text()
        assert "libtorch_python" not in maps and "tokenizers" not in maps
    finally:
        running.kill()
        running.wait()
        os.close(terminal)
