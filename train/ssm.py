"""Train an ensemble of small speculative models (SSMs) for a target by boosting (SpecInfer, arXiv 2305.09781 §3).

    accelerate launch train/ssm.py recipes/tiny-ssm.yaml [section.field=value ...] [--tiny] [--resume | --restart]

Each stage of the recipe trains one SSM, a copy of the same base, on the target's own greedy answers:

    D_1 = all prompts with their answers;   SSM_s minimises CE (or KL or LK to the target) on D_s
    D_{s+1} = the prompts that none of SSM_1 … SSM_s answers like the target does, in its first m tokens

An SSM's weights are those of the evaluation with the highest simulated τ of the ensemble so far. Every part of the
exported folder is a complete ``transformers`` model. Then: inference/calibrate.py, inference/decode.py. Shape letters:
B batch, T tokens, P positions, d hidden width, S draft vocabulary, n SSMs.
"""

import copy
from functools import partial
from typing import Any

from draftsmith.common.command import before_imports, counted, recipe_parser, run_command
from draftsmith.train.early import reader

PARSER = recipe_parser(
    __doc__, "recipes/tiny-ssm.yaml", "boost.mark=train", "two steps of each stage on a small random target"
)
RECIPE = before_imports(PARSER, reader("ssm")) if __name__ == "__main__" else None

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.data.packing import Rows
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.measure.tree_statistics import (
    SIMULATED_NODES,
    best_tree,
    chained_ranks,
    coverage,
    matched_answers,
    next_token_ranks,
    overlap,
    simulate_ensemble,
)
from draftsmith.inference.verify.tree import Topology
from draftsmith.kernels.soft_loss import lk_weight
from draftsmith.models.artifact import in_dtype, write_model
from draftsmith.models.ssm import part_name
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import to_draft_ids
from draftsmith.train import draft_vocabulary
from draftsmith.train.boosting import rows_of_round
from draftsmith.train.launch import console
from draftsmith.train.loop import checkpoint_activations, fit
from draftsmith.train.losses import in_chunks, labels_of, linear_cross_entropy, shifted_labels
from draftsmith.train.run import Run, digest_of
from draftsmith.train.samples import Batch
from draftsmith.train.script import Script, run_script
from draftsmith.train.sections.ssm import DEPTH, SsmRecipe
from draftsmith.train.ssm_base import make_base, plans


class Ssm(nn.Module):
    """An SSM that trains on the target's answers; the target itself takes part with ``loss: kl`` and ``lk``."""

    def __init__(self, ssm: Target, target: Target, draft_vocab: Tensor | None, loss: str, frozen: bool) -> None:
        super().__init__()
        self.ssm, self.target, self.loss = ssm, target, loss
        self.model = ssm.model.requires_grad_()
        if frozen:
            for module in (ssm.model.get_input_embeddings(), ssm.lm_head):
                assert isinstance(module, nn.Module)
                module.requires_grad_(False)
        self.output_layers = ("model.lm_head",)  # not for Muon
        self.teacher = None if loss == "ce" else target.model  # frozen: moves with the module, is in no optimizer
        self.draft_vocab = draft_vocab

    def train(self, mode: bool = True) -> "Ssm":
        """Only the SSM enters train mode; the target stays in eval."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def labels(self, batch: Batch) -> Tensor:
        """``[B, T]``, the place of the next token in the draft vocabulary; a token outside is no label."""
        labels = shifted_labels(batch["tokens"], batch["supervised"], 1, batch.get("segment"))
        return labels if self.draft_vocab is None else to_draft_ids(labels, self.draft_vocab, outside=-100)

    def count(self, batch: Batch) -> Tensor:
        return (labels_of(self, batch) != -100).sum().view(1)

    def head(self, model: Target) -> tuple[Tensor, Tensor | None]:
        """The draft vocabulary's rows of a model's LM head: ``[S, d]``, and their bias ``[S]``."""
        head: Any = model.lm_head
        weight, bias = head.weight, getattr(head, "bias", None)
        if self.draft_vocab is None:
            return weight, bias
        return weight[self.draft_vocab], None if bias is None else bias[self.draft_vocab]

    def forward(self, batch: Batch, counts: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """CE of the next token, or KL(target ‖ SSM) or LK over the draft vocabulary, in nats per label."""
        tokens, positions, labels = batch["tokens"].long(), batch.get("positions"), labels_of(self, batch)
        used, labelled = labels != -100, counts[0].clamp(min=1)
        hidden = self.ssm.hidden(tokens, positions)[used]
        if self.loss == "ce" and not self.ssm.changes_logits:
            weight, bias = self.head(self.ssm)
            total, hits = linear_cross_entropy(hidden.float(), weight, labels[used], bias)
            return total / labelled, {"ce": total.detach() / labelled, "top1": hits / labelled}

        def log_q(own: Tensor) -> Tensor:
            return self.ssm.after_head(F.linear(own, *self.head(self.ssm))).float().log_softmax(-1)

        if self.loss == "ce":
            total = in_chunks(
                lambda own, right: F.nll_loss(log_q(own), right, reduction="sum"),
                self.ssm.vocab_size,
                *(hidden, labels[used]),
            )
            return total / labelled, {"ce": total.detach() / labelled}
        with torch.no_grad():
            teacher = self.target.hidden(tokens, positions)[used]

        def chunk(own: Tensor, given: Tensor) -> Tensor:
            log_probs = log_q(own)
            with torch.no_grad():
                log_p = self.target.logits(given).float().log_softmax(-1)
                log_p = log_p if self.draft_vocab is None else log_p[:, self.draft_vocab]
                inside = log_p.log_softmax(-1)  # on the draft vocabulary
            acceptance = torch.minimum(log_p.exp(), log_probs.exp()).sum(-1)
            losses = F.kl_div(log_probs, inside, log_target=True, reduction="none").sum(-1)
            if self.loss == "lk":  # kernels/soft_loss.py
                weight = lk_weight(acceptance)
                losses = weight * losses + (1 - weight) * (1 - acceptance)
            return torch.stack((losses.sum(), acceptance.detach().sum()))

        total, accepted = in_chunks(chunk, self.target.vocab_size, hidden, teacher) / labelled
        return total, {self.loss: total.detach(), "acceptance": accepted.detach()}


def evaluate(run: Run[SsmRecipe], earlier: list[Tensor], module: nn.Module) -> dict[str, float]:
    """Of the SSM in training, its accuracy and simulated τ alone; of the ensemble with those before it (``earlier``,
    their :func:`next_token_ranks` of the held-out rows), simulated τ and coverage; now and then the real τ."""
    assert isinstance(module, Ssm)
    own = run.held_out_ranks(partial(next_token_ranks, module.ssm, draft_vocab=module.draft_vocab))
    ranks, matched = _held_out(run, [*earlier, own])
    trees = _trees(ranks)
    run.show_ranks(ranks[:, :, -1], trees[-1])
    found = {
        "simulated_tau": simulate_ensemble(trees, ranks),
        "tau_alone": simulate_ensemble(_trees(ranks[:, :, -1:]), ranks[:, :, -1:]),
        "held_out_top1": float((own == 0).sum() / (own >= 0).sum()),
        "coverage_alone": float(matched[-1].float().mean()),
        "coverage": coverage(matched)[-1],
    }

    def drafter() -> DraftModelDrafter:
        model: Any = copy.deepcopy(module.ssm.model)
        ssm = Target(model.to(module.target.dtype), None, "the SSM in training", "")
        return DraftModelDrafter(ssm, module.target, run.recipe.drafter.expansion, draft_vocab=module.draft_vocab)

    return found | run.decode_tau(module.target, drafter)


def _held_out(run: Run[SsmRecipe], next_ranks: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of the held-out rows, the rank at each depth ``[S, T, n, K]`` and the answers reproduced ``[n, A]``, by each
    SSM's :func:`next_token_ranks`."""
    tokens, supervised = run.held_out["tokens"], run.held_out["supervised"]
    ranks = torch.stack([chained_ranks(each, tokens, supervised, DEPTH) for each in next_ranks], 2)
    return ranks, matched_answers(torch.stack(next_ranks), supervised, run.recipe.boost.tokens)


def _trees(ranks: Tensor) -> tuple[Topology, ...]:
    """The best tree of :data:`SIMULATED_NODES` nodes of each SSM, by ``ranks [S, T, n, K]``."""
    return tuple(best_tree(of_ssm, SIMULATED_NODES) for of_ssm in ranks.unbind(2))


def train(run: Run[SsmRecipe]) -> None:
    """From the target and the base to the exported ensemble."""
    recipe, d, facts = run.recipe, run.recipe.drafter, dict[str, Any]()
    target = run.load_target()
    size = draft_vocabulary.size_of(run, d.draft_vocab_size, target.vocab_size)
    base = make_base(d, target)
    run.check_room(sum(p.numel() for p in base.parameters()))
    run.depends_on["drafter.base"] = digest_of(base.parameters()).hex()
    base = base.cpu()  # and so are SSMs whose rounds are over: a device holds one at a time
    rows = [part for part in run.read_rows(target, DEPTH) if isinstance(part, Rows)]
    ids = None
    if size is not None:
        ids, facts = draft_vocabulary.choose(run, size, target.vocab_size, rows, draft_vocabulary.begun(run))
        ids = ids.to(target.device)
    ssms, ranks, prompts = list[Target](), list[Tensor](), list[int]()
    for number, stage in enumerate(recipe.stages):
        chosen, weights, left = rows_of_round(run, rows, number, len(recipe.stages), ssms, ids, recipe.boost)
        console.print(f"{part_name(number)}: {counted(left, 'prompt')}")
        if ssms and left < recipe.boost.min_prompts:
            console.print(f"  fewer than boost.min_prompts={recipe.boost.min_prompts}: the ensemble ends here")
            break
        if not chosen:
            raise ValueError(f"stage '{stage.name}': no prompt is left to train on; use more data")
        model: Any = copy.deepcopy(base)
        ssm = Target(model.to(target.device), target.tokenizer, part_name(number), "")
        if recipe.precision.gradient_checkpointing:
            checkpoint_activations(ssm.model)
        module = Ssm(ssm, target, ids, d.loss, frozen=d.layers is not None)
        fit(run, stage, module, chosen, lambda m: evaluate(run, ranks, m), "simulated_tau", weights=weights)
        ssm.model.eval().requires_grad_(False)
        ssms.append(ssm)
        prompts.append(left)
        with run.evaluating(module):
            ranks.append(run.held_out_ranks(partial(next_token_ranks, ssm, draft_vocab=ids)))
        ssm.model.cpu()
    export(run, target, ssms, ranks, ids, facts | {"prompts": prompts})


def export(
    run: Run[SsmRecipe],
    target: Target,
    ssms: list[Target],
    ranks: list[Tensor],
    ids: Tensor | None,
    facts: dict[str, Any],
) -> None:
    """Write the SSMs, each a model folder, and what holds for all of them."""
    recipe, parts = run.recipe, [part_name(number) for number in range(len(ssms))]
    of_depth, matched = _held_out(run, ranks)
    trees = _trees(of_depth)
    facts |= {"simulated_tau": simulate_ensemble(trees, of_depth), "loss": recipe.drafter.loss}
    facts |= {"boost": recipe.boost.model_dump()}
    size = None if ids is None else len(ids)
    shape: dict[str, Any] = {"num_ssms": len(ssms), "layers": recipe.drafter.layers, "draft_vocab_size": size}
    shape |= {"vocab_size": target.vocab_size, "mark_tokens": recipe.boost.tokens}
    shape |= {"coverage": coverage(matched), "overlap": overlap(matched)}
    if run.main:
        for name, ssm in zip(parts, ssms, strict=True):
            stored = in_dtype(ssm.model.state_dict(), recipe.export.dtype)
            model = type(ssm.model)(ssm.model.config).to(getattr(torch, recipe.export.dtype))
            model.load_state_dict(stored)
            model.generation_config = ssm.model.generation_config
            write_model(run.folder / name, model, target.tokenizer, run.facts(part_of=recipe.run.name))
    run.export(shape, {} if ids is None else {"draft_vocab": ids.cpu()}, target, facts, trees, parts)


SCRIPT = Script("ssm", SsmRecipe, train, plans)


def main() -> None:
    run_script(SCRIPT, PARSER, RECIPE)


if __name__ == "__main__":
    run_command(main, resumable=True)
