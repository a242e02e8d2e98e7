"""What shortlists are made from: the trained drafter, its clusters or token counts, its recorded drafts as training
rows, how long a shortlist's logits take, and the table of what was measured (train/dynaspec.py).

Shape letters: V vocabulary, K depths, P positions.
"""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.common.files import read_json, write_json
from draftsmith.common.progress import ProgressBar
from draftsmith.data.packing import Rows
from draftsmith.data.tokenized import tokenized
from draftsmith.inference.drafters.dynaspec import PART, check_eagle
from draftsmith.inference.drafters.shortlists import Shortlists
from draftsmith.inference.measure.rollouts import BEST, Drafts, Recorded, open_eagle_drafts, record
from draftsmith.inference.measure.step_costs import StepClock
from draftsmith.inference.measure.tree_statistics import AT_ONCE
from draftsmith.models.artifact import TEMPLATE, check_target, in_dtype, read_drafter, write_drafter
from draftsmith.models.card import weights_sha256
from draftsmith.models.eagle import Eagle
from draftsmith.models.files.identity import was_asked
from draftsmith.models.serving.from_published import convert_if_published
from draftsmith.models.shortlist import DEPTHS, ShortlistConfig, ShortlistHead, budget, low_rank_factors
from draftsmith.models.target import Target
from draftsmith.train import checkpoint
from draftsmith.train.clusters import Clusters, report, spherical_kmeans
from draftsmith.train.launch import console
from draftsmith.train.run import Run
from draftsmith.train.samples import Stored

BLOCK = 64  # positions of a training sequence
READS = 4096  # positions whose drafts give the second moment of what the LM head reads


def load_base(run: Run[Any], target: Target) -> Drafts:
    """The drafter, also written into the run's folder as its part."""
    d, part = run.recipe.drafter, run.folder / PART
    if d.base is None:
        if not run.small:
            raise ValueError("drafter.base: name the trained drafter, a folder or Hub id")
        random = Eagle.for_target(target, 1, "shared")
        config: dict[str, Any] = random.config.to_dict() | {"drafter_type": "eagle"}
        folder, weights = part, random.state_dict()
    else:
        t = run.recipe.target
        base = convert_if_published(d.base, t.name, revision=t.revision, trust_remote_code=t.trust_remote_code)
        folder, config, weights = read_drafter(base)
        check_target(folder, config, target)
    if d.all_tokens:
        if config.get("projection") != "shared":
            raise ValueError(f"drafter.all_tokens: {folder} has an LM head of its own; leave it out")
        config = config | {"draft_vocab_size": None}
        weights = {name: weight for name, weight in weights.items() if name != "draft_vocab"}
    check_eagle(folder, config)
    if (template := folder / TEMPLATE).exists() and run.recipe.data.template is None:
        raise ValueError(f"data.template: {folder} has a chat template of its own; set it to {template}")
    if run.main:
        file = folder / "provenance.json"  # how the base was trained: this run does not change it
        facts = (read_json(file) if file.exists() else {}) | {"base": d.base}
        shape = {n: v for n, v in config.items() if n not in ("draftsmith_version", "drafter_type", "target", "parts")}
        kept_weights = in_dtype(weights, run.recipe.export.dtype)
        if run.resume and (part / "model.safetensors").exists():
            before = load_file(part / "model.safetensors")
            same = (name in before and before[name].equal(weight.cpu()) for name, weight in kept_weights.items())
            if len(before) != len(kept_weights) or not all(same):
                raise ValueError(f"--resume: drafter.base={d.base} has other weights now; restore them, or --restart")
        write_drafter(part, config["drafter_type"], shape, kept_weights, target, facts, None)
    run.accelerator.wait_for_everyone()
    return open_eagle_drafts(folder, config, weights, target)


def check_sizes(run: Run[Any], drafts: Drafts) -> None:
    """Refuse more clusters than the drafter's LM head has tokens, before anything slow, and say what is less than asked
    for."""
    d, most = run.recipe.drafter, len(drafts.weight)
    if d.shortlist == "dynaspec":
        if d.num_clusters > most:
            raise ValueError(
                f"drafter.num_clusters={d.num_clusters}: the drafter's LM head has {most} tokens; set fewer"
            )
        limits = [("k_max", d.k_max or 1, d.num_clusters, "all clusters")]
    elif d.shortlist == "low_rank":
        if getattr(drafts.head, "bias", None) is not None:
            raise ValueError(
                "drafter.shortlist=low_rank: the LM head has a bias, which its factors leave out; use another"
            )
        limits = [("rank", d.rank, min(drafts.weight.shape), "that of the LM head")]
        limits += [("candidates", d.candidates, most, "all tokens of the drafter's LM head")]
    else:
        limits = [("size", d.size, most, "all tokens of the drafter's LM head")]
    for name, value, limit, what in limits:
        if value > limit:
            console.print(f"drafter.{name}={value}: {limit} is used, {what}", style="yellow")


def _stored(run: Run[Any], folder: Path, asked: dict[str, Any]) -> dict[str, Tensor]:
    """What an earlier run of the folder kept, if it was asked for the same; empty otherwise."""
    with run.accelerator.main_process_first():  # it may write the request anew
        same = was_asked(folder / "asked.json", asked, run.older_fingerprint)
    found = checkpoint.read_tensors(folder) if same else {}
    run.accelerator.wait_for_everyone()  # all have read before one writes
    return found


def _store(folder: Path, asked: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    (folder / "asked.json").unlink(missing_ok=True)
    checkpoint.write_tensors(folder, tensors)
    write_json(folder / "asked.json", asked)


def frequency(run: Run[Any], target: Target, rows: Sequence[Rows]) -> Tensor:
    """How often each of the target's tokens occurs, ``[V]``: for vocab_trim in the training rows' answers (VocabTrim
    means the target's own: train/distill.py makes them), else in the corpus; each source counts by its weight, as its
    rows would be drawn. Stop tokens count as the most frequent."""
    recipe, d, counts = run.recipe, run.recipe.drafter, torch.zeros(target.vocab_size, dtype=torch.float64)
    assert target.tokenizer is not None
    corpus = [tokenized(source, recipe.data, target.tokenizer) for source in d.corpus or []]
    sources = d.corpus or recipe.data.train
    for source, samples in zip(sources, corpus or [part.samples for part in rows], strict=True):
        marks = samples.supervised if d.shortlist == "vocab_trim" else slice(None)
        own = torch.bincount(torch.from_numpy(samples.tokens[marks]).long(), minlength=target.vocab_size)
        counts += own * (source.weight / len(samples))
    counts[sorted(target.stop_ids)] += counts.max() + 1
    return counts


def cluster(run: Run[Any], target: Target, drafts: Drafts) -> Clusters:
    """Clusters of the LM head's rows, a report of them, and their state in the run's folder, to resume from."""
    d, folder = run.recipe.drafter, run.folder / "clusters"
    asked = {"base": weights_sha256(run.folder / PART), "target": target.fingerprint, "seed": run.recipe.run.seed}
    asked |= {"num_clusters": d.num_clusters, "balanced": d.balanced, "iterations": d.iterations}
    start = None
    if stored := _stored(run, folder, asked):
        start = Clusters(stored["assignment"], stored["centroids"], stored["objective"].tolist())

    def save(state: Clusters) -> None:
        objective = torch.tensor(state.objective, dtype=torch.float64)
        tensors = {"assignment": state.assignment, "centroids": state.centroids, "objective": objective}
        _store(folder, asked, {name: tensor.cpu() for name, tensor in tensors.items()})

    clusters = spherical_kmeans(
        drafts.weight,
        d.num_clusters,
        seed=run.recipe.run.seed,
        max_iterations=d.iterations,
        balanced=d.balanced,
        start=start,
        after=save if run.main else None,
    )
    if run.main:
        found = report(clusters, drafts.weight, target.tokenizer if drafts.ids is None else None, run.folder)
        sizes = found["sizes"]
        console.print(
            f"{d.num_clusters} clusters of {sizes['min']}, {sizes['median']:g} and {sizes['max']:,} tokens (min, "
            f"median, max): objective {clusters.objective[0]:.4f} → {clusters.objective[-1]:.4f} after "
            f"{len(clusters.objective)} iterations; see {run.folder}/clusters.png"
        )
    return clusters


def make_head(run: Run[Any], target: Target, drafts: Drafts, rows: Sequence[Rows]) -> ShortlistHead:
    """The shortlists before training: an LM head in order, by cluster or by frequency, or its factors."""
    d, outputs = run.recipe.drafter, len(drafts.weight)
    if d.shortlist == "dynaspec":
        clusters = cluster(run, target, drafts)
        widths = (d.router_width, drafts.embedding_size, drafts.feature_size)
        config = ShortlistConfig("dynaspec", outputs, (1,), (1,), d.num_clusters, *widths)
        # While the router trains, it is measured by a quarter of the vocabulary.
        head = ShortlistHead(config.with_budget(max(1, d.num_clusters // 4), "position_aware"))
        head.starts.copy_(clusters.starts)
        order = clusters.order
    elif d.shortlist == "low_rank":
        capacity = budget(min(d.candidates, outputs), d.schedule or "fixed")
        sizes = {"rank": min(d.rank, *drafts.weight.shape), "feature_size": drafts.weight.shape[1]}
        head = ShortlistHead(ShortlistConfig(d.shortlist, outputs, capacity, **sizes))
        head.down, head.up = low_rank_factors(drafts.weight, head.config.rank, second_moment(run, drafts, rows))
        return head.to(target.device)
    else:
        capacity = budget(min(d.size, outputs), d.schedule or "fixed")
        head = ShortlistHead(ShortlistConfig(d.shortlist, outputs, capacity))
        counts = frequency(run, target, rows)
        order = (counts if drafts.ids is None else counts[drafts.ids.cpu()]).argsort(descending=True, stable=True)
    head.order.copy_(order)
    return head.to(target.device)


def drawn_texts(
    run: Run[Any], rows: Sequence[Rows], positions: int, drawn: torch.Generator
) -> list[tuple[Tensor, Tensor]]:
    """Training rows by the sources' weights, with so many positions before an answer's tokens: ``tokens`` and
    ``supervised``, ``[4, T]`` each, of about equal length."""
    recipe, parts = run.recipe, list[tuple[Tensor, Tensor]]()
    shares = torch.tensor([source.weight for source in recipe.data.train]).double()
    for part, share in zip(rows, (shares / shares.sum()).tolist(), strict=True):
        count, most = 0, share * positions
        for number in torch.randperm(len(part), generator=drawn).tolist():
            batch = part.batch([number], recipe.data.max_length)
            parts.append((batch["tokens"], batch["supervised"]))
            count += int(batch["supervised"].sum())
            if count >= most:
                break
    parts.sort(key=lambda part: int(part[1].sum(0).nonzero().max()) if part[1].any() else 0)  # little padding
    texts = list[tuple[Tensor, Tensor]]()
    for start in range(0, len(parts), 4):
        tokens, supervised = (torch.cat([part[i] for part in parts[start : start + 4]]) for i in (0, 1))
        length = int(supervised.sum(0).nonzero().max()) + 1 if supervised.any() else 2
        texts.append((tokens[:, :length], supervised[:, :length]))
    return texts


@torch.no_grad()
def second_moment(run: Run[Any], drafts: Drafts, rows: Sequence[Rows]) -> Tensor:
    """E[x xᵀ] of what the LM head reads at all depths, ``[d, d]`` float64, from some training rows."""
    recipe, count = run.recipe, 0
    drawn = torch.Generator().manual_seed(recipe.run.seed)
    texts = drawn_texts(run, rows, min(READS, recipe.drafter.positions), drawn)
    moment = drafts.weight.new_zeros(2 * drafts.weight.shape[1:], dtype=torch.float64)
    with ProgressBar("what the LM head reads", len(texts), console) as bar, run.evaluating(drafts.embed):
        for done, text in enumerate(texts, 1):
            at_once = max(1, AT_ONCE // text[0].shape[1])
            for part in zip(*(each.split(at_once) for each in text), strict=True):
                for rollout in drafts.run(*part):
                    read = rollout.out.to(moment)
                    moment.addmm_(read.t(), read)
                    count += len(read)
            bar(done)
    return moment / count


def rollouts(run: Run[Any], drafts: Drafts, rows: Sequence[Rows]) -> Recorded:
    """Recorded drafts of the training rows, kept in the run's folder."""
    recipe, folder = run.recipe, run.folder / "rollouts"
    outputs = len(drafts.weight)
    asked = {"base": weights_sha256(run.folder / PART), "target": run.fingerprint, "seed": recipe.run.seed}
    asked |= {"rows": run.data_sha256, "weights": [source.weight for source in recipe.data.train], "outputs": outputs}
    asked |= {"positions": recipe.drafter.positions, "autocast": recipe.precision.autocast}
    asked |= {"tensors": [each.name for each in fields(Recorded)]}
    if stored := _stored(run, folder, asked):
        return Recorded(**stored, outputs=outputs)
    wanted, recorded = recipe.drafter.positions, list[Recorded]()
    drawn = torch.Generator().manual_seed(recipe.run.seed)
    texts = drawn_texts(run, rows, wanted, drawn)
    with ProgressBar("rollouts of the drafter", len(texts), console) as bar, run.evaluating(drafts.embed):
        for done, (tokens, supervised) in enumerate(texts, 1):
            recorded.append(record(drafts, tokens, supervised, BEST, torch.bfloat16))
            bar(done)
    mixed = torch.randperm(sum(len(each.tokens) for each in recorded), generator=drawn)
    names = [name for name in recorded[0].tensors() if name != "begins"]
    pieces = [each.tensors() for each in recorded]
    recorded.clear()  # the hidden states of large targets are many GB
    tensors = {name: torch.cat([piece.pop(name) for piece in pieces])[mixed] for name in names}
    tensors["begins"] = torch.ones(len(mixed), 1, dtype=torch.bool)  # each position is a text of its own
    if len(mixed) < BLOCK:
        raise ValueError(
            f"drafter.positions={wanted}: the training rows give {len(mixed)}, and a router learns from blocks of "
            f"{BLOCK}; set more, or use more data"
        )
    if run.main:
        _store(folder, asked, tensors)
    return Recorded(**tensors, outputs=outputs)


class Blocks(Stored):
    """Recorded positions as training sequences of :data:`BLOCK`; the last ones, which fill none, are left out."""

    def __init__(self, recorded: Recorded) -> None:
        count = len(recorded.tokens) // BLOCK
        parts = {name: part[: count * BLOCK] for name, part in recorded.tensors().items() if name != "begins"}
        super().__init__(**{name: part.unflatten(0, (count, BLOCK)) for name, part in parts.items()})


def head_seconds(head: ShortlistHead, drafts: Drafts, target: Target) -> list[float]:
    """The time, by depth, of the router, the choice and the logits of a level of four nodes: medians, measured."""
    head = copy.deepcopy(head)  # decoding takes the router in the target's dtype
    lists = Shortlists(head, drafts.head, drafts.ids, drafts.after_head)
    lists.allocate(static=False)
    found = dict[tuple[int, int], float]()
    embeddings, hidden = (torch.randn(1, 4, n) for n in (drafts.embedding_size, drafts.feature_size))
    read = torch.randn(1, 4, lists.weight.shape[1])
    inputs = [part.to(lists.weight) for part in (embeddings, hidden, read)]
    seconds = list[float]()
    for depth in range(DEPTHS):
        key = head.config.tokens(depth), head.config.wanted(depth) if head.config.clusters else 0
        if key not in found:
            found[key] = median_seconds(partial(_level, lists, *inputs, depth), target.device)
        seconds.append(found[key])
    return seconds


def _level(lists: Shortlists, embeddings: Tensor, hidden: Tensor, read: Tensor, depth: int) -> None:
    with torch.inference_mode():
        lists.choose(embeddings, hidden, depth)
        lists.logits(read)


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median time of 15 calls, after two that are not counted."""
    return statistics.median([StepClock().timed(call, device)() for _ in range(17)][2:])


def table_of(measured: Sequence[dict[str, Any]], best: dict[str, Any]) -> Table:
    """What was measured of each k_max and schedule; an arrow marks the best."""
    table = Table("k_max", "schedule", "τ", "recall@1", "recall@10", "tokens", "head")
    for line in measured:
        first, ten, tokens = (statistics.fmean(line[name]) for name in ("top1", "top10", "tokens"))
        name = f"{line['k_max']}{' ←' if line is best else ''}"
        shares = (f"{share:.3f}" for share in (line["simulated_tau"], first, ten))
        table.add_row(name, line["schedule"], *shares, f"{tokens:,.0f}", f"{line['seconds'] * 1e3:.2f} ms")
    return table
