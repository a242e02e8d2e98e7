"""Train shortlists of a drafter's LM head (DynaSpec, arXiv 2510.13847; FR-Spec, arXiv 2502.14856).

    accelerate launch train/dynaspec.py recipes/tiny-dynaspec.yaml [section.field=value ...] [--tiny] [--resume]
    accelerate launch train/dynaspec.py recipes/tiny-dynaspec.yaml drafter.shortlist=fr_spec drafter.size=1024

1. clusters: spherical k-means on the rows of the LM head that the drafter uses
2. rollouts: what the trained drafter's layer and its whole LM head say at every depth, after the true tokens
3. router: L = BCE of the clusters that hold the whole head's ten likeliest tokens or the target's (labels: top10), or
   CE with the ten tokens' probability by cluster (labels: mass); the drafter and the LM head are frozen
4. k_max and schedule: the fastest that keep ``drafter.keep`` of the whole head's simulated τ

A list by frequency (fr_spec, vocab_trim) is counted, and low_rank is computed: nothing is trained. Then:
inference/calibrate.py, inference/decode.py. Shape letters: S sequences, B positions of one, K depths, M clusters, V
vocabulary, d hidden width.
"""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from draftsmith.common.command import before_imports, recipe_parser, run_command
from draftsmith.train.early import reader

PARSER = recipe_parser(
    __doc__, "recipes/tiny-dynaspec.yaml", "drafter.num_clusters=64", "two steps on a small random target"
)
RECIPE = before_imports(PARSER, reader("dynaspec")) if __name__ == "__main__" else None

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.data.packing import Rows
from draftsmith.inference.drafters.dynaspec import PART, check_eagle
from draftsmith.inference.measure.rollouts import BEST, Drafts, Recorded, kept, record
from draftsmith.inference.measure.tree_statistics import selection_tree, simulate
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.files.drafters import drafter_config, is_published
from draftsmith.models.files.locate import ModelFolder, known_folder
from draftsmith.models.options import ShortlistSchedule
from draftsmith.models.shortlist import DEPTHS, ShortlistHead
from draftsmith.models.target import Target
from draftsmith.train import sharded
from draftsmith.train.dry_run import Plan, target_shape
from draftsmith.train.launch import console
from draftsmith.train.loop import fit
from draftsmith.train.run import Run
from draftsmith.train.samples import Batch
from draftsmith.train.script import Script, run_script
from draftsmith.train.sections.dynaspec import DynaspecRecipe
from draftsmith.train.shortlists import (
    BLOCK,
    Blocks,
    check_sizes,
    head_seconds,
    load_base,
    make_head,
    rollouts,
    table_of,
)

SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2)  # of the clusters: values of k_max that are tried


class RouterTraining(nn.Module):
    """A router that trains on recorded drafts. ``embed`` is frozen, and not the module's own."""

    def __init__(self, head: ShortlistHead, embed: nn.Module, labels: str) -> None:
        super().__init__()
        self.head, self.objective, self.frozen = head, labels, (embed,)
        self.output_layers = ("head.router.clusters",)  # not for Muon
        cluster = torch.empty(head.config.outputs + 1, dtype=torch.int64, device=head.order.device)
        cluster[head.order] = torch.repeat_interleave(
            torch.arange(head.config.num_clusters, device=cluster.device), head.starts.diff()
        )
        self.register_buffer("cluster", cluster, persistent=False)  # of each token

    def count(self, batch: Batch) -> Tensor:
        return (batch["label"] >= 0).sum()[None]

    def forward(self, batch: Batch, counts: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss as a mean over all nodes that have a label (``counts [1]``)."""
        assert self.head.router is not None
        known = batch["label"] >= 0  # [S, B, K]
        depth = torch.arange(known.shape[2], device=known.device).expand_as(known)[known]
        embeddings = self.frozen[0](batch["tokens"][known])
        scores = self.head.router(embeddings.float(), batch["hidden"][known].float(), depth).float()  # [P, M]
        label, best = batch["label"][known], batch["best"][known][:, :10]
        if self.objective == "mass":
            share = batch["log_q"][known][:, :10].float().softmax(-1)
            mass = torch.zeros_like(scores).scatter_add_(1, self.cluster[best], share)
            loss = -(mass * scores.log_softmax(-1)).sum() / counts[0]
        else:
            wanted = torch.zeros_like(scores).scatter_(1, self.cluster[best], 1.0)
            inside = label < self.head.config.outputs
            wanted[inside, self.cluster[label[inside]]] = 1.0
            weight = 1 + wanted * (scores.shape[1] / wanted.sum(1, keepdim=True) - 1)  # pos_weight M / |pos|
            losses = F.binary_cross_entropy_with_logits(scores, wanted, weight, reduction="none")
            loss = losses.mean(1).sum() / counts[0]
        return loss, {}


def evaluate(
    run: Run[DynaspecRecipe], module: nn.Module, drafts: Drafts, recorded: Recorded, tree: Topology
) -> dict[str, float]:
    """What the shortlists keep of the whole LM head, on held-out text."""
    assert isinstance(module, RouterTraining)
    found = kept(recorded, drafts.embed, module.head)
    run.show_ranks(found.ranks, tree)
    metrics = {"simulated_tau": simulate(tree, found.ranks)}
    for depth in range(recorded.label.shape[1]):
        metrics |= {f"depth{depth}_top1": found.top1[depth], f"depth{depth}_top10": found.top10[depth]}
    return metrics


def select(
    run: Run[DynaspecRecipe], head: ShortlistHead, drafts: Drafts, target: Target, recorded: Recorded, tree: Topology
) -> list[dict[str, Any]]:
    """Set k_max and the schedule, where the recipe does not: the fastest that keep ``drafter.keep`` of the whole LM
    head's simulated τ, or those that keep the most. Returns what was measured of each, for provenance.json."""
    d, config = run.recipe.drafter, head.config
    whole = simulate(tree, kept(recorded, drafts.embed, None).ranks)
    most, measured = config.num_clusters, list[dict[str, Any]]()
    sizes = {min(d.k_max, most)} if d.k_max else {max(1, round(most * share)) for share in SHARES}
    schedules: tuple[ShortlistSchedule, ...] = (d.schedule,) if d.schedule else get_args(ShortlistSchedule)
    for schedule, k_max in itertools.product(schedules, sorted(sizes)):
        head.config = config.with_budget(k_max, schedule)
        found, seconds = kept(recorded, drafts.embed, head), head_seconds(head, drafts, target)
        line = {"k_max": k_max, "schedule": schedule, "seconds": sum(seconds[: recorded.label.shape[1]])}
        line |= {"simulated_tau": simulate(tree, found.ranks), "top1": found.top1, "top10": found.top10}
        measured.append(line | {"tokens": found.tokens, "dropped": found.dropped})
    enough = [line for line in measured if line["simulated_tau"] >= d.keep * whole]
    fastest = min(enough, key=lambda line: line["seconds"], default=None)
    best = fastest or max(measured, key=lambda line: line["simulated_tau"])
    console.print(f"Simulated τ of {tree.num_nodes} nodes, {whole:.3f} with the whole LM head, means over depths:")
    console.print(table_of(measured, best))
    if not enough:
        console.print(f"none keeps drafter.keep={d.keep:g} of it; the one that keeps the most is taken", style="yellow")
    head.config = config.with_budget(best["k_max"], best["schedule"])
    return measured


def train(run: Run[DynaspecRecipe]) -> None:
    """From the trained drafter to the exported shortlists, with the drafter as their part."""
    if sharded.spreads():
        raise ValueError("shortlists need whole rows of the LM head: launch without ZeRO-3 and FSDP")
    recipe, d, facts = run.recipe, run.recipe.drafter, dict[str, Any]()
    target = run.load_target()
    drafts = load_base(run, target)
    check_sizes(run, drafts)
    rows = [part for part in run.read_rows(target, drafts.depth) if isinstance(part, Rows)]
    head = make_head(run, target, drafts, rows)
    run.start_weights(head, target)
    with run.evaluating(head):
        texts = run.held_out["tokens"], run.held_out["supervised"]
        recorded = record(drafts, *texts, BEST, torch.bfloat16, low_rank=head.low_rank)
    whole = kept(recorded, drafts.embed, None).ranks
    tree = selection_tree(whole)
    if head.router is not None:
        module = RouterTraining(head, drafts.embed, d.labels).to(target.device)
        blocks = Blocks(rollouts(run, drafts, rows))
        measure = partial(evaluate, run, drafts=drafts, recorded=recorded, tree=tree)
        for stage in recipe.stages:
            fit(run, stage, module, [blocks], measure, "simulated_tau", weights=[1.0])
        with run.evaluating(module):
            facts["selection"] = select(run, head, drafts, target, recorded, tree)
    found = kept(recorded, drafts.embed, head)
    run.show_ranks(found.ranks, tree)
    facts |= {"simulated_tau": simulate(tree, found.ranks), "top1": found.top1, "top10": found.top10}
    facts["whole_simulated_tau"] = simulate(tree, whole)
    weights = {n: w.int() if n in ("order", "starts") else w for n, w in head.state_dict().items()}
    shape = head.config.to_dict() | {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
    run.export(shape, weights, target, facts, tree, [PART])


def plans(recipe: DynaspecRecipe) -> list[Plan]:
    """What each stage costs; the rollouts come before. The target is held, not run.
    Raises FileNotFoundError, ValueError: the base is a folder here, and no drafter that takes shortlists."""
    d, shape = recipe.drafter, target_shape(recipe.target)
    folder = known_folder(d.base) if d.base else None
    if folder and not is_published(base := ModelFolder(str(d.base), folder)):
        check_eagle(folder, drafter_config(base))
    width = 2 * shape.hidden_size + DEPTHS + d.num_clusters
    trained = d.router_width * width + d.num_clusters if d.shortlist == "dynaspec" else 0
    plans = [Plan.of(recipe, s, shape, trained, passes=0, every_row=False) for s in recipe.stages]
    return [replace(plan, length=BLOCK * DEPTHS) for plan in plans]


SCRIPT = Script("dynaspec", DynaspecRecipe, train, plans)


def main() -> None:
    run_script(SCRIPT, PARSER, RECIPE)


if __name__ == "__main__":
    run_command(main, resumable=True)
