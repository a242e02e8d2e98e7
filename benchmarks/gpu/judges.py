"""What the parts of `make gpu` measured: a judge reads the files of one part and compares with a goal.

Goals of time are computed (benchmarks/floors.py) from the bytes and operations of each row and the limits of the device
that were measured in the same run; a row is judged where its floor is above 30 µs. Each judge takes the
folder of all results and whether this is a rehearsal, in which no goal of speed is judged. A part that was killed has
measured less: what is missing is counted, not an error. ValueError: a result is wrong, whatever the speed.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.benchmarks import floors
from draftsmith.benchmarks.floors import Work
from draftsmith.common.files import json_object

OTHERS = ("SDPA", "flex_attention", "flashinfer")  # ways of attention in kernel_times.py, beside ours
# Shares of the bandwidth and of the matrix rate that goals ask for.
STEP = {"bytes": 0.87, "operations": 0.6}
ATTENTION = {"bytes": 0.85, "operations": 0.6}
SHORTLIST = {"bytes": 0.8, "operations": 0.6}
TRAINING = {"medusa-1": 0.5, "medusa-2": 0.45}  # of the matrix rate
KERNELS = (15, 40)  # of a step: of each layer, around the layers
NOISE = 1.02  # two medians within this factor count as equal


@dataclass(frozen=True)
class Finding:
    """What a part measured.

    value: for the table.
    met: whether the numeric goal is met; None where there is none. Not judged in a rehearsal.
    facts: for result.json.
    missing: figures that were asked for and not measured: «2 of 4 figures are missing», or nothing.
    """

    value: str
    met: bool | None = None
    facts: dict[str, Any] | None = None
    missing: str = ""


def missing(found: int, wanted: int) -> str:
    return f"{wanted - found} of {wanted} figures are missing" if found < wanted else ""


RESULTS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL"
# pytest -v, alone and in parallel processes: «tests/a.py::test PASSED [ 1%]», «[gw0] [  1%] PASSED tests/a.py::test»
TEST = re.compile(rf"^(?:(\S+::.*?) ({RESULTS})\b|\[gw\d+\] \[ *\d+%\] ({RESULTS}) (\S+::.*?) *$)", re.M)


def judge_tests(log: Path) -> Finding:
    """Counts of pytest -v, also of one that was killed."""
    found = [(a or b, kind or other) for a, kind, other, b in TEST.findall(log.read_text(errors="replace"))]
    names = {kind: [name for name, its in found if its == kind] for kind in RESULTS.split("|")}
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
    most = KERNELS[0] * 32 + KERNELS[1]  # llama3-8b has 32 layers
    met = all(row["profile"]["kernels"] <= most for row in rows)
    facts = {"profiles": [row["profile"] for row in rows]}
    return Finding(f"{how}: " + "; ".join(shown), met, facts, missing(len(rows), 2))


def device_of(limits: Mapping[str, Any]) -> floors.Device:
    return floors.Device(limits["bandwidth"], limits["matmul_rate"])


def judge_step(out: Path, rehearsal: bool) -> Finding:
    """Every step at its own goal. Shown are the plain step, that of the largest tree with shared heads, and others that
    miss their goals."""
    report = json_object(out / "step" / "step.json")
    shown: list[str] = []
    met: list[bool] = []
    goals: dict[tuple[str, int], float] = {}  # of plain steps
    for row in report["rows"]:
        device = device_of(report["limits"][row["shape"]])
        goal = floors.goal(device, floors.works_of(row["work"]), STEP)
        name = f"{row['shape']} at {row['context']}"
        if goal.judged:
            met.append(row["median"] <= goal.seconds)
        late = goal.judged and not met[-1]
        time = f"{row['median'] * 1e3:.2f} ms = {row['median'] / goal.floor:.2f} × floor"
        if row["nodes"] == 1:
            goals[row["shape"], row["context"]] = goal.seconds
            shown.append(f"{name}: plain {time} (goal {goal.seconds / goal.floor:.2f})")
        elif late or (row["projection"] == "shared" and row["nodes"] == max(r["nodes"] for r in report["rows"])):
            plain = goals.get((row["shape"], row["context"]))
            ratio = f", {row['ratio']:.2f} × plain (goal {goal.seconds / plain:.2f})" if plain and row["ratio"] else ""
            heads = "" if row["projection"] == "shared" else f" with {row['projection']} heads"
            shown.append(f"{row['nodes']} nodes{heads} {time}{ratio}")
    if met:
        shown.append(f"{sum(met)} of {len(met)} steps at their goals")
    return Finding("; ".join(shown), all(met), missing=missing(len(report["rows"]), report["planned"]))


def judge_beside(out: Path, part: str, file: Path, names: tuple[str, str], most: float) -> Finding:
    """The steps in another file, ours, beside the same ones in a part's step.json: at most so many times as slow.
    Raises ValueError: the two have no step in common."""
    wanted = lambda row: (row["shape"], row["context"], row["nodes"], row["projection"])  # noqa: E731
    report, ours = json_object(out / part / "step.json"), {wanted(row): row["median"] for row in rows_of(file)}
    pairs = [(row, ours[wanted(row)]) for row in report["rows"] if wanted(row) in ours]
    if not pairs:
        raise ValueError("no step was measured both ways")
    shown = [
        f"{row['shape']}, {row['nodes']} nodes: {names[0]} {time * 1e3:.2f} ms, {names[1]} {row['median'] * 1e3:.2f} ms"
        for row, time in pairs
    ]
    met = all(time <= most * row["median"] for row, time in pairs)
    return Finding("; ".join(shown), met, missing=missing(len(pairs), report["planned"]))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return json_object(file)["rows"]


def by_shape(rows: Iterable[dict[str, Any]], kernel: str = "") -> dict[str, dict[str, dict[str, Any]]]:
    """Rows of kernel_times.py, all or one kernel's: «B=1 L=1024 N=16» → way → row. What stands behind a way's comma is
    part of the shape, as «ragged» or «chunk»; a product's form has commas of its own."""
    shapes: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if kernel in ("", row["kernel"]):
            way, _, kind = row["way"].partition(", ") if row["kernel"] != "few_rows" else (row["way"], "", "")
            shape = " ".join([*(f"{name}={size}" for name, size in row["shape"].items()), kind]).strip()
            shapes.setdefault(shape, {})[way] = row
    return shapes


def judge_lean(out: Path, rehearsal: bool) -> Finding:
    """The lean decoder's steps of the part ``step`` against those of transformers' modules."""
    return judge_beside(out, "lean", out / "step" / "step.json", ("lean", "transformers"), 1.0)


def judge_switches(out: Path, rehearsal: bool) -> Finding:
    """What is off by default beside the default: one that is faster should be on."""
    folder, shown, met = out / "switches", [], []
    default = {row["nodes"]: row["median"] for row in rows_of(folder / "default.json")}
    for name in ("pdl", "logits", "same-bits"):
        for row in rows_of(folder / f"{name}.json"):
            ratio = row["median"] / default[row["nodes"]]
            shown.append(f"{name}, {row['nodes']} nodes: {ratio:.3f} × the default")
            met.append(NOISE * ratio >= 1)
    shapes = by_shape(rows_of(folder / "attention.json"), "attention")
    for merged, ways in shapes.items():
        shape = merged.removesuffix(" last program merges")
        if shape != merged:
            ratio = ways["triton"]["median_us"] / shapes[shape]["triton"]["median_us"]
            shown.append(f"last program merges, {shape}: {ratio:.3f} ×")
            met.append(NOISE * ratio >= 1)
    return Finding("; ".join(shown), all(met), missing="" if len(met) > 3 * len(default) else "no merged attention")


def judge_kernels(out: Path, rehearsal: bool) -> Finding:
    """Tree attention at its goals, and beside the best of the other ways."""
    report = kernel_rows(out / "kernel-bench" / "kernels.json", rehearsal)
    if rehearsal:
        return interpreted(report)
    shapes = by_shape(report["rows"], "attention")
    shapes = {shape: ways for shape, ways in shapes.items() if "triton" in ways}  # the others are the plan's own time
    below: list[str] = []
    slower: list[str] = []
    shares: dict[str, list[float]] = {"bytes": [], "operations": []}
    for shape, ways in shapes.items():
        ours, others = ways["triton"], [ways[way]["median_us"] for way in OTHERS if way in ways]
        what, share = judged_share(report, ours, below, shape, ATTENTION)
        if share:
            shares[what].append(share)
        if others and ours["median_us"] > min(others):
            slower.append(f"{shape} ({ours['median_us'] / min(others):.2f} ×)")
    value = "; ".join(f"{min(all_):.0%}–{max(all_):.0%} of the {LIMITS[w]}" for w, all_ in shares.items() if all_)
    value += f"; below the goal in {len(below)}, slower than the best in {len(slower)} of {len(shapes)} shapes"
    facts = {"below": below, "slower": slower}
    return Finding(value, not below and not slower, facts, missing_shapes(report))


LIMITS = {"bytes": "bandwidth", "operations": "matrix rate"}


def judged_share(
    report: Mapping[str, Any], row: Mapping[str, Any], below: list[str], name: str, shares: Mapping[str, float]
) -> tuple[str, float | None]:
    """What limits a row of benchmarks/kernel_times.py, and the share of it that the row reaches; None where the floor
    is too low to judge. Rows that miss their goal are noted in ``below``."""
    device, work = device_of(report), Work(row["moved"], row["operations"], 1)
    goal, (what, least), seconds = floors.goal(device, [work], shares), device.bound(work), row["median_us"] / 1e6
    if not goal.judged:
        return what, None
    if seconds > goal.seconds:
        below.append(f"{name} ({least / seconds:.0%} of the {LIMITS[what]})")
    return what, least / seconds


def missing_shapes(*reports: Mapping[str, Any]) -> str:
    """Of the shapes that benchmarks/kernel_times.py was asked for."""
    done, wanted = (sum(report["shapes"][key] for report in reports) for key in ("done", "planned"))
    return missing(done, wanted).replace("figures", "shapes")


def kernel_rows(file: Path, rehearsal: bool, most: float = 0.5) -> dict[str, Any]:
    """The report of benchmarks/kernel_times.py. Raises ValueError: a result differs from the plain one's by more than
    ``most``, in a rehearsal by more than 1e-3."""
    report = json_object(file)
    if wrong := [row for row in report["rows"] if not row["difference"] <= (1e-3 if rehearsal else most)]:
        row = wrong[0]
        raise ValueError(f"{row['kernel']}, {row['way']}, {row['shape']}: difference {row['difference']:.1e}")
    return report


def interpreted(report: dict[str, Any]) -> Finding:
    most = max(row["difference"] for row in report["rows"])
    value = f"interpreted, {len(report['rows'])} rows, differences at most {most:.0e}"
    return Finding(value, missing=missing_shapes(report))


def judge_around(out: Path, rehearsal: bool) -> Finding:
    """Sampling verification of 64 nodes, and the kernels around the products beside PyTorch's operations. There is no
    goal: the floors are below what is judged."""
    report = kernel_rows(out / "around" / "kernels.json", rehearsal)
    if rehearsal:
        return interpreted(report)
    shown: list[str] = []
    ratios: dict[str, list[float]] = {}
    times = {(row["kernel"], row["way"], str(row["shape"])): row["median_us"] for row in report["rows"]}
    for kernel in ("verify", "fused"):
        for ways in by_shape(report["rows"], kernel).values():
            row, kind = ways.get("triton"), next(iter(ways.values()))["way"].partition(", ")[2]
            if row is None:
                continue
            if "plain PyTorch" in ways:
                name, plain = kind if kernel == "fused" else kernel, ways["plain PyTorch"]["median_us"]
                ratios.setdefault(name, []).append(plain / row["median_us"])
            if kernel == "verify" and row["shape"]["N"] == 64:
                over = row["median_us"] / 1e6 / device_of(report).floor([Work(row["moved"], row["operations"], 1)])
                shown.append(f"{kind}, V = {row['shape']['V']}: {row['median_us']:.0f} µs = {over:.1f} × floor")
    shown += [f"{name} {min(all_):.1f}–{max(all_):.1f} × PyTorch" for name, all_ in ratios.items()]
    facts = {"medians": {" ".join(k): v for k, v in times.items()}}
    return Finding("; ".join(shown), None, facts, missing_shapes(report))


def judge_target(out: Path, rehearsal: bool) -> Finding:
    folder = model_folder(out, "target", rehearsal)
    size = (folder / "model.safetensors").stat().st_size
    return Finding(
        f"{size / 1e6:,.0f} MB of weights, validation loss {last(folder, 'validation_loss'):.2f}, "
        f"{last(folder, 'tokens_per_second'):,.0f} tokens/s"
    )


METRICS = {"simulated_tau": "simulated τ", "head1_held_out_top1": "top-1 of head 1"}


def judge_drafter(model: str, *metrics: str) -> Callable[[Path, bool], Finding]:
    """The last values of some of :data:`METRICS`, the speed of training and the calibrated tree."""

    def judge(out: Path, rehearsal: bool) -> Finding:
        folder = model_folder(out, model, rehearsal)
        shown = [f"{METRICS[name]} {last(folder, name):.2f}" for name in metrics]
        tree = json_object(folder / "tree.json")
        nodes = 1 + sum(map(len, tree.get("parts", [tree.get("paths", [])])))  # parts: of each SSM
        shown.append(f"{last(folder, 'tokens_per_second'):,.0f} tokens/s; calibrated tree of {nodes} nodes")
        return Finding(", ".join(shown))

    return judge


def last(folder: Path, name: str) -> float:
    """The last value of a metric in a run's folder; NaN while there is none."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next((float(line[name]) for line in reversed(lines) if name in line), float("nan"))


def reports_of(folder: Path, *, graphs: bool, exact: bool = False) -> list[dict[str, Any]]:
    """The report of each drafter below a folder; the texts are the target's own. Raises ValueError: a text differs,
    with ``graphs`` steps ran outside CUDA graphs, or with ``exact`` a row's bits depended on other rows."""
    reports = {json_object(path)["drafter"]: json_object(path) for path in folder.rglob("report.json")}
    for report in reports.values():
        name, lossless = drafter_name(report), report["lossless"]
        if not lossless["passed"]:
            raise ValueError(f"{name}: {lossless['mismatches']} mismatches in {lossless['checked']} tokens")
        if graphs and "cuda graph" not in report["execution"]:
            raise ValueError(f"{name}: steps ran {report['execution']}")
        if exact and not lossless["bitwise"]:
            raise ValueError(f"{name}: the bits of a row depended on other rows")
    return list(reports.values())


def drafter_name(report: dict[str, Any]) -> str:
    return "+".join(Path(each).name for each in report["drafter"].split("+"))


def told(report: dict[str, Any]) -> str:
    """A report in one line."""
    bases = {"speedup": "plain", "speedup_vs_transformers": "generate", "speedup_vs_prompt_lookup": "its prompt lookup"}
    over = [f"{report[field]:.2f} × {base}" for field, base in bases.items() if report.get(field)]
    return (
        f"τ {report['mean_accepted_length']:.2f}, {', '.join([*over, report['execution']])}, "
        f"{report['lossless']['checked']} tokens checked, {report['lossless']['near_ties']} near-ties"
    )


def judge_decode(part: str, count: int, *, graphs: bool = True, exact: bool = False) -> Callable[[Path, bool], Finding]:
    """Every report below the part's folder, of which there are ``count``, as :func:`reports_of` checks them."""

    def judge(out: Path, rehearsal: bool) -> Finding:
        reports = reports_of(out / part, graphs=graphs and not rehearsal, exact=exact)
        shown = [f"{drafter_name(report)}: {told(report)}" for report in reports]
        return Finding("; ".join(shown), missing=missing(len(reports), count))

    return judge


CODER_GOALS = {  # on HumanEval: × plain decoding, and τ
    "coder-1.5b": {"eagle3": (2.0, 2.8), "medusa": (1.7, 0.0)},
    "coder-0.5b": {"eagle3": (1.9, 0.0)},
}


def judge_coder(part: str) -> Callable[[Path, bool], Finding]:
    """What benchmarks/gpu/coder.py decoded, on all four sets and on HumanEval; no text may differ."""

    def judge(out: Path, rehearsal: bool) -> Finding:
        folder = out / part
        reports = {drafter_name(each): each for each in reports_of(folder / "report", graphs=not rehearsal)}
        reports_of(folder / "report-same-bits", graphs=not rehearsal, exact=True)
        shown, met = list[str](), list[bool]()
        for name, report in reports.items():
            code = report["kinds"]["humaneval"]
            speed, tau = code["speedup"], code["mean_accepted_length"]
            shown.append(f"{name}: {told(report)}, HumanEval {speed or 0:.2f} × at τ {tau:.2f}")
            if goal := CODER_GOALS[part].get(name):
                met.append((speed or 0) >= goal[0] and tau >= goal[1])
        data = json_object(folder / "data.json")
        shown.append(f"{data['answer_tokens']:,} answer tokens")
        return Finding(
            "; ".join(shown), all(met) if met else None, missing=missing(len(reports), 3 if rehearsal else 5)
        )

    return judge


def judge_streams(out: Path, rehearsal: bool) -> Finding:
    """Two merged SSMs, with a stream for the second and without; the texts and trees are the same."""
    folder = out / "ssm-streams"
    reports = [report for name in ("two", "one") for report in reports_of(folder / name, graphs=not rehearsal)]
    if len(reports) < 2:
        return Finding("; ".join(map(told, reports)), missing=missing(len(reports), 2))
    two, one = (report["tokens_per_second"] for report in reports)
    return Finding(
        f"two SSMs, τ {reports[0]['mean_accepted_length']:.2f}: {two:,.0f} tokens/s at the same time, {one:,.0f} one "
        f"after the other ({two / one:.2f} ×)",
        two > one,
    )


def judge_eagle_decode(out: Path, rehearsal: bool) -> Finding:
    """The calibrated fixed tree and a dynamic one, each its own text, and steps in CUDA graphs."""
    shown = [
        f"{tree} tree: {told(report)}"
        for tree in ("fixed", "dynamic")
        for report in reports_of(out / "eagle-decode" / tree, graphs=not rehearsal)
    ]
    return Finding("; ".join(shown), missing=missing(len(shown), 2))


def judge_serving(out: Path, rehearsal: bool) -> Finding:
    """Requests that arrive over time: where speculation pays, by number of rows."""
    report = json_object(out / "serving" / "serving.json")
    for name, texts in report["texts"].items():
        if texts["mismatches"]:
            raise ValueError(f"{name}: {texts['mismatches']} mismatches")
    for name, execution in report["execution"].items():
        if not rehearsal and "cuda graph" not in execution:
            raise ValueError(f"{name}: steps ran {execution}")
    figures = len(report["batches"]) + bool(report["texts"])  # the comparison of all texts comes last
    sentences = [sentence for batch in report["batches"] for sentence in batch["sentences"]]
    return Finding("; ".join(sentences), missing=missing(figures, report["planned"] + 1))


def judge_budget(out: Path, rehearsal: bool) -> Finding:
    """Trees of the sizes that steps choose are never slower than plain decoding, over all kinds of text."""
    report = json_object(out / "budget" / "budget.json")
    rows, shown, lowest = [row for row in report["rows"] if row["kind"] == "all"], [], []
    for row in rows:
        if not rehearsal and "cuda graph" not in row["execution"]:
            raise ValueError(f"{row['drafter']}: steps ran {row['execution']}")
        speed = row["speeds"]["budget"]
        lowest.append((speed["interval"] or [speed["speedup"]])[0])
        how = f"T {row['temperature']:g}, " if row["temperature"] else ""
        shown.append(f"{how}{row['batch']} rows: {speed['speedup']:.2f} ×, {row['nodes']:.1f} nodes")
    return Finding("; ".join(shown), min(lowest, default=0.0) >= 0.97, missing=missing(len(rows), report["planned"]))


def judge_magicdec(out: Path, rehearsal: bool) -> Finding:
    """Speed-ups of self-speculation, the best setting of each batch size and context, beside the predicted ones."""
    report = json_object(out / "magicdec" / "compressed.json")
    best: dict[tuple[int, int], dict[str, Any]] = {}
    for row in report["rows"]:
        if not rehearsal and "cuda graph" not in row["execution"]:
            raise ValueError(f"{row['selector']}:{row['entries']}: steps ran {row['execution']}")
        key = row["batch"], row["context"]
        if key not in best or row["speedup"] > best[key]["speedup"]:
            best[key] = row
    shown = [
        f"{rows} × {context}: {row['speedup']:.2f} × ({row['predicted']:.2f} predicted)"
        for (rows, context), row in best.items()
    ]
    return Finding("; ".join(shown), missing="" if shown else "nothing was measured")


def judge_unroll(out: Path, rehearsal: bool) -> Finding:
    """Seven unrolled steps take no longer than with dense attention, and less memory."""
    report = json_object(out / "eagle-unroll" / "unroll.json")
    shown: list[str] = []
    met = False
    for row in report["results"]:
        ours, dense = (row["peak_memory_bytes"][form] for form in ("draftsmith", "dense"))
        milliseconds = row["seconds"]["draftsmith"] * 1e3
        shown.append(f"{row['steps']} steps: {milliseconds:.1f} ms = {row['ratio']:.2f} × dense attention's")
        if ours:  # a CPU's is not known
            shown[-1] += f", {ours / 1e9:.1f} GB instead of {dense / 1e9:.1f}"
            met = met or (row["steps"] == 7 and row["ratio"] <= NOISE and ours < dense)
    return Finding("; ".join(shown), met, missing=missing(len(shown), len(report["shape"]["steps"])))


def judge_products(out: Path, rehearsal: bool) -> Finding:
    """The chosen form of each product beside torch.mm and the bandwidth, by number of rows."""
    report = kernel_rows(out / "products" / "kernels.json", rehearsal)
    if rehearsal:
        return interpreted(report)
    shown: list[str] = []
    for count in sorted({row["shape"]["M"] for row in report["rows"]}):
        shares, gains = [], []
        for ways in by_shape(row for row in report["rows"] if row["shape"]["M"] == count).values():
            # One whose parts are not added up is no product yet: the kernel after it adds them.
            best = min(row["median_us"] for way, row in ways.items() if not way.startswith("parts: "))
            shares.append(ways["torch.mm"]["moved"] / report["bandwidth"] / best * 1e6)
            gains.append(ways["torch.mm"]["median_us"] / best)
        shown.append(
            f"{count} rows: {min(shares):.0%}–{max(shares):.0%} of the bandwidth, {min(gains):.2f}–{max(gains):.2f} × "
            "torch.mm"
        )
    return Finding("; ".join(shown), None, {"rows": report["rows"]}, missing_shapes(report))


def judge_shortlist(out: Path, rehearsal: bool) -> Finding:
    """A fifth of an LM head's rows at its goal, and beside the full head."""
    files = [out / "shortlist" / f"{width}.json" for width in ("4096", "576")]
    reports = [kernel_rows(file, rehearsal, 0.05) for file in files if file.exists()]
    lost = missing_shapes(*reports) or missing(len(reports), 2)
    if rehearsal:
        most = max(row["difference"] for report in reports for row in report["rows"])
        return Finding(f"interpreted, differences at most {most:.0e}", missing=lost)
    shown: list[str] = []
    below: list[str] = []
    for report in reports:
        for ways in by_shape(report["rows"]).values():
            ours = ways.get("shortlist")
            if ours is not None and "full head" in ways and ours["way"] == "shortlist":  # the logits alone
                shape = ours["shape"]
                name = f"{shape['V']} × {shape['d']}, {shape['n']} nodes"
                what, share = judged_share(report, ours, below, name, SHORTLIST)
                shown.append(f"{name}: {ours['median_us'] / ways['full head']['median_us']:.2f} × full")
                shown[-1] += f", {share:.0%} of the {LIMITS[what]}" if share else ""
    fields = ("way", "shape", "median_us")
    medians = [{name: row[name] for name in fields} for report in reports for row in report["rows"]]
    return Finding("; ".join(shown), not below, {"medians": medians, "below": below}, lost)


def judge_dynaspec(out: Path, rehearsal: bool) -> Finding:
    """Shortlists beside the drafter that they were made for, and with the router on the drafter's own stream: each its
    own text, and steps in CUDA graphs. Speeds within 3 %, to which decode.py knows them, count as equal."""
    folder = model_folder(out, "dynaspec", rehearsal)
    facts = json_object(folder / "provenance.json")
    shown = [f"simulated τ {facts['simulated_tau']:.2f}, with the whole LM head {facts['whole_simulated_tau']:.2f}"]
    both = {report["drafter"]: report for report in reports_of(out / "dynaspec" / "two", graphs=not rehearsal)}
    with_two = both.pop(str(folder), None)
    with_one = next(iter(reports_of(out / "dynaspec" / "one", graphs=not rehearsal)), None)
    named = {
        "shortlists": with_two,
        "whole LM head": next(iter(both.values()), None),
        "shortlists on one stream": with_one,
    }
    shown += [f"{name}: {told(report)}" for name, report in named.items() if report]
    met = None
    if with_two and with_one:
        two, one = with_two["tokens_per_second"], with_one["tokens_per_second"]
        shown.append(f"{two:,.0f} tokens/s with a stream for the router, {one:,.0f} without ({two / one:.2f} ×)")
        met = two >= 0.97 * one
    return Finding("; ".join(shown), met, missing=missing(len(shown) - 1 - (met is not None), 3))


def judge_training(out: Path, rehearsal: bool) -> Finding:
    report = json_object(out / "train-step" / "train.json")
    shown = [
        f"{r['stage']}: {r['of_matmul_rate']:.0%} of the matrix rate, {r['hours_per_70M_tokens']:.2f} h per 70 M tokens"
        + (f", {r['peak_memory_bytes'] / 1e9:.0f} GB" if r["peak_memory_bytes"] else "")
        for r in report["results"]
    ]
    met = all(r["of_matmul_rate"] >= TRAINING[r["stage"]] for r in report["results"])
    return Finding("; ".join(shown), met, missing=missing(len(shown), len(report["shape"]["stages"])))


def model_folder(out: Path, name: str, rehearsal: bool) -> Path:
    """The run ``target``, ``drafter``, ``ssms``, ``eagle`` or ``dynaspec``; --tiny adds to its name."""
    return out / "models" / (f"{name}-tiny" if rehearsal else name)
