"""Joint training: the target trains too, by LoRA, beside its drafter (Medusa-2, arXiv 2401.10774 §2.2.2). The
teacher is the same model with its adapters off; how far the target moves from it is measured, bounded and reported.

Shape letters: B batch, S rows, T tokens, P positions, d hidden width.
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from draftsmith.common.recipe import Section
from draftsmith.common.sections import DrafterRecipe, Factor, Name, Optim, Positive
from draftsmith.models.adapter import FOLDER, add_lora, merge_adapter, switched_off, write_adapter
from draftsmith.models.artifact import provenance, write_model
from draftsmith.models.files.identity import fingerprint
from draftsmith.models.target import Target, load_target
from draftsmith.train import loop
from draftsmith.train.losses import in_chunks, shifted_labels


class Lora(Section):
    """The adapters that train with the drafter. r, alpha and dropout are the published ones; the published recipe has
    one on ``lm_head`` too, which is not possible where the heads share it."""

    r: int = Field(default=32, gt=0, le=4096)
    alpha: Factor = 16
    dropout: float = Field(default=0.05, ge=0, lt=1)
    modules: list[Name] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
        description="names of linear layers; lm_head may be one, and is untied from the embeddings first",
    )


class Joint(Section):
    """A stage in which the target trains too: loss = L_LM + λ0 · L_heads."""

    lora: Lora = Lora()
    loss: Literal["kl", "ce"] = Field(
        default="kl",
        description="kl: KL(the target as it was ‖ as it is), for its own texts; ce: cross-entropy, for others",
    )
    head_weight: Factor | None = Field(
        default=None,
        description="λ0: 0.2 with ce, 0.01 with kl if left out; with kl it is divided by the supervised share of the "
        "positions, because the published 0.01 goes with a sum over all of them",
    )
    ramp: Literal["constant", "linear", "sine"] | None = Field(
        default=None, description="how λ0 is reached; if left out, constant with ce and along a sine with kl"
    )
    ramp_steps: Positive | None = Field(default=None, description="in so many steps; all of the stage's if left out")
    heads_lr: Factor = Field(default=4.0, description="the heads' learning rate, as a multiple of the adapters'")
    max_kl: float = Field(
        default=0.05, gt=0, le=1e6, description="nats per token the target may move, on held-out answers"
    )
    on_drift: Literal["warn", "stop"] = Field(default="warn", description="what happens beyond max_kl")

    def check(self, recipe: DrafterRecipe, optim: Optim, shared: bool) -> None:
        """Refuse what cannot go with joint training. ``shared``: the heads have the target's LM head.

        Raises:
            ValueError: the recipe asks for it.
        """
        if optim.name != "adamw":
            raise ValueError(
                "optim.name: Muon has one learning rate for heads and adapters; use adamw where both train"
            )
        if self.loss == "kl" and recipe.target.quantize != "none":
            raise ValueError(
                f"target.quantize={recipe.target.quantize}: joint.loss=kl compares with the target as it was, which "
                "has to be unquantised (arXiv 2401.10774 §2.3.2); use none, or joint.loss=ce"
            )
        if "lm_head" in self.lora.modules and shared:
            raise ValueError(
                "joint.lora.modules: lm_head is shared by all heads; drop it, or set drafter.projection=own"
            )
        if recipe.precision.compile:
            raise ValueError("precision.compile: joint training changes its loss at every step; leave it off")

    def check_loaded(self, recipe: DrafterRecipe, target: Target) -> None:
        """Refuse what cannot go with a target that is stored quantised, before anything trains.

        Raises:
            ValueError: the recipe asks for it.
        """
        asked = "joint.loss=kl" if self.loss == "kl" else "export.merged=true" if recipe.export.merged else None
        if target.quantized and recipe.target.quantize == "none" and asked:
            why = (
                "compares with the target as it was"
                if self.loss == "kl"
                else "writes the target with the adapter in it"
            )
            raise ValueError(
                f"target.name={target.name}: {asked} {why}, which has to be unquantised, and this one is stored "
                "quantised; name the model that was quantised, or set joint.loss=ce and export.merged=false"
            )

    def weight(self, step: int, steps: int) -> float:
        """λ0 at step ``step`` (from 0) of a stage of ``steps``."""
        final = self.head_weight or (0.2 if self.loss == "ce" else 0.01)
        share = min(1.0, (step + 1) / (self.ramp_steps or steps))
        ramp = self.ramp or ("constant" if self.loss == "ce" else "sine")
        return final * {"constant": 1.0, "linear": share, "sine": math.sin(math.pi / 2 * share)}[ramp]


def add_adapters(target: Target, joint: Joint, seed: int, gradient_checkpointing: bool) -> None:
    """Put the stage's adapters on the target; the same ones for the same seed, however the run reached the stage."""
    torch.manual_seed(seed)
    lora = joint.lora
    add_lora(target, lora.r, lora.alpha, lora.dropout, lora.modules)
    if gradient_checkpointing:
        loop.checkpoint_activations(target.model)


def divergence(target: Target, hidden: Tensor, teacher: Tensor) -> Tensor:
    """Σ KL(original ‖ trained) over positions, in nats, from their last hidden states ``[P, d]``."""

    def chunk(trained: Tensor, original: Tensor) -> Tensor:
        with torch.no_grad(), switched_off(target.model):
            wanted = target.logits(original).float().log_softmax(-1)
        log_probs = target.logits(trained).float().log_softmax(-1)
        return nn.functional.kl_div(log_probs, wanted, log_target=True, reduction="sum")

    return in_chunks(chunk, target.vocab_size, hidden, teacher)


def cross_entropy(target: Target, hidden: Tensor, labels: Tensor) -> Tensor:
    """Σ −log p(label) over positions ``[P, d]`` and ``[P]``."""
    return in_chunks(
        lambda x, y: nn.functional.cross_entropy(target.logits(x).float(), y, reduction="sum"),
        target.vocab_size,
        hidden,
        labels,
    )


@torch.no_grad()
def drift(target: Target, tokens: Tensor, supervised: Tensor, batch_size: int = 16) -> dict[str, float]:
    """How far the target has moved, on held-out rows ``[S, T]``: KL(original ‖ trained) per token, and both
    perplexities."""
    sums = torch.zeros(4, dtype=torch.float64)
    for begin in range(0, len(tokens), batch_size):
        rows, marks = (part[begin : begin + batch_size].to(target.device) for part in (tokens, supervised))
        labels = shifted_labels(rows, marks, 1)
        used = labels != -100
        hidden = target.hidden(rows.long())[used]
        with switched_off(target.model):
            teacher = target.hidden(rows.long())[used]
            before = cross_entropy(target, teacher, labels[used])
        after, moved = cross_entropy(target, hidden, labels[used]), divergence(target, hidden, teacher)
        sums += torch.stack([moved, after, before, used.sum()]).double().cpu()
    moved, after, before = (sums[:3] / sums[3].clamp(min=1)).tolist()
    return {
        "kl": moved,
        "perplexity": math.exp(after),
        "original_perplexity": math.exp(before),
        "perplexity_ratio": math.exp(after - before),
    }


def guarded(joint: Joint, tau: float, kl: float) -> float:
    """The selection metric of a joint stage: τ while KL ≤ ``max_kl``, else −KL.

    Raises:
        FloatingPointError: KL is larger, and the recipe says to stop then.
    """
    if kl <= joint.max_kl:
        return tau
    message = f"the target has moved by {kl:.4f} nats per token, beyond joint.max_kl={joint.max_kl:g}"
    if joint.on_drift == "stop":
        raise FloatingPointError(f"{message}; lower the stage's optim.lr or head_weight, then --resume or --restart")
    loop.console.print(f"  {message}; weights that moved less are preferred to these", style="yellow")
    return -kl if kl == kl else -math.inf


def export_target(recipe: DrafterRecipe, target: Target) -> None:
    """Write the trained adapter into the run's folder and, where ``export.merged`` says so, the target with it merged
    in, for servers that take no adapter."""
    folder, t = recipe.run.folder, recipe.target
    write_adapter(folder, target, recipe.export.dtype)
    if not recipe.export.merged:
        return
    base = load_target(t.name, revision=t.revision, dtype=t.dtype, trust_remote_code=t.trust_remote_code)
    whole = merge_adapter(base, folder / FOLDER)
    (folder / "target").mkdir(exist_ok=True)
    write_model(folder / "target", whole.model, whole.tokenizer, provenance(merged_from=t.name))
    target.merged_fingerprint = fingerprint(folder / "target")
