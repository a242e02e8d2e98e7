"""The kernels that a step launches: Triton's, and PyTorch's operations that are no views and no allocations."""

import copy
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.runner import engine_attention
from draftsmith.inference.verify.tree import Topology
from draftsmith.kernels.few_rows import candidates
from draftsmith.models import lean
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target

FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
    "_unsafe_view",
}
TREE = Topology(((0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0), (2,)))


@pytest.fixture(autouse=True)
def as_users_run_it(poison):
    """Poisoning fills new tensors, which would count."""
    torch.use_deterministic_algorithms(False)


class Launches(TorchDispatchMode):
    """Kernels by name. Of a custom operator the kernels inside are counted, of PyTorch's composite ones the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.inside = False  # a Triton kernel, which the interpreter runs by operations of its own

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.inside and func.namespace != "draftsmith":
            if func._can_decompose():
                with self:
                    out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            if not func.is_view and func.overloadpacket.__name__ not in FREE:
                self.seen[func.overloadpacket.__name__] += 1
        elif func.namespace == "draftsmith":
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def counting(self):
        patch = pytest.MonkeyPatch()
        for kind in (InterpretedFunction, JITFunction):
            run = kind.run

            def counted(kernel, *args, run=run, **kwargs):
                self.seen[kernel.fn.__name__] += not kwargs.get("warmup")
                self.inside = True
                try:
                    return run(kernel, *args, **kwargs)
                finally:
                    self.inside = False

            patch.setattr(kind, "run", counted)
        try:
            with self:
                yield
        finally:
            patch.undo()


def medusa(target):
    heads = MedusaHeads.for_target(target, 3, 1, "shared")
    return MedusaDrafter(heads, TREE, target)


def step_launches(target, drafter, mode="greedy"):
    decoder = SpeculativeDecoder(target, drafter, static=True)
    decoder.generate([[1, 2, 3], [4, 5]], 2, mode=mode)
    step = decoder._step
    assert "lean decoder" in decoder.execution
    with torch.inference_mode(), engine_attention([target]):
        step.active.fill_(True)
        step.cache.lengths.fill_(5)
        launches = Launches()
        with launches.counting():
            step.run()
    return launches.seen


@pytest.fixture
def folded(monkeypatch):
    """Products in forms that do what stands around them, as measuring chooses them where they are faster."""

    def folding(rows, matrix, partial=False):
        forms = candidates(rows, *matrix.shape, matrix.dtype, 1) if partial else []
        return next((form.name for form in forms if form.parts == 1), "blas")

    monkeypatch.setattr(lean, "choose", folding)


def test_launches_of_a_folded_step(make_target, device, folded):
    """At most 7 kernels a layer."""
    counts = []
    for layers in (1, 2):
        target = make_target("llama", num_hidden_layers=layers)
        target = Target(copy.deepcopy(target.model).to(device), None, target.name, "")
        counts.append(step_launches(target, None))
    per_layer = {name: counts[1][name] - counts[0][name] for name in counts[1]}
    print(f"launches of a folded layer: {sum(per_layer.values())}")
    print({name: count for name, count in per_layer.items() if count})
    assert per_layer["_few_rows_kernel"] == 4
    assert sum(per_layer.values()) <= 7


@pytest.mark.parametrize(
    ("drafter", "mode", "most"),
    [(None, "greedy", 27), (medusa, "greedy", 27), (medusa, "mss", 27), (medusa, "sample", 23)],
)
def test_launches_of_a_step(make_target, device, drafter, mode, most):
    """At most 10 kernels a layer and 27 around the layers; 23 in coupled sampling."""
    counts = []
    for layers in (1, 2):
        target = make_target("llama", num_hidden_layers=layers)
        target = Target(copy.deepcopy(target.model).to(device), None, target.name, "")
        counts.append(step_launches(target, drafter and drafter(target), mode))
    few, many = counts
    per_layer = {name: many[name] - few[name] for name in many}
    around = {name: few[name] - per_layer.get(name, 0) for name in few}
    print(f"launches of a layer: {sum(per_layer.values()):g}, around: {sum(around.values()):g}")
    print({name: count for name, count in per_layer.items() if count})
    print({name: count for name, count in around.items() if count})
    assert per_layer["_tree_attention_kernel"] == 1  # it is being counted
    assert sum(per_layer.values()) <= 10
    assert sum(around.values()) <= most


def eagle(target, tree, version=3, ids=None):
    torch.manual_seed(0)
    module = Eagle.for_target(target, version, "own" if version == 3 else "shared", None if ids is None else len(ids))
    if ids is not None:
        module.draft_from(ids, target)
    return EagleDrafter(module, target, tree)


def eagle_1(target, tree):
    return eagle(target, tree, 1)


def eagle_of_some_tokens(target, tree):
    return eagle(target, tree, 3, torch.arange(0, 61, 2))


def ssm(target, tree):
    return DraftModelDrafter(target, target, tree)


@pytest.mark.parametrize(
    ("drafter", "most", "tree"),
    [(eagle, 12, (1, 1)), (eagle_of_some_tokens, 12, (2, 2)), (eagle_1, 12, (2, 2)), (ssm, 15, (2, 2))],
)
def test_launches_of_a_level(make_target, device, folded, drafter, most, tree):
    """Of one more level of a tree, with the layer that is run, in forms that do what stands around them."""
    target = make_target("llama", num_hidden_layers=1)
    target = Target(copy.deepcopy(target.model).to(device), None, target.name, "")
    few, many = (step_launches(target, drafter(target, of)) for of in (tree, (*tree, 1)))
    level = {name: many[name] - few[name] for name in many if many[name] - few[name]}
    print(f"launches of a level: {sum(level.values())}")
    print(level)
    assert level["_tree_attention_kernel"] == 1  # it is being counted
    assert sum(level.values()) <= most
