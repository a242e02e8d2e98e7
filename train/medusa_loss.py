"""What Medusa trains: heads beside a frozen target (Medusa-1), or heads and LoRA on the target together (Medusa-2).

Shape letters: B batch, T tokens, P positions in a chunk, d hidden width, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from draftsmith.common.recipe import Section
from draftsmith.common.sections import Factor, Name, Positive, Stage
from draftsmith.models.adapter import switched_off
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target
from draftsmith.train import loop
from draftsmith.train.losses import HEAD_DECAY, LOGITS, linear_cross_entropy, shifted_labels


class Lora(Section):
    """The adapters that train with the heads (the published defaults)."""

    r: int = Field(default=32, gt=0, le=4096)
    alpha: Factor = 16
    dropout: float = Field(default=0.05, ge=0, lt=1)
    modules: list[Name] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], min_length=1,
        description="names of linear layers; lm_head may be one, and is untied from the embeddings first",
    )  # fmt: skip


class Joint(Stage):
    """Medusa-2's second stage: loss = L_LM + λ0 · L_heads (arXiv 2401.10774 §2.2.2)."""

    lora: Lora = Lora()
    loss: Literal["kl", "ce"] = Field(
        default="kl",
        description="kl: KL(the target as it was ‖ as it is), for its own texts; ce: cross-entropy, for others",
    )
    head_weight: Factor | None = Field(
        default=None,
        description="λ0: 0.2 with ce, 0.01 with kl if left out; with kl it is divided by the supervised share of the "
        "positions, because the published 0.01 goes with a sum over all of them",
    )  # fmt: skip
    ramp: Literal["constant", "linear", "sine"] | None = Field(
        default=None, description="how λ0 is reached; if left out, constant with ce and along a sine with kl"
    )
    ramp_steps: Positive | None = Field(default=None, description="in so many steps; all of the stage's if left out")
    heads_lr: Factor = Field(default=4.0, description="the heads' learning rate, as a multiple of the adapters'")
    heads_first: bool = Field(
        default=True,
        description="train the heads alone before (the recipe's own steps); false: from the start together",
    )
    max_kl: float = Field(
        default=0.05, gt=0, le=1e6, description="nats per token the target may move, on held-out answers"
    )
    on_drift: Literal["warn", "stop"] = Field(default="warn", description="what happens beyond max_kl")

    @model_validator(mode="after")
    def _possible(self) -> "Joint":
        if self.optim.name != "adamw":
            raise ValueError(f"joint.optim.name={self.optim.name}: adapters train with adamw")
        return self

    def weight(self, step: int) -> float:
        """λ0 at a step of the stage, from 0."""
        whole = self.head_weight or (0.2 if self.loss == "ce" else 0.01)
        share = min(1.0, (step + 1) / (self.ramp_steps or self.steps))
        ramp = self.ramp or ("constant" if self.loss == "ce" else "sine")
        return whole * {"constant": 1.0, "linear": share, "sine": math.sin(math.pi / 2 * share)}[ramp]


class Medusa1(nn.Module):
    """A frozen target and the heads that train on its last hidden state."""

    def __init__(self, target: Target, heads: MedusaHeads) -> None:
        super().__init__()
        self.target, self.heads = target, heads
        self.model = target.model  # registered, frozen: moves with the module, is in no optimizer

    def train(self, mode: bool = True) -> "Medusa1":
        """The heads'; the target stays as it decodes, without the dropout that some families train with."""
        super().train(mode)
        self.model.eval()
        return self

    def labels(self, batch: loop.Batch) -> list[Tensor]:
        """Per head ``[B, T]``: head k reads position t and predicts x_{t+k+1}."""
        tokens, supervised, segment = batch["tokens"], batch["supervised"], batch.get("segment")
        heads = self.heads.config.num_draft_heads
        return [shifted_labels(tokens, supervised, k + 1, segment) for k in range(1, heads + 1)]

    def count(self, batch: loop.Batch) -> Tensor:
        return torch.stack([(labels != -100).sum() for labels in self.labels(batch)])

    def forward(self, batch: loop.Batch, counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if "hidden" in batch:
            hidden = batch["hidden"]
        else:
            with torch.no_grad():
                # Padding is behind every label, and attention is causal.
                hidden = self.target.hidden(batch["tokens"].long(), batch.get("positions"))
        return self.heads_loss(batch, hidden, counts)

    def heads_loss(self, batch: loop.Batch, hidden: Tensor, counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Σ_k 0.8^k · CE(head_k(h_t), x_{t+k+1}) from hidden states ``[B, T, d]``; ``counts`` labels of each head."""
        labels = self.labels(batch)
        used = (torch.stack(labels) != -100).any(0)  # prompts and padding need no heads
        projections = self.heads.projections(self.target.lm_head)
        loss, metrics = hidden.new_zeros(()), {}
        for k, features in enumerate(self.heads.features(hidden[used].float()), 1):
            weight, bias = projections[k - 1]
            total, hits = linear_cross_entropy(features, weight, labels[k - 1][used], bias)
            mean = total / counts[k - 1].clamp(min=1)
            loss = loss + HEAD_DECAY**k * mean
            metrics |= {f"head{k}_loss": mean.detach(), f"head{k}_top1": hits / counts[k - 1].clamp(min=1)}
        return loss, metrics


class Medusa2(Medusa1):
    """A target with adapters and its heads, trained together. The teacher is the same model, its adapters off.

    Args:
        step: how far the stage is, for λ0.
    """

    def __init__(self, target: Target, heads: MedusaHeads, joint: Joint, step: Callable[[], int]) -> None:
        super().__init__(target, heads)
        self.joint, self.step = joint, step
        self.lr_factors = {"heads.": joint.heads_lr}

    def train(self, mode: bool = True) -> "Medusa2":
        """Heads and adapters; of the target only what makes its layers keep no activations."""
        super().train(mode)
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
                module.training = mode  # of the layer alone: the modules inside stay as they are
            if isinstance(dropout := getattr(module, "lora_dropout", None), nn.Module):
                dropout.train(mode)
        return self

    def next_labels(self, batch: loop.Batch) -> Tensor:
        """``[B, T]``, what the LM head should say."""
        return shifted_labels(batch["tokens"], batch["supervised"], 1, batch.get("segment"))

    def count(self, batch: loop.Batch) -> Tensor:
        """Labels of each head, of the LM head, and all positions."""
        labels = self.next_labels(batch)
        return torch.cat([super().count(batch), torch.stack([(labels != -100).sum(), torch.ones_like(labels).sum()])])

    def forward(self, batch: loop.Batch, counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, positions = batch["tokens"].long(), batch.get("positions")
        labels = self.next_labels(batch)
        used, counted, places = labels != -100, counts[-2].clamp(min=1), counts[-1]
        hidden = self.target.hidden(tokens, positions)
        weight = self.joint.weight(self.step())
        if self.joint.loss == "kl":
            with torch.no_grad(), switched_off(self.model):
                teacher = self.target.hidden(tokens, positions)
            lm_loss = self.divergence(hidden[used], teacher[used]) / counted
            weight = weight * places / counted  # 1 / ρ
        else:
            lm_loss = self.cross_entropy(hidden[used], labels[used]) / counted
        heads_loss, metrics = self.heads_loss(batch, hidden, counts)
        metrics |= {"lm_loss": lm_loss.detach(), "heads_loss": heads_loss.detach()}
        return lm_loss + weight * heads_loss, metrics

    def divergence(self, hidden: Tensor, teacher: Tensor) -> Tensor:
        """Σ KL(original ‖ trained) over positions ``[P, d]`` of both, in nats."""

        def chunk(x: Tensor, t: Tensor) -> Tensor:
            with torch.no_grad(), switched_off(self.model):
                wanted = self.target.logits(t).float().log_softmax(-1)
            return nn.functional.kl_div(
                self.target.logits(x).float().log_softmax(-1), wanted, log_target=True, reduction="sum"
            )

        return self._by_chunks(chunk, hidden, teacher)

    def cross_entropy(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Σ −log p(label) over positions ``[P, d]`` and ``[P]``."""
        return self._by_chunks(
            lambda x, y: nn.functional.cross_entropy(self.target.logits(x).float(), y, reduction="sum"), hidden, labels
        )

    def _by_chunks(self, function: Callable[..., Tensor], *parts: Tensor) -> Tensor:
        """The logits of a few positions at a time, through the LM head as a module (it may be adapted or sharded); made
        again in the backward pass."""
        size = max(1, LOGITS.get(parts[0].device.type, LOGITS["cuda"]) // self.target.vocab_size)
        total = parts[0].new_zeros((), dtype=torch.float32)
        for begin in range(0, len(parts[0]), size):
            pieces = [part[begin : begin + size] for part in parts]
            total = total + (
                checkpoint(function, *pieces, use_reentrant=False) if torch.is_grad_enabled() else function(*pieces)
            )
        return total

    @torch.no_grad()
    def drift(self, tokens: Tensor, supervised: Tensor, batch_size: int = 16) -> dict[str, float]:
        """How far the target has moved, on held-out rows ``[S, T]``: KL(original ‖ trained) per token, and both
        perplexities."""
        sums = torch.zeros(4, dtype=torch.float64)
        for begin in range(0, len(tokens), batch_size):
            rows = {"tokens": tokens[begin : begin + batch_size], "supervised": supervised[begin : begin + batch_size]}
            rows = {name: part.to(self.target.device) for name, part in rows.items()}
            labels = self.next_labels(rows)
            used = labels != -100
            hidden = self.target.hidden(rows["tokens"].long())[used]
            with switched_off(self.model):
                teacher = self.target.hidden(rows["tokens"].long())[used]
                before = self.cross_entropy(teacher, labels[used])
            after, moved = self.cross_entropy(hidden, labels[used]), self.divergence(hidden, teacher)
            sums += torch.stack([moved, after, before, used.sum()]).double().cpu()
        moved, after, before = (sums[:3] / sums[3].clamp(min=1)).tolist()
        return {
            "kl": moved, "perplexity": math.exp(after), "original_perplexity": math.exp(before),
            "perplexity_ratio": math.exp(after - before),
        }  # fmt: skip
