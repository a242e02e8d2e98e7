"""What kernels' public functions read may have any strides: with transposed, sliced and expanded inputs the results are
those of dense ones, bit for bit. Runs on the plain path here, and on the kernels under the interpreter."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.kernels.accept_greedy import accept_greedy, advance
from draftsmith.kernels.add_norm import add_norm
from draftsmith.kernels.backend import why_not_triton
from draftsmith.kernels.commit import commit
from draftsmith.kernels.distribution import distribution_scalars
from draftsmith.kernels.few_rows import candidates, few_rows_product
from draftsmith.kernels.gated import gated
from draftsmith.kernels.head_topk import head_argmax, head_topk
from draftsmith.kernels.multi_step import verify_logits
from draftsmith.kernels.pair_input import pair_input
from draftsmith.kernels.res_block import res_block
from draftsmith.kernels.rotate_write import rotate_write
from draftsmith.kernels.shortlist_linear import shortlist_logits, shortlist_topk
from draftsmith.kernels.tree_attention import causal_ancestors, tree_attention_cached

Inputs = dict[str, Tensor]
Case = tuple[Inputs, Callable[[Inputs], object]]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOTH = torch.ones(2, dtype=torch.bool)


def normal(*shape: int) -> Tensor:
    """Whole numbers, whose products are exact in any order."""
    return (4 * torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))).round().to(DEVICE)


def filled(shape: tuple[int, ...], write: Callable[[Tensor], object]) -> Tensor:
    """What a function writes to its output."""
    write(out := torch.zeros(shape, device=DEVICE))
    return out


def case_add_norm() -> Case:
    x, weight = normal(3, 24), normal(24)

    def run(i: Inputs) -> object:
        return filled((3, 24), lambda out: add_norm(x.clone(), i["y"], weight, 1e-6, out))

    return {"y": normal(2, 3, 24)}, run


def case_gated() -> Case:
    return {"gate_up": normal(2, 3, 40)}, lambda i: filled((3, 20), lambda out: gated(i["gate_up"], out, "silu"))


def case_few_rows_product() -> Case:
    matrix = normal(30, 48).t()
    form = next(form for form in candidates(4, 48, 30, torch.float32, 4) if form.parts == 1)
    return {"x": normal(3, 48)}, lambda i: few_rows_product(i["x"], matrix, form)


def case_head_topk() -> Case:
    weight = normal(70, 24)
    return {"x": normal(3, 24)}, lambda i: (head_topk(i["x"], weight, 4), head_argmax(i["x"], weight))


def case_res_block() -> Case:
    weight, bias = normal(2, 24, 24), normal(2, 1, 24)
    return {"x": normal(2, 3, 24)}, lambda i: res_block(i["x"], weight, bias)


def case_shortlist() -> Case:
    weight, ids = normal(70, 24), torch.arange(70, device=DEVICE).flip(0)
    rows = torch.tensor([[1, 5, 9, 30, 69, -1, -1, -1], [0, 2, 4, 6, 8, 10, 12, 14]], device=DEVICE)

    def run(i: Inputs) -> object:
        parts = i["features"], weight, i["rows"]
        return shortlist_logits(*parts), shortlist_topk(*parts, i["ids"], 3)

    return {"features": normal(2, 3, 24), "rows": rows, "ids": ids}, run


def case_pair_input() -> Case:
    embedding = normal(50, 16)
    inputs = {
        "tokens": torch.tensor([[3, 49, 7], [0, 1, -1]], device=DEVICE),
        "hidden": normal(2, 3, 16),
        "lengths": torch.tensor([4, 9], device=DEVICE),
        "depth": torch.tensor([[0, 1, 1], [0, 1, 2]], dtype=torch.int32, device=DEVICE),
    }

    def run(i: Inputs) -> object:
        return pair_input(i["tokens"], embedding, i["hidden"], None, None, i["lengths"], i["depth"], 1, 60)

    return inputs, run


def case_rotate_write() -> Case:
    table = normal(20, 16)
    inputs = {
        "qkv": normal(1, 6, 32),
        "positions": torch.tensor([[1, 2, 3], [4, 5, 5]], device=DEVICE),
        "slots": torch.tensor([[1, 2, 3], [0, 3, 4]], device=DEVICE),
    }

    def run(i: Inputs) -> object:
        cache, q = torch.zeros(2, 6, 2, 1, 8, device=DEVICE), torch.zeros(2, 3, 2, 8, device=DEVICE)
        rotate_write(i["qkv"], table, i["positions"], i["slots"], cache, q)
        return cache, q

    return inputs, run


def case_tree_attention() -> Case:
    k, v, ancestors = normal(2, 1, 40, 16), normal(2, 1, 40, 16), causal_ancestors(3, DEVICE).repeat(2, 1, 1)
    depth = torch.arange(3, device=DEVICE).repeat(2, 1)
    inputs = {"q": normal(2, 2, 3, 16), "lengths": torch.tensor([30, 7], device=DEVICE), "ancestors": ancestors}
    inputs |= {"depth": depth, "key_depth": depth.clone()}

    def run(i: Inputs) -> object:
        depths = i["depth"], i["key_depth"]
        return tree_attention_cached(i["q"], k, v, i["lengths"], i["ancestors"], 3, 0.25, *depths, window=8)

    return inputs, run


def case_commit() -> Case:
    storage = normal(1, 2, 2, 1, 12, 8)
    inputs = {
        "lengths": torch.tensor([3, 0], device=DEVICE),
        "path": torch.tensor([[0, 2, 5], [0, 3, 4]], device=DEVICE),
        "length": torch.tensor([2, 1], device=DEVICE),
    }

    def run(i: Inputs) -> object:
        commit(changed := storage.clone(), i["lengths"], i["path"], i["length"])
        return changed

    return inputs, run


def case_accept_greedy() -> Case:
    inputs = {
        "choice": torch.tensor([[5, 6, 7], [8, 1, 2]], device=DEVICE),
        "best": normal(2, 3).abs(),
        "tokens": torch.tensor([[9, 5, 6], [9, 5, 6]], device=DEVICE),
        "parent": torch.tensor([[-1, 0, 1], [-1, 0, 1]], dtype=torch.int32, device=DEVICE),
        "depth": torch.tensor([[0, 1, 2], [0, 1, 2]], dtype=torch.int32, device=DEVICE),
        "ancestors": causal_ancestors(3, DEVICE).repeat(2, 1, 1),
        "valid": torch.ones(2, 3, dtype=torch.bool, device=DEVICE),
        "active": BOTH.to(DEVICE),
    }

    def run(i: Inputs) -> object:
        committed = torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)
        return accept_greedy(*i.values(), committed, 2), committed

    return inputs, run


def case_advance() -> Case:
    inputs = {
        "features": normal(2, 3, 8),
        "node": torch.tensor([2, 0], device=DEVICE),
        "bonus": torch.tensor([4, 5], device=DEVICE),
        "length": torch.tensor([2, 0], device=DEVICE),
        "active": BOTH.to(DEVICE),
    }

    def run(i: Inputs) -> object:
        (lengths, root), feature = torch.tensor([[7, 8], [1, 2]], device=DEVICE), torch.zeros(2, 8, device=DEVICE)
        advance(lengths, root, feature, *i.values())
        return lengths, root, feature

    return inputs, run


def sampled() -> Inputs:
    """Two children of the root, one-hot draws."""
    return {
        "logits": normal(2, 3, 20),
        "temperature": torch.tensor([0.7, 1.0], device=DEVICE),
        "top_k": torch.tensor([9, 20], device=DEVICE),
        "top_p": torch.tensor([0.9, 1.0], device=DEVICE),
        "min_p": torch.zeros(2, device=DEVICE),
        "tokens": torch.tensor([[1, 4, 5], [2, 6, 7]], device=DEVICE),
        "child": torch.tensor([[[1, 2], [-1, -1], [-1, -1]]] * 2, dtype=torch.int32, device=DEVICE),
    }


def case_distribution_scalars() -> Case:
    def run(i: Inputs) -> object:
        *parameters, tokens, child = i.values()
        return distribution_scalars(*parameters, (True, True, False), tokens, child)

    return sampled(), run


def case_verify_logits() -> Case:
    inputs = sampled() | {
        "kind": torch.zeros(2, 3, 2, dtype=torch.int8, device=DEVICE),
        "q_row": torch.zeros(2, 3, 2, dtype=torch.int32, device=DEVICE),
        "uniforms": normal(2, 3, 2).sigmoid(),
        "bonus_uniform": torch.tensor([0.3, 0.8], device=DEVICE),
    }

    def run(i: Inputs) -> object:
        *draws, uniforms, bonus_uniform = i.values()
        return verify_logits(*draws, None, uniforms, bonus_uniform, 1, None, (False, True, False))

    return inputs, run


def transposed(tensor: Tensor) -> Tensor:
    """The first axis innermost, as products of few rows are returned."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


def sliced(tensor: Tensor) -> Tensor:
    """Every second entry of the last axis of a larger tensor, behind others."""
    large = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), 77, device=DEVICE).to(tensor.dtype)
    large[..., 2:-1:2] = tensor
    return large[..., 2:-1:2]


def expanded(tensor: Tensor) -> Tensor:
    """The first entry of the last axis for all of them."""
    return tensor[..., :1].expand(tensor.shape)


CASES = {name.removeprefix("case_"): case for name, case in globals().items() if name.startswith("case_")}


def flat(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in flat(each)] if isinstance(value, tuple) else []


@pytest.mark.parametrize("form", [transposed, sliced, expanded])
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_strides_do_not_matter(case: str, form: Callable[[Tensor], Tensor]) -> None:
    """All inputs at a time, but for expanded ones, whose values change too; node numbers have to be a tree's. One
    position for all nodes is what an engine may give."""
    inputs, run = CASES[case]()
    if case == "distribution_scalars" and why_not_triton(inputs["logits"]):
        pytest.skip("on Triton alone")
    kept = {n: x for n, x in inputs.items() if form is not expanded or x.is_floating_point() or n == "positions"}
    strided = {name: form(given) for name, given in kept.items()}
    dense = {name: each.clone(memory_format=torch.contiguous_format) for name, each in strided.items()}
    for name, each in strided.items():
        assert form is transposed or each.shape[-1] == 1 or each.stride() != dense[name].stride()
    for names in [[name] for name in strided] if form is expanded else [list(strided)]:
        expected = flat(run(inputs | {name: dense[name] for name in names}))
        found = flat(run(inputs | {name: strided[name] for name in names}))
        assert len(found) == len(expected) > 0
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.nan_to_num(99.0), other.nan_to_num(99.0)), f"{case}: {names}, {form.__name__}"
