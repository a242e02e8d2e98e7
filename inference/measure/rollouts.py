"""Teacher-forced drafts of all positions of a text at once: what a drafter's layer and LM head read at each depth,
after the true tokens before it, which it has drafted itself. Routers train on them, and shortlists are evaluated on
them.

Shape letters: B batch, T tokens, P positions where a step begins, K depths, R best tokens, S tokens that the drafter
chooses from, e width of embeddings, d of hidden states.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.inference.drafters.eagle import check_context, to_target
from draftsmith.inference.drafters.shortlists import after_head_of
from draftsmith.inference.measure.tree_statistics import AT_ONCE, LOGITS, MAX_RANK, draft_labels
from draftsmith.models.eagle import Eagle
from draftsmith.models.shortlist import DEPTHS, ShortlistHead, head_rows_of
from draftsmith.models.target import Target
from draftsmith.models.unrolled import marked_places

BEST = 24  # tokens of the whole LM head that are recorded, where nothing else is said


@dataclass(frozen=True)
class Rollout:
    """One depth of drafts."""

    tokens: Tensor  # [P] int64 of the nodes: the root's at depth 0, then the true tokens after it
    hidden: Tensor  # [P, d], the hidden state that a router reads
    out: Tensor  # [P, d], what the LM head reads


@dataclass(frozen=True)
class Drafts:
    """A drafter as shortlists are made for it.

    run: (tokens ``[B, T]``, supervised ``[B, T]``, as ``engine.answers.answer`` returns them) → one
        :class:`Rollout` for each depth, of the P positions t whose next token is an answer's, row by row.
    """

    run: Callable[[Tensor, Tensor], Iterator[Rollout]]
    embed: nn.Module  # of the tokens that a router reads
    head: nn.Module  # its LM head, […, d] → […, S]
    ids: Tensor | None  # [S] int64, the target's tokens of its rows; the first S if None
    embedding_size: int  # e
    feature_size: int  # d
    after_head: Callable[[Tensor], Tensor] | None  # the scale or cap of its logits, if there is one
    depth: int  # K

    def logits(self, out: Tensor) -> Tensor:
        """``[…, d]`` → ``[…, S]`` float32."""
        logits = self.head(out)
        return (logits if self.after_head is None else self.after_head(logits)).float()

    @property
    def weight(self) -> Tensor:
        """:func:`head_rows_of` its LM head, ``[S, d]``."""
        return head_rows_of(self.head)


@dataclass(frozen=True)
class Recorded:
    """What a drafter's whole LM head says at every depth of every position; tokens are places in its vocabulary."""

    begins: Tensor  # [B, T] bool, the positions, P in all
    tokens: Tensor  # [P, K] int64, of the nodes, ids of the target
    hidden: Tensor  # [P, K, d], what the shortlists read: a router's hidden states, or what the LM head reads
    best: Tensor  # [P, K, R] int64, the R likeliest tokens
    log_q: Tensor  # [P, K, R] float32, their log probabilities
    label: Tensor  # [P, K] int64, the target's token; S if the drafter's vocabulary lacks it; −1 where there is none
    outputs: int  # S

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name; with ``outputs`` the arguments that make it again."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "outputs"}


@torch.no_grad()
def record(
    drafts: Drafts,
    tokens: Tensor,
    supervised: Tensor,
    best: int,
    dtype: torch.dtype = torch.float32,
    batch_size: int = 4,
    on_done: Callable[[int], None] | None = None,
    low_rank: bool = False,
) -> Recorded:
    """Record a drafter on texts ``[B, T]``, on the CPU, with R = ``best`` tokens, at most S, and hidden states of
    ``dtype``, for shortlists that are ``low_rank`` or not. ``batch_size``: rows of a forward pass, at most; long
    ones are fewer. ``on_done`` is called with the number of sequences done so far."""
    begins, batch_size = F.pad(supervised[:, 1:], (0, 1)), max(1, min(batch_size, AT_ONCE // tokens.shape[1]))
    parts, outputs = list[list[Tensor]](), len(drafts.weight)
    best = min(best, outputs)
    for start in range(0, len(tokens), batch_size):
        part = slice(start, start + batch_size)
        found, where = list[tuple[Tensor, ...]](), begins[part]
        for rollout in drafts.run(tokens[part], supervised[part]):
            chunks = [drafts.logits(out).log_softmax(-1).topk(best, -1) for out in rollout.out.split(LOGITS)]
            log_q, top = (torch.cat([chunk[i] for chunk in chunks]).cpu() for i in (0, 1))
            reads = rollout.out if low_rank else rollout.hidden
            found.append((rollout.tokens.cpu(), reads.cpu().to(dtype), top, log_q))
        nodes, hidden, top, log_q = (torch.stack(each, 1) for each in zip(*found, strict=True))
        label = draft_labels(tokens[part], supervised[part], nodes.shape[1])[where]
        ids = torch.arange(outputs) if drafts.ids is None else drafts.ids.cpu()
        size = int(max(ids.max(), tokens.max())) + 1
        place = torch.full((size,), outputs).scatter(0, ids, torch.arange(outputs))
        label = torch.where(label < 0, -1, place[label.clamp(min=0)])
        parts.append([nodes, hidden, top, log_q, label])
        if on_done:
            on_done(min(start + batch_size, len(tokens)))
    nodes, hidden, top, log_q, label = (torch.cat(each) for each in zip(*parts, strict=True))
    return Recorded(begins, nodes, hidden, top, log_q, label, outputs)


@dataclass(frozen=True)
class Coverage:
    """What shortlists keep of a whole LM head, by depth.

    ranks: ``[B, T, K]`` int64 as :func:`~draftsmith.inference.measure.tree_statistics.head_ranks`; a label not among
        the R recorded tokens counts as missed.
    """

    ranks: Tensor
    tokens: list[float]  # the mean number of tokens
    top1: list[float]  # the share of the whole head's likeliest token that is inside
    top10: list[float]  # and of its ten likeliest
    dropped: list[float]  # the share of the wanted clusters' tokens that do not fit


@torch.no_grad()
def kept(recorded: Recorded, embed: nn.Module, shortlist: ShortlistHead | None, chunk: int = 512) -> Coverage:
    """Apply shortlists to what was recorded, each node having its own; None: the whole head."""
    device = next(embed.parameters()).device
    columns = list[Tensor]()
    sums = torch.zeros(5, recorded.label.shape[1], dtype=torch.float64)  # tokens, dropped, top1, top10, count
    for k, label in enumerate(recorded.label.unbind(1)):
        nodes = (label >= 0).nonzero()[:, 0]  # where a step begins and the answer has a token for this depth
        best, label = recorded.best[nodes, k], label[nodes]
        inside = torch.ones_like(best, dtype=torch.bool)
        for part in torch.arange(len(nodes)).split(chunk) if shortlist is not None else ():
            assert shortlist is not None
            at = nodes[part]
            embeddings = embed(recorded.tokens[at, k].to(device)).float()
            chosen = shortlist.choose(embeddings, recorded.hidden[at, k].to(device).float(), k)
            inside[part] = shortlist.contains(best[part].to(device), chosen, k).cpu()
            if chosen is not None:
                sums[:2, k] += torch.stack((chosen.count.sum(), chosen.dropped.sum())).cpu()
        if shortlist is None or shortlist.router is None:
            sums[0, k] = len(nodes) * (recorded.outputs if shortlist is None else shortlist.config.tokens(k))
        sums[2, k], sums[3, k] = inside[:, 0].sum(), inside[:, :10].double().mean(1).sum()
        hit = (best == label[:, None]) & inside
        rank = inside.long().cumsum(1).gather(1, hit.byte().argmax(1, keepdim=True))[:, 0] - 1
        column = torch.full_like(recorded.label[:, k], -1)
        column[nodes] = torch.where(hit.any(1), rank.clamp(max=MAX_RANK), MAX_RANK)
        columns.append(column)
        sums[4, k] = len(nodes)
    ranks = torch.full((*recorded.begins.shape, len(columns)), -1, dtype=torch.int64)
    ranks[recorded.begins] = torch.stack(columns, 1)
    tokens, dropped, top1, top10, count = sums.clamp(min=1e-9)
    shares = tokens / count, top1 / count, top10 / count, dropped / (tokens + dropped)
    return Coverage(ranks, *([round(float(x), 4) for x in share] for share in shares))


def eagle_drafts(eagle: Eagle, target: Target, depth: int = DEPTHS) -> Drafts:
    """A drafter as shortlists are made for it; the router reads what the layer reads, so both can run at once."""
    to_target(eagle, target)
    head, embed = eagle.draft_head(target.lm_head), eagle.embeddings(target.embeddings)
    dtypes = eagle.fc.weight.dtype, next(head.parameters()).dtype

    def run(tokens: Tensor, supervised: Tensor) -> Iterator[Rollout]:
        rows, begins = tokens.to(target.device).long(), F.pad(supervised[:, 1:], (0, 1))
        places = marked_places(begins)  # [B, P]
        begun = begins.gather(1, places).to(rows.device)
        places = places.to(rows.device)
        features = target.features(rows, eagle.config.captured_layers).to(dtypes[0])
        following = F.pad(rows, (0, depth))
        for k, (hidden, out) in enumerate(eagle.unroll_pairs(features, embed, rows, depth, chosen=places)):
            yield Rollout(following.gather(1, places + k + 1)[begun], hidden[begun], out[begun].to(dtypes[1]))

    after_head = after_head_of(target) if eagle.config.projection == "shared" else None
    sizes = eagle.config.hidden_size, eagle.config.hidden_size
    return Drafts(run, embed, head, eagle.draft_vocab, *sizes, after_head, depth)


def open_eagle_drafts(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], target: Target) -> Drafts:
    """A drafter's folder as shortlists are made for it (train/dynaspec.py)."""
    eagle = Eagle.from_artifact(config, weights, str(folder))
    check_context(eagle, target, str(folder))
    return eagle_drafts(eagle, target)
