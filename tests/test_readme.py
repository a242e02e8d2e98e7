"""Every command that the documents and `make demo` show exists and takes the flags shown."""

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from draftsmith.models.artifact import write_drafter
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target

ROOT = Path(__file__).parents[1]


def shown(document: str) -> list[str]:
    """The commands in the ```bash blocks of a document."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def demo() -> list[str]:
    """What `make demo` runs, and what it says to type next."""
    printed = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = printed[printed.index("1/4") :].splitlines()
    return [
        re.sub(r"^(time |echo '  )", "", line).removesuffix("'")
        for line in lines
        if re.match(r"(time |echo '  )\.venv", line)
    ]


COMMANDS = [(name, line) for name in ("README.md", "CONTRIBUTING.md") for line in shown(name)]
COMMANDS += [("make demo", line) for line in demo()]


@cache
def help_of(script: str) -> str:
    done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_were_found():
    assert len(shown("README.md")) >= 10
    assert len(demo()) == 7


@pytest.mark.parametrize("where, line", COMMANDS, ids=lambda value: value[:60])
def test_command(where, line):
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if not any(word.endswith(".py") for word in words):
        assert words[0] == ".venv/bin/pre-commit", f"{where} shows a command this test does not know: {line}"
        return
    script, *arguments = words[next(i for i, word in enumerate(words) if word.endswith(".py")) :]
    launcher = words[: words.index(script)]
    assert launcher[0].removeprefix(".venv/bin/") in ("python", "accelerate")
    assert (ROOT / script).is_file()
    accepted = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", help_of(script).split("options:")[1]))
    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    assert flags <= accepted
    for argument in arguments:
        if argument.startswith("recipes/"):
            assert (ROOT / argument).is_file()


def test_the_python_example(tmp_path, monkeypatch, capsys):
    """As printed, where there is a drafter ``runs/mine`` for the bundled target."""
    target = load_target("models/tiny-lm")
    heads = MedusaHeads.for_target(target, 2, 1, "shared")
    write_drafter(tmp_path / "runs/mine", "medusa", heads.config.to_dict(), heads.state_dict(), target, {})
    (tmp_path / "runs/mine/tree.json").write_text('{"paths": [[0], [0, 0]]}')
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    names = {}
    exec(example, names)
    said = capsys.readouterr().out
    committed = {n: [int(t) for line in re.findall(rf"^{n} \[(.+)\]$", said, re.M) for t in line.split(", ")]
                 for n in range(2)}  # fmt: skip
    assert all(1 <= len(tokens) <= 64 for tokens in committed.values()), "tokens are printed as they come"
    for tokens in committed.values():
        assert names["target"].tokenizer.decode(tokens) in said


def test_links_lead_somewhere():
    for document in ("README.md", "CONTRIBUTING.md", "BENCHMARKS.md"):
        for target in re.findall(r"\]\(([^)#]+)", (ROOT / document).read_text()):
            assert target.startswith("https://") or (ROOT / target).exists(), f"{document}: {target}"
