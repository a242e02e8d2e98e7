"""Run every check and benchmark that BENCHMARKS.md awaits a GPU for, within a time budget, and write what was measured.

    python train/gpu.py                             # all parts, 25 minutes at most; also: make gpu
    python train/gpu.py --list                      # the parts: goal, time limit, commands
    python train/gpu.py --only kernels step         # some parts
    python train/gpu.py --minutes 9                 # and once more: parts that have a result are not run again
    python train/gpu.py --rehearsal                 # toy sizes on a CPU; also: make gpu-rehearsal

A part is one or more of the project's own commands, started as processes in the order of their value. A part that takes
longer than its limit is killed with its children; whatever a part does, the next one runs. Written at once after each
part: OUT/PART/result.json, OUT/table.md (a Markdown row per part); while it runs: OUT/PART/log.txt.

Results: pass, fail, «cut short» (killed at its limit before it failed), «not run» (a package is missing, an earlier
part that it needs has not passed, or no time is left). A result counts as long as the sources, the device and the
versions are the same; --again measures anew. Exit code 1: a part failed, or any part of a rehearsal did not pass.

It needs a Python with torch, transformers and accelerate, not `make install`: the checkout is put on the path. Parts
that need a missing package are not run.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINKS = ROOT / ".types"  # holds draftsmith/ with a link for each room
if __name__ == "__main__":
    sys.path.insert(0, str(LINKS))

from draftsmith.common.command import run_command
from draftsmith.common.files import check_folder, json_object, locked, write_json, write_text

GROUP = 4  # query heads of a key/value head in kernels/bench.py
OTHERS = ("SDPA", "flex_attention", "flashinfer")  # the ways of attention there, beside ours
MARK = "DRAFTSMITH_GPU_RUN"  # environment variable of every process that a part starts: the folder of the results
ROOMS = ("common", "kernels", "models", "data", "inference", "train", "recipes", "tests")
# Packages that a part may need, by import name, and what they are used for.
PACKAGES = {
    "torch": "everything",
    "transformers": "every model",
    "accelerate": "training, drafters' checkpoints",
    "triton": "the kernels; without it steps run on plain PyTorch",
    "pydantic": "recipes",
    "yaml": "recipes",
    "rich": "tables",
    "safetensors": "weights",
    "tokenizers": "tokenizers",
    "psutil": "free memory",
    "scipy": "intervals of reports; χ² tests, which fail without it",
    "pytest": "tests",
    "hypothesis": "tests of the commit kernel and of merges, which fail without it",
    "matplotlib": "plots of reports",
    "peft": "LoRA (Medusa-2)",
    "bitsandbytes": "8-bit AdamW and quantised targets, not measured here",
    "deepspeed": "ZeRO, not measured here",
}
ENGINE = ("torch", "transformers", "accelerate", "yaml", "rich", "safetensors", "tokenizers", "psutil")
RECIPE = (*ENGINE, "pydantic")
REPORT = (*RECIPE, "matplotlib", "scipy")
TESTS = (*ENGINE, "pytest")


@dataclass(frozen=True)
class Finding:
    """What a part measured.

    value: for the table.
    met: whether the numeric goal is met; None where there is none. Not judged in a rehearsal.
    facts: for result.json.
    """

    value: str
    met: bool | None = None
    facts: dict[str, Any] | None = None


@dataclass(frozen=True)
class Part:
    """One row of the table.

    limit: seconds after which it is killed.
    commands: run one after the other, until one fails; NAME=VALUE before one sets an environment variable. ``{out}`` is
        the folder of all results, ``{target}``, ``{drafter}``, ``{ssms}``, ``{eagle}`` and ``{dynaspec}`` the models of
        the parts ``target``, ``medusa``, ``ssm``, ``eagle`` and ``dynaspec``.
    rehearsal: the same at toy size on a CPU.
    judge: reads what the commands wrote: ``judge(folder of all results, rehearsal)``. Raises ValueError if it is wrong
        whatever the speed.
    needs: packages by import name.
    after: parts that have to pass first; what they left behind may be of other sources.
    interpreted: the rehearsal runs under Triton's interpreter.
    """

    name: str
    goal: str
    limit: int
    commands: tuple[str, ...]
    rehearsal: tuple[str, ...]
    judge: Callable[[Path, bool], Finding]
    needs: tuple[str, ...] = ENGINE
    after: tuple[str, ...] = ()
    interpreted: bool = False


@dataclass(frozen=True)
class Result:
    """result.json of a part. ``sources``: of the code, the device and the versions it was measured with."""

    part: str
    goal: str
    value: str
    result: str
    seconds: float
    sources: str
    rehearsal: bool
    commands: list[str]
    facts: dict[str, Any] | None
    device: str
    versions: dict[str, str]


# ---- what the commands wrote


def judge_tests(log: Path) -> Finding:
    """Counts of pytest -v, also of one that was killed."""
    lines = re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", log.read_text(errors="replace"), re.M)
    names = {kind: [name for name, its in lines if its == kind] for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    bad = names["FAILED"] + names["ERROR"]
    value = f"{len(names['PASSED'])} passed, {len(bad)} failed, {len(names['SKIPPED'])} skipped"
    if bad or not names["PASSED"]:
        raise ValueError(value + ("; " + ", ".join(name.rpartition("/")[2] for name in bad[:4]) if bad else ""))
    return Finding(value, facts={"skipped": names["SKIPPED"]})


def tests_of(part: str) -> Callable[[Path, bool], Finding]:
    return lambda out, rehearsal: judge_tests(out / part / "log.txt")


def judge_profile(out: Path, rehearsal: bool) -> Finding:
    rows = json_object(out / "profile" / "step.json")["rows"]
    how = "eager operations on a CPU, where there is no graph" if rehearsal else "kernels of a graph replay"
    shown = [
        f"{row['nodes']} nodes: {row['profile']['kernels']}, {row['profile']['seconds'] * 1e3:.2f} ms in them, step "
        f"{row['median'] * 1e3:.2f} ms"
        for row in rows
    ]
    met = all(row["profile"]["kernels"] <= 15 * 32 + 40 for row in rows)  # of llama3-8b's 32 layers
    return Finding(f"{how}: " + "; ".join(shown), met, {"profiles": [row["profile"] for row in rows]})


def judge_step(part: str, count: int) -> Callable[[Path, bool], Finding]:
    """Plain step: at most 1.15 × its bytes over the copy bandwidth. 64 nodes with shared heads over the plain step: at
    most 1.10, at 16k tokens 1.15, and 1.35 with grouped-query attention.

    Args:
        count: of the figures that the goals ask for; fewer where something did not fit into memory.
    """

    def judge(out: Path, rehearsal: bool) -> Finding:
        report = json_object(out / part / "step.json")
        shown: list[str] = []
        met: list[bool] = []
        for row in report["rows"]:
            name = f"{row['shape']} at {row['context']}"
            if row["nodes"] == 1:
                bound = row["bytes"] / report["limits"][row["shape"]]["copy_bandwidth"]
                met.append(row["median"] <= 1.15 * bound)
                shown.append(f"{name}: plain {row['median'] * 1e3:.2f} ms = {row['median'] / bound:.2f} × bound")
            elif row["nodes"] in (64, 4) and row["projection"] == "shared":
                most = 1.1 if row["context"] <= 8192 else 1.35 if "llama3" in row["shape"] else 1.15
                met.append(row["ratio"] <= most)
                shown.append(f"{row['nodes']} nodes {row['ratio']:.2f} × plain (goal {most})")
        if len(met) < count and not rehearsal:
            shown.append(f"{count - len(met)} of {count} figures are missing")
        return Finding("; ".join(shown), all(met) and len(met) == count)

    return judge


def beside_step(out: Path, part: str) -> list[tuple[dict[str, Any], float]]:
    """The rows of a part's step.json, each with the median of the same step in the part ``step``.

    Raises:
        ValueError: the two have no step in common.
    """
    wanted = lambda row: (row["shape"], row["context"], row["nodes"], row["projection"])  # noqa: E731
    ours = {wanted(row): row["median"] for row in json_object(out / "step" / "step.json")["rows"]}
    rows = json_object(out / part / "step.json")["rows"]
    pairs = [(row, ours[wanted(row)]) for row in rows if wanted(row) in ours]
    if not pairs:
        raise ValueError("no step was measured both ways")
    return pairs


def judge_lean(out: Path, rehearsal: bool) -> Finding:
    """The lean decoder's steps of the part ``step`` against those of transformers' modules."""
    pairs = beside_step(out, "lean")
    shown = [
        f"{row['shape']}, {row['nodes']} nodes: lean {ours * 1e3:.2f} ms, transformers {row['median'] * 1e3:.2f} ms"
        for row, ours in pairs
    ]
    met = all(row["median"] - ours >= (1e-3 if row["nodes"] == 1 else 0) for row, ours in pairs)
    return Finding("; ".join(shown), met)


def judge_compile(out: Path, rehearsal: bool) -> Finding:
    """The kernels, which are the default, against torch.compile: if that is faster, it has to be the default."""
    pairs = beside_step(out, "compile")
    shown = [
        f"{row['shape']}, {row['nodes']} nodes: kernels {ours * 1e3:.2f} ms, compiled {row['median'] * 1e3:.2f} ms"
        for row, ours in pairs
    ]
    return Finding("; ".join(shown), all(ours <= 1.02 * row["median"] for row, ours in pairs))


def judge_kernels(out: Path, rehearsal: bool) -> Finding:
    """Tree attention beside the best of the other ways, and beside the device's limits: at least 85 % of the bandwidth
    with 8,192 tokens or more, and 60 % of the matrix rate where the products take longer than reading K and V."""
    report = kernel_rows(out / "kernel-bench" / "kernels.json", rehearsal)
    if rehearsal:
        return interpreted(report)
    shapes: dict[str, dict[str, Any]] = {}
    for row in report["rows"]:
        if row["kernel"] == "attention":
            way, _, kind = row["way"].partition(", ")  # of a ragged batch, or a prompt's chunk
            shape = " ".join(f"{k}={v}" for k, v in row["shape"].items())
            shapes.setdefault(f"{shape} {kind}".strip(), {})[way] = row
    below: list[str] = []
    slower: list[str] = []
    shares: dict[str, list[float]] = {"bandwidth": [], "matrix rate": []}
    for shape, ways in shapes.items():
        if "triton" not in ways:  # the plan's own time
            continue
        ours, others = ways["triton"], [ways[way]["median_us"] for way in OTHERS if way in ways]
        memory = ours["shape"].get("N", GROUP * 64) * GROUP <= 64  # else the products take longer than reading K and V
        what, goal = ("bandwidth", 0.85) if memory else ("matrix rate", 0.6)
        bound = ours["moved"] / report["copy_bandwidth"] if memory else ours["operations"] / report["matmul_rate"]
        share = bound / ours["median_us"] * 1e6
        if not memory or ours["shape"]["L"] >= 8192:
            shares[what].append(share)
            if share < goal:
                below.append(f"{shape} ({share:.0%} of the {what})")
        if others and ours["median_us"] > min(others):
            slower.append(f"{shape} ({ours['median_us'] / min(others):.2f} ×)")
    value = "; ".join(f"{min(all_):.0%}–{max(all_):.0%} of the {what}" for what, all_ in shares.items() if all_)
    value += f"; below the goal in {len(below)}, slower than the best in {len(slower)} of {len(shapes)} shapes"
    return Finding(value, not below and not slower, {"below": below, "slower": slower})


def kernel_rows(file: Path, rehearsal: bool, most: float = 0.5) -> dict[str, Any]:
    """The report of kernels/bench.py.

    Raises:
        ValueError: a result differs from the plain one's by more than ``most``, in a rehearsal by more than 1e-3.
    """
    report = json_object(file)
    if wrong := [row for row in report["rows"] if not row["difference"] <= (1e-3 if rehearsal else most)]:
        row = wrong[0]
        raise ValueError(f"{row['kernel']}, {row['way']}, {row['shape']}: difference {row['difference']:.1e}")
    return report


def interpreted(report: dict[str, Any]) -> Finding:
    most = max(row["difference"] for row in report["rows"])
    return Finding(f"interpreted, {len(report['rows'])} rows, differences at most {most:.0e}")


def judge_around(out: Path, rehearsal: bool) -> Finding:
    """Sampling verification of 64 nodes: at most 60 µs with 32,000 tokens, 150 µs with 128,256. The kernels around the
    products beside PyTorch's operations."""
    report = kernel_rows(out / "around" / "kernels.json", rehearsal)
    if rehearsal:
        return interpreted(report)
    shown: list[str] = []
    met: list[bool] = []
    ratios: dict[str, list[float]] = {}
    times = {(row["kernel"], row["way"], str(row["shape"])): row["median_us"] for row in report["rows"]}
    for row in report["rows"]:
        way, _, kind = row["way"].partition(", ")
        plain = times.get((row["kernel"], ", ".join(filter(None, ("plain PyTorch", kind))), str(row["shape"])))
        if way == "triton" and plain:
            ratios.setdefault(kind if row["kernel"] == "fused" else row["kernel"], []).append(plain / row["median_us"])
        if row["kernel"] == "verify" and way == "triton" and row["shape"]["N"] == 64 and kind.startswith("one-hot"):
            most = 60 if row["shape"]["V"] <= 32000 else 150
            met.append(row["median_us"] <= most)
            shown.append(f"{kind}, V = {row['shape']['V']}: {row['median_us']:.0f} µs (goal {most})")
    shown += [f"{name} {min(all_):.1f}–{max(all_):.1f} × PyTorch" for name, all_ in ratios.items()]
    if len(met) < 4:
        shown.append(f"{4 - len(met)} of 4 figures are missing")
    return Finding(
        "; ".join(shown), all(met) and len(met) == 4, {"medians": {" ".join(k): v for k, v in times.items()}}
    )


def judge_target(out: Path, rehearsal: bool) -> Finding:
    lines = metrics(model_folder(out, "target", rehearsal))
    loss = [line["validation_loss"] for line in lines if "validation_loss" in line][-1]
    rate = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line][-1]
    size = (model_folder(out, "target", rehearsal) / "model.safetensors").stat().st_size
    return Finding(f"{size / 1e6:,.0f} MB of weights, validation loss {loss:.2f}, {rate:,.0f} tokens/s")


def judge_medusa(out: Path, rehearsal: bool) -> Finding:
    folder = model_folder(out, "drafter", rehearsal)
    found = [line for line in metrics(folder) if "simulated_tau" in line][-1]
    rate = [line["tokens_per_second"] for line in metrics(folder) if "tokens_per_second" in line][-1]
    nodes = 1 + len(json_object(folder / "tree.json")["paths"])
    return Finding(
        f"simulated τ {found['simulated_tau']:.2f}, top-1 of head 1 {found['head1_held_out_top1']:.2f}, "
        f"{rate:,.0f} tokens/s; calibrated tree of {nodes} nodes"
    )


def reports_of(folder: Path, *, graphs: bool) -> list[dict[str, Any]]:
    """The report of each drafter below a folder; the texts are the target's own.

    Raises:
        ValueError: a text differs, or with ``graphs`` steps ran outside CUDA graphs.
    """
    reports = {json_object(path)["drafter"]: json_object(path) for path in folder.rglob("report.json")}
    for report in reports.values():
        name, lossless = drafter_name(report), report["lossless"]
        if not lossless["passed"]:
            raise ValueError(f"{name}: {lossless['mismatches']} mismatches in {lossless['checked']} tokens")
        if graphs and "cuda graph" not in report["execution"]:
            raise ValueError(f"{name}: steps ran {report['execution']}")
    return list(reports.values())


def drafter_name(report: dict[str, Any]) -> str:
    return "+".join(Path(each).name for each in report["drafter"].split("+"))


def judge_decode(part: str) -> Callable[[Path, bool], Finding]:
    """Every report below the part's folder: its own text, and steps in CUDA graphs."""

    def judge(out: Path, rehearsal: bool) -> Finding:
        shown: list[str] = []
        for report in reports_of(out / part, graphs=not rehearsal):
            name, lossless = drafter_name(report), report["lossless"]
            over = [
                f"{report[field]:.2f} × {base}"
                for field, base in (
                    ("speedup", "plain"), ("speedup_vs_transformers", "generate"),
                    ("speedup_vs_prompt_lookup", "its prompt lookup"),
                ) if report.get(field)
            ]  # fmt: skip
            shown.append(
                f"{name}: τ {report['mean_accepted_length']:.2f}, {', '.join([*over, report['execution']])}, "
                f"{lossless['checked']} tokens checked, {lossless['near_ties']} near-ties"
            )
        if not shown:
            raise ValueError("there is no report")
        return Finding("; ".join(shown))

    return judge


def judge_streams(out: Path, rehearsal: bool) -> Finding:
    """Two merged SSMs, with a stream for the second and without; the texts and trees are the same."""
    ((with_two,), (with_one,)) = (reports_of(out / "ssm-streams" / n, graphs=not rehearsal) for n in ("two", "one"))
    two, one, tau = with_two["tokens_per_second"], with_one["tokens_per_second"], with_two["mean_accepted_length"]
    return Finding(
        f"two SSMs, τ {tau:.2f}: {two:,.0f} tokens/s at the same time, {one:,.0f} one after the other "
        f"({two / one:.2f} ×)", two > one,
    )  # fmt: skip


def judge_ssm_claim(out: Path, rehearsal: bool) -> Finding:
    """Part ``ssm``, and SSMs on the device for a target in CPU memory, over plain decoding with that target."""
    best = max(reports_of(out / "ssm", graphs=not rehearsal), key=lambda report: report["speedup"])
    (offloaded,) = reports_of(out / "ssm-claim", graphs=False)
    shown = [
        f"{where}: {report['speedup']:.2f} × plain, τ {report['mean_accepted_length']:.2f}"
        for where, report in (("target on the device", best), ("target in CPU memory", offloaded))
    ]
    return Finding("; ".join(shown), best["speedup"] >= 1.5 and offloaded["speedup"] >= 2.6)


def judge_eagle(out: Path, rehearsal: bool) -> Finding:
    """The calibrated fixed tree and a dynamic one, each its own text, and steps in CUDA graphs."""
    lines = metrics(model_folder(out, "eagle", rehearsal))
    simulated = [line["simulated_tau"] for line in lines if "simulated_tau" in line][-1]
    rate = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line][-1]
    shown = [f"simulated τ {simulated:.2f}, {rate:,.0f} tokens/s in training"]
    for tree in ("fixed", "dynamic"):
        (report,) = reports_of(out / "eagle" / tree, graphs=not rehearsal)
        shown.append(
            f"{tree} tree: τ {report['mean_accepted_length']:.2f}, {report['speedup']:.2f} × plain, "
            f"{report['execution']}, {report['lossless']['checked']} tokens checked, "
            f"{report['lossless']['near_ties']} near-ties"
        )
    return Finding("; ".join(shown))


def judge_serving(out: Path, rehearsal: bool) -> Finding:
    """Requests that arrive over time: where speculation pays, by number of rows."""
    report = json_object(out / "serving" / "serving.json")
    for name, texts in report["texts"].items():
        if texts["mismatches"]:
            raise ValueError(f"{name}: {texts['mismatches']} mismatches")
        if not rehearsal and "cuda graph" not in report["execution"][name]:
            raise ValueError(f"{name}: steps ran {report['execution'][name]}")
    return Finding("; ".join(sentence for batch in report["batches"] for sentence in batch["sentences"]))


def judge_unroll(out: Path, rehearsal: bool) -> Finding:
    """Seven unrolled steps take no longer than with dense attention, and less memory."""
    shown: list[str] = []
    met = False
    for row in json_object(out / "eagle-unroll" / "unroll.json")["results"]:
        ours, dense = (row["peak_memory_bytes"][form] for form in ("draftsmith", "dense"))
        milliseconds = row["seconds"]["draftsmith"] * 1e3
        shown.append(f"{row['steps']} steps: {milliseconds:.1f} ms = {row['ratio']:.2f} × dense attention's")
        if ours:  # a CPU's is not known
            shown[-1] += f", {ours / 1e9:.1f} GB instead of {dense / 1e9:.1f}"
            met = met or (row["steps"] == 7 and row["ratio"] <= 1 and ours < dense)
    return Finding("; ".join(shown), met)


def judge_products(out: Path, rehearsal: bool) -> Finding:
    """The chosen form of each product beside torch.mm and the bandwidth, by number of rows."""
    report = kernel_rows(out / "products" / "kernels.json", rehearsal)
    if rehearsal:
        return interpreted(report)
    shapes: dict[tuple[int, int, int], dict[str, Any]] = {}
    for row in report["rows"]:
        shapes.setdefault((row["shape"]["M"], row["shape"]["K"], row["shape"]["N"]), {})[row["way"]] = row
    shown: list[str] = []
    for count in sorted({rows for rows, _, _ in shapes}):
        shares, gains = [], []
        for ways in (ways for (rows, _, _), ways in shapes.items() if rows == count):
            best = min(row["median_us"] for row in ways.values())
            shares.append(ways["torch.mm"]["moved"] / report["copy_bandwidth"] / best * 1e6)
            gains.append(ways["torch.mm"]["median_us"] / best)
        shown.append(
            f"{count} rows: {min(shares):.0%}–{max(shares):.0%} of the bandwidth, {min(gains):.2f}–{max(gains):.2f} × "
            "torch.mm"
        )
    return Finding("; ".join(shown), facts={"rows": report["rows"]})


def judge_shortlist(out: Path, rehearsal: bool) -> Finding:
    """A fifth of an LM head's rows beside the full head: at most 0.35 × its time, at least 80 % of the bandwidth."""
    shown: list[str] = []
    met: list[bool] = []
    rows: list[dict[str, Any]] = []
    for width in ("4096", "576"):
        report = json_object(out / "shortlist" / f"{width}.json")
        rows += report["rows"]
        shapes: dict[tuple[int, int], dict[str, Any]] = {}
        for row in report["rows"]:
            shapes.setdefault((row["shape"]["V"], row["shape"]["n"]), {})[row["way"]] = row
        for (vocabulary, nodes), ways in shapes.items():
            if "shortlist" in ways and "full head" in ways:  # memory may have lasted for some
                ours = ways["shortlist"]
                ratio = ours["median_us"] / ways["full head"]["median_us"]
                share = ours["moved"] / report["copy_bandwidth"] / ours["median_us"] * 1e6
                met.append(ratio <= 0.35 and share >= 0.8)
                shown.append(f"{vocabulary} × {width}, {nodes} nodes: {ratio:.2f} × full, {share:.0%} of the bandwidth")
    if wrong := [row for row in rows if not row["difference"] <= (1e-3 if rehearsal else 0.05)]:
        raise ValueError(f"{wrong[0]['way']}, {wrong[0]['shape']}: difference {wrong[0]['difference']:.1e}")
    if rehearsal:
        return Finding(f"interpreted, {len(rows)} rows, differences at most {max(r['difference'] for r in rows):.0e}")
    if len(met) < 6:
        shown.append(f"{6 - len(met)} of 6 figures are missing")
    medians = [{name: row[name] for name in ("way", "shape", "median_us")} for row in rows]
    return Finding("; ".join(shown), all(met) and len(met) == 6, {"medians": medians})


def judge_dynaspec(out: Path, rehearsal: bool) -> Finding:
    """Shortlists beside the drafter that they were made for, and with the router on the drafter's own stream: each its
    own text, and steps in CUDA graphs. Speeds within 3 %, to which decode.py knows them, count as equal."""
    folder = model_folder(out, "dynaspec", rehearsal)
    facts = json_object(folder / "provenance.json")
    whole, kept = facts["whole_simulated_tau"], facts["simulated_tau"]
    shown = [f"simulated τ {kept:.2f}, with the whole LM head {whole:.2f}"]
    reports = {report["drafter"]: report for report in reports_of(out / "dynaspec" / "two", graphs=not rehearsal)}
    with_two = reports.pop(str(folder))
    (base,) = reports.values()
    (with_one,) = reports_of(out / "dynaspec" / "one", graphs=not rehearsal)
    for name, report in (("shortlists", with_two), ("whole LM head", base), ("shortlists on one stream", with_one)):
        shown.append(
            f"{name}: τ {report['mean_accepted_length']:.2f}, {report['speedup']:.2f} × plain, {report['execution']}, "
            f"{report['lossless']['checked']} tokens checked, {report['lossless']['near_ties']} near-ties"
        )
    two, one = with_two["tokens_per_second"], with_one["tokens_per_second"]
    shown.append(f"{two:,.0f} tokens/s with a stream for the router, {one:,.0f} without ({two / one:.2f} ×)")
    return Finding("; ".join(shown), two >= 0.97 * one)


def judge_training(out: Path, rehearsal: bool) -> Finding:
    results = json_object(out / "train-step" / "train.json")["results"]
    shown = [
        f"{r['stage']}: {r['of_matmul_rate']:.0%} of the matrix rate, {r['hours_per_70M_tokens']:.2f} h per 70 M tokens"
        + (f", {r['peak_memory_bytes'] / 1e9:.0f} GB" if r["peak_memory_bytes"] else "")
        for r in results
    ]
    met = all(r["of_matmul_rate"] >= (0.5 if r["stage"] == "medusa-1" else 0.45) for r in results)
    met = met and all(r["hours_per_70M_tokens"] <= 1 for r in results if r["stage"] == "medusa-1")
    return Finding("; ".join(shown), met)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def model_folder(out: Path, name: str, rehearsal: bool) -> Path:
    """The run of part ``target``, ``medusa``, ``ssm``, ``eagle`` or ``dynaspec``; --tiny adds to its name."""
    return out / "models" / (f"{name}-tiny" if rehearsal else name)


# ---- the parts, most valuable first

PYTEST = "python -m pytest -v -p no:cacheprovider --continue-on-collection-errors "
SHORTLIST = "python kernels/bench.py shortlist --batches 1 "
BENCH = "python inference/bench.py --dtype bfloat16 --batches 1 --graphs "
TOY = "python inference/bench.py --shape tiny-lm --device cpu --threads 1 --contexts 32 --heads 3 --repeat 2 "
DECODE = (
    "python inference/decode.py {drafter} --prompts {out}/models/prompts.jsonl --check-lossless --report {out}/decode "
)
DRAFT = "--prompts {out}/models/prompts.jsonl --check-lossless --report {out}/draft-model "
PROMPTS = "python data/prompts.py stdlib --split test --tokenizer models/tiny-lm --out {out}/models/prompts.jsonl "
LM = "python train/lm.py recipes/tiny-lm.yaml --restart run.name=target run.output_dir={out}/models lookahead=null "
MEDUSA = "python train/medusa.py recipes/tiny-medusa.yaml --restart run.name=drafter run.output_dir={out}/models "
SSM = "python train/ssm.py recipes/tiny-ssm.yaml --restart run.name=ssms run.output_dir={out}/models "
TWO_SSMS = "python inference/decode.py draft_model:{ssms}/ssm-0@TREE+draft_model:{ssms}/ssm-1@TREE --target {target} "
MEASURED = "--prompts {out}/models/prompts.jsonl --check-lossless --baseline engine "
STREAMS = TWO_SSMS.replace("TREE", "2,2,1,1") + MEASURED + "--max-new-tokens 128 --seconds 20 --report "
OFFLOADED = TWO_SSMS.replace("TREE", "3,2,2,1,1") + MEASURED + "--report {out}/ssm-claim "
TOY_SSMS = (
    TWO_SSMS.replace("TREE", "2,1").replace("{target}", "{ssms}/tiny-target")
    + MEASURED
    + ("--max-new-tokens 4 --device cpu --threads 1 --report ")
)
EAGLE = "python train/eagle.py recipes/tiny-eagle3.yaml --restart run.name=eagle run.output_dir={out}/models "
# Calibration may have written a dynamic tree, too; both kinds are decoded with.
TREES = (
    'python -c "import json, sys; tree, fixed, dynamic, shape = sys.argv[1:]; '
    "json.dump({'paths': json.load(open(tree))['paths']}, open(fixed, 'w')); "
    "json.dump({'dynamic': json.loads(shape)}, open(dynamic, 'w'))\" "
    '{eagle}/tree.json {out}/eagle/fixed.json {out}/eagle/dynamic.json \'{"top_k": 4, "depth": 6, "nodes": 32}\''
)
DECODE_EAGLE = "python inference/decode.py {eagle} --tree {out}/eagle/TREE.json --report {out}/eagle/TREE " + MEASURED
SERVING = (
    "python inference/bench_serving.py {eagle} --prompts {out}/models/prompts.jsonl --out {out}/serving/serving.json "
)
DYNASPEC = (
    "python train/dynaspec.py recipes/tiny-dynaspec.yaml --restart run.name=dynaspec run.output_dir={out}/models "
)
DECODE_DYNASPEC = "python inference/decode.py {dynaspec} " + MEASURED + "--report "
UNROLL = "python train/bench_unroll.py --out {out}/eagle-unroll/unroll.json --steps 1 4 7 "
# About 190 M parameters and 13 M tokens: beyond toys, trained in a few minutes.
MIDDLE = (
    "tokenizer=models/tiny-lm model.hidden_size=1024 model.num_layers=16 model.num_heads=16 model.num_kv_heads=8 "
    "model.head_dim=64 model.intermediate_size=2816 "
    '\'data.train=[{source: stdlib}, {source: "package:torch"}, {source: "package:transformers"}]\' '
    "'stages=[{name: all, max_length: 512, steps: 400, optim: {lr: 6e-4, schedule: linear, warmup_steps: 30}, "
    "batch: {sequences: 64}}]'"
)
SMALL = "'stages=[{name: all, max_length: 64, steps: 2, optim: {lr: 6e-4}, batch: {sequences: 2}}]'"

PARTS = (
    Part(
        "kernels", "tests of the kernels pass on the device, bfloat16 and CUDA graphs too", 240,
        (PYTEST + "tests/kernels/device tests/kernels",),
        (PYTEST + "tests/kernels/device/test_commit_kernel.py tests/kernels/device/test_engine_on_kernels.py -k "
         "'commit or (greedy and llama)'",),
        tests_of("kernels"), (*TESTS, "triton"), interpreted=True,
    ),
    Part(
        "products", "products of few rows with the matrices of two models: share of the bandwidth, gain over "
        "PyTorch's: no goal; the forms found are used from then on", 120,
        ("python kernels/bench.py few_rows --rows 1 8 16 64 --out {out}/products/kernels.json",),
        ("python kernels/bench.py few_rows --rows 1 5 --hidden 32 --vocabulary 200 --dtype float32 "
         "--out {out}/products/kernels.json",),
        judge_products, ("torch", "triton"), interpreted=True,
    ),
    Part(
        "profile", "every step a graph replay of at most 15 kernels a layer and 40 around; their time: no goal", 90,
        (BENCH + "--shape llama3-8b --contexts 1024 --nodes 1 64 --repeat 20 --profile {out}/profile/kernels.txt "
         "--out {out}/profile/step.json",),
        (TOY + "--nodes 1 4 --profile {out}/profile/kernels.txt --out {out}/profile/step.json",),
        judge_profile,
    ),
    Part(
        "step", "plain step ≤ 1.15 × bytes / bandwidth; 64 nodes, shared heads ≤ 1.10 × plain (at 16k: llama2-7b 1.15, "
        "llama3-8b 1.35)", 240,
        (BENCH + "--shape llama2-7b llama3-8b --contexts 1024 16384 --nodes 1 16 64 --projection shared own "
         "--out {out}/step/step.json",),
        (TOY + "--nodes 1 4 --projection shared own --out {out}/step/step.json",),
        judge_step("step", 8),
    ),
    Part(
        "target", "a causal LM of about 190 M parameters trains and exports (speed: unmeasured, no goal)", 240,
        (LM + MIDDLE, PROMPTS + "--count 40 --prompt-tokens 96"),
        (LM + "--tiny " + SMALL, PROMPTS + "--count 2 --prompt-tokens 24"),
        judge_target, RECIPE,
    ),
    Part(
        "medusa", "Medusa-1 on that target trains and calibrates (τ: unmeasured, no goal)", 180,
        (MEDUSA + "target.name={target} stages.0.optim.lr=1e-3",
         "python inference/calibrate.py {drafter} --seconds 30"),
        (MEDUSA + "--tiny", "python inference/calibrate.py {drafter} --seconds 1"),
        judge_medusa, RECIPE, ("target",),
    ),
    Part(
        "decode", "output identical to plain greedy decoding, CUDA graphs (speed-up: unmeasured, no goal)", 180,
        (DECODE + "--max-new-tokens 128 --baseline all --seconds 60",),
        (DECODE + "--max-new-tokens 8 --baseline all --seconds 1 --threads 1",),
        judge_decode("decode"), REPORT, ("medusa",),
    ),
    Part(
        "engine", "χ², exact distributions, families and batching pass on the device", 180,
        (PYTEST + "--device cuda tests/inference/test_engine.py tests/inference/test_tree_logits.py "
         "tests/inference/test_batching.py tests/inference/test_engine_sampling.py tests/inference/test_sampling.py",),
        (PYTEST + "--device cpu tests/inference/test_engine.py -k 'llama-1 or mates'",),
        tests_of("engine"), TESTS,
    ),
    Part(
        "drafters", "drafters with caches, draws and merges pass on the kernels, on streams and in CUDA graphs", 240,
        (PYTEST + "--device cuda tests/inference/test_protocol.py tests/inference/test_draft_model.py "
         "tests/inference/test_merged.py tests/inference/test_merged_lossless.py tests/inference/test_ngram.py",),
        (PYTEST + "--device cpu tests/inference/test_ngram.py -k 'static and not reference'",),
        tests_of("drafters"), TESTS,
    ),
    Part(
        "kernel-bench", "tree attention ≥ 85 % of bandwidth from 8k on for N·Hq/Hkv ≤ 64, else ≥ 60 % of the matrix "
        "rate, never slower than SDPA, flex_attention and FlashInfer", 240,
        ("python kernels/bench.py attention commit --batches 1 8 --contexts 1024 16384 --nodes 16 64 "
         "--out {out}/kernel-bench/kernels.json",),
        ("python kernels/bench.py attention commit --batches 1 2 --contexts 33 --nodes 8 --heads 4 --kv-heads 2 "
         "--width 16 --layers 2 --dtype float32 --out {out}/kernel-bench/kernels.json",),
        judge_kernels, ("torch", "triton"), interpreted=True,
    ),
    Part(
        "around", "sampling verification of 64 nodes ≤ 60 µs at V = 32,000, ≤ 150 µs at 128,256; kernels around the "
        "products", 150,
        ("python kernels/bench.py verify head_topk fused --batches 1 --nodes 16 64 --vocabulary 32000 128256 "
         "--out {out}/around/kernels.json",),
        ("python kernels/bench.py verify head_topk fused --batches 2 --nodes 8 --heads 4 --kv-heads 2 --width 16 "
         "--hidden 32 --vocabulary 200 --dtype float32 --out {out}/around/kernels.json",),
        judge_around, ("torch", "triton"), interpreted=True,
    ),
    Part(
        "train-step", "≥ 45 % of the matrix rate; Medusa-1 ≥ 50 % and ≤ 1 h per 70 M tokens", 180,
        ("python train/bench_step.py --shape llama2-7b --dtype bfloat16 --sequences 4 --tokens 2048 "
         "--stages medusa-1 medusa-2 --gradient-checkpointing --out {out}/train-step/train.json",),
        ("python train/bench_step.py --shape tiny-lm --device cpu --sequences 1 --tokens 24 --heads 2 --repeat 1 "
         "--projection shared --gradient-checkpointing --out {out}/train-step/train.json",),
        judge_training, (*RECIPE, "peft"),
    ),
    Part(
        "draft-model", "output identical, CUDA graphs, alone and merged with n-grams", 120,
        ("python inference/decode.py draft_model:models/tiny-lm@1,1,1,1 draft_model:models/tiny-lm@1,1,1,1+ngram "
         "--target {target} --max-new-tokens 96 --baseline engine --seconds 30 " + DRAFT,),
        ("python inference/decode.py draft_model:{target}@1,1+ngram --target {target} --max-new-tokens 4 --threads 1 "
         + DRAFT,),
        judge_decode("draft-model"), REPORT, ("target",),
    ),
    Part(
        "ssm", "a boosted ensemble on that target trains, calibrates and decodes: output identical, CUDA graphs", 360,
        (SSM + "target.name={target} 'drafter.layers=[0, 15]'",
         "python inference/calibrate.py {ssms} --seconds 30",
         "python inference/decode.py {ssms} {ssms}+ngram --prompts {out}/models/prompts.jsonl --check-lossless "
         "--report {out}/ssm --max-new-tokens 128 --baseline engine --seconds 40"),
        (SSM + "--tiny boost.min_prompts=1", "python inference/calibrate.py {ssms} --seconds 1",
         "python inference/decode.py {ssms} {ssms}+ngram --prompts {out}/models/prompts.jsonl --check-lossless "
         "--report {out}/ssm --max-new-tokens 8 --baseline engine --seconds 1 --threads 1"),
        judge_decode("ssm"), REPORT, ("target",),
    ),
    Part(
        "ssm-streams", "two merged SSMs decode faster on two CUDA streams than one after the other", 180,
        (STREAMS + "{out}/ssm-streams/two", "DRAFTSMITH_ONE_STREAM=1 " + STREAMS + "{out}/ssm-streams/one"),
        (TOY_SSMS + "{out}/ssm-streams/two", "DRAFTSMITH_ONE_STREAM=1 " + TOY_SSMS + "{out}/ssm-streams/one"),
        judge_streams, REPORT, ("ssm",),
    ),
    Part(
        "ssm-claim", "≥ 1.5 × plain decoding, ≥ 2.6 × with the target in CPU memory: where the paper's ranges, of "
        "other models, begin", 180,
        (OFFLOADED + "--device-map cpu --max-new-tokens 64 --seconds 60",),
        (TOY_SSMS + "{out}/ssm-claim --device-map disk",),
        judge_ssm_claim, REPORT, ("ssm",),
    ),
    Part(
        "eagle", "EAGLE-3 on that target trains, calibrates and decodes: output identical, CUDA graphs, with a fixed "
        "and a dynamic tree", 360,
        (EAGLE + "target.name={target} cache_hidden=none", "python inference/calibrate.py {eagle} --seconds 30", TREES,
         *(DECODE_EAGLE.replace("TREE", tree) + "--max-new-tokens 128 --seconds 30" for tree in ("fixed", "dynamic"))),
        (EAGLE + "--tiny", "python inference/calibrate.py {eagle} --seconds 1", TREES,
         *(DECODE_EAGLE.replace("TREE", tree) + "--max-new-tokens 8 --seconds 1 --threads 1"
           for tree in ("fixed", "dynamic"))),
        judge_eagle, REPORT, ("target",),
    ),
    Part(
        "serving", "requests arriving over time, 1, 8 and 32 rows: texts identical, CUDA graphs; where speculation "
        "stops paying: no goal", 240,
        (SERVING + "--batches 1 8 32 --max-new-tokens 128 --seconds 3 --rounds 2",),
        (SERVING + "--batches 1 2 --loads 0.5 1 --requests 4 --max-new-tokens 8 --seconds 2 --rounds 1 --threads 1",),
        judge_serving, REPORT, ("eagle",),
    ),
    Part(
        "eagle-unroll", "7 unrolled steps of training-time test take no longer than with dense attention, and less "
        "memory", 120,
        (UNROLL + "--shape llama3-8b --dtype bfloat16 --sequences 1 --tokens 2048",),
        (UNROLL + "--shape tiny-lm --device cpu --threads 1 --tokens 24 --repeat 2",),
        judge_unroll, (*ENGINE, "scipy"),
    ),
    Part(
        "shortlist", "logits of a fifth of an LM head's rows take ≤ 0.35 × the full head's time, at ≥ 80 % of the "
        "bandwidth", 150,
        (SHORTLIST + "--hidden 4096 --vocabulary 128256 262144 --level 1 8 --out {out}/shortlist/4096.json",
         SHORTLIST + "--hidden 576 --vocabulary 49152 --level 1 8 --out {out}/shortlist/576.json"),
        (SHORTLIST + "--hidden 32 --vocabulary 90 --level 3 --dtype float32 --out {out}/shortlist/4096.json",
         SHORTLIST + "--hidden 16 --vocabulary 60 --level 1 --dtype float32 --out {out}/shortlist/576.json"),
        judge_shortlist, ("torch", "triton"), interpreted=True,
    ),
    Part(
        "dynaspec", "shortlists for the drafter of eagle train, calibrate and decode: output identical, CUDA graphs; "
        "not slower (to within 3 %) with the router on a stream of its own", 300,
        (DYNASPEC + "target.name={target} drafter.base={eagle}",
         "python inference/calibrate.py {dynaspec} --seconds 30",
         DECODE_DYNASPEC + "{out}/dynaspec/two --max-new-tokens 128 --seconds 30 {eagle}",
         "DRAFTSMITH_ONE_STREAM=1 " + DECODE_DYNASPEC + "{out}/dynaspec/one --max-new-tokens 128 --seconds 30"),
        # Its base is a new one, which has no tree of its own.
        (DYNASPEC + "--tiny", "python inference/calibrate.py {dynaspec} --seconds 1",
         DECODE_DYNASPEC + "{out}/dynaspec/two --max-new-tokens 8 --seconds 1 --threads 1 "
         "--tree {dynaspec}/tree.json {dynaspec}/drafter",
         "DRAFTSMITH_ONE_STREAM=1 " + DECODE_DYNASPEC
         + "{out}/dynaspec/one --max-new-tokens 8 --seconds 1 --threads 1"),
        judge_dynaspec, REPORT, ("eagle",),
    ),
    Part(
        "lean", "the lean decoder's step takes less time than transformers' modules, by ≥ 1 ms for one node", 120,
        (BENCH.replace("--graphs ", "") + "--shape llama2-7b llama3-8b --contexts 1024 --nodes 1 16 --decoder "
         "transformers --out {out}/lean/step.json",),
        (TOY + "--nodes 1 4 --decoder transformers --out {out}/lean/step.json",),
        judge_lean, after=("step",),
    ),
    Part(
        "compile", "the kernels' step, the default, is not slower (to within 2 %) than one by torch.compile", 240,
        (BENCH + "--shape llama3-8b --contexts 1024 --nodes 1 64 --compile --out {out}/compile/step.json",),
        (TOY + "--nodes 1 4 --out {out}/compile/step.json",),  # eager: compiling takes a minute on a CPU
        judge_compile, after=("step",),
    ),
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"some of: {', '.join(names)}")
    parser.add_argument("--minutes", type=float, default=25, help="budget for all parts (default 25)")
    parser.add_argument("--again", action="store_true", help="run parts that have a result too")
    parser.add_argument("--rehearsal", action="store_true", help="toy sizes on a CPU, kernels interpreted")
    parser.add_argument("--list", action="store_true", help="print the parts and run nothing")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default runs/gpu, of a rehearsal runs/gpu-rehearsal")
    return parser


# ---- running a part


def processes_of(mark: str) -> list[int]:
    """Living processes that carry this mark, whoever their parent is by now (Linux; elsewhere none are found)."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return [pid for pid in found if pid != os.getpid()]


def kill(process: "subprocess.Popen[bytes] | None", mark: str) -> None:
    """End a command and everything it started."""
    if process is not None and process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for _ in range(20):  # one may start another meanwhile
        pids = processes_of(mark)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.05)


def environment(part: Part, mark: str, out: Path, rehearsal: bool) -> dict[str, str]:
    """Of a part's commands. The import name ``draftsmith`` is this checkout, whatever is installed."""
    path = os.pathsep.join([str(LINKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    more = {MARK: mark, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    if rehearsal:
        more |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DRAFTSMITH_CACHE": str(out / "cache")}
        more |= {"TRITON_INTERPRET": "1"} if part.interpreted else {}
    return {**{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}, **more}


def commands_of(part: Part, out: Path, rehearsal: bool) -> list[str]:
    """The part's commands as one would type them."""
    places = {
        "out": out,
        **{name: model_folder(out, name, rehearsal) for name in ("target", "drafter", "ssms", "eagle", "dynaspec")},
    }
    written = part.rehearsal if rehearsal else part.commands
    for name, place in places.items():
        written = tuple(command.replace(f"{{{name}}}", shlex.quote(str(place))) for command in written)
    return list(written)


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """A command's environment variables and its words."""
    words = shlex.split(command)
    first = next(number for number, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    return dict(word.split("=", 1) for word in words[:first]), words[first:]


def run_part(part: Part, out: Path, rehearsal: bool, limit: float) -> tuple[str, Finding, float]:
    """Run a part for ``limit`` seconds at most.

    Returns:
        The result (pass, fail or cut short), what was found, and the seconds it took.
    """
    began, mark = time.monotonic(), str(out.resolve())
    log = out / part.name / "log.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    for old in log.parent.rglob("*.json"):  # nothing of an earlier attempt is judged
        old.unlink()
    process, problem, ended = None, "", False
    with log.open("wb") as output:
        try:
            for command in commands_of(part, out, rehearsal):
                output.write(f"$ {command}\n".encode())
                output.flush()
                variables, words = words_of(command)
                process = subprocess.Popen(
                    [sys.executable if words[0] == "python" else words[0], *words[1:]], cwd=ROOT, stdout=output,
                    stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                    env=environment(part, mark, out, rehearsal) | variables,
                )  # fmt: skip
                code = process.wait(max(0.0, began + limit - time.monotonic()))
                if code:
                    problem = f"exit code {code}: {last_line(log)}"
                    break
        except subprocess.TimeoutExpired:
            ended, problem = True, f"killed after {limit:.0f} s"
        finally:
            kill(process, mark)
    seconds = time.monotonic() - began
    try:
        finding = part.judge(out, rehearsal)
        wrong = ""
    except Exception as error:  # a part's broken output must not stop the others
        wrong = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        finding = Finding(wrong)
    if ended:  # what was measured until then; a file that is missing by then is no failure of its own
        known = not wrong or bool(re.match(r"\d+ passed, [1-9]\d* failed", wrong))
        value = f"{problem}; {finding.value}" if known else f"{problem}: {last_line(log)}"
        return "fail" if wrong and known else "cut short", Finding(value, finding.met, finding.facts), seconds
    if problem:  # pytest's counts say more than its exit code
        value = finding.value if re.match(r"\d+ passed", finding.value) and wrong else problem
        value += "" if wrong else f"; {finding.value}"
        return "fail", Finding(value, None, finding.facts), seconds
    passed = not wrong and (rehearsal or finding.met is not False)
    return "pass" if passed else "fail", finding, seconds


def last_line(log: Path) -> str:
    """The last line of a log that says something, at most 200 characters of it."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


# ---- all parts


def versions() -> dict[str, str]:
    """Installed versions of :data:`PACKAGES`; what is missing is left out."""
    found: dict[str, str] = {"python": platform.python_version()}
    for name in PACKAGES:
        if importlib.util.find_spec(name) is not None:
            try:
                found[name] = importlib.metadata.version("pyyaml" if name == "yaml" else name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = "?"
    return found


def describe_device(rehearsal: bool) -> str:
    """The GPU's name and memory, asked in another process: this one must not hold memory of it."""
    if rehearsal:
        return f"CPU ({platform.machine()}), toy sizes"
    asked = "import torch\nif torch.cuda.is_available():\n p = torch.cuda.get_device_properties(0)\n"
    asked += " print(f'{p.name}, {p.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}')"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise ValueError(
            f"this torch sees no GPU ({(done.stderr.strip().splitlines() or [sys.executable])[-1]}); on a CPU use "
            "make gpu-rehearsal"
        )
    return done.stdout.strip()


def fingerprint(device: str, installed: dict[str, str]) -> str:
    """Of what a result depends on: the sources, the device, the versions."""
    digest = hashlib.sha256(json.dumps([device, installed]).encode())
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in (".py", ".yaml")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def stored(out: Path, name: str) -> dict[str, Any] | None:
    """result.json of a part; None if there is none."""
    try:
        return json_object(out / name / "result.json")
    except (OSError, ValueError):
        return None


def read_result(out: Path, part: Part, sources: str) -> Result | None:
    """The part's result with the same sources; None if there is none, or it was not run to its end."""
    found = stored(out, part.name)
    if found is None or found.get("sources") != sources or found.get("result") not in ("pass", "fail"):
        return None
    return Result(**found)


def table_of(results: Sequence[Result]) -> str:
    """The Markdown table, and above it where it was measured."""
    cell = lambda text: text.replace("|", "\\|").replace("\n", " ")  # noqa: E731
    lines = ["| part | goal | measured | result | seconds |", "|---|---|---|---|---|"]
    lines += [f"| {r.part} | {cell(r.goal)} | {cell(r.value)} | {r.result} | {r.seconds:.0f} |" for r in results]
    where = ""
    if results:
        names = ("python", "torch", "triton", "transformers")
        shown = ", ".join(f"{name} {results[-1].versions[name]}" for name in names if name in results[-1].versions)
        command = "make gpu-rehearsal" if results[-1].rehearsal else "make gpu"
        where = f"{time.strftime('%Y-%m-%d')}, {results[-1].device}; {shown}; `{command}`:\n\n"
    return where + "\n".join(lines) + "\n"


def run_all(
    parts: Sequence[Part], out: Path, *, rehearsal: bool, minutes: float, again: bool, device: str
) -> list[Result]:
    """Run the parts that have no result yet; write and return the results of all.

    Raises:
        KeyboardInterrupt: asked to stop; the part that was running has no result.
    """
    deadline, installed = time.monotonic() + 60 * minutes, versions()
    sources = fingerprint(device, installed)
    results: list[Result] = []
    for part in parts:
        before = None if again else read_result(out, part, sources)
        if before is not None:
            results.append(before)
            print(f"{part.name}: {before.result} already, {before.value}", flush=True)
            write_text(out / "table.md", table_of(results))
            continue
        left = deadline - time.monotonic()
        missing = [name for name in part.needs if name not in installed]
        blocked = [name for name in part.after if (stored(out, name) or {}).get("result") != "pass"]
        result, seconds, finding = "not run", 0.0, Finding("")
        if missing:
            finding = Finding(f"not installed: {', '.join(missing)}")
        elif blocked:
            finding = Finding(f"needs {', '.join(blocked)}, which has not passed")
        elif left < part.limit / 2:
            finding = Finding(f"left out: {max(left, 0):.0f} s of the budget are left, it may take {part.limit} s")
        else:
            limit = min(part.limit, left)
            print(f"{part.name}: {part.goal} (at most {limit:.0f} s)", flush=True)
            result, finding, seconds = run_part(part, out, rehearsal, limit)
        (out / part.name).mkdir(parents=True, exist_ok=True)
        results.append(
            Result(
                part.name, part.goal, finding.value, result, round(seconds, 1), sources, rehearsal,
                commands_of(part, out, rehearsal), finding.facts, device, installed,
            )
        )  # fmt: skip
        if result != "not run":  # which is no reason to lose an earlier result
            write_json(out / part.name / "result.json", asdict(results[-1]))
        write_text(out / "table.md", table_of(results))
        print(f"{part.name}: {result} after {seconds:.0f} s: {finding.value}", flush=True)
    return results


def say_missing(parts: Sequence[Part], installed: dict[str, str]) -> None:
    """Print the missing packages, and which parts are not run for that."""
    for name, use in PACKAGES.items():
        if name not in installed:
            lost = [part.name for part in parts if name in part.needs]
            print(f"missing: {name} ({use}); not run for that: {', '.join(lost) or 'nothing'}", flush=True)


def interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # the part that runs is killed, too


def main() -> None:
    args = parser().parse_args()
    parts = [part for part in PARTS if not args.only or part.name in args.only]
    if not 0 < args.minutes <= 1440:
        raise ValueError(f"--minutes {args.minutes}: must be above 0 and at most 1440")
    out = args.out or Path("runs/gpu-rehearsal" if args.rehearsal else "runs/gpu")
    out = Path(os.path.abspath(out))
    if args.list:
        for part in parts:
            print(f"{part.name}: {part.goal} (at most {part.limit} s)")
            print(*(f"    {command}" for command in commands_of(part, out, args.rehearsal)), sep="\n")
        return
    check_folder("--out", out)
    device, installed = describe_device(args.rehearsal), versions()
    print(f"{device}; " + ", ".join(f"{name} {version}" for name, version in installed.items()), flush=True)
    say_missing(parts, installed)
    signal.signal(signal.SIGTERM, interrupt)
    with locked(out / ".lock"):
        kill(None, str(out.resolve()))  # what a run that was killed here has left behind
        results = run_all(
            parts, out, rehearsal=args.rehearsal, minutes=args.minutes, again=args.again, device=device
        )  # fmt: skip
    print(f"\n{table_of(results)}\nwritten to {out / 'table.md'}")
    if not args.rehearsal:
        print("Paste it into BENCHMARKS.md as a section of its own; what passed leaves «Awaiting a GPU».")
    if any(result.result == "fail" or (args.rehearsal and result.result != "pass") for result in results):
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
