"""Train an EAGLE drafter on a target's features (arXiv 2401.15077, 2503.01840).

    accelerate launch train/eagle.py recipes/tiny-eagle3.yaml [section.field=value ...] [--tiny] [--resume | --restart]
    accelerate launch train/eagle.py recipes/tiny-eagle1.yaml

    EAGLE-3   L = Σ_i 0.8^i · CE(p_{t+1+i} ‖ q_{t,i}), i = 0 … K − 1: training-time test, K steps of drafting from
              every position, each on the drafter's own states of the steps before it
              drafter.loss=lk, tv or nla, in place of CE: by the probability that a draft is accepted
              drafter.one_pass (P-EAGLE): K drafts of one pass, all of weight 1 (arXiv 2602.01469); with
              drafter.keep_depths r draft i trains on a share of r^i of the positions (conditional drop-on-depth)
              drafter.replay: on its own drafts, rejected ones too (Draft-OPD, train/replay.py)
    EAGLE-1   L = SmoothL1(o_t, h_{t+1}) + 0.1 · CE(p_{t+1} ‖ q_{t,0}); noise on the features that are read

p_u is the target's distribution after token u, on the draft vocabulary; positions whose likeliest token is outside do
not train. Formulas: kernels/soft_loss.py. The checkpoint with the highest simulated τ on held-out rows is exported.
Then: inference/calibrate.py, inference/decode.py. Shape letters: B batch, T tokens, P positions that draft, N positions
of the teacher, F features per token, d hidden width, V vocabulary, S draft vocabulary, K unrolled steps.
"""

import copy
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from typing import Any

from draftsmith.common.command import before_imports, recipe_parser, run_command
from draftsmith.train.early import reader

PARSER = recipe_parser(
    __doc__, "recipes/tiny-eagle3.yaml", "drafter.unroll=5", "two steps of each stage on a small random target"
)
RECIPE = before_imports(PARSER, reader("eagle")) if __name__ == "__main__" else None

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.inference.drafters.parallel_eagle import drafter_of
from draftsmith.inference.measure.tree_statistics import eagle_ranks, selection_tree, simulate, top_shares
from draftsmith.kernels.distribution import philox_uniforms
from draftsmith.models.eagle import Eagle, EagleConfig
from draftsmith.models.files.locate import ModelFolder
from draftsmith.models.target import Target
from draftsmith.train import draft_vocabulary, memory, sharded
from draftsmith.train.dry_run import Plan, target_shape
from draftsmith.train.launch import console
from draftsmith.train.loop import fit
from draftsmith.train.losses import HEAD_DECAY, BesideTarget, labels_of, linear_soft_loss, shifted_labels, teach
from draftsmith.train.replay import Replay
from draftsmith.train.run import Run, beginning
from draftsmith.train.samples import Batch
from draftsmith.train.script import Script, run_script
from draftsmith.train.sections.eagle import DEPTH, EagleRecipe, EagleSection

CE_WEIGHT = 0.1  # of EAGLE-1's cross-entropy beside its regression (arXiv 2401.15077 §3.2)


class EagleTraining(BesideTarget):
    """A frozen target and the drafter that trains on its features. ``seed``: of the noise, and of what is dropped."""

    def __init__(self, target: Target, eagle: Eagle, recipe: EagleRecipe) -> None:
        super().__init__()
        self.target, self.eagle, self.seed = target, eagle, recipe.run.seed
        self.steps, self.noise, self.loss = recipe.drafter.unroll, recipe.drafter.noise, recipe.drafter.loss
        self.shares = recipe.drafter.shares
        self.captures = eagle.config.captured_layers
        eagle.recompute, eagle.blocks = recipe.precision.gradient_checkpointing, recipe.target.attention != "sdpa"
        embeddings = ("eagle.embed_tokens",) if eagle.config.own_embeddings else ()
        self.output_layers = ("eagle.lm_head", *embeddings)  # not for Muon
        self.model = target.model  # registered, frozen: moves with the module, is in no optimizer

    def labels(self, batch: Batch) -> Tensor:
        """``[K, B, T]`` bool: step i of index t has a label, x_{t+i+2}, in the same sample, which is not dropped.

        Each index draws one number for all of its steps, so that one that keeps a step keeps those before it
        (conditional drop-on-depth): a function of the seed and of ``visit [B]``."""
        tokens, supervised, segment = batch["tokens"], batch["supervised"], batch.get("segment")
        shifted = [shifted_labels(tokens, supervised, step + 2, segment) for step in range(self.steps)]
        labels = torch.stack(shifted) != -100
        if self.shares[-1] == 1:
            return labels
        visit = batch.get("visit", torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device))
        uniforms = philox_uniforms(torch.full_like(visit, self.seed), visit, tokens.shape[1])
        return labels & (uniforms < uniforms.new_tensor(self.shares)[:, None, None])

    def count(self, batch: Batch) -> Tensor:
        """Labels of each step."""
        return labels_of(self, batch).sum((1, 2))

    def noisy(self, features: Tensor, batch: Batch, step: int) -> Tensor:
        """Features with uniform noise of EAGLE-1: of each row from the seed, the step and its own tokens, whatever rows
        it is beside, narrower in long rows."""
        drawn, noise = torch.Generator(features.device), torch.zeros_like(features)
        segment = batch.get("segment", torch.ones_like(batch["tokens"]))
        facts = torch.stack((batch["tokens"].sum(1), (segment > 0).sum(1)), 1)
        for row, (total, length) in enumerate(facts.tolist()):
            drawn.manual_seed((self.seed + 1_000_003 * step + total) % (1 << 63))
            uniform = torch.rand(length, features.shape[2], generator=drawn, device=features.device) - 0.5
            noise[row, :length] = uniform * (self.noise * 512 / max(1, length))
        return features + noise

    def forward(self, batch: Batch, counts: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, each step's as a mean over its labels (``counts [K]``), also those outside the draft vocabulary;
        ``hidden``, the features ``[B, T, F]``, may be in the batch."""
        if (features := batch.get("hidden")) is None:
            with torch.no_grad():  # padding follows every label, and attention is causal
                features = self.target.features(batch["tokens"].long(), self.captures, batch.get("positions"))
        eagle, labelled, steps = self.eagle, labels_of(self, batch), self.steps  # [K, B, T]
        taught = torch.zeros_like(labelled[0])  # where the target's distribution is needed
        for i, where in enumerate(labelled):
            taught[:, i + 1 :] |= where[:, : max(0, where.shape[1] - i - 1)]
        hidden = features[..., : eagle.config.feature_size][taught]  # [N, d]
        teacher = teach(self.target, hidden, eagle.draft_vocab, self.loss)
        # Which indices run step i: those with a label there or later. Of training-time test each runs all steps, and
        # queries stay in the order of the text; of P-EAGLE those that run longest come first.
        runs = labelled.flip(0).cumsum(0).flip(0) > 0
        runs = runs if eagle.config.parallel else runs[:1].expand_as(runs)
        widths = runs.sum(2).amax(1).clamp(min=1).tolist()
        chosen = runs.sum(0).argsort(dim=1, descending=True, stable=True)[:, : widths[0]]  # [B, P]
        # Step i predicts from index t what the target predicts from t + i + 1. A row of −1 is of no token.
        ahead = torch.arange(1, steps + 1, device=chosen.device)[:, None, None]
        row_of = (taught.flatten().cumsum(0).view_as(taught) - 1).expand_as(labelled)
        rows = row_of.gather(2, (chosen + ahead).clamp(max=taught.shape[1] - 1))  # [K, B, P]
        marks = labelled.gather(2, chosen.expand(steps, -1, -1))
        kept = marks & (F.pad(teacher.best, (0, 1), value=-1)[rows] >= 0)
        number, row, place = kept.nonzero(as_tuple=True)
        sizes = kept.sum((1, 2)).tolist()
        read = features.float()
        if eagle.config.version == 1 and self.noise and self.training:
            read = self.noisy(read, batch, step)
        places_of = (batch.get("positions"), batch.get("segment"), chosen, widths)
        unrolled = eagle.unroll(read, self.target.embeddings, batch["tokens"], steps, *places_of)
        first = next(unrolled)
        at = zip(row.split(sizes), place.split(sizes), strict=True)
        outs = [out[each] for out, each in zip(chain([first], unrolled), at, strict=True)]
        head: Any = eagle.draft_head(self.target.lm_head)
        after = self.target.after_head if eagle.lm_head is None and self.target.changes_logits else None
        counts = counts.clamp(min=1)
        decay = 1.0 if eagle.config.parallel else HEAD_DECAY
        weights = (1.0 if eagle.config.version == 3 else CE_WEIGHT) * decay ** (ahead.flatten() - 1) / counts
        given = (teacher, rows[number, row, place], weights[number])
        loss, found = linear_soft_loss(torch.cat(outs), head.weight, *given, getattr(head, "bias", None), after)
        means = torch.stack([part.sum(1) for part in found.split(sizes, 1)]) / counts[:, None]
        named = zip(("loss", "top1", "acceptance"), means.unbind(1), strict=True)
        metrics = {f"step{i + 1}_{name}": each[i] for name, each in named for i in range(steps)}
        if eagle.config.version == 1:
            out, wanted = first[marks[0]].float(), hidden[rows[0][marks[0]]].float()
            regression = F.smooth_l1_loss(out, wanted, reduction="sum") / (out.shape[-1] * counts[0])
            loss, metrics = loss + regression, metrics | {"regression_loss": regression.detach()}
        return loss, metrics


class EagleReplay(Replay, EagleTraining):
    """An EAGLE-3 drafter that learns from its own drafts, too."""


def evaluate(run: Run[EagleRecipe], module: nn.Module) -> dict[str, float]:
    """Simulated τ, the accuracy of each step of drafting, and now and then the real τ."""
    assert isinstance(module, EagleTraining)
    target, eagle = module.target, module.eagle
    depth = depth_of(eagle)
    ranks = run.held_out_ranks(partial(eagle_ranks, target, eagle, depth=depth), module)
    tree = selection_tree(ranks)
    run.show_ranks(ranks, tree)
    metrics = {"simulated_tau": simulate(tree, ranks)}
    metrics |= {f"step{k}_held_out_top1": share for k, share in enumerate(top_shares(ranks), 1)}
    # The drafter casts its weights: a copy.
    return metrics | run.decode_tau(target, lambda: drafter_of(copy.deepcopy(eagle), target, tree))


def depth_of(eagle: Eagle) -> int:
    """Of the drafts that are measured on held-out rows."""
    return min(DEPTH, eagle.config.parallel or DEPTH)


def plans(recipe: EagleRecipe) -> list[Plan]:
    """What each stage costs."""
    d, shape = recipe.drafter, target_shape(recipe.target)
    length, layers = recipe.data.max_length, d.captured_layers or ()
    own_shape = (d.version, d.projection, d.draft_vocab_size, layers, d.intermediate_size)
    made = EagleConfig.for_target(shape.config, shape.vocab_size, length, *own_shape, **d.options)
    made = shape_of_init(recipe, made, beginning(recipe))
    with torch.device("meta"):
        own = sum(p.numel() for p in Eagle(made).parameters())
    rows = made.outputs * shape.hidden_size if d.projection == "shared" else 0
    passes = sum(d.shares)
    costs: dict[str, Any] = {"projected": round(passes * rows), "copied": rows if d.draft_vocab_size else 0}
    heads, given = made.num_attention_heads, recipe.cache_hidden != "none" or recipe.target.features is not None
    costs |= {"passes": (0 if given else 1) + 2 * bool(d.replay), "unrolled": passes}
    costs |= {"logits": round(passes * made.outputs)}
    recomputed = recipe.precision.gradient_checkpointing
    costs["kept"] = partial(memory.eagle, made, shape.config, steps=passes, given=given, recomputed=recomputed)
    costs |= {
        "attended": 3.5 * passes * heads * made.head_dim * made.num_layers,
        "scores": round(passes * heads * made.num_layers),
    }  # twice backward, and again
    costs["features"] = made.feature_size * (1 + len(made.captured_layers))
    return [Plan.of(recipe, s, shape, own, **costs) for s in recipe.stages]


def shape_of_init(recipe: EagleRecipe, made: EagleConfig, start: ModelFolder | None) -> EagleConfig:
    """The config of a drafter that begins with ``start``, the one of ``init_from``: what the recipe does not say is as
    in ``start``, which are the layers that it reads and, of an imported one, sizes, rotary positions, biases and
    embeddings."""
    if start is None:
        return made
    stored = start.config
    own = {*EagleSection.model_fields, "fc_bias", "vocab_size", "max_position_embeddings"}
    own |= {"parallel"} if stored.get("parallel") else {"parallel", "mask_token_id"}
    free = ("captured_layers", "intermediate_size", "num_layers")
    own -= {name for name in free if getattr(recipe.drafter, name) is None}
    return replace(made, **{f.name: stored[f.name] for f in fields(made) if f.name in stored and f.name not in own})


def train(run: Run[EagleRecipe]) -> None:
    """From the target to the exported drafter."""
    sharded.refuse_zero3("the target's embeddings, too, which an EAGLE drafter reads whole")
    recipe, d = run.recipe, run.recipe.drafter
    target = run.load_target()
    size = draft_vocabulary.size_of(run, d.draft_vocab_size, target.vocab_size)
    shape = (d.version, d.projection, size, d.captured_layers or (), d.intermediate_size)
    eagle = Eagle.for_target(target, *shape, **d.options)
    if (config := shape_of_init(recipe, eagle.config, run.start or beginning(recipe))) != eagle.config:
        eagle = Eagle(config)
    run.start_weights(eagle, target)
    module = (EagleReplay if d.replay else EagleTraining)(target, eagle, recipe)
    rows = run.read_rows(target, depth_of(eagle))
    facts = draft_vocabulary.apply(run, eagle, target, rows)
    if isinstance(module, EagleReplay):
        module.check(max(part.length for part in rows))
    inputs = run.with_hidden(target, rows, module.captures)
    if d.unroll > 1:
        console.print(f"the loss is a sum over {d.unroll} unrolled steps")
    for stage in recipe.stages:
        fit(run, stage, module, inputs, partial(evaluate, run), "simulated_tau")
    with run.evaluating(module):
        ranks = run.held_out_ranks(partial(eagle_ranks, target, eagle, depth=depth_of(eagle)), module)
    tree = selection_tree(ranks)
    facts["simulated_tau"] = simulate(tree, ranks)
    run.export(eagle.config.to_dict(), eagle.state_dict(), target, facts, tree)


SCRIPT = Script("eagle", EagleRecipe, train, plans)


def main() -> None:
    run_script(SCRIPT, PARSER, RECIPE)


if __name__ == "__main__":
    run_command(main, resumable=True)
