"""Train Medusa heads on a target (arXiv 2401.10774 §2.2).

    accelerate launch train/medusa.py recipes/tiny-medusa.yaml [section.field=value ...] [--tiny] [--resume | --restart]
    accelerate launch train/medusa.py recipes/tiny-medusa2.yaml

    Medusa-1   the target is frozen:     L_heads = Σ_k 0.8^k · CE(head_k(h_t), x_{t+k+1}),  h_t its last hidden state
    Medusa-2   then both train together: L_LM + λ0 · L_heads, the target by LoRA (a stage with a section ``joint``)

The checkpoint with the highest simulated τ on held-out rows is exported. Then: inference/calibrate.py,
inference/decode.py. Shape letters: B batch, T tokens, K heads, d hidden width, V vocabulary, S draft vocabulary.
"""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

from draftsmith.common.command import before_imports, recipe_parser, run_command
from draftsmith.train.early import reader

PARSER = recipe_parser(
    __doc__,
    "recipes/tiny-medusa.yaml",
    "stages.0.optim.lr=1e-3",
    "two steps of each stage on a small random target and bundled samples",
)
RECIPE = before_imports(PARSER, reader("medusa")) if __name__ == "__main__" else None

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.measure.tree_statistics import SIMULATED_NODES, best_tree, head_ranks, simulate, top_shares
from draftsmith.models.adapter import switched_off
from draftsmith.models.medusa import MedusaConfig, MedusaHeads
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import to_draft_ids
from draftsmith.train import draft_vocabulary, memory
from draftsmith.train.dry_run import Plan, target_shape
from draftsmith.train.joint import (
    add_adapters,
    check_loaded,
    cross_entropy,
    divergence,
    drift,
    drift_sums,
    export_target,
    guarded,
)
from draftsmith.train.loop import fit
from draftsmith.train.losses import HEAD_DECAY, BesideTarget, labels_of, linear_cross_entropy, shifted_labels
from draftsmith.train.run import Run
from draftsmith.train.samples import Batch
from draftsmith.train.script import Script, run_script
from draftsmith.train.sections.medusa import MedusaRecipe, MedusaStage

FACTS = ("simulated_tau", "kl", "perplexity", "original_perplexity", "perplexity_ratio")  # for provenance.json


class Medusa1(BesideTarget):
    """A frozen target and the heads that train on its last hidden state."""

    def __init__(self, target: Target, heads: MedusaHeads) -> None:
        super().__init__()
        self.target, self.heads = target, heads
        self.output_layers = ("heads.projection",)  # not for Muon
        self.model = target.model  # registered, frozen: moves with the module, is in no optimizer

    def labels(self, batch: Batch) -> Tensor:
        """Per head ``[K, B, T]``: head k reads position t and predicts x_{t+k+1}. With a draft vocabulary a label is
        the token's place in it, and a token outside is no label."""
        tokens, supervised, segment = batch["tokens"], batch["supervised"], batch.get("segment")
        heads, ids = self.heads.config.num_draft_heads, self.heads.draft_vocab
        labels = torch.stack([shifted_labels(tokens, supervised, k + 1, segment) for k in range(1, heads + 1)])
        return labels if ids is None else to_draft_ids(labels, ids, outside=-100)

    def count(self, batch: Batch) -> Tensor:
        """Labels of each head."""
        return (labels_of(self, batch) != -100).sum((1, 2))

    def forward(self, batch: Batch, counts: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """L_heads; ``hidden`` may be in the batch."""
        if (hidden := batch.get("hidden")) is None:
            with torch.no_grad():  # padding follows every label, and attention is causal
                hidden = self.target.hidden(batch["tokens"].long(), batch.get("positions"))
        return self.heads_loss(hidden, labels_of(self, batch), counts)

    def heads_loss(self, hidden: Tensor, labels: Tensor, counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Σ_k 0.8^k · CE(head_k(h_t), x_{t+k+1}) from hidden states ``[B, T, d]``; ``counts`` labels of each head."""
        used = (labels != -100).any(0)  # prompts and padding need no heads
        projections, loss, metrics = self.heads.projections(self.target.lm_head), hidden.new_zeros(()), {}
        features = self.heads.features(hidden[used].float())
        for k, (feature, (weight, bias)) in enumerate(zip(features, projections, strict=True), 1):
            total, hits = linear_cross_entropy(feature, weight, labels[k - 1][used], bias)
            mean = total / counts[k - 1].clamp(min=1)
            loss = loss + HEAD_DECAY**k * mean
            metrics |= {f"head{k}_loss": mean.detach(), f"head{k}_top1": hits / counts[k - 1].clamp(min=1)}
        return loss, metrics


class Medusa2(Medusa1):
    """A target with adapters and its heads, trained together. The teacher is the same model, its adapters off."""

    def __init__(self, target: Target, heads: MedusaHeads, stage: MedusaStage) -> None:
        super().__init__(target, heads)
        assert stage.joint is not None
        self.joint, self.steps = stage.joint, stage.num_steps
        self.lr_factors = {"heads.": self.joint.heads_lr}

    def train(self, mode: bool = True) -> "Medusa2":
        """Heads and adapters enter train mode; of the target only what makes its layers keep no activations."""
        super().train(mode)
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
                module.training = mode  # of the layer alone: the modules inside stay as they are
            if isinstance(dropout := getattr(module, "lora_dropout", None), nn.Module):
                dropout.train(mode)
        return self

    def labels(self, batch: Batch) -> Tensor:
        """``[K + 1, B, T]``: of each head, then of the LM head."""
        following = shifted_labels(batch["tokens"], batch["supervised"], 1, batch.get("segment"))
        return torch.cat([super().labels(batch), following[None]])

    def count(self, batch: Batch) -> Tensor:
        """Labels of each head, of the LM head, and all positions but padding."""
        positions = batch["segment"] > 0 if "segment" in batch else torch.ones_like(batch["tokens"])
        return torch.cat([super().count(batch), positions.sum()[None]])

    def forward(self, batch: Batch, counts: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """L_LM + λ0 · L_heads."""
        tokens, positions = batch["tokens"].long(), batch.get("positions")
        *of_heads, labels = labels_of(self, batch)
        used, labelled, all_positions = labels != -100, counts[-2].clamp(min=1), counts[-1]
        hidden = self.target.hidden(tokens, positions)
        weight: float | Tensor = self.joint.weight(step, self.steps)
        if self.joint.loss == "kl":
            if (teacher := batch.get("hidden")) is None:  # kept by ``cache_hidden``: those of the target as it was
                with torch.no_grad(), switched_off(self.model):
                    teacher = self.target.hidden(tokens, positions)
            lm_loss = divergence(self.target, hidden[used], teacher[used]) / labelled
            weight = weight * all_positions / labelled  # 1 / (supervised share)
        else:
            lm_loss = cross_entropy(self.target, hidden[used], labels[used]) / labelled
        heads_loss, metrics = self.heads_loss(hidden, torch.stack(of_heads), counts)
        metrics |= {"lm_loss": lm_loss.detach(), "heads_loss": heads_loss.detach()}
        return lm_loss + weight * heads_loss, metrics


def evaluate(run: Run[MedusaRecipe], module: nn.Module) -> dict[str, float]:
    """Simulated τ, each head's accuracy, now and then the real τ, and how far a joint stage moved the target."""
    assert isinstance(module, Medusa1)
    target, heads = module.target, module.heads
    ranks = run.held_out_ranks(partial(head_ranks, target, heads), module)
    tree = best_tree(ranks, SIMULATED_NODES)
    run.show_ranks(ranks, tree)
    metrics = {"simulated_tau": simulate(tree, ranks)}
    for top in (1, 5):
        metrics |= {f"head{k}_held_out_top{top}": share for k, share in enumerate(top_shares(ranks, top), 1)}
    metrics |= run.decode_tau(target, lambda: MedusaDrafter(copy.deepcopy(heads), tree, target))  # it casts its heads
    if isinstance(module, Medusa2):
        metrics |= drift(run.held_out_sums(partial(drift_sums, target)))
        metrics["guarded_tau"] = guarded(module.joint, metrics["simulated_tau"], metrics["kl"])
    return metrics


def plans(recipe: MedusaRecipe) -> list[Plan]:
    """What each stage costs."""
    d, joint = recipe.drafter, recipe.stages[-1].joint
    shape = target_shape(recipe.target, joint.lora.modules if joint else ())
    with torch.device("meta"):
        config = MedusaConfig(**d.model_dump(), hidden_size=shape.hidden_size, vocab_size=shape.vocab_size)
        own = sum(p.numel() for p in MedusaHeads(config).parameters())
    rows = shape.hidden_size * config.outputs if d.projection == "shared" else 0
    costs: dict[str, Any] = {"projected": d.num_draft_heads * rows, "copied": rows if d.draft_vocab_size else 0}
    costs |= {"logits": d.num_draft_heads * config.outputs, "features": shape.hidden_size}
    given = recipe.cache_hidden != "none" or recipe.target.features is not None
    frozen = 0 if given else 1  # passes through the target
    heads = partial(memory.medusa, config, shape.config)
    costs["kept"] = partial(heads, given=not frozen)
    found = [Plan.of(recipe, stage, shape, own, passes=frozen, **costs) for stage in recipe.stages]
    if joint:

        def kept(micro: memory.Micro) -> memory.Kept:
            found = heads(micro, given=True)
            recomputed, dropout = recipe.precision.gradient_checkpointing, joint.lora.dropout > 0
            more = memory.adapted(shape.config, micro, recomputed, dropout)
            return replace(found, activations=found.activations + more)

        trained, teacher = own + joint.lora.r * shape.rank, frozen if joint.loss == "kl" else 0
        costs |= {"passes": 2 + teacher, "kept": kept}  # 2: and backward
        found[-1] = Plan.of(recipe, recipe.stages[-1], shape, trained, **costs)
    return found


def train(run: Run[MedusaRecipe]) -> None:
    """From the target to the exported drafter."""
    recipe, d, target = run.recipe, run.recipe.drafter, run.load_target()
    if joint := recipe.stages[-1].joint:
        check_loaded(joint, recipe, target)
    size = draft_vocabulary.size_of(run, d.draft_vocab_size, target.vocab_size)
    heads = MedusaHeads.for_target(target, d.num_draft_heads, d.num_layers, d.projection, size)
    run.start_weights(heads, target)
    module: Medusa1 = Medusa1(target, heads)
    rows = run.read_rows(target, d.num_draft_heads)
    facts = draft_vocabulary.apply(run, heads, target, rows)
    # Joint training on labels changes the target, so that kept hidden states would be stale.
    used = any(not stage.joint or stage.joint.loss == "kl" for stage in recipe.stages if stage.name in run.remaining)
    inputs = run.with_hidden(target, rows) if used else rows
    for stage in recipe.stages:
        if stage.joint:
            add_adapters(target, stage.joint, recipe.run.seed + 1, recipe.precision.gradient_checkpointing)
            inputs = inputs if stage.joint.loss == "kl" else rows
            stage = run.with_steps(stage, inputs)  # λ0 rises over them
            module = Medusa2(target, heads, stage)
        best_on = "guarded_tau" if stage.joint else "simulated_tau"
        fit(run, stage, module, inputs, partial(evaluate, run), best_on)
    with run.evaluating(module):
        found = evaluate(run, module)
        tree = best_tree(run.held_out_ranks(partial(head_ranks, target, heads), module), SIMULATED_NODES)
    if recipe.stages[-1].joint and run.main:
        export_target(recipe, target)
    measured = {name: found[name] for name in FACTS if name in found}
    run.export(heads.config.to_dict(), heads.state_dict(), target, facts | measured, tree)


SCRIPT = Script("medusa", MedusaRecipe, train, plans)


def main() -> None:
    run_script(SCRIPT, PARSER, RECIPE)


if __name__ == "__main__":
    run_command(main, resumable=True)
