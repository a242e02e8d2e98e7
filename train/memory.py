"""Memory that a micro-batch takes on a device, by part, computed from shapes: nothing is run.

A frozen target keeps nothing, so that of its pass the largest moment counts; of what trains, what is kept for the
backward pass. The numbers are read off the code: when a step comes to keep something else, the function of that drafter
changes here, and tests/train/test_memory.py compares it with what PyTorch allocates. Each token counts as a label.

Shape letters: N tokens of a micro-batch, T tokens of a row, d hidden width, F features per token, V vocabulary, S draft
vocabulary, K heads or unrolled steps.
"""

from dataclasses import dataclass, replace
from typing import Any

from draftsmith.models.dflash import DFlashConfig
from draftsmith.models.eagle import EagleConfig
from draftsmith.models.medusa import MedusaConfig
from draftsmith.models.unrolled import SCORES
from draftsmith.train.losses import LOGITS

SINGLE = 4  # bytes of a float32
SHORT = 128  # tokens of a short conversation


@dataclass(frozen=True)
class Micro:
    """A micro-batch on a device.

    rows, length: of tokens.
    packed: several samples share a row.
    blocks: attention is FlexAttention's, on a GPU; else it has masks of every two tokens of a packed row, or scores.
    product: bytes of a number in products of what trains: 2 under bfloat16 autocast, else 4.
    target: bytes of a number in the target's pass.
    cuda: it runs on a GPU.
    """

    rows: int
    length: int
    packed: bool = False
    product: int = 2
    target: int = 2
    cuda: bool = True
    blocks: bool = False

    @property
    def masks(self) -> int:
        """Pairs of tokens that attention has a mask of."""
        return self.rows * self.length**2 if self.packed and not (self.cuda and self.blocks) else 0

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def device(self) -> str:
        return "cuda" if self.cuda else "cpu"

    def logits(self, outputs: int) -> int:
        """Logits that exist at a time."""
        return outputs * min(self.tokens, max(1, LOGITS[self.device] // outputs))


@dataclass(frozen=True)
class Kept:
    """Bytes of a micro-batch. activations: with the features that a drafter reads, and the chunks of logits or scores
    that exist at a time; teacher: distributions; heads: gradients of LM heads, which exist before the backward pass."""

    activations: float
    teacher: float = 0.0
    heads: float = 0.0


def widths(config: Any) -> tuple[int, int, int, int]:
    """Of a text config: hidden width, width of all queries, of all keys, and of the MLP; of a mixture of experts, of
    those that a token takes."""
    d, heads = int(config.hidden_size), int(config.num_attention_heads)
    head = int(getattr(config, "head_dim", None) or d // heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    experts = int(getattr(config, "num_experts_per_tok", None) or 0)
    wide = int(getattr(config, "intermediate_size", None) or 4 * d)
    return d, heads * head, groups * head, experts * int(getattr(config, "moe_intermediate_size", wide)) or wide


def target_pass(config: Any, micro: Micro) -> float:
    """The largest moment of a frozen target's pass: in an MLP (its input, the residual, and three of its width) or in
    attention (queries and keys before and after rotation, values, repeated for groups); and the masks."""
    d, queries, keys, wide = widths(config)
    repeated = 2 * queries if micro.packed else 2 * keys
    token = max(2 * d + 3 * wide, 2 * d + 4 * queries + 2 * keys + repeated)
    return micro.target * micro.tokens * token + micro.masks * (1 + micro.target)  # bool, and as scores' summand


def layer(micro: Micro, shape: tuple[int, int, int, int], inputs: int, normed: int) -> float:
    """What a trained Llama layer keeps of a token: the inputs of its products (under autocast each product has a copy
    of its own), queries, keys, values, attention's output twice, two residuals in float32, and four of the MLP's width.

    Args:
        shape: :func:`widths`.
        inputs: width of what queries, keys and values are made of.
        normed: norms that keep their result, too; a fused one does not.
    """
    d, queries, keys, wide = shape
    copies = (3, 2) if micro.product < SINGLE else (1, 1)
    products = copies[0] * inputs + copies[1] * d + 3 * queries + 2 * keys + 4 * wide
    return micro.product * products + SINGLE * d * (2 + normed)


def layer_weights(shape: tuple[int, int, int, int], inputs: int) -> int:
    """Weights of a Llama layer's products, of which autocast keeps a copy; arguments as those of :func:`layer`."""
    d, queries, keys, wide = shape
    return inputs * (queries + 2 * keys) + queries * d + 3 * d * wide


def eagle(config: EagleConfig, target: Any, micro: Micro, steps: float, given: bool, recomputed: bool = False) -> Kept:
    """An EAGLE drafter of K = ``steps`` unrolled steps; of P-EAGLE the sum of the shares of tokens that run them.

    Args:
        given: its features are kept from an earlier pass.
        recomputed: of each step the input and the keys are kept alone (gradient checkpointing), of one all.
    """
    d, n, narrow = config.hidden_size, micro.tokens, micro.product < SINGLE
    head = config.head_dim
    shape = d, config.num_attention_heads * head, config.num_key_value_heads * head, config.intermediate_size
    read = config.feature_size * (1 + len(config.captured_layers))
    features = n * read * (micro.target + (0 if micro.target == SINGLE else SINGLE))
    version_3 = config.version == 3
    normed = 0 if micro.cuda else 3 if version_3 else 1  # in place of frozen embeddings, their normed form
    fused = read * micro.product + SINGLE * d if version_3 else 2 * d * (micro.product + (SINGLE if narrow else 0))
    step = layer(micro, shape, 2 * d if version_3 else d, normed)
    step += (config.num_layers - 1) * layer(micro, shape, d, 0 if micro.cuda else 2)
    # Embeddings, rotary angles, softmax's denominators.
    step += SINGLE * (d + 2 * head + config.num_attention_heads)
    # What the LM head reads, by step and joined, as its product reads it, and the gradient there.
    read_out = 2 * SINGLE * d + micro.product * d * (2 if narrow else 1)
    if narrow:  # keys in float32; each step has its own copies of the first one's and of those since
        step += config.num_layers * shape[2] * (SINGLE + micro.product * (steps - 1) / 2)
    inputs = config.feature_size * len(config.captured_layers) or 2 * d
    weights = inputs * d + layer_weights(shape, 2 * d if version_3 else d)
    weights += (config.num_layers - 1) * layer_weights(shape, d)
    blocks = micro.cuda and micro.blocks
    if blocks:  # values of the steps since the first one, repeated for groups
        step += config.num_layers * micro.product * shape[1] * (steps - 1) / 2
    scores = 0 if blocks else min(SCORES[micro.device], micro.rows * config.num_attention_heads * micro.length**2)
    chunks = max(micro.logits(config.outputs) * (2 * SINGLE + 2 * micro.product), 3 * SINGLE * scores)
    teacher = n * (SINGLE * config.outputs + micro.target * config.feature_size)
    keys = config.num_layers * (SINGLE + micro.product) * shape[2]
    # The first step's layers but the last one are not recomputed, since later steps need their keys.
    kept_ones = (config.num_layers - 1) * layer(micro, shape, d, 0 if micro.cuda else 2)
    layers = step + kept_ones + (steps - 1) * (SINGLE * d + keys) if recomputed else steps * step
    kept = n * (fused + layers + steps * read_out) + chunks + (micro.product * weights if narrow else 0)
    run = 0.0 if given else target_pass(target, micro)
    heads = SINGLE * config.outputs * d if config.projection == "own" else 0  # one for all steps
    return Kept(features + max(kept, run - teacher), teacher, heads)


def row_blocks(anchors: int, length: int, slots: int, packed: bool) -> int:
    """Blocks of a row of a DFlash drafter's training: of one conversation; of a packed row, whose conversations are not
    counted before, of as many as have :data:`SHORT` tokens, and at least as many as have a slot for each token."""
    of_conversations = anchors * max(1, length // SHORT) if packed else anchors
    return max(min(of_conversations, length), length // slots if packed else 0)


def dflash(
    config: DFlashConfig,
    target: Any,
    micro: Micro,
    anchors: int,
    given: bool,
    recomputed: bool = False,
    soft: bool = False,
) -> Kept:
    """A DFlash drafter on blocks of S slots, ``anchors`` of a conversation at most. ``soft``: with the target's
    distributions; the rest is as in :func:`eagle`."""
    d, n, narrow, layers = config.hidden_size, micro.tokens, micro.product < SINGLE, config.num_layers
    head, heads = config.head_dim, config.num_attention_heads
    shape = d, heads * head, config.num_key_value_heads * head, config.intermediate_size
    own = row_blocks(anchors, micro.length, config.block_size, micro.packed)
    blocks = micro.rows * own
    read = d * len(config.captured_layers)
    features = n * (read + d) * (micro.target + (0 if micro.target == SINGLE else SINGLE))
    # Context features; keys and values of each layer before and after their norm and rotation, and as products.
    fused = n * (read * micro.product * narrow + 2 * SINGLE * d + layers * shape[2] * (4 * SINGLE + 2 * micro.product))
    step = layer(micro, shape, d, 2) + 2 * SINGLE * (shape[1] + shape[2]) + SINGLE * heads
    kept = (SINGLE * d * layers + step) if recomputed else layers * step
    read_out = 3 * SINGLE * d + micro.product * d * (2 if narrow else 1)
    scores = min(SCORES[micro.device], blocks * heads * config.block_size * micro.length)
    logits = replace(micro, length=own * config.num_draft_heads).logits(config.outputs)
    chunks = max(logits * (SINGLE + (micro.product if narrow else 0)), 3 * SINGLE * scores)
    weights = read * d + layers * layer_weights(shape, d)
    kept = fused + blocks * config.block_size * (kept + read_out) + chunks + (micro.product * weights if narrow else 0)
    teacher = blocks * config.num_draft_heads * SINGLE * config.outputs if soft else 0
    return Kept(features + max(kept, 0.0 if given else target_pass(target, micro)), teacher)


def medusa(config: MedusaConfig, target: Any, micro: Micro, given: bool) -> Kept:
    """Medusa heads on a frozen target. Of each head and layer the input's copy, what SiLU reads, and the output; the
    gradient at what each projection reads."""
    d, n, narrow = config.hidden_size, micro.tokens, micro.product < SINGLE
    block = (micro.product if narrow else 0) + micro.product + SINGLE
    heads = config.num_draft_heads * d * (config.num_layers * block + micro.product)
    hidden = d * (
        2 * micro.target + (SINGLE if micro.target < SINGLE else 0)
    )  # all, the labelled ones, those in float32
    own = config.outputs * d if config.projection == "own" else 0
    chunks = micro.logits(config.outputs) * (SINGLE + (micro.product if narrow else 0))
    weights = config.num_draft_heads * config.num_layers * d * d + own  # the copy of one LM head at a time
    run = 0.0 if given else target_pass(target, micro)
    kept = n * (hidden + heads) + chunks + (micro.product * weights if narrow else 0)
    return Kept(max(kept, n * micro.target * d + run), heads=config.num_draft_heads * SINGLE * own)


def language_model(
    config: Any, micro: Micro, losses: int, trains_head: bool, outputs: int | None = None, recomputed: bool = False
) -> Kept:
    """A Llama that trains, with ``losses`` on its hidden states by an LM head of ``outputs`` rows.
    ``recomputed``: of each layer its input is kept alone (gradient checkpointing), of one all."""
    shape, narrow = widths(config), micro.product < SINGLE
    d, outputs = shape[0], outputs or int(config.vocab_size)
    layers, whole = int(config.num_hidden_layers), layer(micro, shape, d, 2)  # transformers' norms are not fused
    kept = layers * SINGLE * d + whole if recomputed else layers * whole
    kept += SINGLE * d * 4 + losses * d * (micro.product + SINGLE)  # embeddings, the last norm, what the losses read
    chunks = micro.logits(outputs) * (SINGLE + (micro.product if narrow else 0))
    chunks += micro.product * layers * layer_weights(shape, d) if narrow else 0
    masks = micro.masks * (1 + micro.product)
    heads = losses * SINGLE * int(config.vocab_size) * d if trains_head else 0
    return Kept(micro.tokens * kept + chunks + masks, heads=heads)


def adapted(config: Any, micro: Micro, recomputed: bool, dropout: bool) -> float:
    """A frozen target whose layers train by adapters: of each layer the residuals, attention and MLP, a copy of each
    adapter's input; with gradient checkpointing its input alone, and one layer whole."""
    d, queries, keys, wide = widths(config)
    copies = (6 * d + queries + wide) * (micro.product + (1 if dropout else 0))
    whole = micro.target * (2 * d + 2 * queries + 2 * keys + 3 * wide) + 2 * SINGLE * d + copies
    layers = int(config.num_hidden_layers)
    per_token = layers * micro.target * d + whole if recomputed else layers * whole
    return micro.tokens * per_token + LOGITS[micro.device] * 7 * SINGLE
