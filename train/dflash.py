"""Train a DFlash drafter on a target's features (arXiv 2602.06036).

    accelerate launch train/dflash.py recipes/tiny-dflash.yaml [section.field=value ...] [--tiny] [--resume | --restart]

    L = Σ w_k · CE(x_{a+k} ‖ q_{a,k}) over blocks that begin at random places a of answers, and their drafts k
    drafter.loss=lk, tv or nla, of the target's distribution, as EAGLE-3's (kernels/soft_loss.py); by gamma alone
    drafter.replay: on its own drafts, rejected ones too (Draft-OPD, train/replay.py)

The labels are the answers' own tokens; one outside the draft vocabulary does not train. ``drafter.weights``:

    dpace   c_k = e^−CE_k,  s_k = (1 + c_k) / 2,  w_j = Σ_{m ≥ j} Π_{i ≤ m} s_i, constants to the gradient; a mean over
            the labels (D-PACE, arXiv 2605.18810)
    gamma   w_k = e^(−(k − 1) / γ); a mean by weight

The checkpoint with the highest simulated τ on held-out rows is exported. Then: inference/calibrate.py,
inference/decode.py. Shape letters: B batch, T tokens, P blocks, S slots of a block, K = S − 1 drafts, F features per
token, d hidden width, V vocabulary.
"""

import copy
from dataclasses import fields, replace
from functools import partial
from typing import Any

from draftsmith.common.command import before_imports, recipe_parser, run_command
from draftsmith.train.early import reader

PARSER = recipe_parser(
    __doc__, "recipes/tiny-dflash.yaml", "drafter.block_size=8", "two steps of each stage on a small random target"
)
RECIPE = before_imports(PARSER, reader("dflash")) if __name__ == "__main__" else None

import torch
from torch import Tensor, nn

from draftsmith.inference.drafters.dflash import DFlashDrafter
from draftsmith.inference.measure.tree_statistics import block_ranks, selection_tree, simulate, top_shares
from draftsmith.kernels.distribution import philox_uniforms
from draftsmith.models.dflash import DFlash, DFlashConfig, block_anchors
from draftsmith.models.files.locate import ModelFolder
from draftsmith.models.target import Target
from draftsmith.models.unrolled import marked_places
from draftsmith.models.vocabulary import to_draft_ids
from draftsmith.train import draft_vocabulary, memory, sharded
from draftsmith.train.dry_run import Plan, target_shape
from draftsmith.train.loop import fit
from draftsmith.train.losses import BesideTarget, labels_of, linear_block_loss, linear_soft_loss, shifted_labels, teach
from draftsmith.train.replay import Replay
from draftsmith.train.run import Run, beginning
from draftsmith.train.samples import Batch
from draftsmith.train.script import Script, run_script
from draftsmith.train.sections.dflash import DflashRecipe, DFlashSection

SMOOTHING = 0.5  # of confidences in D-PACE (arXiv 2605.18810)
NONE, OUTSIDE = -100, -1  # labels: there is none; it is not in the draft vocabulary


class DFlashTraining(BesideTarget):
    """A frozen target and the drafter that trains on its features."""

    def __init__(self, target: Target, dflash: DFlash, recipe: DflashRecipe) -> None:
        super().__init__()
        self.target, self.dflash, self.seed = target, dflash, recipe.run.seed
        d = recipe.drafter
        self.anchors, self.loss, self.gamma = d.anchors, d.loss, d.gamma if d.weights == "gamma" else None
        self.captures = dflash.config.captured_layers
        dflash.recompute, dflash.flex = recipe.precision.gradient_checkpointing, recipe.target.attention != "sdpa"
        self.model = target.model  # registered, frozen: moves with the module, is in no optimizer

    def labels(self, batch: Batch) -> Tensor:
        """``[K, B, T]``: where a block begins, the drafts' labels, up to the answer's end; elsewhere −100. Blocks are
        a function of the seed and of ``visit [B]`` in the batch, the number of each row among all of the run."""
        tokens, supervised, segment = batch["tokens"], batch["supervised"], batch.get("segment")
        visit = batch.get("visit", torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device))
        uniforms = philox_uniforms(torch.full_like(visit, self.seed), visit, tokens.shape[1])
        begins = block_anchors(supervised, segment, uniforms, self.anchors)
        drafts = range(1, self.dflash.config.block_size)
        labels = torch.stack([shifted_labels(tokens, supervised, k, segment) for k in drafts])
        labels = labels.where((labels != NONE).int().cumprod(0).bool() & begins, NONE)
        if (ids := self.dflash.draft_vocab) is None:
            return labels
        return torch.where(labels == NONE, NONE, to_draft_ids(labels, ids, outside=OUTSIDE))

    def count(self, batch: Batch) -> Tensor:
        """Labels of each draft of a block."""
        return (labels_of(self, batch) != NONE).sum((1, 2))

    def weigh(self, losses: Tensor, labels: Tensor) -> Tensor:
        """The weights ``[P, K]`` of drafts with these losses and labels."""
        if self.gamma is not None:
            return position_weights(labels.shape[1], self.gamma, labels.device).expand(labels.shape)
        return dpace_weights(losses, labels)

    def forward(self, batch: Batch, counts: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, with metrics of each draft of a block (``counts [K]`` labels); ``hidden``, the features
        ``[B, T, F]``, may be in the batch."""
        if (features := batch.get("hidden")) is None:
            with torch.no_grad():  # padding follows every label, and attention is causal
                features = self.target.features(batch["tokens"].long(), self.captures, batch.get("positions"))
        labels = labels_of(self, batch)
        marks = labels[0] != NONE
        anchors = marked_places(marks)  # [B, P]
        begun = marks.gather(1, anchors)
        of_blocks = labels.gather(2, anchors.expand(len(labels), -1, -1)).permute(1, 2, 0)[begun]  # [blocks, K]
        embed, places = self.target.embeddings, (batch.get("positions"), batch.get("segment"))
        out = self.dflash.draft(features.float(), embed, batch["tokens"], anchors, *places)[begun]
        head: Any = self.dflash.draft_head(self.target.lm_head)
        matrix = head.weight, getattr(head, "bias", None)
        if self.loss == "ce":
            total, found = linear_block_loss(out, matrix[0], of_blocks, self.weigh, matrix[1])
        else:
            total, found = self.soft_loss(out, *matrix, of_blocks, self.before(features, anchors, begun))
        counts = counts.clamp(min=1)
        whole = counts.sum()
        if self.gamma is not None:
            whole = (position_weights(len(counts), self.gamma, counts.device) * counts).sum()
        named = zip(("loss", "top1", "acceptance"), found.sum(1) / counts, strict=False)
        metrics = {f"position{k}_{name}": each for name, means in named for k, each in enumerate(means, 1)}
        return total / whole, metrics

    def before(self, features: Tensor, anchors: Tensor, begun: Tensor) -> Tensor:
        """The target's last hidden states ``[blocks, K, d]`` that predict the drafts of the blocks that begin; any
        ones behind the row's end, where there are no labels."""
        at = anchors[..., None] + torch.arange(self.dflash.config.num_draft_heads, device=anchors.device)
        rows = torch.arange(len(at), device=at.device)[:, None, None].expand_as(at)[begun]
        return features[..., : self.target.hidden_size][rows, at[begun].clamp(max=features.shape[1] - 1)]

    def soft_loss(
        self, out: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As :func:`linear_block_loss`, of a loss against the target's distributions: Σ w · loss, ``[3, blocks, K]`` as
        :func:`linear_soft_loss` has them."""
        assert self.gamma is not None
        labelled, dflash = labels != NONE, self.dflash
        teacher = teach(self.target, hidden[labelled], dflash.draft_vocab, self.loss)
        kept = teacher.best >= 0
        scale = position_weights(labels.shape[1], self.gamma, out.device).expand(labels.shape)[labelled][kept]
        given = out[labelled][kept], weight, teacher, kept.nonzero()[:, 0], scale, bias
        total, found = linear_soft_loss(*given)
        by_draft, own = out.new_zeros(3, *labels.shape), labelled.clone()
        own[labelled] = kept
        by_draft[:, own] = found
        return total, by_draft


class DFlashReplay(Replay, DFlashTraining):
    """A DFlash drafter that learns from its own drafts, too."""


def position_weights(drafts: int, gamma: float, device: torch.device) -> Tensor:
    """e^(−(k − 1) / γ) for k = 1 … K: ``[K]``."""
    return torch.exp(-torch.arange(drafts, device=device) / gamma)


def dpace_weights(losses: Tensor, labels: Tensor) -> Tensor:
    """D-PACE's weights ``[P, K]`` of drafts with these cross-entropies and labels ``[P, K]`` (arXiv 2605.18810): each
    draft counts by how likely the drafts up to it, and up to each one behind it, are accepted together."""
    confidence = torch.where(labels >= 0, torch.exp(-losses), 0.0)  # a token outside is never drafted
    smoothed = (1 - SMOOTHING) * confidence + SMOOTHING
    reached = smoothed.cumprod(1) * (labels != NONE)
    return reached.flip(1).cumsum(1).flip(1)


def evaluate(run: Run[DflashRecipe], module: nn.Module) -> dict[str, float]:
    """Simulated τ, the accuracy of each draft of a block, and now and then the real τ."""
    assert isinstance(module, DFlashTraining)
    target, dflash = module.target, module.dflash
    ranks = run.held_out_ranks(partial(block_ranks, target, dflash), module)
    tree = selection_tree(ranks)
    run.show_ranks(ranks, tree)
    metrics = {"simulated_tau": simulate(tree, ranks)}
    metrics |= {f"position{k}_held_out_top1": share for k, share in enumerate(top_shares(ranks), 1)}
    # The drafter casts its weights: a copy.
    return metrics | run.decode_tau(target, lambda: DFlashDrafter(copy.deepcopy(dflash), tree, target))


def with_start(recipe: DflashRecipe, made: DFlashConfig, start: ModelFolder | None) -> DFlashConfig:
    """The config of a drafter that begins with ``start``, the one of ``init_from``: what the recipe does not say is as
    in ``start``, heads, rotary positions and the norms' ε among it."""
    if start is None:
        return made
    own = {name for name in DFlashSection.model_fields if getattr(recipe.drafter, name) is not None}
    own |= {"draft_vocab_size", "vocab_size", "max_position_embeddings", "num_target_layers"}
    left = [f.name for f in fields(made) if f.name not in own and f.name in start.config]
    return replace(made, **{name: start.config[name] for name in left})


def plans(recipe: DflashRecipe) -> list[Plan]:
    """What each stage costs."""
    d, shape, length = recipe.drafter, target_shape(recipe.target), recipe.data.max_length
    known: dict[str, Any] = d.shape | {"draft_vocab_size": d.draft_vocab_size, "mask_token_id": d.mask_token_id or 0}
    made = DFlashConfig.for_target(shape.config, shape.vocab_size, length, **known)
    made = with_start(recipe, made, beginning(recipe))
    with torch.device("meta"):
        own = sum(p.numel() for p in DFlash(made).parameters())
    blocks = memory.row_blocks(d.anchors, length, d.block_size, recipe.data.packing) / length  # of a token
    rows = made.outputs * shape.hidden_size
    given = recipe.cache_hidden != "none" or recipe.target.features is not None
    costs: dict[str, Any] = {"projected": round(d.drafts * blocks * rows), "copied": rows if d.draft_vocab_size else 0}
    costs |= {"passes": (0 if given else 1) + 2 * bool(d.replay), "unrolled": made.block_size * blocks}
    costs |= {"logits": round(d.drafts * blocks * made.outputs)}
    recomputed, layers = recipe.precision.gradient_checkpointing, made.num_layers * made.block_size * blocks
    kept: dict[str, Any] = {"anchors": d.anchors, "given": given, "recomputed": recomputed, "soft": d.loss != "ce"}
    costs["kept"] = partial(memory.dflash, made, shape.config, **kept)
    costs |= {"attended": 3.5 * layers * made.num_attention_heads * made.head_dim}  # twice backward, and again
    costs |= {"scores": round(layers * made.num_attention_heads)}
    costs["features"] = made.hidden_size * (1 + len(made.captured_layers))
    return [Plan.of(recipe, s, shape, own, **costs) for s in recipe.stages]


def train(run: Run[DflashRecipe]) -> None:
    """From the target to the exported drafter."""
    sharded.refuse_zero3("the target's embeddings, too, which a DFlash drafter reads whole")
    recipe, d, target = run.recipe, run.recipe.drafter, run.load_target()
    size = draft_vocabulary.size_of(run, d.draft_vocab_size, target.vocab_size)
    rows = run.read_rows(target, d.drafts)
    start, mask = run.start or beginning(recipe), d.mask_token_id
    mask = start.config.get("mask_token_id") if start and mask is None else mask
    mask = draft_vocabulary.mask_token(run, mask, target, rows)
    torch.manual_seed(recipe.run.seed)  # for the weights, whatever made the rows
    dflash = DFlash.for_target(target, **d.shape, mask_token_id=mask, draft_vocab_size=size)
    if (config := with_start(recipe, dflash.config, start)) != dflash.config:
        dflash = DFlash(config)
    run.start_weights(dflash, target)
    module = (DFlashReplay if d.replay else DFlashTraining)(target, dflash, recipe)
    if isinstance(module, DFlashReplay):
        module.check(max(part.length for part in rows))
    facts = draft_vocabulary.apply(run, dflash, target, rows)
    inputs = run.with_hidden(target, rows, module.captures)
    for stage in recipe.stages:
        fit(run, stage, module, inputs, partial(evaluate, run), "simulated_tau")
    with run.evaluating(module):
        ranks = run.held_out_ranks(partial(block_ranks, target, dflash), module)
    tree = selection_tree(ranks)
    facts["simulated_tau"] = simulate(tree, ranks)
    run.export(dflash.config.to_dict(), dflash.stored(), target, facts, tree)


SCRIPT = Script("dflash", DflashRecipe, train, plans)


def main() -> None:
    run_script(SCRIPT, PARSER, RECIPE)


if __name__ == "__main__":
    run_command(main, resumable=True)
