"""Joint training: the target trains too, by LoRA, beside its drafter (Medusa-2, arXiv 2401.10774 §2.2.2). The
teacher is the same model with its adapters off; how far the target moves from it is measured, bounded and reported.

Shape letters: B batch, S rows, T tokens, P positions, d hidden width.
"""

import math

import torch
from torch import Tensor, nn

from draftsmith.common.sections import DrafterRecipe
from draftsmith.models.adapter import FOLDER, add_lora, merge_adapter, switched_off, write_adapter
from draftsmith.models.artifact import provenance, write_model
from draftsmith.models.files.identity import fingerprint
from draftsmith.models.target import Target, load_target
from draftsmith.train.launch import console
from draftsmith.train.loop import checkpoint_activations
from draftsmith.train.losses import in_chunks, shifted_labels
from draftsmith.train.sections.medusa import Joint


def check_loaded(joint: Joint, recipe: DrafterRecipe, target: Target) -> None:
    """Refuse what cannot go with a target that is stored quantised, before anything trains."""
    asked = "joint.loss=kl" if joint.loss == "kl" else "export.merged=true" if recipe.export.merged else None
    if target.quantized and recipe.target.quantize == "none" and asked:
        why = "compares with the target as it was" if joint.loss == "kl" else "writes the target with the adapter in it"
        raise ValueError(
            f"target.name={target.name}: {asked} {why}, which has to be unquantised, and this one is stored "
            "quantised; name the model that was quantised, or set joint.loss=ce and export.merged=false"
        )


def add_adapters(target: Target, joint: Joint, seed: int, gradient_checkpointing: bool) -> None:
    """Put the stage's adapters on the target; the same ones for the same seed, however the run reached the stage."""
    torch.manual_seed(seed)
    lora = joint.lora
    add_lora(target, lora.r, lora.alpha, lora.dropout, lora.modules)
    if gradient_checkpointing:
        checkpoint_activations(target.model)


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
def drift_sums(target: Target, tokens: Tensor, supervised: Tensor) -> Tensor:
    """What :func:`drift` is computed from, summed over the labels of rows ``[B, T]``: KL(original ‖ trained), the
    cross-entropy of the trained target and of the original, and the number of labels; ``[4]`` float64."""
    rows, marks = tokens.to(target.device), supervised.to(target.device)
    labels = shifted_labels(rows, marks, 1)
    used = labels != -100
    hidden = target.hidden(rows.long())[used]
    with switched_off(target.model):
        teacher = target.hidden(rows.long())[used]
        before = cross_entropy(target, teacher, labels[used])
    after, moved = cross_entropy(target, hidden, labels[used]), divergence(target, hidden, teacher)
    return torch.stack([moved, after, before, used.sum()]).double()


def drift(sums: Tensor) -> dict[str, float]:
    """How far the target has moved on held-out rows, from the sum of their :func:`drift_sums`: KL(original ‖ trained)
    per token, and both perplexities."""
    moved, after, before = (sums[:3] / sums[3].clamp(min=1)).tolist()
    return {
        "kl": moved,
        "perplexity": math.exp(after),
        "original_perplexity": math.exp(before),
        "perplexity_ratio": math.exp(after - before),
    }


def guarded(joint: Joint, tau: float, kl: float) -> float:
    """The selection metric of a joint stage: τ while KL ≤ ``max_kl``, else −KL.
    Raises FloatingPointError: KL is larger, and the recipe says to stop then."""
    if kl <= joint.max_kl:
        return tau
    message = f"the target has moved by {kl:.4f} nats per token, beyond joint.max_kl={joint.max_kl:g}"
    if joint.on_drift == "stop":
        raise FloatingPointError(f"{message}; lower the stage's optim.lr or head_weight, then --resume or --restart")
    console.print(f"  {message}; weights that moved less are preferred to these", style="yellow")
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
