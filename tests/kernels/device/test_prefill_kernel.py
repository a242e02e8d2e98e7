"""Parts of prompts of several rows through the attention kernel, in one pass without padding."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.prompts import Chunk
from draftsmith.inference.engine.runner import Runner, engine_attention

pytestmark = pytest.mark.usefixtures("as_users_run_it")
# Of each pass (row, first position, tokens): prompts that begin, go on and end together, in any order of the rows; one
# token alone; parts of more and of fewer queries than a block has.
PASSES = [[(2, 0, 23), (0, 0, 7)], [(3, 0, 1)], [(0, 7, 12), (2, 23, 1), (3, 1, 40)], [(2, 24, 3), (0, 19, 2)]]
LONG = [[(2, 0, 90), (0, 0, 66)], [(0, 66, 7), (2, 90, 70)]]


def prefill(target, lean, kernel, passes):
    """Hidden states and a captured layer ``[T, 2 · d]`` of all passes, in rows of four."""
    longest = max(start + count for parts in passes for _, start, count in parts)
    cache = KVCache(target, 4, longest + 5)
    for storage in cache._storages:
        storage.fill_(float("nan"))
    runner = Runner(target, cache, lean=lean)
    assert (runner.lean is not None) == lean and runner.kernel
    runner.on_cpu = not kernel
    tokens = torch.randint(61, (4, 200), generator=torch.Generator().manual_seed(1)).tolist()
    found, used = [], torch.zeros(4, longest + 5, dtype=torch.bool)
    with torch.inference_mode(), engine_attention([target]):
        for parts in passes:
            chunk = Chunk.of([(row, at, tokens[row][at : at + count]) for row, at, count in parts], target.device)
            hidden, captured = runner.forward_prompts(chunk, [1])
            found.append(torch.cat([hidden, *captured], -1)[0])
            for row, start, count in parts:
                used[row, start : start + count] = True
    for storage in cache._storages:
        written = ~storage.isnan().movedim((2, 4), (0, 1)).flatten(2)  # [B, S, ·]
        assert torch.equal(written.all(-1).cpu(), used) and torch.equal(written.any(-1).cpu(), used), "other slots"
    return torch.cat(found).double().cpu()


WAYS = [("llama", True, LONG), ("mistral", False, PASSES), ("gemma2", True, PASSES)]


@pytest.mark.parametrize(
    ("family", "lean", "passes"), [*WAYS, pytest.param("gemma2", False, PASSES, marks=pytest.mark.slow)]
)
def test_parts_as_on_the_plain_path(make_target, on, family, lean, passes):
    """Windows of 8 tokens across the chunks' edge, soft caps. The plain path's are those of each prompt alone."""
    target = on(make_target(family, num_attention_heads=2, num_key_value_heads=1))
    double = on(target, torch.float64)
    exact = prefill(double, False, False, passes)
    plain, ours = (prefill(target, lean, kernel, passes) for kernel in (False, True))
    alone = {row: prefill(double, False, False, own) for row, own in by_row(passes).items()}
    rows = torch.tensor([row for parts in passes for row, _, count in parts for _ in range(count)])
    for row, own in alone.items():
        torch.testing.assert_close(exact[rows == row], own)
    allowed = 1000 * torch.finfo(torch.float32).eps * float(exact.norm())  # of two layers and their norms
    assert float((ours - exact).norm()) <= allowed and float((plain - exact).norm()) <= allowed


def by_row(passes):
    """The passes of each row's parts alone."""
    rows = {row for parts in passes for row, _, _ in parts}
    return {row: [[part] for parts in passes for part in parts if part[0] == row] for row in rows}


class Largest(TorchDispatchMode):
    """Records the largest storage that an operation returns, in elements, of those not known before."""

    def __init__(self, known):
        super().__init__()
        self.known, self.elements = {tensor.untyped_storage().data_ptr() for tensor in known}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize(("family", "lean"), [("llama", True), ("gemma2", False)])
def test_neither_scores_nor_masks_are_kept(make_target, device, on, family, lean):
    """T chunk tokens behind many others: nothing of T · S elements, let alone heads · T · S."""
    fields = {"num_hidden_layers": 1} if family == "llama" else {}
    target, chunk, start = on(make_target(family, max_position_embeddings=1024, **fields)), 40, 900
    size = chunk * (start + chunk)
    largest = {}
    for kernel in (True, False):
        cache = KVCache(target, 1, start + chunk)
        runner = Runner(target, cache, lean=lean)
        runner.on_cpu = not kernel
        known = [*cache._storages, *target.model.parameters(), *runner.tables.values(), runner.numbers]
        with torch.inference_mode(), engine_attention([target]), Largest(known) as seen:
            runner.forward_prompts(Chunk.of([(0, start, [0] * chunk)], device))
        largest[kernel] = seen.elements
    assert chunk * 32 <= largest[True] < size // 2, "hidden states at least"
    assert largest[False] >= size * (4 if family == "gemma2" else 1), "the plain path has a mask, with a cap scores"
