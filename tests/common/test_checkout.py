"""Scripts of one checkout of the project, run with the library of another."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def other_checkout(tmp_path_factory):
    """A copy of what `data/prompts.py --help` needs."""
    copy = tmp_path_factory.mktemp("other")
    shutil.copy(ROOT / "__init__.py", copy)
    for room in ("common", "kernels", "models", "data"):
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__", "tiny-lm"))
    return copy


def run_script(*arguments, cwd, path=None):
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    if path:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_a_script_of_another_checkout_is_refused(other_checkout, tmp_path):
    script = other_checkout / "data/prompts.py"
    done = run_script(script, "--help", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {script}: this script is part of {other_checkout}, but this Python imports draftsmith from {ROOT}; "
        f"install the script's (pip install --editable {other_checkout}), or run {ROOT}/data/prompts.py\n"
    )
    before_imports = (
        "import argparse; from draftsmith.common import command as c; c.before_imports(argparse.ArgumentParser())"
    )
    (other_checkout / "data/early.py").write_text(before_imports)
    done = run_script(other_checkout / "data/early.py", "--help", cwd=tmp_path)
    assert done.returncode == 2 and "this script is part of" in done.stderr


def test_scripts_that_are_not_refused(other_checkout, tmp_path):
    (tmp_path / "link").symlink_to(ROOT)
    (tmp_path / "path").mkdir()
    (tmp_path / "path/draftsmith").symlink_to(other_checkout)
    (tmp_path / "own.py").write_text("from draftsmith.common.command import run_command\nrun_command(lambda: None)")
    help_of = ("data/prompts.py", "--help")
    for arguments, cwd, path in (
        (help_of, ROOT, None),
        ((tmp_path / "link/data/prompts.py", "--help"), tmp_path, None),
        (help_of, ROOT, ROOT / ".types"),
        (help_of, other_checkout, tmp_path / "path"),
        (("-m", "draftsmith.data.prompts", "--help"), other_checkout, None),
        (("-m", "draftsmith.data.prompts", "--help"), ROOT, tmp_path / "path"),
        ((tmp_path / "own.py",), tmp_path, None),  # somebody else's script
        (("-c", "from draftsmith.common.command import run_command; run_command(lambda: None)"), other_checkout, None),
    ):
        done = run_script(*arguments, cwd=cwd, path=path)
        assert done.returncode == 0, (arguments, done.stderr)
