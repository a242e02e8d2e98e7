"""The documents keep their promises: commands, flags and recipe fields exist, the README's examples run as printed, its
table of folders is the one that the layout test enforces."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draftsmith.inference.engine.text import answer_text
from draftsmith.models.artifact import write_drafter
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "RESULTS.md",
    "benchmarks/AWAITING.md",
    *(p.relative_to(ROOT).as_posix() for p in sorted([*ROOT.glob("benchmarks/log/*.md"), *ROOT.glob("docs/*.md")])),
]
ROOMS = ("common", "kernels", "models", "data", "inference", "train")


def blocks(document: str, language: str) -> list[str]:
    """The contents of a document's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)


def inline(document: str) -> list[str]:
    """A document's text in backticks, each on one line."""
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def shown(document: str) -> list[str]:
    """The commands in a document: the lines of its bash blocks, and those in its text that run a script or a target of
    make."""
    lines = "".join(blocks(document, "bash")).replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.strip() and not line.startswith("#")]
    said = [code for code in inline(document) if re.match(r"(make [a-z]|(python|accelerate|torchrun) .*\.py\b)", code)]
    return commands + [code for code in said if not code.startswith("python -m")]


def demo() -> list[str]:
    """What `make demo` runs, and what it says to type next."""
    printed = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = printed[printed.index("1/6") :].splitlines()
    return [
        re.sub(r"^(time |echo '  )", "", line).removesuffix("'")
        for line in lines
        if re.match(r"(time |echo '  )\.venv", line)
    ]


COMMANDS = [(name, line) for name in DOCUMENTS for line in dict.fromkeys(shown(name))]
COMMANDS += [("make demo", line) for line in demo()]


@cache
def help_of(script: str) -> str:
    done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def schema(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"recipes/schema/{name}.json").read_text())


def has_field(recipe: dict[str, Any], path: str) -> bool:
    """Whether a recipe's schema knows a field such as ``stages.0.optim.lr``."""

    def below(node: dict[str, Any], names: list[str]) -> bool:
        if "$ref" in node:
            node = recipe["$defs"][node["$ref"].rpartition("/")[2]]
        if not names:
            return True
        children = [node["items"]] if names[0].isdigit() and "items" in node else []
        children += [node["properties"][names[0]]] if names[0] in node.get("properties", {}) else []
        if isinstance(node.get("additionalProperties"), dict):
            children.append(node["additionalProperties"])
        alternatives = [*node.get("anyOf", []), *node.get("allOf", []), *node.get("oneOf", [])]
        return any(below(child, names[1:]) for child in children) or any(below(each, names) for each in alternatives)

    return below(recipe, path.split("."))


def test_commands_were_found():
    assert len(shown("README.md")) >= 6
    assert len(shown("RESULTS.md")) >= 8
    assert len(shown("benchmarks/AWAITING.md")) >= 25
    assert sum(len(shown(name)) for name in DOCUMENTS if name.startswith("benchmarks/log/")) >= 15
    assert sum(len(shown(name)) for name in DOCUMENTS if name.startswith("docs/")) >= 30
    assert len(demo()) == 10


@pytest.mark.parametrize("where, line", COMMANDS, ids=lambda value: value[:60])
def test_command(where, line):
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if not any(word.endswith(".py") for word in words):
        known = words[0] == ".venv/bin/pre-commit" or words == ["source", ".venv/bin/activate"]
        assert known, f"{where} shows a command this test does not know: {line}"
        return
    script, *arguments = words[next(i for i, word in enumerate(words) if word.endswith(".py")) :]
    launcher = words[: words.index(script)]
    assert launcher[0].removeprefix(".venv/bin/") in ("python", "accelerate", "torchrun")
    assert (ROOT / script).is_file()
    accepted = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", help_of(script).split("options:")[1]))
    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    assert flags <= accepted
    recipe = next((argument for argument in arguments if argument.startswith("recipes/")), None)
    if recipe is None:
        return
    name = re.search(r"schema/(\w+)\.json", (ROOT / recipe).read_text())[1]
    for field in [argument.partition("=")[0] for argument in arguments if re.match(r"[a-z][\w.]*=", argument)]:
        assert has_field(schema(name), field), f"{where}: {recipe} has no field {field}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_recipe_fields_in_the_text(document):
    """`evaluate.decode=400` and `stages.0.optim.lr` are fields of some recipe."""
    schemas = [schema(path.stem) for path in sorted((ROOT / "recipes/schema").glob("*.json"))]
    for code in inline(document):
        assigned = re.match(r"([a-z][a-z_0-9.]*)=\S", code)
        section = re.fullmatch(
            r"((?:run|data|stages|target|track|export|evaluate|checkpoint|precision)\.[a-z_0-9.]+)", code
        )
        if found := assigned or section:
            assert any(has_field(each, found[1]) for each in schemas), f"{document}: `{code}`"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder that looks like the checkout and keeps what the examples write."""
    for name in (*ROOMS, "benchmarks", "tools", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run_as_printed(command: list[str], folder: Path) -> str:
    """A command's stdout, in a shell with `.venv` activated."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def section_blocks(document: str, heading: str, language: str) -> list[str]:
    """The blocks of one language in a section of a document."""
    text = (ROOT / document).read_text()
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE)
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def readme_section(heading: str, language: str) -> str:
    (block,) = section_blocks("README.md", heading, language)
    return block


@pytest.mark.whole_runs
def test_the_examples_of_the_readme(folder):
    """Train, decode and Python as printed, in this order: the text is the same with a trained drafter and without."""
    said = readme_section("Decode", "text")
    run_as_printed(["bash", "-euo", "pipefail", "-c", readme_section("Train", "bash")], folder)
    decoded = run_as_printed(["bash", "-euo", "pipefail", "-c", readme_section("Decode", "bash")], folder)
    assert decoded.strip("\n") == said.strip("\n")
    printed = run_as_printed(["python", "-c", readme_section("Python", "python")], folder)
    assert printed.strip("\n") == said.strip("\n")


@pytest.mark.whole_runs
def test_from_a_model_of_your_own_to_a_server(folder):
    """The blocks of docs/training.md in this order, in a clean folder: model, drafter, tree, report, answer, export."""
    commands = section_blocks("docs/training.md", "Your own model, from training to a server", "bash")
    said = [run_as_printed(["bash", "-euo", "pipefail", "-c", block], folder) for block in commands]
    plain, _, drafted, _ = said
    answer = drafted.split("modules\n")[1]
    assert plain.endswith(answer) and len(answer) > 40, "the model's own answer"
    report = json.loads((folder / "runs/own/report.json").read_text())
    assert report["lossless"]["mismatches"] == 0 and report["mean_accepted_length"] > 1.1
    assert (folder / "runs/own/tree.json").exists()
    for page in ("report", "training"):
        assert "drafted by" in (folder / f"runs/own/{page}.html").read_text()
    assert {path.name for path in (folder / "served/own").iterdir()} >= {"config.json", "model.safetensors"}
    assert "vllm serve" in (folder / "served/own/README.md").read_text()


def test_the_example_of_requests(tmp_path, monkeypatch, capsys):
    """Those of docs/decoding.md, where there is a drafter ``runs/mine`` for the bundled target."""
    target = load_target("models/tiny-lm")
    heads = MedusaHeads.for_target(target, 2, 1, "shared")
    write_drafter(tmp_path / "runs/mine", "medusa", heads.config.to_dict(), heads.state_dict(), target, {})
    (tmp_path / "runs/mine/tree.json").write_text('{"paths": [[0], [0, 0]]}')
    monkeypatch.chdir(tmp_path)
    example, streaming = blocks("docs/decoding.md", "python")
    names = {}
    exec(example, names)
    said = capsys.readouterr().out
    committed = {
        n: [int(t) for line in re.findall(rf"^{n} \[(.+)\]$", said, re.M) for t in line.split(", ")] for n in range(2)
    }
    assert all(1 <= len(tokens) <= 64 for tokens in committed.values()), "tokens are printed as they come"
    for tokens in committed.values():
        assert answer_text(names["target"], tokens) in said
    exec(streaming, names)
    said, result = capsys.readouterr().out, names["streamed"]
    assert said == result.text + "\n" and result.finish_reason == "stop" and len(said) > 20


def test_the_example_of_a_server(monkeypatch, capsys):
    """That of docs/serving.md: one request has arrived, and no other comes."""
    monkeypatch.chdir(ROOT)
    (example,) = blocks("docs/serving.md", "python")
    names = {}
    exec(example, names)
    (result,) = names["results"]
    printed = [int(t) for line in re.findall(r"^0 \[(.+)\]$", capsys.readouterr().out, re.M) for t in line.split(", ")]
    assert printed == result.tokens and 1 <= len(printed) <= 32


def module_of(path: str) -> ModuleType:
    """A file of the repository that no import path leads to."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


def test_the_results_are_one_page():
    assert len((ROOT / "RESULTS.md").read_text().splitlines()) <= 240


LINK = re.compile(r"\[([^\]]*)\]\(([^)#]*)#?([^)]*)\)")
CLAIMS = "docs/claims.md"


def figures_in(line: str) -> list[str]:
    """The decimals and numbers of thousands of a line, but for those of names."""
    return re.findall(r"(?<![\w.])\d{0,3}\.\d+(?!\w|\.\d)|\d{1,3}(?:,\d{3})+", LINK.sub(r"\1", line))


def source_of(text: str, page: str, anchor: str) -> str:
    """What a page of figures holds: a section; of a claim that is named its values alone, those too that the page of
    claims leaves out."""
    if page != CLAIMS:
        return section(page, anchor).replace("*", "")
    kept = json.loads((ROOT / "benchmarks/claims.json").read_text())
    runs = [run for name in kept if text in (name, "all of them") for run in kept[name]]
    figures = [figure for run in runs for figure in run["figures"]]
    values = [value for figure in figures for value in (figure["value"], *(figure["interval"] or []))]
    return " ".join(f"{value:.3f}" for value in values) + (ROOT / CLAIMS).read_text() * (text == "all of them")


@pytest.mark.parametrize(("document", "least"), [("README.md", 25), ("RESULTS.md", 330)])
def test_figures_are_those_of_the_pages_that_they_link_to(document, least):
    """Every decimal and every number of thousands in a row that links to a section of the log or to the claims, or to
    what the row above links to (`same`), is there. So is that of a paragraph that links there or has a speed-up."""
    source, checked = "", 0
    page = re.sub(r"(?s)<!-- (\S+) -->.*?<!-- /\1 -->", "", (ROOT / document).read_text())  # tests/benchmarks has those
    for line in re.sub(r"(?s)```.*?```", "", page).splitlines():
        pages = [
            found for found in LINK.findall(line) if "/log/" in found[1] or (found[1] == CLAIMS and source_of(*found))
        ]
        row = line.startswith("|")
        if not (pages or (line.endswith("| same |") if row else "×" in line)):
            continue
        if pages or not row:
            source = "".join(source_of(*page) for page in pages)
        for figure in figures_in(line):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", source), f"{figure}: not in the sources of {line}"
            checked += 1
    assert checked > least


def section(page: str, anchor: str) -> str:
    """A section of a document, up to the next heading; the whole document without an anchor."""
    parts = re.split(r"(?m)^(?=#+ )", (ROOT / page).read_text())
    slugs = [re.sub(r"[^\w\- ]", "", part.partition("\n")[0].lstrip("# ").lower()).replace(" ", "-") for part in parts]
    return parts[slugs.index(anchor)] if anchor else "".join(parts)


def test_the_table_of_folders_is_the_one_that_is_enforced():
    """The README's table of folders and tests/test_layout.py say the same."""
    layout = module_of("tests/test_layout.py")
    rows = re.findall(r"^\| `(\w+)/` \| .* \| (.*?) ?\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    said = {
        room: set(layout.ROOMS) - {room} if allowed == "all of them" else set(re.findall(r"`(\w+)`", allowed))
        for room, allowed in rows
    }
    assert said == {room: allowed - {room} for room, allowed in layout.MAY_IMPORT.items() if room in layout.ROOMS}
    arrows = re.search(r"`([\w ←]+)`: a folder imports", (ROOT / "README.md").read_text())[1]
    assert tuple(arrows.split(" ← ")) == layout.ROOMS


def headings(document: Path) -> set[str]:
    """Anchors that a Markdown page gives its headings."""
    found = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_walk_through_a_family_shows_its_code():
    """What CONTRIBUTING.md quotes stands in the toy family word for word."""
    family, quoted = (ROOT / "tests/family/toy_family.py").read_text(), blocks("CONTRIBUTING.md", "python")
    assert len(quoted) >= 6
    for quote in quoted:
        assert quote in family, quote


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    page = ROOT / document
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{document}: {link}"
        assert not anchor or anchor in headings(target), f"{document}: {link}"


def test_every_document_is_in_the_index():
    """The README links to all but the pages of the log, to which RESULTS.md links."""
    readme, results = (ROOT / "README.md").read_text(), (ROOT / "RESULTS.md").read_text()
    for name in DOCUMENTS[1:]:
        of_log = name.startswith("benchmarks/log/")
        assert f"]({name}" in results if of_log else f"]({name})" in readme, name
