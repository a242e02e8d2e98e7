"""Prompts in chunks through the tree attention kernel: a chunk is a chain of nodes behind the tokens before it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.inference.engine import runner as runner_module
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.runner import Runner, engine_attention
from draftsmith.kernels import attention_plan
from draftsmith.kernels import tree_attention as kernel_module

pytestmark = pytest.mark.usefixtures("as_users_run_it")
SIZES = {True: ([70, 30], 66), False: ([23, 11], 18)}  # of prompts, of chunks; those with more than a word's bits


def prefill(target, lean, kernel, large):
    """Hidden states and a captured layer ``[2, T, 2 · d]`` of ragged prompts in two rows of three, by chunks: in
    neighbours, or in others if ``large``."""
    lengths, size = SIZES[large]
    longest = max(lengths)
    cache = KVCache(target, 3, longest + 5)
    for storage in cache._storages:
        storage.fill_(float("nan"))
    runner = Runner(target, cache, lean=lean)
    assert (runner.lean is not None) == lean and runner.kernel
    runner.kernel = kernel
    rows, other = (torch.tensor([0, 2], device=target.device), 1) if large else (slice(1, 3), 0)
    tokens = torch.randint(61, (2, longest), generator=torch.Generator().manual_seed(1))
    for row, length in enumerate(lengths):
        tokens[row, length:] = 0
    chunks = []
    with torch.inference_mode(), engine_attention([target]):
        for start in range(0, longest, size):
            chunk = tokens[:, start : start + size].to(target.device)
            with cache.only(rows, start + chunk.shape[1]):
                hidden, captured = runner.forward_chunk(chunk, start, [1])
            chunks.append(torch.cat([hidden, *captured], -1))
    for storage in cache._storages:
        assert storage[:, :, other].isnan().all() and storage[..., longest:, :].isnan().all(), "other rows and slots"
        assert not storage[:, :, rows, :, :longest].isnan().any()
    return torch.cat(chunks, 1).double().cpu()


WAYS = [("llama", True, 5), ("mistral", False, 5), ("gemma2", True, 2)]


@pytest.mark.parametrize(("family", "lean", "items"), [*WAYS, pytest.param("gemma2", False, 2, marks=pytest.mark.slow)])
def test_chunks_as_on_the_plain_path(make_target, on, monkeypatch, family, lean, items):
    """Windows of 8 tokens across the chunks' edge, soft caps, prompts that end in either chunk; with and without rows
    that are split."""
    target = on(make_target(family, num_attention_heads=2, num_key_value_heads=1))
    exact = prefill(on(target, torch.float64), False, kernel=False, large=items > 2)
    plain = prefill(target, lean, kernel=False, large=items > 2)
    planned, make_plan = [], kernel_module.make_plan

    def plan(*arguments):
        planned.append(make_plan(*arguments, min_share=1))
        return planned[-1]

    for module in (kernel_module, attention_plan):
        monkeypatch.setattr(module, "make_plan", plan)
    for module in (kernel_module, runner_module):
        monkeypatch.setattr(module, "attention_items", lambda *arguments: items)
    ours = prefill(target, lean, kernel=True, large=items > 2)
    windows = 1 if family == "llama" else 2
    assert len(planned) == (0 if items == 2 else 2 * windows), "once for each chunk and window, not for each layer"
    assert items == 2 or max(int(one.count.max()) for one in planned) > 1, "rows are split"
    allowed = 1000 * torch.finfo(torch.float32).eps * float(exact.norm())  # of two layers and their norms
    assert float((ours - exact).norm()) <= allowed and float((plain - exact).norm()) <= allowed


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
        runner.kernel = kernel
        known = [*cache._storages, *target.model.parameters(), *runner.tables.values(), runner.numbers]
        with torch.inference_mode(), engine_attention([target]), Largest(known) as seen:
            runner.forward_chunk(torch.zeros(1, chunk, dtype=torch.int64, device=device), start)
        largest[kernel] = seen.elements
    assert chunk * 32 <= largest[True] < size // 2, "hidden states at least"
    assert largest[False] >= size * (4 if family == "gemma2" else 1), "the plain path has a mask, with a cap scores"
