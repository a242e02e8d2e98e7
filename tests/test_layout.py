"""The rules of the layout: who imports whom, no name that hides a library, everything in the wheel."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
ROOMS = ("common", "kernels", "models", "data", "inference", "train")  # in the wheel
ALL = (*ROOMS, "benchmarks", "tools")
# common ← kernels ← models ← data ← inference ← train
MAY_IMPORT = {
    "common": {"common"},
    "kernels": {"common", "kernels"},
    "models": {"common", "kernels", "models"},
    "data": {"common", "models", "data"},
    "inference": {"common", "kernels", "models", "data", "inference"},
    "train": set(ROOMS),
    "benchmarks": {*ROOMS, "benchmarks"},
    "tools": {*ROOMS, "tools"},
}
INSIDE = ("verify", "engine", "trees", "drafters", "commands", "measure")  # of inference/: each imports those before it
# Libraries this project or its dependencies import, installed here or not.
LIBRARIES = set(
    "accelerate bitsandbytes datasets deepspeed evaluate kernels numpy peft safetensors sklearn tokenizers "
    "torch transformers triton wandb".split()
)


def modules(room: str) -> list[Path]:
    return sorted(p for p in (ROOT / room).rglob("*.py") if "__pycache__" not in p.parts)


def imports(path: Path) -> set[str]:
    """Full names of the modules of ours that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports do not work in a script"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found.add(str(node.module))
    ours = {name for name in found if name.startswith("draftsmith.")}
    return {".".join(name.split(".")[:3]) for name in ours if name.count(".") >= 2}


@pytest.mark.parametrize("room", ALL)
def test_import_directions(room):
    assert modules(room)
    for path in modules(room):
        for name in imports(path):
            assert name.split(".")[1] in MAY_IMPORT[room], f"{path.relative_to(ROOT)} must not import {name}"


@pytest.mark.parametrize("folder", INSIDE)
def test_import_directions_inside_inference(folder):
    later = [*INSIDE[INSIDE.index(folder) + 1 :], *(path.stem for path in (ROOT / "inference").glob("*.py"))]
    assert modules(f"inference/{folder}")
    for path in modules(f"inference/{folder}"):
        found = re.findall(rf"(?:from|import) (draftsmith\.inference\.(?:{'|'.join(later)})\b\S*)", path.read_text())
        assert not found, f"{path.relative_to(ROOT)} must not import {found}"


def test_the_files_of_models_are_read_without_their_modules():
    """models/files/ finds and reads what any command may ask for before torch is imported."""
    assert modules("models/files")
    for path in modules("models/files"):
        found = re.findall(r"(?:from|import) draftsmith\.models\.(\w+)", path.read_text())
        assert set(found) <= {"files", "precision"}, f"{path.relative_to(ROOT)} must not import {found}"


@pytest.mark.parametrize("room", ALL)
def test_scripts_import_ours_by_full_name(room):
    """`import loop` works in `accelerate launch train/x.py` and nowhere else."""
    for path in modules(room):
        siblings = {p.stem for p in path.parent.glob("*.py")}
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not siblings.intersection(names), f"{path.relative_to(ROOT)}: import draftsmith.{room}.… instead"


RENAMING = {"common/files.py", "train/checkpoint.py", "benchmarks/servers.py"}  # synced folders; without draftsmith


@pytest.mark.parametrize("room", ALL)
def test_files_are_replaced_by_one_helper(room):
    """`common/files.py` writes a temporary file and renames it; everybody else calls it."""
    for path in modules(room):
        if path.relative_to(ROOT).as_posix() in RENAMING:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of_os = isinstance(node.func.value, ast.Name) and node.func.value.id == "os"
                renames = node.func.attr in ("rename", "renames") or (of_os and node.func.attr == "replace")
                assert not renames, f"{path.relative_to(ROOT)}:{node.lineno}: use draftsmith.common.files.replacing"


@pytest.mark.parametrize("room", ALL)
def test_no_name_hides_a_library(room):
    """A command's folder is first on sys.path: train/datasets.py would be what `import datasets` finds."""
    outside = [p for p in sys.path if p and Path(p).resolve() not in {ROOT, *(ROOT / r for r in ALL)}]
    for path in [*(ROOT / room).glob("*.py"), *(p for p in (ROOT / room).iterdir() if p.is_dir())]:
        name = path.stem
        if name == "__pycache__" or not name.isidentifier():
            continue
        taken = name in sys.stdlib_module_names or name in LIBRARIES
        assert not taken and importlib.machinery.PathFinder.find_spec(name, outside) is None, f"{path} hides {name}"


def test_no_init_files():
    found = [p for folder in (*ALL, "recipes", "tests") for p in (ROOT / folder).rglob("__init__.py")]
    assert not found


def test_type_checkers_see_every_room():
    for room in ALL:
        assert (ROOT / ".types/draftsmith" / room).resolve() == ROOT / room


IMPORTED_AS = {
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
    "protobuf": "google",
}  # where distribution and module differ


def declared(requirements: list[str]) -> set[str]:
    """The modules that requirements such as ``numpy>=1.26; sys_platform == 'linux'`` bring in."""
    names = [re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower() for requirement in requirements]
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}


@pytest.mark.parametrize("folder", [*ALL, "tests"])
def test_every_imported_library_is_declared(folder):
    """What another package brings along today may be gone with its next version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    known = {"draftsmith", *sys.stdlib_module_names, *declared(project["dependencies"] + extras["gpu"])}
    known |= declared(extras["tensorboard"] + extras["data"])
    if folder in ("tests", "tools"):  # a developer's
        known |= declared(extras["dev"])
    if folder == "tests":
        known |= {path.stem for path in modules("tests")}  # helpers beside the tests
        known |= {"medusa", "speculators", "dflash"}  # of checkouts and environments that scripts are given
    for path in modules(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in known, f"{path.relative_to(ROOT)}: declare {name} in pyproject.toml"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy, so that no stale build folder helps and none is left."""
    copy = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "smollm2", "qwen2.5-coder-?.?b")  # models that are fetched
    for folder in (*ROOMS, "recipes"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in ("pyproject.toml", "__init__.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / file, copy)
    build = "import setuptools.build_meta as b; print(b.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next((copy / "dist").glob("*.whl")))


def test_wheel_holds_every_file(wheel):
    wanted = {"__init__.py", *(p.relative_to(ROOT).as_posix() for room in ROOMS for p in modules(room))}
    wanted |= {p.relative_to(ROOT).as_posix() for p in (ROOT / "recipes").rglob("*.yaml")}
    data = [
        "kernels/cpu.cpp",
        "kernels/cpu/*.h",
        "common/parts.html",
        "inference/measure/page.html",
        "train/page.html",
        "models/tiny-lm/*",
        "models/requirements.txt",
        "recipes/accelerate/*.json",
        "recipes/templates/*",
        "recipes/schema/*",
        "data/samples.jsonl",
        "data/chats.jsonl",
        "data/code-chats.jsonl",
        "models/smollm2-medusa*/*",
        "models/smollm2-medusa*/adapter/*",
        "models/smollm2-eagle3/*",
        "models/qwen2.5-coder-0.5b-*/*",
    ]
    wanted |= {p.relative_to(ROOT).as_posix() for pattern in data for p in ROOT.glob(pattern) if p.is_file()}
    packed = {n.removeprefix("draftsmith/") for n in wheel.namelist() if n.startswith("draftsmith/")}
    assert packed == wanted


def test_wheel_has_the_licence(wheel):
    names = {Path(name).name for name in wheel.namelist() if "licenses/" in name}
    assert names == {"LICENSE", "NOTICE"}
    (metadata,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    assert "License-Expression: Apache-2.0" in wheel.read(metadata).decode()


def test_commands_run_from_the_wheel(wheel, tmp_path):
    wheel.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import draftsmith.data.prompts as p; print(p.__file__, p.sources.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(tmp_path / f"draftsmith/data/{n}.py") for n in ("prompts", "sources")]


PRINT_VERSION = """
import draftsmith
from draftsmith.models.artifact import versions
print(draftsmith.__version__, versions()["draftsmith"])
"""


@pytest.mark.whole_runs
@pytest.mark.parametrize("installed", ["editable", "wheel", "path"])
def test_version(wheel, tmp_path, installed):
    """The package's version is that of the wheel's metadata, from wherever it is imported."""
    (metadata,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    (version,) = re.findall(r"(?m)^Version: (.+)$", wheel.read(metadata).decode())
    environment = dict(os.environ)
    if installed == "wheel":
        wheel.extractall(tmp_path)
        environment["PYTHONPATH"] = str(tmp_path)
    elif installed == "path":
        environment["PYTHONPATH"] = str(ROOT / ".types")
    done = subprocess.run(
        [sys.executable, "-c", PRINT_VERSION], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == [version, version], done.stderr


def test_git_keeps_data_and_models():
    paths = ["data/x.py", "models/x.py", "models/tiny-lm/model.safetensors", "models/tiny-lm/tokenizer.json"]
    done = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    assert done.stdout == ""


def test_recipes_begin_with_their_command():
    recipes = sorted((ROOT / "recipes").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        first = recipe.read_text().splitlines()[0]
        match = re.fullmatch(r"# (?:accelerate launch(?: --\w+ \S+)*|python) (\S+\.py) (\S+)", first)
        assert match, f"{recipe}: begin with `# accelerate launch train/X.py recipes/{recipe.name}`"
        assert (ROOT / match[1]).is_file()
        assert ROOT / match[2] == recipe


def test_the_tracked_files_stay_small():
    """Room for what is built beside them where a checkout is copied to a rented machine, which often takes 64 MiB."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert len(files) > 300
    assert sum(path.lstat().st_size for path in files if os.path.lexists(path)) < 56 * 2**20
