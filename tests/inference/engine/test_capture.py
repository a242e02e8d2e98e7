"""What a CUDA graph's capture needs, shown without a GPU: no garbage collection, products measured before it in a fixed
order, and steps that a graph can hold (``CaptureSimulation`` of lossless_suite.py)."""

import ast
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import untrained_block
from eagles import untrained
from lossless_suite import CaptureSimulation, caches, simulate_capture
from tiny_models import PATHS, RATES, SPARSE, noisy_heads, random_shortlists

from draftsmith.common.command import no_collection
from draftsmith.inference.drafters.dflash import DFlashDrafter
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.engine import runner
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.protocol import Drafter, PlainDrafter
from draftsmith.inference.engine.runner import engine_attention, find_lean
from draftsmith.inference.engine.static_budget import StepSize
from draftsmith.inference.engine.step import Step
from draftsmith.inference.measure.step_costs import StepClock
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import Topology
from draftsmith.inference.verify.verify import MODES, Mode
from draftsmith.kernels import cpu, linear
from draftsmith.models import lean, lean_from, medusa
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.shortlist import ShortlistConfig, ShortlistHead
from draftsmith.models.target import Target

ROOT = Path(__file__).parents[3]


def test_no_collection():
    class Cycle:
        def __init__(self):
            self.own = self

        def __del__(self):
            freed.append(1)

    freed: list[int] = []
    found = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with no_collection():
            for _ in range(50):
                Cycle()
            assert not freed and not gc.isenabled()
        assert gc.isenabled()
        Cycle()
        _ = [[] for _ in range(10)]
        assert len(freed) >= 50  # the latest object may be collected later
        gc.disable()
        with no_collection():
            pass
        assert not gc.isenabled(), "stays off where it was off"
    finally:
        gc.enable()
        gc.set_threshold(*found)


def captures(tree: ast.AST, inside: bool = False) -> Iterator[tuple[int, bool]]:
    """Line of each capture of a CUDA graph, and whether it is inside ``no_collection()``."""
    if isinstance(tree, ast.With):
        for item in tree.items:
            yield from captures(item, inside)
            inside |= ast.unparse(item.context_expr) == "no_collection()"
        for statement in tree.body:
            yield from captures(statement, inside)
        return
    names = ("cuda.graph", ".capture_begin", "graphed_callables")
    if isinstance(tree, ast.Call) and ast.unparse(tree.func).endswith(names):
        yield tree.lineno, inside
    for child in ast.iter_child_nodes(tree):
        yield from captures(child, inside)


def test_every_capture_is_without_collections():
    files = [Path(name) for name in ("kernels", "models", "inference", "train", "benchmarks", "tests")]
    files = [file for folder in files for file in (ROOT / folder).rglob("*.py")]
    found = {
        (str(file.relative_to(ROOT)), line): inside
        for file in files
        if "graph" in (text := file.read_text(encoding="utf-8"))
        for line, inside in captures(ast.parse(text))
    }
    known = {"kernels/measured.py", "benchmarks/kernel_timing.py", "inference/engine/step.py"}
    assert {file for file, _ in found} >= known
    assert all(found.values()), [where for where, inside in found.items() if not inside]
    assert [*captures(ast.parse("with torch.cuda.graph(g), no_collection():\n    pass"))] == [(1, False)]


@pytest.fixture(autouse=True)
def no_kernels_of_a_cpu(monkeypatch):
    """The operations of steps, one by one, as on a GPU."""
    monkeypatch.setattr(cpu, "runs", lambda tensor: False)


def test_products_are_measured_for_steps_alone_and_in_order(make_target, monkeypatch):
    """Everything that asks for a product's form, from the target's load to its first steps, by fused layers as on a GPU
    (on their definitions)."""
    for module in (lean_from, runner):
        monkeypatch.setattr(module, "runs_kernel", lambda tensor, width: True)
    asked: list[tuple[int, bool]] = []
    choose = linear.choose

    def recorded(rows, matrix, partial=False):
        if tuple(matrix.shape) != (32, 32):  # the heads' own products have the batch's rows at every size
            asked.append((rows, not linear._measuring_is_forbidden(matrix)))
        return choose(rows, matrix, partial)

    for module in (linear, lean, medusa):
        monkeypatch.setattr(module, "choose", recorded)
    target = make_target("llama")
    assert not any(measured for _, measured in asked), "the check of a target is no step"
    heads = MedusaHeads.for_target(target, 3, 1, "shared")
    assert find_lean(target, None).not_fused == ""
    asked.clear()
    for rows in (1, 2):
        drafter = MedusaDrafter(heads, Topology(PATHS), target, RATES)
        drafter.clock = StepClock()
        step = Step(target, drafter, "greedy", rows, 96, static=True)
        with torch.inference_mode(), engine_attention([target]):
            step.reset()
            step.begin(range(0, rows), [[5, 7, 11, 13, 2]] * rows, [Sampling()] * rows)
            assert asked and not any(measured for _, measured in asked), "a prompt is no step"
            asked.clear()
            step.choice = StepSize(12)
            step.warm_up()
            assert step.choice == StepSize(12)
        order = list(dict.fromkeys(asked))
        of_heads = (3 * rows, True)  # three heads on the shared LM head, from the first tree that has drafts
        assert [each for each in order if each != of_heads] == [(nodes * rows, True) for nodes in (1, 8, 12)]
        asked.clear()
    SpeculativeDecoder(target).generate([[5, 7, 11]], 4)
    assert {rows for rows, measured in asked if measured} == {1}


def shortlist(target: Target, kind: str) -> ShortlistHead:
    """Lists of 12, 9 and 8 tokens of the whole vocabulary."""
    if kind == "fr_spec":
        return random_shortlists(ShortlistConfig(kind, 61, (12, 9, 8)))
    if kind == "low_rank":
        return random_shortlists(ShortlistConfig(kind, 61, (12, 9, 8), rank=4, feature_size=32))
    sizes = {"num_clusters": 8, "router_width": 8, "embedding_size": 32, "feature_size": 32}
    config = ShortlistConfig(kind, 61, (12, 9, 8), clusters=(3, 2, 2), **sizes)
    return random_shortlists(config, [0, 3, 9, 14, 20, 31, 44, 50, 61])


def heads(target: Target, **options: Any) -> MedusaDrafter:
    return MedusaDrafter(noisy_heads(target, 0.1, "shared"), Topology(PATHS), target, RATES, **options)


def eagle(target: Target, tree: Any, kind: str = "eagle3", **options: Any) -> EagleDrafter:
    return EagleDrafter(untrained(target, kind), target, tree, **options)


def ssms(target: Target) -> dict[str, Drafter]:
    """The target as two SSMs, whose drafts are accepted."""
    return {"ssm-0": DraftModelDrafter(target, target, [2, 1]), "ssm-1": DraftModelDrafter(target, target, [1, 1, 1])}


def some(target: Target) -> torch.Tensor:
    return torch.arange(0, 61, 2)


MAKE: dict[str, Callable[[Target], Drafter]] = {
    "plain": lambda t: PlainDrafter(t.device),
    "medusa": heads,
    "eagle": lambda t: eagle(t, SPARSE),
    "eagle-1": lambda t: eagle(t, (2, 1, 1), "eagle1"),
    "dynamic eagle": lambda t: eagle(t, DynamicShape(4, 3, 12)),
    "eagle i.i.d.": lambda t: eagle(t, (2, 2), "normed", draws="iid"),
    "dynaspec": lambda t: eagle(t, SPARSE, shortlist=shortlist(t, "dynaspec")),
    "dynamic fr-spec": lambda t: eagle(t, DynamicShape(4, 3, 12), shortlist=shortlist(t, "fr_spec")),
    "low rank": lambda t: eagle(t, SPARSE, shortlist=shortlist(t, "low_rank")),
    "dflash": lambda t: DFlashDrafter(untrained_block(t), Topology(PATHS), t, RATES),
    "draft model": lambda t: DraftModelDrafter(t, t, SPARSE, draft_vocab=some(t)),
    "ssms": lambda t: MergedDrafter(ssms(t), t, 8),
    "ngram": lambda t: NgramDrafter(t, min_match=1, depth=4),
    "medusa + ngram": lambda t: MergedDrafter({"heads": heads(t), "ngram": NgramDrafter(t, depth=4)}, t, 10),
    "ssms + eagle + ngram": lambda t: MergedDrafter(
        {**ssms(t), "eagle": eagle(t, DynamicShape(2, 2, 4)), "ngram": NgramDrafter(t, depth=2)}, t, 14
    ),
}
PENALISED = Sampling(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=4,
                     presence_penalty=0.3, frequency_penalty=0.2, logit_bias={5: 2.0})  # fmt: skip


@contextmanager
def begun(target: Target, drafter: Drafter, mode: Mode) -> Iterator[Step]:
    """A static step of two texts."""
    step = Step(target, drafter, mode, 2, 96, static=True)
    with torch.inference_mode(), engine_attention([target, *drafter.models]):
        step.reset()
        step.begin(range(0, 2), [[5, 7, 5, 7, 11, 5, 7], [9, 9]], [PENALISED, Sampling(temperature=0.8, seed=2)])
        yield step


@pytest.fixture(scope="module")
def target(make_target):
    return make_target("llama")


@pytest.mark.parametrize("name", MAKE)
def test_a_graph_can_hold_steps_of(target, name):
    for mode in MODES if name in ("plain", "medusa") else ("greedy", "sample", "mss"):  # typical drafts are greedy
        with begun(target, MAKE[name](target), mode) as step:
            simulate_capture(step)


# What a step must not do with a drafter and its state, by what is said of it.
READS: dict[str, Callable[[Any, Any], object]] = {
    "item in a static step": lambda drafter, state: state.root[0].item(),
    "tolist in a static step": lambda drafter, state: state.root.tolist(),
    "__bool__ in a static step": lambda drafter, state: 1 if state.root[0] > 3 else 2,
    "index by a mask": lambda drafter, state: state.root[state.root > 3],
    "index_put_ by a mask": lambda drafter, _: drafter.cached.index_put_((drafter.cached < 0,), drafter.cached[0]),
    "where in a static step": lambda drafter, state: torch.where(state.root > 3),
    "tensor of the host's data": lambda drafter, state: torch.tensor([1, 2], device=state.root.device),
    "arange of the host's data": lambda drafter, state: state.root + torch.arange(2),
}


class Reading(EagleDrafter):
    read: Callable[[Any, Any], object]

    def propose(self, state):
        assert self.read(self, state) is not None
        return super().propose(state)


class Moving(EagleDrafter):
    """A buffer that is made anew: a graph would go on reading the first one."""

    def absorb(self, state, verdict, tree, features):
        self.missing_tokens = self.missing_tokens.clone()
        super().absorb(state, verdict, tree, features)


class Keeping(EagleDrafter):
    """Reads in a step what the step before has made."""

    last: torch.Tensor | None = None

    def propose(self, state):
        before, self.last = self.last, state.root + 1
        assert before is None or before.sum() is not None
        return super().propose(state)


class Forgetting(EagleDrafter):
    def buffers(self):
        return super().buffers()[1:]


class Counting(EagleDrafter):
    """The host's state decides what a step does."""

    turn = 0

    def propose(self, state):
        self.turn += 1
        self.missing_tokens.add_(0, alpha=self.turn)
        return super().propose(state)


class Scratch(EagleDrafter):
    """Right: memory of its own that each step overwrites, in two parts, before it reads it."""

    def propose(self, state):
        if not hasattr(self, "scratch"):
            self.scratch = torch.empty(2, 4, device=self.device)
        self.scratch[:, :2].copy_(state.root[:, None].expand(-1, 2))
        self.scratch[:, 2:].fill_(1.0)
        assert self.scratch.sum() is not None
        return super().propose(state)


class Unfilled(Scratch):
    """Only one part is overwritten."""

    def propose(self, state):
        self.__dict__.setdefault("scratch", torch.ones(2, 4, device=self.device))[:, 2:].zero_()
        assert self.scratch.sum() is not None
        return EagleDrafter.propose(self, state)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *((Reading, message) for message in READS),
        (Moving, "reads what another one has elsewhere"),
        (Keeping, "reads what another one has elsewhere"),
        (Forgetting, r"buffers\(\) does not name it"),
        (Counting, "not the same operations"),
        (Unfilled, r"buffers\(\) does not name it"),
    ],
)
def test_steps_that_no_graph_can_hold_are_found(target, wrong, message):
    drafter = wrong(untrained(target), target, (2, 1))
    drafter.read = READS.get(message)
    with begun(target, drafter, "greedy") as step, pytest.raises(AssertionError, match=message):
        simulate_capture(step)


def test_what_a_step_overwrites_before_it_reads_it_needs_no_name(target):
    with begun(target, Scratch(untrained(target), target, (2, 1)), "greedy") as step:
        simulate_capture(step)
        simulation = CaptureSimulation()
        for _ in range(2):
            simulation.step(step.run)
        with pytest.raises(AssertionError, match="does not name it"):
            simulation.check(caches(step))
        with pytest.raises(AssertionError, match="does not name it"):
            simulation.check(step.buffers())
