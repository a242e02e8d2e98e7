"""Targets and Medusa heads of known shapes with random weights, trees for them, and the least work of their steps.

Shape letters: see step_times.py.
"""

import gc
import heapq
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.benchmarks.floors import STEP_LAUNCHES, Work
from draftsmith.benchmarks.options import SHAPES
from draftsmith.inference.engine.cache import free_bytes
from draftsmith.inference.verify.tree import Ranks, Topology
from draftsmith.models.files.locate import local_folder
from draftsmith.models.medusa import MedusaConfig, MedusaHeads
from draftsmith.models.precision import choose_dtype, describe, say
from draftsmith.models.target import Target

Projection = Literal["own", "shared"]
ACCURACY = 0.55  # probability p that a head's best token is right in the trees of :func:`grow_tree`
MAX_RANK = 10  # ranks per head, as many as calibration looks at


def release() -> None:
    """Free memory that is no longer in use."""
    gc.collect()  # a cache and its layers refer to each other
    torch.cuda.empty_cache()  # does nothing without a GPU


def check_fits(needed: int, device: torch.device) -> None:
    """Check that ``needed`` bytes of the device's memory are free. Raises MemoryError: fewer are."""
    free = free_bytes(device)
    if needed > free:
        raise MemoryError(f"needs {needed / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free")


def config_of(name: str) -> LlamaConfig:
    """
    Raises:
        ValueError: there is no such shape in :data:`SHAPES`.
    """
    if name not in SHAPES:
        raise ValueError(f"--shape {name}: unknown; use {', '.join(SHAPES)}")
    shape, bundled = SHAPES[name], local_folder("models/tiny-lm")
    assert shape is not None or bundled is not None, "the bundled model is missing"
    return LlamaConfig(**shape) if shape else LlamaConfig.from_pretrained(str(bundled))


def random_target(name: str, positions: int, dtype: torch.dtype, device: torch.device) -> Target:
    """A target of a shape of :data:`SHAPES` with random weights, made on the device, for so many positions."""
    config = config_of(name)
    config.max_position_embeddings = positions
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    check_fits(size * dtype.itemsize, device)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return Target(model, None, name, "")


def random_heads(target: Target, count: int, projection: Projection) -> MedusaHeads:
    """Medusa heads of one layer with random weights in the target's dtype."""
    own = target.vocab_size if projection == "own" else 0
    check_fits(count * target.hidden_size * (target.hidden_size + own) * target.dtype.itemsize, target.device)
    with target.device:
        config = MedusaConfig(count, 1, projection, target.hidden_size, target.vocab_size)
        heads = MedusaHeads(config, target.dtype).requires_grad_(False)
    for weight in heads.parameters():
        weight.normal_(std=0.02)
    return heads


def grow_tree(nodes: int, heads: int) -> Topology:
    """The best tree of ``nodes`` nodes, root included, if each head's token of rank r is right with probability p · (1
    − p)^r, p = :data:`ACCURACY`, independently of the others: much like the trees that calibration finds. Raises
    ValueError: there are fewer paths."""
    paths: list[Ranks] = []
    waiting: list[tuple[float, Ranks]] = [(-ACCURACY, (0,))]  # (minus the probability, path); a parent comes first
    while len(paths) < nodes - 1:
        if not waiting:
            raise ValueError(
                f"--nodes {nodes}: {heads} heads give trees of at most {len(paths) + 1} nodes; raise --heads"
            )
        negative, path = heapq.heappop(waiting)
        paths.append(path)
        if len(path) < heads:
            heapq.heappush(waiting, (negative * ACCURACY, (*path, 0)))
        if path[-1] + 1 < MAX_RANK:
            heapq.heappush(waiting, (negative * (1 - ACCURACY), (*path[:-1], path[-1] + 1)))
    return Topology(tuple(paths))


def works_of_step(
    target: Target, heads: MedusaHeads | None, topology: Topology, batch: int, context: int
) -> list[Work]:
    """The least work of a dense target's step: its products, its attention, and the draft heads.

    Every weight is read once, but embedding tables, which are not read, and the LM head that draft heads share: they
    wait for the target's best tokens, so that they read it again. The target's matrices are multiplied with every node,
    those of the heads with one hidden state per row; nodes attend to the prefix and their ancestors. Launches: the
    kernels of a greedy step without drafting.
    """
    tables = {id(module.weight) for module in target.decoder.modules() if isinstance(module, nn.Embedding)}
    weights = [w for w in target.decoder.parameters() if id(w) not in tables] + list(target.lm_head.parameters())
    products = sum(w.numel() for w in weights if w.dim() > 1) * batch * topology.num_nodes
    # If some layers have a sliding window, all are counted with it: a lower bound.
    seen = min(context, getattr(target.config, "sliding_window", None) or context)
    keys = topology.num_nodes * seen + 1 + sum(len(path) + 1 for path in topology.paths)
    cached = sum(2 * batch * seen * kv_heads * width for kv_heads, width in target.kv_shapes)
    scores = sum(2 * batch * keys * target.config.num_attention_heads * width for _, width in target.kv_shapes)
    (per_layer, around), size = STEP_LAUNCHES, target.dtype.itemsize
    launches = per_layer * len(target.kv_shapes) + around
    works = [Work(size * sum(w.numel() for w in weights), 2 * products, launches), Work(size * cached, 2 * scores)]
    used = topology.max_depth  # further heads are not run
    if heads is not None and used:
        head = target.vocab_size * target.hidden_size
        blocks, read = heads.weight[:, :used].numel(), head * (1 if heads.projection is None else used)
        read += blocks + heads.bias[:, :used].numel()
        works.append(Work(size * read, 2 * batch * (blocks + used * head)))
    return works


def totals(works: Sequence[Work]) -> tuple[int, int]:
    """The bytes that a step reads at least, and its multiply-adds · 2."""
    return int(sum(work.moved for work in works)), int(sum(work.operations for work in works))


def dtype_of_shape(given: str, device: torch.device) -> str:
    """The dtype of random weights, which count as stored in bfloat16; it is said why."""
    chosen = choose_dtype(given, device, lambda: "bfloat16")
    for line in describe(device, chosen):
        say(line)
    return chosen.value
