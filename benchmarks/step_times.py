"""Measure what a decoding step costs for the shape of a target, with trees of several sizes.

    python benchmarks/step_times.py --shape tiny-lm --device cpu --contexts 128 --nodes 1 4 12 16 --threads 1
    python benchmarks/step_times.py --shape llama3-8b --batches 1 8 --contexts 1024 16384 --nodes 1 4 16 64
    python benchmarks/step_times.py --shape llama2-7b --projection shared own --out runs/bench/step.json
    python benchmarks/step_times.py --target models/tiny-lm --nodes 1 16
    python benchmarks/step_times.py --shape llama3-8b --nodes 64 --graphs --profile runs/bench/kernels.txt

The weights of a shape are random, the drafter is a set of random Medusa heads, and the cache holds random numbers:
nothing is downloaded or prefilled. The state is restored before each timed step, so that all see the same context.

steps    the median time of a whole step as the engine launches it (on a GPU in a CUDA graph), its 20 % and 80 %
         quantiles, and its ratio to the plain step (one node), which is always measured. «of bound»: the lower bound of
         this device over the median: reading the weights of the target, its LM head (heads that share it read it
         again), the draft heads and the prefix's K/V once at the measured copy bandwidth, or the products at the rate
         of a large one, whichever takes longer.
phases   medians of instrumented steps. On a GPU these are eager and include the host's time to launch kernels.
         «outside»: the share outside the target's forward pass and LM head (CPU). Random heads are never right, so a
         commit that moves nodes is timed separately: «moving».

Shape letters: B rows, L cached tokens of each, N nodes, A depth of the deepest node + 1, d hidden width.
"""

import argparse
import functools
import itertools
import timeit
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from draftsmith.benchmarks.options import SHAPES, check_options, machine_options
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.models.files.locate import known_folder
from draftsmith.models.options import DECODERS, choose_device, decoder_option

PHASES = ("draft", "verify", "accept", "commit", "other")
TURN = 5  # steps in a row before the next tree has its turn


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", nargs="+", metavar="NAME", help=f"some of: {', '.join(SHAPES)}; random weights")
    what.add_argument("--target", metavar="FOLDER", help="a stored model instead")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16, 64], help="of the tree, root included (N)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="rows (B)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024], help="cached tokens of each row (L)")
    parser.add_argument("--projection", nargs="+", choices=["shared", "own"], default=["shared"], help="of the heads")
    parser.add_argument("--heads", type=int, default=5, help="draft heads; no tree is deeper (default 5)")
    parser.add_argument("--repeat", type=int, default=50, help="timed steps (default 50)")
    decoder_option(parser)
    parser.add_argument("--graphs", action="store_true", help="fail unless every step was replayed from a CUDA graph")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE.txt",
        help="write the kernels of one step of each tree (a graph replay on a GPU, else an eager step), by time",
    )
    machine_options(parser, "of the weights (those of a --shape count as stored in bfloat16)")
    return parser


if __name__ == "__main__":
    before_imports(parser(), lambda args: args.target and known_folder(args.target))

import torch
from torch.profiler import ProfilerActivity, profile
from transformers.cache_utils import CacheLayerMixin

from draftsmith.benchmarks import kernel_timing
from draftsmith.benchmarks.floors import Device
from draftsmith.benchmarks.kernel_timing import quantiles
from draftsmith.benchmarks.shapes import (
    check_fits,
    config_of,
    dtype_of_shape,
    grow_tree,
    random_heads,
    random_target,
    release,
    totals,
    works_of_step,
)
from draftsmith.benchmarks.tables import cell, facts_of, picture, print_table, table_of, write_report
from draftsmith.common.files import check_file, write_json, write_text
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.protocol import PlainDrafter
from draftsmith.inference.engine.runner import ATTENTION
from draftsmith.inference.engine.step import ReadCommitted, Step, capacity_for
from draftsmith.inference.measure.timing import PhaseTimes
from draftsmith.inference.verify.tree import MAX_NODES, Topology
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.precision import matmul_rate, say
from draftsmith.models.target import Target, load_target


def measure_device(device: torch.device, dtype: torch.dtype, bytes_read: int) -> Device:
    """Measured limits of the device. A CPU copies as many bytes as a step reads, since some stay in its caches."""
    if device.type == "cuda":
        return kernel_timing.measure_device(dtype)
    source = torch.ones(min(max(bytes_read // 2, 1 << 16), 1 << 28), dtype=torch.uint8)
    into = torch.empty_like(source)
    copy = min(timeit.repeat(lambda: into.copy_(source), number=1, repeat=8))
    return Device(2 * source.numel() / copy, matmul_rate(device, dtype))


class Case:
    """A step that is repeated from the same state: ``batch`` rows of ``context`` cached tokens each.

    steps, replays: number of steps launched so far, and of those that were replayed from a CUDA graph.

    Raises:
        MemoryError: the cache does not fit.
    """

    def __init__(
        self,
        target: Target,
        heads: MedusaHeads | None,
        topology: Topology,
        batch: int,
        context: int,
        lean: bool | None = None,
    ) -> None:
        self.heads, self.topology, self.batch, self.context = heads, topology, batch, context
        self.device = target.device
        drafter = PlainDrafter(self.device) if heads is None else MedusaDrafter(heads, topology, target)
        capacity = capacity_for(context, drafter)
        slot = sum(2 * kv_heads * width for kv_heads, width in target.kv_shapes) * target.dtype.itemsize
        check_fits(batch * capacity * slot, self.device)
        static = self.device.type == "cuda" and not target.spread
        self.step = step = Step(target, drafter, "greedy", batch, capacity, static=static, lean=lean)
        for layer in cast(list[CacheLayerMixin], step.cache.layers):
            for part in (layer.keys, layer.values):
                assert part is not None
                part.normal_()
        self.root = torch.randint(target.vocab_size, (batch,), device=self.device)
        self.feature = torch.randn_like(step.state.feature)  # [B, d]
        step.active.fill_(True)
        self.steps = self.replays = 0

    def reset(self) -> None:
        """Restore the state before the first step; a step changes the cache only behind the context."""
        self.step.cache.lengths.fill_(self.context)
        self.step.state.root.copy_(self.root)
        self.step.state.feature.copy_(self.feature)

    def launch(self) -> ReadCommitted:
        """Launch a step and count it; returns what ``Step.launch`` returns."""
        read = self.step.launch()
        self.steps += 1
        self.replays += not self.step.eager  # a capture that fails says so there, then or at any later step
        return read

    def check_graphs(self) -> None:
        """Raises:
        ValueError: a step was not replayed from a CUDA graph.
        """
        if self.replays < self.steps:
            raise ValueError(
                f"--graphs: {self.replays} of {self.steps} steps with {self.topology.num_nodes} nodes were replayed "
                f"from a CUDA graph ({self.step.execution}); leave out --graphs to measure them anyway"
            )

    def take(self, count: int) -> list[float]:
        """Seconds of each of ``count`` steps. On a GPU the host launches ahead, as the engine does."""
        if self.device.type != "cuda":
            return timeit.repeat(lambda: self.launch()(), self.reset, number=1, repeat=count)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            self.reset()
            start.record()
            self.launch()
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) / 1e3 for start, end in events]

    def phases(self, count: int) -> dict[str, float]:
        """The median seconds of each phase."""
        steps: list[dict[str, float]] = []
        for _ in range(count + 1):
            self.reset()
            times = PhaseTimes(self.device)
            self.step.launch(times)()
            times("other", None, None)
            steps.append(times.seconds)
        return {phase: quantiles([each[phase] for each in steps[1:]])[0] for phase in PHASES}

    def profile(self) -> tuple[int, float, str]:
        """The profile of one step.

        Returns:
            Kernels and copies launched (on a CPU: operations), their seconds in all, and a table of them by time.

        Raises:
            ValueError: the profiler has seen no kernels.
        """
        cuda = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        for _ in range(2):  # the first one includes the profiler's own start
            self.reset()
            with profile(activities=activities) as profiler:
                self.launch()()
                if cuda:
                    torch.cuda.synchronize(self.device)
        key = f"self_{'device' if cuda else 'cpu'}_time_total"
        averages = profiler.key_averages()
        used = [each for each in averages if not cuda or each.device_type.name == "CUDA"]
        if not used:
            raise ValueError(
                "--profile: the profiler has seen no kernels; this process may not be allowed to trace them"
            )
        table = averages.table(sort_by=key, row_limit=60, max_name_column_width=90)
        return sum(each.count for each in used), sum(getattr(each, key) for each in used) / 1e6, table

    def moving_commit(self, count: int) -> tuple[int, float | None]:
        """The largest number of nodes that committing a path of this tree moves, and its median seconds."""
        paths = [[0]]
        for node, above in enumerate(self.topology.parents[1:], 1):
            paths.append([*paths[above], node])
        moves = [sum(node != place for place, node in enumerate(path)) for path in paths]
        node = moves.index(max(moves))
        if not moves[node]:  # a chain stays where it is
            return 0, None
        path = torch.tensor(paths[node], device=self.device).repeat(self.batch, 1)  # [B, A]
        length = torch.full((self.batch,), len(paths[node]) - 1, device=self.device)
        self.reset()
        call = functools.partial(self.step.cache.commit, path, length)
        if self.device.type == "cuda":
            return moves[node], kernel_timing.seconds([call])[0]
        return moves[node], quantiles(timeit.repeat(call, number=1, repeat=count))[0]


def take_turns(cases: Sequence[Case], repeat: int) -> list[list[float]]:
    """Seconds of ``repeat`` steps of each case, a few of each in turn, so that other load affects all of them alike."""
    times: list[list[float]] = [[] for _ in cases]
    for case in cases:
        case.take(3)  # compiles, captures and allocates
    turn = TURN if len(cases) > 1 else repeat
    for done in range(0, repeat, turn):
        for case, seconds in zip(cases, times, strict=True):
            seconds += case.take(min(turn, repeat - done))
    return times


def make_row(target: Target, case: Case, times: Sequence[float], best: Device) -> dict[str, Any]:
    """The measurements of a case as a row of the JSON file; all times in seconds."""
    median, low, high = quantiles(times)
    works = works_of_step(target, case.heads, case.topology, case.batch, case.context)
    moved_bytes, flops = totals(works)
    by_bytes, by_flops = moved_bytes / best.bandwidth, flops / best.matmul_rate
    bound, phases = max(by_bytes, by_flops), case.phases(len(times))
    moved, commit = case.moving_commit(len(times))
    # The phases of a GPU's eager steps are not those of a CUDA graph.
    outside = 1 - phases["verify"] / sum(phases.values()) if case.device.type == "cpu" else None
    return {
        "shape": target.name,
        "projection": None if case.heads is None else case.heads.config.projection,
        "batch": case.batch,
        "context": case.context,
        "nodes": case.topology.num_nodes,
        "depth": case.topology.max_depth,
        "execution": case.step.execution,
        "steps": case.steps,
        "graph_replays": case.replays,
        "median": median,
        "low": low,
        "high": high,
        "ratio": None,
        "work": [asdict(work) for work in works],
        "bytes": moved_bytes,
        "flops": flops,
        "bound": bound,
        "bound_by": "bytes" if by_bytes > by_flops else "flops",
        "of_bound": bound / median,
        "bytes_per_second": moved_bytes / median,
        "flops_per_second": flops / median,
        "seconds": phases,
        "outside_target": outside,
        "moving_commit": {"nodes": moved, "seconds": commit},
    }


def measure_cases(
    target: Target, cases: Sequence[Case], best: Device, args: argparse.Namespace, tables: list[str]
) -> list[dict[str, Any]]:
    """The rows of some cases, timed in turn; with ``--profile``, their profiles are appended to ``tables``."""
    times = take_turns(cases, args.repeat)
    for case in cases if args.graphs else ():
        case.check_graphs()
    rows = [make_row(target, case, seconds, best) for case, seconds in zip(cases, times, strict=True)]
    for case, row in zip(cases, rows, strict=True) if args.profile else ():
        kernels, seconds, table = case.profile()
        row["profile"] = {"kernels": kernels, "seconds": seconds}
        what = "graph replay" if case.replays == case.steps else "eager step"
        where = f"batch {case.batch}, context {case.context}, {row['nodes']} nodes"
        title = f"{target.name}, {case.step.execution}, {where}: one {what}, {kernels} kernels"
        tables.append(f"{title}, {seconds * 1e3:.3f} ms in them\n\n{table}\n")
        write_text(args.profile, "\n".join(tables))
    return rows


def measure_target(
    target: Target, best: Device, args: argparse.Namespace, facts: dict[str, Any], tables: list[str]
) -> None:
    """Append the rows of every combination on a target; one that does not fit into memory is left out with one line.
    The file is written whenever there are new rows, so that a command that is killed keeps what it measured."""
    heads = functools.cache(lambda projection: projection and random_heads(target, args.heads, projection))
    trees = [(None, 1), *((p, n) for p in args.projection for n in sorted(set(args.nodes)) if n > 1)]
    # One by one on a GPU, whose memory is limited and whose times vary little.
    groups = [[tree] for tree in trees] if target.device.type == "cuda" else [trees]
    for batch, context in itertools.product(args.batches, args.contexts):
        measured: list[dict[str, Any]] = []
        for group in groups:
            what = f"{target.name}, batch {batch}, context {context}, {' '.join(str(n) for _, n in group)} nodes"
            release()
            try:
                with console.status(f"measuring {what}"):
                    options = batch, context, DECODERS[args.decoder]
                    made = [(heads(p), grow_tree(n, args.heads)) for p, n in group]
                    rows = measure_cases(target, [Case(target, *each, *options) for each in made], best, args, tables)
            except (MemoryError, torch.OutOfMemoryError) as error:
                left_out(what, error)
                rows = []
            else:
                console.print(f"  measured {what}", markup=False, soft_wrap=True)
            measured += rows
            facts["rows"] += rows
            plain = next((row["median"] for row in measured if row["nodes"] == 1), None)
            for row in measured:
                row["ratio"] = row["median"] / plain if plain else None
            if args.out:
                write_json(args.out, facts)


def left_out(what: str, error: Exception) -> None:
    console.print(f"left out: {what}: {str(error).splitlines()[0]}", markup=False, soft_wrap=True)


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    """Steps, then phases; times in milliseconds."""
    ms = lambda seconds: "–" if seconds is None else f"{seconds * 1e3:.2f}"  # noqa: E731
    share = lambda part: "–" if part is None else f"{part:.0%}"  # noqa: E731
    tree = ("heads", "B", "L", "N")
    steps = table_of(*tree, "ms", "20–80 %", "× plain", "of bound", "GB/s", "GFLOP/s", left=0)
    phases = table_of(*tree, *PHASES, "outside", "moving", left=0)
    for r in rows:
        place = (r["projection"] or "–", *(str(r[key]) for key in ("batch", "context", "nodes")))
        rates = (f"{r[f'{each}_per_second'] / 1e9:,.1f}" for each in ("bytes", "flops"))
        spread = f"{ms(r['low'])}–{ms(r['high'])}"
        steps.add_row(*place, ms(r["median"]), spread, cell(r["ratio"]), share(r["of_bound"]), *rates)
        moving = ms(r["moving_commit"]["seconds"])
        phases.add_row(*place, *(ms(r["seconds"][phase]) for phase in PHASES), share(r["outside_target"]), moving)
    print_table(steps, f"{rows[0]['shape']}: steps, ms")
    print_table(phases, f"{rows[0]['shape']}: phases, ms")


def plot(facts: dict[str, Any], path: Path) -> None:
    """Plot by size of the tree: a step's time over the plain step's, and the device's bound over the step's time."""
    rows = facts["rows"]
    trees = [row for row in rows if row["projection"]] or rows
    with picture(path, 12, 4.6, panels=2) as panels:
        for key in dict.fromkeys((r["shape"], r["batch"], r["context"], r["projection"]) for r in trees):
            points = [r for r in rows if (r["shape"], r["batch"], r["context"]) == key[:3]]
            points = [r for r in points if r["projection"] in (None, key[3])]
            label = "{}, batch {}, context {}, {}".format(*key)
            for axes, value in zip(panels, ("ratio", "of_bound"), strict=True):
                axes.plot([r["nodes"] for r in points], [r[value] for r in points], marker="o", label=label)
        for axes, name in zip(panels, ("time of a step over the plain step's", "of bound"), strict=True):
            axes.set(xlabel="nodes of the tree", title=name, ylim=(0, None))
        panels[0].legend(fontsize=8)
        panels[0].figure.suptitle(f"{facts['device']}, {facts['dtype']}", fontsize=10)


def main() -> None:
    args = parser().parse_intermixed_args()
    check_options(args, "nodes", "batches", "contexts", "heads", "repeat")
    if max(args.nodes) > MAX_NODES:
        raise ValueError(f"--nodes {max(args.nodes)}: must be at most {MAX_NODES}")
    for name in args.shape or []:
        config_of(name)
    device = torch.device(choose_device(args.device))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: unknown; use cpu, cuda or cuda:N")
    # Impossible trees are refused before anything is loaded.
    positions = max(args.contexts) + max(grow_tree(nodes, args.heads).max_depth for nodes in args.nodes) + 1
    check_file("--profile", args.profile, ".txt")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    name = args.dtype
    if args.shape:
        name = dtype_of_shape(args.dtype, device)
    trees = 1 + len(args.projection) * len(set(args.nodes) - {1})
    planned = len(args.shape or [args.target]) * len(args.batches) * len(args.contexts) * trees  # rows
    facts = facts_of(__file__, device) | {"dtype": name, "draft_heads": args.heads, "repeat": args.repeat}
    facts |= {"limits": {}, "rows": [], "planned": planned}
    tables: list[str] = []
    for shape in args.shape or [args.target]:
        release()
        try:
            if args.shape:
                target = random_target(shape, positions, getattr(torch, name), device)
            else:
                target = load_target(shape, dtype=name, device=str(device), say=say)
                facts["dtype"] = name = str(target.dtype).removeprefix("torch.")
        except (MemoryError, torch.OutOfMemoryError) as error:
            left_out(shape, error)
            continue
        if positions > target.context:
            raise ValueError(
                f"--contexts {max(args.contexts)}: with the tree this exceeds the target's context of "
                f"{target.context}; lower it"
            )
        with torch.inference_mode(), target.attention(ATTENTION), torch.cuda.device_of(target.lm_head.weight):
            bytes_read = totals(works_of_step(target, None, Topology(()), 1, min(args.contexts)))[0]
            best = measure_device(device, getattr(torch, name), bytes_read)
            facts["limits"][target.name], before = asdict(best), len(facts["rows"])
            measure_target(target, best, args, facts, tables)
        del target  # its memory is the next one's
        if rows := facts["rows"][before:]:
            rates = f"moves {best.bandwidth / 1e9:,.1f} GB/s, multiplies {best.matmul_rate / 1e9:,.1f} GFLOP/s"
            executions = ", ".join(sorted({row["execution"] for row in rows}))
            console.print(f"{facts['device']}, {name}: {rates}; steps: {executions}", markup=False, soft_wrap=True)
            print_tables(rows)
    if not facts["rows"]:
        raise ValueError("nothing fits into memory; take smaller --batches, --contexts or another --dtype")
    if args.out:
        write_report(args.out, facts, plot)  # with the dtype of a stored target


if __name__ == "__main__":
    run_command(main)
