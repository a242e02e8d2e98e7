"""The compiled kernels that serving needs, counted without a GPU: the launches of a trace, by the key under which
Triton caches a compiled kernel. Each new key stops all requests of a server for up to a second or two."""

import random
from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch

from draftsmith.benchmarks.intercept import PROCESSORS, intercepted
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.prompts import PREFILL_CHUNK
from draftsmith.inference.engine.runner import engine_attention
from draftsmith.inference.engine.static_budget import StepSize
from draftsmith.inference.engine.step import Step, capacity_for
from draftsmith.inference.measure.step_costs import StepClock
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import Topology
from draftsmith.kernels import cpu, tree_attention
from draftsmith.kernels.backend import INTERPRETING, triton
from draftsmith.kernels.few_rows import MAX_ROWS, candidates
from draftsmith.models.eagle import Eagle
from draftsmith.models.lean import LeanDecoder
from draftsmith.models.lean_from import lean_decoder
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target

pytestmark = pytest.mark.skipif(
    triton is None or INTERPRETING, reason="kernels are compiled only where Triton does not interpret"
)
MOST_KEYS = 40
NUM_HEADS = 4


def tree(nodes: int) -> Topology:
    """The root, up to 9 paths of four tokens, and up to 9 that leave the first of these at depth 2."""
    paths = [(rank, *[0] * below) for rank in range(9) for below in range(NUM_HEADS)]
    paths += [(0, rank, *[0] * below) for rank in range(1, 10) for below in range(NUM_HEADS - 1)]
    return Topology(tuple(paths[: nodes - 1]))


def first_form(rows, matrix, packed=False, partial=False):
    """In place of the form that is measured on a GPU: the first of those in question."""
    if not 0 < rows <= MAX_ROWS or matrix.stride(0) != 1:
        return "blas"
    return candidates(1 << (rows - 1).bit_length(), *matrix.shape, matrix.dtype, PROCESSORS)[0].name


@contextmanager
def counted(monkeypatch, keys, record=set.add):
    """Launches are recorded by name in ``keys``, not run."""
    monkeypatch.setattr("draftsmith.inference.engine.static_budget.SIZES", range(1, 65))
    for module in ("linear", "lean", "target"):
        room = "kernels" if module == "linear" else "models"
        monkeypatch.setattr(f"draftsmith.{room}.{module}.choose", first_form, raising=False)
    with torch.inference_mode(), intercepted(lambda launch: record(keys[launch.name], launch.key)):
        yield


def make_step(target, drafter, mode, rows):
    step = Step(target, drafter, mode, rows, capacity_for(1024, drafter), static=True)
    step.reset()
    return step


@pytest.fixture(autouse=True)
def no_kernels_of_a_cpu(monkeypatch):
    """The tensors of these tests stand for those of a GPU."""
    monkeypatch.setattr(cpu, "runs", lambda tensor: False)
    monkeypatch.setattr(tree_attention, "INTERPRETING", True)


@pytest.fixture
def target(make_target):
    """A target whose layers are fused where kernels run."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 2048}
    heads = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 1}
    target = make_target("llama", **sizes, **heads, max_position_embeddings=1024)
    target = Target(target.model.to(torch.bfloat16), None, "tiny", "")
    lean = lean_decoder(target)  # compared with the model, by plain PyTorch
    assert isinstance(lean, LeanDecoder)
    lean.not_fused = ""
    return target


@pytest.mark.parametrize("sampling_mode", ["sample", "mss"])
@pytest.mark.parametrize("drafts", ["medusa", "eagle"])
def test_lengths_and_counts_compile_no_kernel_again(target, monkeypatch, drafts, sampling_mode):
    """A server with one drafter: prompts of 1 to 700 tokens, Medusa's trees of 1 to 64 nodes, 1 to 8 texts at a time,
    greedy and sampled."""
    keys: defaultdict[str, set[str]] = defaultdict(set)
    chosen = random.Random(0)
    with counted(monkeypatch, keys), engine_attention([target]):
        if drafts == "medusa":
            heads = MedusaHeads.for_target(target, NUM_HEADS, 1, "shared")
            drafter = MedusaDrafter(heads, tree(64), target, [0.9 - 0.01 * path for path in range(63)])
            drafter.clock = StepClock()
        else:
            drafter = EagleDrafter(Eagle.for_target(target, 3, "own", captured_layers=(0,)), target, (4, 2, 1))
        step = make_step(target, drafter, "greedy", 8)
        for length in (*range(1, 35), *range(50, PREFILL_CHUNK, 21), 512, 513, 700):  # as requests come
            texts = chosen.choice((1, 1, 1, 2, 3, 8))
            step.begin(range(0, texts), [[1] * length] * texts, [Sampling()] * texts)
        for rows in range(1, 9):
            step = make_step(target, drafter, "greedy", rows)
            step.begin(range(0, rows), [[1] * 5] * rows, [Sampling()] * rows)
            sizes = [0]
            if drafts == "medusa":
                assert step.static_budget is not None and len(step.static_budget.choices) == 64
                sizes = [*range(1, 65)] if rows in (1, 8) else [1, 7, 16, 33, 64]
            for nodes in sizes:
                step.choice = StepSize(nodes)
                step.run()
            for samplings in ([Sampling()], [Sampling(temperature=0.7, top_k=20, top_p=0.9)]):
                step = make_step(target, drafter, sampling_mode, rows)
                step.begin(range(0, rows), [[1] * 5] * rows, samplings * rows)
                step.state.root.zero_()
                step.run()
    number = sum(map(len, keys.values()))
    print(f"{drafts}, {sampling_mode}: {number} keys:", {name: len(own) for name, own in sorted(keys.items())})
    assert {"_tree_attention_kernel", "_rotate_write_kernel", "_few_rows_kernel", "_commit_kernel"} <= set(keys)
    assert number <= MOST_KEYS


@pytest.mark.parametrize("tree", [(4, 2, 1, 1), DynamicShape(4, 4, 30)])
def test_attention_is_planned_once_for_all_passes_of_a_drafter(target, monkeypatch, tree):
    """In a step, one plan for the drafter's passes, and one for the target's if that has other items."""
    keys: defaultdict[str, list[str]] = defaultdict(list)
    with counted(monkeypatch, keys, list.append), engine_attention([target]):
        eagle = EagleDrafter(Eagle.for_target(target, 3, "own", captured_layers=(0,)), target, tree)
        step = make_step(target, eagle, "greedy", 2)
        keys.clear()
        step.run()
    assert len(keys["_tree_attention_kernel"]) == 1 + 4, "the target's layer, and a pass for each level"
    assert 1 <= len(keys["_plan_kernel"]) <= 2
