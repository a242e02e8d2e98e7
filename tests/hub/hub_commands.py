"""Runs commands one after the other in one process, which imports but once, each as ``python SCRIPT …`` would.

A line of JSON in: ``{"words": [SCRIPT, …], "environment": {…}}``. A line out: ``{"code", "out", "err"}``.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import sys
import traceback
from typing import Any


def run(words: list[str], environment: dict[str, str | None]) -> dict[str, Any]:
    """Exit code, stdout and stderr of one command. ``environment``: what differs from this process's; None: unset."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    sys.argv = words
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as stopped:
            code = stopped.code or 0
        except BaseException:
            traceback.print_exc()
            code = 70  # what run_command lets through, a defect
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    imported = 0
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library writes past sys.stdout is no answer
    for module in ("draftsmith.train.medusa", "peft"):  # while the first command runs in a process of its own
        importlib.import_module(module)
    for line in sys.stdin:
        if len(sys.modules) > imported:  # a training command collects garbage at its end: not among what was imported
            gc.collect()
            gc.freeze()
            imported = len(sys.modules)
        asked = json.loads(line)
        answers.write(json.dumps(run(asked["words"], asked["environment"])) + "\n")
        answers.flush()
    gc.unfreeze()  # libraries report as leaked what is not collected at the end
