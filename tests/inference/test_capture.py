"""What a CUDA graph's capture needs, shown without a GPU: no garbage collection, products measured before it in a fixed
order, and steps that a graph can hold (``CaptureSimulation`` of lossless_suite.py)."""

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine import SpeculativeDecoder
from draftsmith.inference.runner import engine_attention, find_lean
from draftsmith.inference.sampling import Sampling
from draftsmith.inference.step import Step
from draftsmith.inference.tree import Topology
from draftsmith.kernels import linear
from draftsmith.kernels.measured import no_collection
from draftsmith.models import lean, medusa
from draftsmith.models.medusa import MedusaHeads

ROOT = Path(__file__).parents[2]


def test_no_collection():
    class Cycle:
        def __init__(self):
            self.own = self

    found = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        freed = []
        Cycle.__del__ = lambda _: freed.append(1)
        with no_collection():
            for _ in range(50):
                Cycle()
            assert not freed and not gc.isenabled()
        assert gc.isenabled()
        Cycle()
        _ = [[] for _ in range(10)]
        assert len(freed) > 50
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
    if isinstance(tree, ast.Call) and ast.unparse(tree.func).endswith(
        ("cuda.graph", ".capture_begin", "graphed_callables")
    ):
        yield tree.lineno, inside
    for child in ast.iter_child_nodes(tree):
        yield from captures(child, inside)


def test_every_capture_is_without_collections():
    files = [Path(name) for name in ("kernels", "models", "inference", "train", "tests")]
    files = [file for folder in files for file in (ROOT / folder).rglob("*.py")]
    found = {
        (str(file.relative_to(ROOT)), line): inside
        for file in files
        if "graph" in (text := file.read_text(encoding="utf-8"))
        for line, inside in captures(ast.parse(text))
    }
    assert {file for file, _ in found} >= {"kernels/measured.py", "kernels/bench.py", "inference/step.py"}
    assert all(found.values()), [where for where, inside in found.items() if not inside]
    assert [*captures(ast.parse("with torch.cuda.graph(g), no_collection():\n    pass"))] == [(1, False)]


PATHS = ((0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1), (0, 1, 0), (1,), (1, 0), (1, 1), (2,), (2, 0))
RATES = (0.6, 0.3, 0.2, 0.05, 0.1, 0.04, 0.2, 0.1, 0.03, 0.1, 0.02)


def test_products_are_measured_for_steps_alone_and_in_order(make_target, monkeypatch):
    """Everything that asks for a product's form, from the target's load to its first steps."""
    asked: list[tuple[int, bool]] = []
    choose = linear.choose

    def recorded(rows, matrix, packed=False, partial=False):
        if tuple(matrix.shape) != (32, 32):  # the heads' own products have the batch's rows at every size
            asked.append((rows, not linear._measuring_is_forbidden(matrix)))
        return choose(rows, matrix, packed, partial)

    for module in (linear, lean, medusa):
        monkeypatch.setattr(module, "choose", recorded)
    target = make_target("llama")
    assert asked and not any(measured for _, measured in asked), "the check of a target is no step"
    heads = MedusaHeads.for_target(target, 3, 1, "shared")
    find_lean(target, None)  # its comparison with the model asks for forms on a CPU alone
    asked.clear()
    for rows in (1, 2):
        step = Step(target, MedusaDrafter(heads, Topology(PATHS), target, RATES), "greedy", rows, 96, static=True)
        with torch.inference_mode(), engine_attention([target]):
            step.reset()
            step.begin(slice(0, rows), [[5, 7, 11, 13, 2]] * rows, [Sampling()] * rows)
            assert asked and not any(measured for _, measured in asked), "a prompt is no step"
            asked.clear()
            step.state.nodes = 12
            step.warm_up()
            assert step.state.nodes == 12
        order = list(dict.fromkeys(asked))
        of_heads = (3 * rows, True)  # three heads on the shared LM head, from the first tree that has drafts
        assert [each for each in order if each != of_heads] == [(nodes * rows, True) for nodes in (1, 8, 12)]
        asked.clear()
    SpeculativeDecoder(target).generate([[5, 7, 11]], 4)
    assert {rows for rows, measured in asked if measured} == {1}
