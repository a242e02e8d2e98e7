"""With DRAFTSMITH_SAME_BITS a node of a tree has the bits of plain decoding: its attention, its logits, the texts."""

import itertools
import random

import pytest
import torch
from bounds import assert_within, attention_bound
from cases import DTYPES, depths, random_parents, walk

from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.prompts import Chunk
from draftsmith.inference.engine.runner import Runner
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import bitsets
from draftsmith.kernels import step_attention
from draftsmith.kernels.attention_plan import KERNEL_TILE, TILE
from draftsmith.kernels.backend import INTERPRETING, SAME_BITS, jit
from draftsmith.kernels.few_rows import few_rows_product, parse_form
from draftsmith.kernels.head_topk import head_argmax
from draftsmith.kernels.linear import choose
from draftsmith.kernels.step_attention import attend_tree
from draftsmith.kernels.tree_attention import TreeKeys

GPU = torch.cuda.is_available()
FIELDS = {} if GPU else {"num_attention_heads": 2, "num_key_value_heads": 1}  # of targets: fewer programs to interpret


def product_by_halves(builder, a, b, d, *options):
    """``tl.dot`` in the interpreter: an element's sum depends, as on a GPU, on the columns of its terms, but not on its
    own place, as it does in the BLAS that NumPy calls."""
    from triton.runtime.interpreter import TensorHandle

    terms = a.data.astype(d.data.dtype).T[:, :, None] * b.data.astype(d.data.dtype)[:, None]
    while len(terms) > 1:
        terms = terms[: len(terms) // 2] + terms[len(terms) // 2 :]
    return TensorHandle(terms[0] + d.data, d.dtype.scalar)


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv(SAME_BITS, "1")
    if INTERPRETING:
        monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.create_dot", product_by_halves)


def attend_both_ways(device, lengths, tree, reach, group, dtype=torch.float32, window=0, softcap=None, asked=None):
    """Attention of random trees of so many nodes, one for each row, beside that of some of their nodes as the last
    token of a text: its bits, and the values themselves."""
    rng = random.Random(repr((lengths, tree, reach, group, window, softcap)))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 32))
    rows, kv_heads, width, capacity = len(lengths), 2, 16, max(lengths) + tree + 3
    parents = [random_parents(tree, reach, rng) for _ in lengths]
    q = 3 * torch.randn(rows, tree, kv_heads * group, width, generator=generator).to(dtype).transpose(1, 2)
    cache = torch.full((2, rows, kv_heads, capacity, width), float("nan"), dtype=dtype)
    for row, length in enumerate(lengths):
        used = torch.randn(2, kv_heads, length + tree, width, generator=generator)
        cache[:, row, :, : length + tree] = used.to(dtype)
    level = torch.stack(list(map(depths, parents))).to(device)
    sets = torch.stack(list(map(bitsets, parents))).to(device)
    q, cache, scale = q.to(device), cache.to(device), width**-0.5
    keys = TreeKeys(torch.tensor(lengths, device=device), sets, level, level, None, True)
    out = attend_tree(q, *cache, keys, scale, window, softcap)
    one, zero = torch.ones(1, 1, 1, dtype=torch.int64, device=device), level[:1, :1] * 0
    for row, length in enumerate(lengths):
        for node in asked or rng.sample(range(tree), min(tree, 3)):
            path = [length + above for above in walk(parents[row], node)[::-1]]
            slots = [*range(length), *path]
            alone = torch.full((2, 1, kv_heads, len(slots) + rng.choice((0, 700)), width), float("nan"), dtype=dtype)
            alone = alone.to(device)
            alone[:, 0, :, : len(slots)] = cache[:, row, :, slots]
            before = TreeKeys(torch.tensor([len(slots) - 1], device=device), one, zero, zero, None, True)
            single = attend_tree(q[row : row + 1, :, node : node + 1], *alone, before, scale, window, softcap)
            assert torch.equal(out[row : row + 1, :, node : node + 1], single), (row, node)
            seen = torch.tensor([[not window or place > len(slots) - 1 - window for place in range(len(slots))]])
            exact = attention_bound(
                q[row, :, node : node + 1], *alone[:, 0, :, : len(slots)], seen, scale, softcap, dtype
            )
            assert_within(out[row, :, node : node + 1], *exact)


TREES = [(1, 1), (9, 1), (20, 4), (70, 70)]  # nodes and reach: chains, trees, and for one row a bush of several words
# Lengths, nodes, reach, group, dtype, window, soft cap, the nodes that are asked for (None: some).
CASES = [  # in the interpreter each tree in each dtype and each group, but not in all pairs of these
    ([0, 60, 131] if nodes < 64 else [60], nodes, reach, group, dtype)
    for number, ((nodes, reach), group, dtype) in enumerate(itertools.product(TREES, [1, 4], DTYPES))
    if GPU or (number + number // 2 + number // 4) % 2
]
# At edges: of a block of keys, of the positions whose keys are gathered, and of a part.
for length in (TILE - 5, TILE, 2 * TILE - 3, 2 * TILE - 1, 2 * TILE, 511 + TILE, 1023 + TILE):
    CASES.append(([length], 12, 3, 2, torch.float32, 0, None, (0, 3, 7, 11)))
for window, softcap in ((5, None), (70, 2.0), (200, None), (0, 2.0)):
    CASES.append(([3, 700], 12, 3, 2, torch.float32, window, softcap))
CASES.append(([63 + TILE], TILE + 1, 1, 1, torch.float32, 0, None, (TILE,)))  # as deep as can be


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_attention(device, case):
    attend_both_ways(device, *case)


@jit
def _one_block_later(position):
    return position // KERNEL_TILE * KERNEL_TILE


@pytest.mark.skipif(not INTERPRETING, reason="a compiled kernel cannot be changed")
@pytest.mark.parametrize("wrong", ["start", "kernel"])
def test_others_differ(device, monkeypatch, wrong):
    """Where keys that are not committed are taken by their slots, and by the ordinary kernel."""
    if wrong == "start":
        monkeypatch.setattr(step_attention, "_start", _one_block_later)
    else:
        ordinary = lambda q, k, v, keys, *rest: attend_tree(q, k, v, keys._replace(same_bits=False), *rest)  # noqa: E731
        monkeypatch.setattr(step_attention, "_attend_same_bits", ordinary)
    with pytest.raises(AssertionError):
        attend_both_ways(device, [2 * TILE - 3], 40, 4, 2, asked=(17, 39))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 160), (2048, 64)])
def test_products(device, dtype, inputs, outputs):
    """Of 1 to 70 rows, of one part with what stands around it and of several; the logits of an LM head."""
    generator = torch.Generator().manual_seed(inputs)
    x, weight = (torch.randn(rows, inputs, generator=generator).to(device, dtype) for rows in (70, outputs))
    norm = torch.rand(inputs, generator=generator).to(device, dtype), 1e-6
    with torch.no_grad():
        forms = {choose(rows, weight.t(), partial) for rows in (1, 5, 64, 70) for partial in (False, True)}
    (form,) = (parse_form(name) for name in forms)
    assert form is not None and form.kernel == "same" and (form.parts > 1) == (inputs > 1000)
    options = {} if form.parts > 1 else {"norm": norm, "act": "silu"}
    for rows in (70, 33):
        out = few_rows_product(x[:rows], weight.t(), form, **options)
        logits, token = head_argmax(x[:rows], weight)
        for row in (0, 5, 32, 64, 69)[: 3 if rows < 70 else 5]:
            own = slice(row, row + 1)
            assert torch.equal(out[:, own], few_rows_product(x[own], weight.t(), form, **options)), (rows, row)
            best, first = head_argmax(x[own], weight)
            assert torch.equal(best, logits[own]) and torch.equal(first, token[own])
    if form.parts == 1:
        held = torch.randn(1, 70, outputs, generator=generator).to(device, dtype)
        added = few_rows_product(x, weight.t(), form, held.clone(), add=True, factor=0.5)
        alone = few_rows_product(x[69:], weight.t(), form, held[:, 69:].clone(), add=True, factor=0.5)
        assert torch.equal(added[:, 69:], alone)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"] if GPU else ["gemma2"])
def test_bits_of_a_trees_nodes_are_those_of_plain_decoding(make_target, device, on, family):
    """Random trees for each of two texts in a batch; each node's hidden state and logits, and the keys and values of
    its path, are those of decoding its path token by token, alone. On a GPU ten trees, in bfloat16; in the interpreter
    one, and of the longer text."""
    target = on(make_target(family, **FIELDS), torch.bfloat16 if GPU else torch.float32)
    rng, lengths = random.Random(3), (13, 2 * TILE - 2)
    prefixes = [[rng.randrange(61) for _ in range(length)] for length in lengths]
    one, zero = torch.ones(1, 1, 1, dtype=torch.int64, device=device), torch.zeros(1, 1, dtype=torch.int32)
    with torch.inference_mode():
        cache = KVCache(target, 2, 250)
        both = Runner(target, cache, static=True)
        assert both.bitwise
        for row, prefix in enumerate(prefixes):
            both.forward_prompts(Chunk.of([(row, 0, prefix)], device))
        cache.lengths.copy_(torch.tensor(lengths))
        for size in (4, 5, 8, 9, 16, 17, 31, 32, 40, 64) if GPU else (12,):
            parents = random_parents(size, 9, rng)
            tokens = torch.tensor([[rng.randrange(61) for _ in range(size)] for _ in prefixes], device=device)
            sets = bitsets(parents).to(device)[None].expand(2, -1, -1)
            hidden, _ = both.forward_nodes(tokens, cache.lengths, sets, depths(parents).to(device).expand(2, -1))
            logits = target.logits(hidden)
            for row, prefix in [*enumerate(prefixes)][0 if GPU else 1 :]:
                path = walk(parents, rng.randrange(size // 2, size))[::-1]
                alone = KVCache(target, 1, 250)
                runner = Runner(target, alone, static=True)
                runner.forward_prompts(Chunk.of([(0, 0, prefix)], device))
                for place, node in enumerate(path):
                    alone.lengths.fill_(lengths[row] + place)
                    token = tokens[row : row + 1, node : node + 1]
                    found, _ = runner.forward_nodes(token, alone.lengths, one, zero.to(device))
                    assert torch.equal(found[0, 0], hidden[row, node]), (size, node)
                    assert torch.equal(target.logits(found)[0, 0], logits[row, node]), (size, node)
                for (together, *_), (single, *_) in zip(cache.views(), alone.views(), strict=True):
                    slots = [*range(lengths[row]), *(lengths[row] + node for node in path)]
                    assert torch.equal(together[row, slots], single[0, : len(slots)])


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("mode", ["greedy", "sample"] if GPU else ["greedy"])
def test_texts(make_target, on, mode):
    """Those of plain decoding to the last token, in a batch, by the target as its own drafter; on a GPU in bfloat16,
    where logits tie often."""
    target = on(make_target("llama", **FIELDS), torch.bfloat16 if GPU else torch.float32)
    rng = random.Random(5)
    prompts = [[rng.randrange(61) for _ in range(rng.randrange(1, 40))] for _ in range(20 if GPU else 2)]
    options = {"max_new_tokens": 40 if GPU else 4, "stop_ids": frozenset(), "mode": mode}
    options["sampling"] = [Sampling(seed=number) for number in range(len(prompts))] if mode == "sample" else None
    plain = SpeculativeDecoder(target, static=True)
    assert plain.bitwise
    drafter = DraftModelDrafter(target, target, (2, 1))
    expected = plain.generate(prompts, batch_size=1, **options)
    found = SpeculativeDecoder(target, drafter, static=True).generate(prompts, batch_size=2, **options)
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    assert any(count > 1 for result in found for count in result.accepted)


def test_what_it_cannot_hold_for_is_refused(make_target, on):
    """Layers that are not fused, trees that are too deep."""
    target = on(make_target("llama"))
    with pytest.raises(ValueError, match=rf"{SAME_BITS} is set, .* the kernels do not know its norms"):
        SpeculativeDecoder(on(make_target("gpt_neox")))
    with pytest.raises(ValueError, match="the drafter's trees are 65 deep, and only 64 levels are possible"):
        SpeculativeDecoder(target, NgramDrafter(target, depth=65))
