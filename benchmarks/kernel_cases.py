"""The operations that kernel_times.py measures, each beside what PyTorch offers for the same result."""

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.benchmarks.floors import Work
from draftsmith.benchmarks.kernel_timing import Table, Ways, largest
from draftsmith.kernels import linear
from draftsmith.kernels.accept_greedy import accept_greedy, accept_greedy_reference, advance, advance_reference
from draftsmith.kernels.add_norm import add_norm, add_norm_reference
from draftsmith.kernels.attention_plan import make_plan
from draftsmith.kernels.backend import multiprocessors, why_not_triton
from draftsmith.kernels.commit import commit
from draftsmith.kernels.coupled import coupled_topk, coupled_topk_reference
from draftsmith.kernels.few_rows import candidates
from draftsmith.kernels.gated import gated, gated_reference
from draftsmith.kernels.head_topk import head_topk
from draftsmith.kernels.multi_step import ONE_HOT, WITHOUT_REPLACEMENT, verify_logits, verify_logits_reference
from draftsmith.kernels.res_block import res_block, res_block_reference
from draftsmith.kernels.rotate_write import rotate_write, rotate_write_reference
from draftsmith.kernels.shortlist_linear import pack_shortlist, shortlist_logits, shortlist_topk
from draftsmith.kernels.tree_attention import (
    ancestor_mask,
    attention_items,
    causal_ancestors,
    causal_bias,
    tree_attention,
    tree_attention_cached,
    tree_bias,
)

CHUNK = 512  # prompt tokens of a forward pass, as the engine runs them
PEERS = ("flex_attention", "flashinfer")  # left out where they fail


def random_tree(nodes: int) -> tuple[Tensor, Tensor]:
    """A tree as calibration makes them, a few levels deep: ancestors ``[1, N, W]``, depth ``[1, N]``."""
    generator = torch.Generator().manual_seed(nodes)
    mask, depth = torch.eye(nodes, dtype=torch.bool), torch.zeros(nodes, dtype=torch.int32)
    for node in range(1, nodes):
        above = int(torch.randint(node, (), generator=generator))
        mask[node] |= mask[above]
        depth[node] = depth[above] + 1
    words = F.pad(mask, (0, -nodes % 64)).view(nodes, -1, 64).long()
    return (words << torch.arange(64)).sum(-1)[None], depth[None]


def bench_attention(args: argparse.Namespace, table: Table, batch: int, context: int, nodes: int, ragged: int) -> None:
    """Trees behind ``context`` cached tokens each; ragged: only the first row has as many, the others a sixteenth."""
    dtype, heads, kv_heads, width = table.dtype, args.heads, args.kv_heads, args.width
    slots, scale = context + nodes, width**-0.5
    cached = [context] + [context // 16 if ragged else context] * (batch - 1)
    caches = table.cold(lambda: table.randn(2, batch, kv_heads, slots, width))
    q = table.randn(batch, nodes, heads, width).transpose(1, 2)
    ancestors, depth = (part.to(args.device).expand(batch, *part.shape[1:]) for part in random_tree(nodes))
    lengths = torch.tensor(cached, device=args.device)
    mask = ancestor_mask(ancestors, nodes)
    bias = tree_bias(lengths, mask, depth, slots, 0, dtype)
    # As in a model, whose layers share the plan of a forward pass.
    items = attention_items(batch, nodes, heads, kv_heads, width, slots, dtype, lengths.device)
    work = make_plan(lengths, nodes, items)
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "SDPA": lambda k, v: tree_attention(q, k, v, bias, scale),
        "triton": lambda k, v: tree_attention_cached(q, k, v, lengths, ancestors, nodes, scale, plan=work),
    }
    if nodes * heads <= 16 * kv_heads:  # whether LAST_MERGES should be on
        ways["triton, last program merges"] = lambda k, v: tree_attention_cached(
            q, k, v, lengths, ancestors, nodes, scale, plan=work, last_merges=True
        )
    if args.device == "cuda":
        ways["flex_attention"] = flex_attention_way(q, mask, lengths, slots, scale)
    if batch == 1 and importlib.util.find_spec("flashinfer"):
        flashinfer: Any = importlib.import_module("flashinfer")
        seen = bias[0, 0] == 0
        ways["flashinfer"] = lambda k, v: flashinfer.single_prefill_with_kv_cache(
            q[0].transpose(0, 1).contiguous(),
            k[0].transpose(0, 1),
            v[0].transpose(0, 1),
            custom_mask=seen,
            sm_scale=scale,
        ).transpose(0, 1)[None]
    expected = ways["SDPA"](*caches[0])
    shape = {"B": batch, "L": context, "N": nodes}
    keys = sum(cached) + batch * nodes
    moved = (2.0 * kv_heads * keys * width + 2 * q.numel()) * dtype.itemsize
    for name, way in ways.items():
        try:
            difference = largest(way(*caches[0]) - expected)
        except RuntimeError as error:
            if name not in PEERS:
                raise
            print(f"{name} {shape}: left out, {str(error).strip().splitlines()[-1]}", flush=True)
            continue
        calls = [partial(way, *cache) for cache in caches]
        name = f"{name}, ragged" if ragged else name
        table.add("attention", name, shape, calls, Work(moved, 4.0 * heads * nodes * keys * width), difference)
    if args.device == "cuda":
        shape = {"B": batch, "T": nodes}
        plan = [lambda: make_plan(lengths, nodes, items)]
        table.add("attention", "plan, ragged" if ragged else "plan", shape, plan, Work(12.0 * items), 0.0)


def bench_prefill(args: argparse.Namespace, table: Table, batch: int, context: int) -> None:
    """A chunk of a prompt behind ``context`` cached tokens; prints the memory that each way takes at its peak."""
    dtype, heads, kv_heads, width = table.dtype, args.heads, args.kv_heads, args.width
    chunk = min(CHUNK, context)
    slots, scale, device = context + chunk, width**-0.5, torch.device(args.device)
    k, v = table.randn(2, batch, kv_heads, slots, width)
    q = table.randn(batch, chunk, heads, width).transpose(1, 2)
    bias = causal_bias(context, chunk, 0, dtype, device)
    ancestors = causal_ancestors(chunk, device).expand(batch, -1, -1)
    lengths = torch.full((batch,), context, device=device)
    ways: dict[str, Callable[[], Tensor]] = {
        "triton, chunk": lambda: tree_attention_cached(q, k, v, lengths, ancestors, chunk, scale),
        "SDPA, chunk": lambda: tree_attention(q, k, v, bias, scale),  # the second, since it may not fit into memory
    }
    expected = ways["triton, chunk"]()
    pairs = chunk * context + chunk * (chunk + 1) // 2  # of a query and a key that it sees
    moved = (2.0 * k.numel() + 2 * q.numel()) * dtype.itemsize
    for name, way in ways.items():
        before = 0
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        difference = largest(way() - expected)
        if args.device == "cuda":
            print(f"{name}: {(torch.cuda.max_memory_allocated() - before) / 2**20:.1f} MiB at its peak", flush=True)
        shape = {"B": batch, "L": context, "T": chunk}
        table.add("attention", name, shape, [way], Work(moved, 4.0 * batch * heads * pairs * width), difference)


def flex_attention_way(
    q: Tensor, mask: Tensor, lengths: Tensor, slots: int, scale: float
) -> Callable[[Tensor, Tensor], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    nodes = mask.shape[1]

    def seen(b: Tensor, h: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        node = slot - lengths[b]
        return (node < 0) | (mask[b, query, node.clamp(0, nodes - 1)] & (node < nodes))

    blocks = create_block_mask(seen, q.shape[0], None, nodes, slots, device=q.device)
    torch.compiler.reset()  # else a third shape is compiled for shapes of all kinds, which torch 2.11 fails to do
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda k, v: compiled(q, k, v, block_mask=blocks, scale=scale, enable_gqa=True)


def bench_commit(args: argparse.Namespace, table: Table, batch: int, nodes: int) -> None:
    depth, context = 5, 256
    storage = table.randn(args.layers, 2, batch, args.kv_heads, context + nodes, args.width)
    generator = torch.Generator().manual_seed(nodes)
    drafted = [torch.randperm(nodes - 1, generator=generator)[:depth].sort().values + 1 for _ in range(batch)]
    path = F.pad(torch.stack(drafted), (1, 0)).to(args.device)
    lengths, length = torch.full((batch,), context, device=args.device), torch.full((batch,), depth, device=args.device)

    def gather_scatter(storage: Tensor) -> None:
        numbers = torch.arange(depth + 1, device=args.device)
        shape = (*storage.shape[:4], depth + 1, storage.shape[5])
        source = (lengths[:, None] + path)[None, None, :, None, :, None].expand(shape)
        target = (lengths[:, None] + numbers)[None, None, :, None, :, None].expand(shape)
        storage.scatter_(4, target, storage.gather(4, source))

    results: list[Tensor] = []
    ways = {"gather + scatter": gather_scatter, "triton": lambda s: commit(s, lengths, path, length)}
    for name, way in ways.items():
        moved = storage.clone()
        way(moved)
        results.append(moved[..., : context + depth + 1, :].clone())  # timing moves them again
        difference = largest(results[-1] - results[0])
        size = 2 * depth * storage[..., 0, :].numel() * table.dtype.itemsize
        shape = {"layers": args.layers, "B": batch, "N": nodes}
        table.add("commit", name, shape, [partial(way, moved)], Work(size), difference)


def bench_verify(args: argparse.Namespace, table: Table, batch: int, nodes: int, vocabulary: int) -> None:
    draws, dtype = 4, table.dtype
    logits = torch.randn(batch, nodes, vocabulary, device=args.device).mul(3).to(dtype)
    p = logits.float().softmax(-1)
    tokens = p.flatten(0, 1).multinomial(1).view(batch, nodes)
    # Node i's draws lead to 4i + 1 … 4i + 4.
    numbers = torch.arange(nodes * draws, device=args.device).view(nodes, draws) + 1
    child = torch.where(numbers < nodes, numbers, -1).expand(batch, -1, -1)
    q_row = torch.arange(nodes, device=args.device)[:, None].expand(nodes, draws).expand(batch, -1, -1)
    uniforms, last = torch.rand(batch, nodes, draws, device=args.device), torch.rand(batch, device=args.device)
    temperature = torch.full((batch,), 0.8, device=args.device)
    top_k, top_p = torch.full((batch,), 50, device=args.device), torch.full((batch,), 0.9, device=args.device)
    drawn_q = torch.randn_like(p).mul(3).add(p.log()).softmax(-1)
    shape = {"B": batch, "N": nodes, "V": vocabulary}
    for name, kind, q, uses in (
        ("one-hot", ONE_HOT, None, (False, False, False)),
        ("one-hot, top-k and top-p", ONE_HOT, None, (False, True, False)),
        ("drawn", WITHOUT_REPLACEMENT, drawn_q, (False, False, False)),
    ):
        kinds = torch.full_like(child, kind, dtype=torch.int8)
        tree = tokens, child, kinds, q_row, q
        arguments = logits, temperature, top_k, top_p, top_p, *tree, uniforms, last, 4, None, uses
        expected = verify_logits_reference(*arguments)
        inner = min(nodes, -(-(nodes - 1) // draws))  # nodes that have draws
        # All logits once, those of the node where the walk stops again; q of the nodes that have draws.
        size = batch * vocabulary * (dtype.itemsize * (nodes + 1.0) + (0 if q is None else 4.0 * inner))
        for way, function in (("plain PyTorch", verify_logits_reference), ("triton", verify_logits)):
            results = function(*arguments)
            # Rows that come out otherwise: a uniform within rounding of a border.
            differs = torch.stack(
                [(a == b).view(batch, -1).all(1) for a, b in zip(results, expected, strict=True)]
            ).all(0)
            calls, differences = [partial(function, *arguments)], float((~differs).float().mean())
            table.add("verify", f"{way}, {name}", shape, calls, Work(size), differences)
    seed, positions = torch.arange(batch, device=args.device), torch.arange(nodes, device=args.device).repeat(batch, 1)
    no_k, no_p, no_min = torch.zeros_like(top_k), torch.ones_like(top_p), torch.zeros_like(top_p)
    for name, filters, uses in (
        ("coupled", (no_k, no_p, no_min), (False, False, False)),
        ("coupled, top-k and top-p", (top_k, top_p, no_min), (False, True, False)),
    ):
        settings = logits, temperature, *filters, seed, positions, 1
        _, _, expected = coupled_topk_reference(*settings)
        for way, function in (("plain PyTorch", coupled_topk_reference), ("kernel", partial(coupled_topk, uses=uses))):
            differs = (function(*settings)[2] != expected).float().mean()
            size = batch * vocabulary * dtype.itemsize * float(nodes)
            calls = [partial(function, *settings)]
            table.add("verify", f"{way}, {name}", shape, calls, Work(size), float(differs))


def bench_head_topk(args: argparse.Namespace, table: Table, batch: int, vocabulary: int) -> None:
    rows, count = 5 * batch, 10  # five heads
    features = table.randn(rows, args.hidden)
    weights = table.cold(lambda: table.randn(vocabulary, args.hidden) * args.hidden**-0.5)
    exact = F.linear(features.float(), weights[0].float()).topk(count).values
    ways: Ways = {
        "F.linear + topk": lambda w: F.linear(features, w).float().topk(count),
        "triton": lambda w: head_topk(features, w, count),
    }
    shape = {"M": rows, "d": args.hidden, "V": vocabulary}
    work = Work(weights[0].nbytes, 2.0 * rows * args.hidden * vocabulary)
    table.add_ways("head_topk", shape, ways, weights, work, lambda found: largest(found[0] - exact))


def bench_shortlist(args: argparse.Namespace, table: Table, batch: int, nodes: int, vocabulary: int) -> None:
    """Other clusters at every call: on a CPU, a fifth of the rows may fit into the cache."""
    dtype, width, count, capacity = table.dtype, args.hidden, 10, vocabulary // 5
    clusters = min(256, vocabulary // 8)
    generator = torch.Generator().manual_seed(vocabulary)
    cuts = torch.randperm(vocabulary - 1, generator=generator)[: clusters - 1].sort().values + 1
    starts = F.pad(F.pad(cuts, (1, 0)), (0, 1), value=vocabulary).to(args.device)
    ids = torch.randperm(vocabulary, generator=generator).to(args.device)
    scores = list(torch.rand(10, batch, clusters, generator=generator).to(args.device))
    lists = [pack_shortlist(one, starts, clusters, capacity) for one in scores]
    features = table.randn(batch, nodes, width)
    size = vocabulary * width * dtype.itemsize
    heads = list[nn.Linear]()
    for weight in table.cold(lambda: table.randn(vocabulary, width) * width**-0.5):
        heads.append(nn.Linear(width, vocabulary, bias=False, device="meta"))
        heads[-1].weight = nn.Parameter(weight, requires_grad=False)

    def full(head: nn.Linear) -> Tensor:
        return linear.apply_linear(head, features).float()

    def full_topk(head: nn.Linear) -> Tensor:
        if why_not_triton(features):
            return full(head).topk(count).values
        return head_topk(features.flatten(0, 1), head.weight, count)[0].view(batch, nodes, count)

    def logits(head: nn.Linear, rows: Tensor) -> Tensor:
        return shortlist_logits(features, head.weight, rows)

    def topk(head: nn.Linear, rows: Tensor) -> Tensor:
        return shortlist_topk(features, head.weight, rows, ids, count)[0]

    shape = {"B": batch, "n": nodes, "d": width, "V": vocabulary, "C": capacity}
    rows, head = lists[0].rows, heads[0]
    known = (rows[:1] >= 0)[:, None].expand(1, nodes, -1)
    chosen = head.weight[rows[:1].clamp(min=0)]  # of one text: gathers in float32
    exact = (features[:1].float() @ chosen.float().transpose(1, 2)).masked_fill(~known, float("-inf"))

    def compare(found: Tensor) -> float:
        return largest((found - exact)[known])

    def compare_best(found: Tensor, best: Tensor) -> float:
        return largest(torch.where(found[:1] == best, 0, found[:1] - best))  # −inf where there are fewer

    of_rows = full(head)[:1].gather(2, rows[:1].clamp(min=0)[:, None].expand_as(exact))
    counts = torch.stack([one.count.sum() for one in lists])  # some rows fewer than fit: clusters are taken whole
    moved = float(counts.double().mean()) * width * dtype.itemsize
    per_byte = 2.0 * nodes / dtype.itemsize  # multiply-adds · 2
    pairs = [(heads[number % len(heads)], one.rows) for number, one in enumerate(lists)]
    whole, listed = Work(size, size * per_byte * batch), Work(moved, moved * per_byte)
    of_full = compare_best(full_topk(head), full(head)[:1].topk(count).values)
    of_list = compare_best(topk(head, rows), exact.topk(count).values)
    on_cpu = pack_shortlist(scores[0].cpu(), starts.cpu(), clusters, capacity).rows
    other_rows = float((on_cpu != rows.cpu()).float().mean())
    choices = [partial(pack_shortlist, each, starts, clusters, capacity) for each in scores]
    for way, calls, difference, work in (
        ("full head", [partial(full, each) for each in heads], compare(of_rows), whole),
        ("shortlist", [partial(logits, *pair) for pair in pairs], compare(logits(head, rows)[:1]), listed),
        ("full head, topk", [partial(full_topk, each) for each in heads], of_full, whole),
        ("shortlist, topk", [partial(topk, *pair) for pair in pairs], of_list, listed),
        ("choice of rows", choices, other_rows, Work(8.0 * rows.numel())),
    ):
        table.add("shortlist", way, shape, calls, work, difference)


def bench_few_rows(args: argparse.Namespace, table: Table, rows: int, inputs: int, outputs: int) -> None:
    x = table.randn(rows, inputs)
    matrices = table.cold(lambda: table.randn(outputs, inputs).mul_(inputs**-0.5).t())
    out = x.new_empty(rows, outputs)
    ways: Ways = {"torch.mm": lambda w: torch.mm(x, w, out=out)}
    form, parts_form = few_rows_forms(rows, matrices[0])
    parts = linear.partial_buffer(parts_form, rows, matrices[0])
    ways[form] = lambda w: linear.product(form, x, w, None, out)
    ways[f"parts: {parts_form}"] = lambda w: linear.partial_product(parts_form, x, w, parts)
    if args.compiled and args.device == "cuda":
        compiled = torch.compile(torch.mm, mode="max-autotune-no-cudagraphs", dynamic=False)
        ways["torch.compile"] = lambda w: compiled(x, w)
    exact = x.float() @ matrices[0].float()
    shape, moved = {"M": rows, "K": inputs, "N": outputs}, float(x.nbytes + matrices[0].nbytes + out.nbytes)
    whole = lambda found: found.float().sum(0) if found.dim() == 3 else found.float()  # noqa: E731
    work = Work(moved, 2.0 * rows * inputs * outputs)
    table.add_ways("few_rows", shape, ways, matrices, work, lambda found: largest(whole(found) - exact))


def few_rows_forms(rows: int, matrix: Tensor) -> tuple[str, str]:
    """The fastest forms of the product and of its parts; under the interpreter, where times mean nothing, the last of
    the candidates."""
    if matrix.is_cuda:
        return linear.choose(rows, matrix), linear.choose(rows, matrix, partial=True)
    inputs, outputs = matrix.shape
    forms = candidates(rows, inputs, outputs, matrix.dtype, multiprocessors(matrix.device))
    return forms[0].name, forms[-1].name


def partial_sums(table: Table, rows: int, outputs: int, parts: int) -> list[Tensor]:
    """Outputs of products ``[S, M, outputs]``: one part in the model's dtype, or several in float32 (split-K)."""
    dtype, device = table.dtype if parts == 1 else torch.float32, table.args.device
    return table.cold(lambda: torch.randn(parts, rows, outputs, device=device, dtype=dtype).mul_(parts**-0.5))


def add_up(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """In separate operations, if there is more than one part: ``[S, M, outputs]`` → ``[M, outputs]``."""
    return parts[0] if len(parts) == 1 else parts.sum(0).to(dtype)


Way = Callable[..., Sequence[Tensor]]  # arguments, some of which are written to → results


def add_fused(
    table: Table, name: str, shape: dict[str, int], ways: Sequence[Way], data: Sequence[Sequence[Tensor]], work: Work
) -> None:
    """Plain PyTorch and the kernel over all ``data``, the arguments of calls, beside the definition's result: the three
    ``ways``, in this order."""
    first = [part.clone() for part in data[0]]  # timing changes them
    expected = ways[2](*(part.clone() for part in first))
    for way, function in zip(("plain PyTorch", "triton"), ways, strict=False):
        found = function(*(part.clone() for part in first))
        pairs = zip(found, expected, strict=True)
        difference = float(torch.stack([(a.float() - b.float()).abs().max() for a, b in pairs]).max())  # NaN if one is
        table.add("fused", f"{way}, {name}", shape, [partial(function, *one) for one in data], work, difference)


def bench_add_norm(args: argparse.Namespace, table: Table, batch: int, nodes: int, parts: int) -> None:
    dtype, rows, width, eps = table.dtype, batch * nodes, args.hidden, 1e-5
    weight = torch.rand(width, device=args.device, dtype=dtype) + 0.5
    data = [
        (torch.randn_like(y[0], dtype=dtype), y, torch.full_like(y[0], torch.nan, dtype=dtype))
        for y in partial_sums(table, rows, width, parts)
    ]

    def plain(x: Tensor, y: Tensor, out: Tensor) -> Sequence[Tensor]:
        x.add_(add_up(y, dtype))
        return x, F.rms_norm(x, weight.shape, weight, eps)

    def by(function: Callable[..., object], x: Tensor, y: Tensor, out: Tensor) -> Sequence[Tensor]:
        function(x, y, weight, eps, out)
        return x, out

    x, y, out = data[0]
    moved = y.nbytes + 2.0 * x.nbytes + out.nbytes + weight.nbytes
    ways = plain, partial(by, add_norm), partial(by, add_norm_reference)
    add_fused(table, "add_norm", {"S": parts, "M": rows, "d": width}, ways, data, Work(moved))


def bench_rotate_write(args: argparse.Namespace, table: Table, batch: int, nodes: int, parts: int) -> None:
    dtype, heads, kv_heads, width = table.dtype, args.heads, args.kv_heads, args.width
    rows, all_heads, context = batch * nodes, heads + 2 * kv_heads, 256
    numbers, depth = torch.arange(context + nodes, device=args.device), random_tree(nodes)[1].to(args.device)
    slots, positions = numbers[context:].expand(batch, -1), (context + depth.long()).expand(batch, -1)
    angle = numbers[:, None] * 5e5 ** -torch.linspace(0, 1, width // 2 + 1, device=args.device)[:-1]
    cos, sin = angle.cos(), angle.sin()
    angles = torch.cat([cos, cos, -sin, sin], 1).to(dtype)  # [P, 2 · D]
    data = [
        (
            qkv,
            qkv.new_zeros(batch, context + nodes, 2, kv_heads, width, dtype=dtype),
            qkv.new_full((batch, nodes, heads, width), torch.nan, dtype=dtype),
        )
        for qkv in partial_sums(table, rows, all_heads * width, parts)
    ]
    # Once per forward pass, for all layers.
    own_cos, own_sin = F.embedding(positions, angles).view(batch, nodes, 2, 1, width).unbind(2)
    numbers_of_rows = torch.arange(batch, device=args.device)[:, None]

    def plain(qkv: Tensor, cache: Tensor, q_out: Tensor) -> Sequence[Tensor]:
        """As ``run_layer`` of models/lean.py."""
        each = add_up(qkv, dtype).view(batch, nodes, all_heads, width)
        qk = each[:, :, : heads + kv_heads]
        other = qk.roll(width // 2, -1)
        qk.mul_(own_cos).addcmul_(other, own_sin)
        cache.index_put_((numbers_of_rows, slots), each[:, :, heads:].view(batch, nodes, 2, kv_heads, width))
        return each[:, :, :heads], cache

    def by(function: Callable[..., object], qkv: Tensor, cache: Tensor, q_out: Tensor) -> Sequence[Tensor]:
        function(qkv, angles, positions, slots, cache, q_out)
        return q_out, cache

    moved = data[0][0].nbytes + float(rows * all_heads * width * dtype.itemsize)
    ways = plain, partial(by, rotate_write), partial(by, rotate_write_reference)
    add_fused(table, "rotate_write", {"S": parts, "B": batch, "N": nodes}, ways, data, Work(moved))


def bench_gated(args: argparse.Namespace, table: Table, batch: int, nodes: int, parts: int) -> None:
    dtype, rows, width = table.dtype, batch * nodes, int(3.5 * args.hidden)
    data = [
        (both, both.new_full((rows, width), torch.nan, dtype=dtype))
        for both in partial_sums(table, rows, 2 * width, parts)
    ]

    def plain(both: Tensor, out: Tensor) -> Sequence[Tensor]:
        gate, up = add_up(both, dtype).chunk(2, -1)
        return (F.silu(gate).mul_(up),)

    def by(function: Callable[..., object], both: Tensor, out: Tensor) -> Sequence[Tensor]:
        function(both, out, "silu")
        return (out,)

    moved = float(sum(part.nbytes for part in data[0]))
    ways = plain, partial(by, gated), partial(by, gated_reference)
    add_fused(table, "gated", {"S": parts, "M": rows, "F": width}, ways, data, Work(moved))


def bench_res_block(args: argparse.Namespace, table: Table, batch: int) -> None:
    """Of five heads, for one position of each text."""
    heads, width = 5, args.hidden
    x, bias = table.randn(batch, width).expand(heads, -1, -1), table.randn(heads, 1, width)
    weights = table.cold(lambda: table.randn(heads, width, width).mul_(width**-0.5))
    moved = weights[0].nbytes + bias.nbytes + (batch + heads * batch) * width * float(table.dtype.itemsize)
    ways = (
        lambda *data: (res_block_reference(*data),),
        lambda *data: (res_block(*data),),
        lambda *data: (res_block_reference(*(part.float() for part in data)),),
    )
    shape, data = {"K": heads, "P": batch, "d": width}, [(x, weight, bias) for weight in weights]
    add_fused(table, "res_block", shape, ways, data, Work(moved, 2.0 * heads * batch * width**2))


def bench_acceptance(args: argparse.Namespace, table: Table, batch: int, nodes: int) -> None:
    """Greedy acceptance and the state of the next step, all in the L2 cache: in a step, most of it was written just
    before."""
    ancestors, depth = (part.to(args.device).repeat(batch, *[1] * (part.dim() - 1)) for part in random_tree(nodes))
    max_depth, number = int(depth.max()), torch.arange(nodes, device=args.device)
    above = ancestor_mask(ancestors, nodes) & (depth[:, None] == depth[..., None] - 1)  # True at the parent alone
    parent = torch.where(number > 0, above.int().argmax(-1), -1).int()
    choice, tokens = torch.randint(2, (2, batch, nodes), device=args.device)  # about half of all nodes agree
    best = table.randn(batch, nodes)
    valid, active = number.expand(batch, -1) >= 0, torch.arange(batch, device=args.device) % 3 != 1
    committed = tokens.new_full((batch, max_depth + 2), -2)
    data = (choice, best, tokens, parent, depth, ancestors, valid, active, committed)

    def accept(function: Callable[..., Sequence[Tensor]], *data: Tensor) -> Sequence[Tensor]:
        return *function(*data, max_depth=max_depth), data[-1]

    plain, fused = partial(accept, accept_greedy_reference), partial(accept, accept_greedy)
    shape, expected = {"B": batch, "N": nodes}, plain(*(part.clone() for part in data))
    moved = float(sum(part.nbytes for part in (*data, *expected[:-1])))
    add_fused(table, "accept_greedy", shape, (plain, fused, plain), [data], Work(moved))

    _, length, node, bonus, _, _ = expected
    features = table.randn(batch, nodes, args.hidden)
    state = (torch.full_like(length, 256), torch.full_like(bonus, -1), torch.full_like(features[:, 0], torch.nan))
    data = (*state, features, node, bonus, length, active)

    def go_on(function: Callable[..., object], *data: Tensor) -> Sequence[Tensor]:
        function(*data)
        return data[:3]

    plain, fused = partial(go_on, advance_reference), partial(go_on, advance)
    work = Work(2.0 * state[2].nbytes)
    add_fused(table, "advance", shape | {"F": args.hidden}, (plain, fused, plain), [data], work)
