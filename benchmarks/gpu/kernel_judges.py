"""Judges of the parts of `make gpu` that time kernels, steps of decoding and training: goals of time.

They are computed (benchmarks/floors.py) from the bytes and operations of each row and the limits of the
device that were measured in the same run; a row is judged where its floor is above 30 µs.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from draftsmith.benchmarks import floors
from draftsmith.benchmarks.floors import Work
from draftsmith.benchmarks.gpu.judges import Finding, missing
from draftsmith.common.files import json_object

OTHERS = ("SDPA", "flex_attention", "flashinfer")  # ways of attention in kernel_times.py, beside ours
# Shares of the bandwidth and of the matrix rate that goals ask for.
STEP = {"bytes": 0.87, "operations": 0.6}
ATTENTION = {"bytes": 0.85, "operations": 0.6}
SHORTLIST = {"bytes": 0.8, "operations": 0.6}
TRAINING = {"medusa-1": 0.5, "medusa-2": 0.45}  # of the matrix rate
EAGLE_TRAINING = {"rows of 2,048": 0.45, "rows of 8,192": 0.35}
KERNELS = (15, 40)  # of a step: of each layer, around the layers
NOISE = 1.02  # two medians within this factor count as equal
LIMITS = {"bytes": "bandwidth", "operations": "matrix rate"}


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
    shown, met = list[str](), list[bool]()
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
    below, slower = list[str](), list[str]()
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


def interpreted(*reports: dict[str, Any]) -> Finding:
    differences = [row["difference"] for report in reports for row in report["rows"]]
    value = f"interpreted, {len(differences)} rows, differences at most {max(differences):.0e}"
    return Finding(value, missing=missing_shapes(*reports))


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
        return interpreted(*reports)
    shown, below = list[str](), list[str]()
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


def judge_unroll(out: Path, rehearsal: bool) -> Finding:
    """Seven unrolled steps take no longer than with dense attention, and less memory."""
    report = json_object(out / "eagle-unroll" / "unroll.json")
    shown, met = list[str](), False
    for row in report["results"]:
        ours, dense = (row["peak_memory_bytes"][form] for form in ("draftsmith", "dense"))
        milliseconds = row["seconds"]["draftsmith"] * 1e3
        shown.append(f"{row['steps']} steps: {milliseconds:.1f} ms = {row['ratio']:.2f} × dense attention's")
        if ours:  # a CPU's is not known
            shown[-1] += f", {ours / 1e9:.1f} GB instead of {dense / 1e9:.1f}"
            met = met or (row["steps"] == 7 and row["ratio"] <= NOISE and ours < dense)
    return Finding("; ".join(shown), met, missing=missing(len(shown), len(report["shape"]["steps"])))


def judge_training(out: Path, rehearsal: bool) -> Finding:
    report = json_object(out / "train-step" / "train.json")
    shown = [
        f"{r['stage']}: {r['of_matmul_rate']:.0%} of the matrix rate, {r['hours_per_70M_tokens']:.2f} h per 70 M tokens"
        + (f", {r['peak_memory_bytes'] / 1e9:.0f} GB" if r["peak_memory_bytes"] else "")
        for r in report["results"]
    ]
    met = all(r["of_matmul_rate"] >= TRAINING[r["stage"]] for r in report["results"])
    return Finding("; ".join(shown), met, missing=missing(len(shown), len(report["shape"]["stages"])))


def judge_eagle_training(out: Path, rehearsal: bool) -> Finding:
    """A training step of EAGLE-3 at its share of the matrix rate, at short rows and at long ones."""
    shown, met = list[str](), True
    for (name, goal), file in zip(EAGLE_TRAINING.items(), ("short", "long"), strict=True):
        if (path := out / "eagle-step" / f"{file}.json").exists():
            for row in json_object(path)["results"]:
                memory = f", {row['peak_memory_bytes'] / 1e9:.0f} GB" if row["peak_memory_bytes"] else ""
                shown.append(f"{name}: {row['of_matmul_rate']:.0%} of the matrix rate{memory}")
                met = met and row["of_matmul_rate"] >= goal
    return Finding("; ".join(shown), met, missing=missing(len(shown), len(EAGLE_TRAINING)))
