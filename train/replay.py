"""Draft-OPD: EAGLE-3 and DFlash learn from the drafts that decoding would reject (arXiv 2605.29343).

    steps        where decoding an answer by chains of K greedy drafts begins a step: with the answer's first token, and
                 each time r + 1 tokens behind the step before; r of its drafts are accepted
    d_1 … d_K    what the drafter, as it is now, drafts in a step; q_k its distribution for d_k and p_k the target's,
                 both after the text and d_1 … d_{k−1}, right or wrong
    L_acc        mean of KL(p_k ‖ q_k) over the drafts k ≤ r
    L_rej        mean of KL(q_k ‖ p_k) over the drafts k > r, weighted by γ^{k−1}, γ = 0.8
    L            (1 − s) · the usual loss + s · (L_acc + L_rej) / 2, s = drafter.replay; s = 1 is the published loss

Decoding is lossless: the text that the target writes with a drafter is its own answer, and the rows hold that. Only the
steps depend on the drafter, and are found anew for each batch. Nothing is recorded, and nothing becomes stale. The
target then reads each row once more, with the drafts of its steps beside it, which see the text up to their root and
the drafts before them.

Published runs decode new answers at temperature 0; in rows that were sampled, a draft is accepted if it is the text's
token. p and q are whole distributions, p on the draft vocabulary; the authors' code has of both the drafted token's
probability alone. Left out are drafts behind an answer's end, and those where the target's likeliest token is outside
the draft vocabulary, which the means count, as in the usual loss. Shape letters: B batch, T tokens, P steps, K drafts,
L = T + P · (K − 1), N drafts that train, d hidden width, F features per token.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.models.dflash import DFlash
from draftsmith.models.eagle import Eagle
from draftsmith.models.target import Target
from draftsmith.models.unrolled import dense_mask, marked_places
from draftsmith.models.vocabulary import to_draft_ids
from draftsmith.train import sharded
from draftsmith.train.losses import at_once, in_chunks, labels_of, shifted_labels
from draftsmith.train.samples import Batch

DECAY = 0.8  # γ


class Replay(nn.Module):
    """Draft-OPD's loss beside that of the class behind it among the bases, whose arguments it takes.

    Its labels are ``[K, B, T]`` int64: at index t the drafts of a step whose root is token t + 1, −1 where no step
    begins. It counts the labels of the usual loss, the accepted drafts, the weights of the rejected ones, the steps.
    """

    target: Target
    captures: tuple[int, ...]

    def __init__(self, target: Target, drafter: Eagle | DFlash, recipe: Any) -> None:
        cast(Any, super()).__init__(target, drafter, recipe)
        self.share, self.drafts = recipe.drafter.replay, recipe.drafter.drafts
        self.low = recipe.precision.autocast == "bfloat16"
        self.drafter = (drafter,)  # registered already

    @torch.no_grad()
    def labels(self, batch: Batch) -> Tensor:
        tokens, segment = batch["tokens"].long(), batch.get("segment")
        # A root and the first draft behind it are the same answer's.
        begins = torch.stack([shifted_labels(tokens, batch["supervised"], k, segment) >= 0 for k in (1, 2)]).all(0)
        with torch.autocast(tokens.device.type, torch.bfloat16, self.low):
            if (features := batch.get("hidden")) is None:
                features = self.target.features(tokens, self.captures, batch.get("positions"))
            chosen = marked_places(begins)
            found = self.draft(features.to(tokens.device), batch, chosen)  # [B, P, K]
        drafts = torch.full((*tokens.shape, self.drafts), -1, device=tokens.device)
        drafts = drafts.scatter(1, chosen[..., None].expand_as(found), found).permute(2, 0, 1)
        accepted, _ = self.sides(batch, drafts)
        starts = begins & ~F.pad(begins[:, :-1], (1, 0))
        return torch.where(steps_of(starts, begins, accepted.sum(0)), drafts, -1)

    def draft(self, features: Tensor, batch: Batch, chosen: Tensor) -> Tensor:
        """The likeliest drafts ``[B, P, K]`` of steps at the ``chosen`` indices ``[B, P]``, as ids of the target."""
        (drafter,), head = self.drafter, self._head
        drafted = chosen.new_zeros(*chosen.shape, self.drafts)
        chunk = at_once(chosen.device, drafter.config.outputs)
        for step, out in enumerate(self.outs(features, batch, chosen, drafted)):
            parts = out.to(head.weight.dtype).flatten(0, 1).split(chunk)
            best = torch.cat([head(part).argmax(-1) for part in parts])
            drafted[..., step] = drafter.tokens(best).view_as(chosen)
        return drafted

    def outs(self, features: Tensor, batch: Batch, chosen: Tensor, drafted: Tensor) -> Iterator[Tensor]:
        """What the LM head reads for each draft of the steps, ``[B, P, d]``; ``drafted``: :meth:`Eagle.unroll_pairs`'s.
        ``features``: ``[B, T, F]``, of the text."""
        (drafter,), tokens, embed = self.drafter, batch["tokens"], self.target.embeddings
        positions, segment = batch.get("positions"), batch.get("segment")
        if isinstance(drafter, Eagle):
            given = (features.float(), embed, tokens, self.drafts, positions, segment, chosen)
            return drafter.unroll(*given, drafted=drafted)
        roots = (chosen + 1).clamp(max=tokens.shape[1] - 1).split(max(1, tokens.shape[1] // self.drafts), 1)
        blocks = [drafter.draft(features.float(), embed, tokens, part, positions, segment) for part in roots]
        return iter(torch.cat(blocks, 1).unbind(2))

    def sides(self, batch: Batch, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """Which drafts ``[K, B, T]`` are accepted, and which train: they are not behind the answer's end."""
        given = batch["tokens"], batch["supervised"]
        wanted = [shifted_labels(*given, k + 2, batch.get("segment")) for k in range(self.drafts)]
        labels = torch.stack(wanted)
        accepted, trains = (labels == drafts).int(), ((labels >= 0) & (drafts >= 0)).int()
        return accepted.cumprod(0).bool(), trains.cumprod(0).bool()

    def _usual(self, batch: Batch) -> Batch:
        return {**batch, "labels": cast(Any, super()).labels(batch)}

    def _weights(self, device: torch.device) -> Tensor:
        return DECAY ** torch.arange(self.drafts, device=device)  # [K]

    def count(self, batch: Batch) -> Tensor:
        drafts = labels_of(self, batch)
        accepted, trains = self.sides(batch, drafts)
        rejected = ((trains & ~accepted).sum((1, 2)) * self._weights(drafts.device)).sum()
        own = torch.stack([accepted.sum(), rejected, (drafts[0] >= 0).sum()])
        return torch.cat([cast(Any, super()).count(self._usual(batch)), own])

    def forward(self, batch: Batch, counts: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss as a mean over all of a step's micro-batches (``counts``, as :meth:`count` has them). ``replay_tau``
        is the mean number of tokens of a step of decoding, that of the target included."""
        drafts = labels_of(self, batch)
        begins, sides = drafts[0] >= 0, torch.stack(self.sides(batch, drafts))
        chosen = marked_places(begins)
        of_steps = drafts.gather(2, chosen.expand(len(drafts), -1, -1)).permute(1, 2, 0)  # [B, P, K]
        accepted, trains = sides.gather(3, chosen.expand(*sides.shape[:2], -1, -1)).permute(0, 2, 3, 1)
        with torch.no_grad():
            features, states = self.states(batch, chosen, of_steps.clamp(min=0))
        loss, metrics = features.new_zeros(()), dict[str, Tensor]()
        if self.share < 1:
            given = {**self._usual(batch), "hidden": features}
            loss, metrics = cast(Any, super()).forward(given, counts[:-3], step)
        outs = torch.stack([*self.outs(features, batch, chosen, of_steps.clamp(min=0))], 2)[trains]
        accepted, weights = accepted[trains], self._weights(outs.device).expand(trains.shape)[trains]
        scale = torch.where(accepted, 1 / counts[-3].clamp(min=1), weights / counts[-2].clamp(min=1))
        by_side = self.divergences(outs, states[trains], accepted, scale)
        metrics |= {"replay_accepted_loss": by_side[0].detach(), "replay_rejected_loss": by_side[1].detach()}
        metrics["replay_tau"] = (sides[0].sum() + begins.sum()) / counts[-1].clamp(min=1)
        return (1 - self.share) * loss + self.share * by_side.sum() / 2, metrics

    def states(self, batch: Batch, chosen: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """The target's features of the text ``[B, T, F]``, and its last hidden states ``[B, P, K, d]`` that predict
        each of the ``drafts [B, P, K]``: d_1 follows the root, each further one the draft before it."""
        target, tokens, width = self.target, batch["tokens"].long(), self.target.hidden_size
        length = tokens.shape[1]
        if (positions := batch.get("positions")) is None:
            positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        ahead = torch.arange(2, self.drafts + 1, device=tokens.device)
        behind = (positions.gather(1, chosen)[..., None] + ahead).flatten(1).clamp(max=target.context - 1)
        mask = replay_mask(chosen, batch.get("segment"), length, self.drafts - 1)
        kind = target.config._attn_implementation
        if kind == "eager":
            mask = torch.zeros_like(mask, dtype=target.dtype).masked_fill_(~mask, torch.finfo(target.dtype).min)
        whole = torch.cat((tokens, drafts[..., :-1].flatten(1)), 1), torch.cat((positions, behind), 1)

        def masked(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, {**kwargs, "attention_mask": mask}

        hook = target.decoder.register_forward_pre_hook(masked, with_kwargs=True)
        try:
            with nullcontext() if kind in ("eager", "sdpa") else target.attention("sdpa"):
                features = target.features(whole[0], self.captures, whole[1])
        finally:
            hook.remove()
        roots = (chosen + 1).clamp(max=length - 1)[..., None].expand(-1, -1, width)
        after_root = features[:, :length, :width].gather(1, roots)[:, :, None]
        after_drafts = features[:, length:, :width].unflatten(1, (-1, self.drafts - 1))
        return features[:, :length], torch.cat((after_root, after_drafts), 2)

    def divergences(self, outs: Tensor, states: Tensor, accepted: Tensor, scale: Tensor) -> Tensor:
        """Σ scale · KL(p ‖ q) over the accepted drafts, and Σ scale · KL(q ‖ p) over the others, ``[2]``, from what the
        drafter's LM head and the target's read of each draft, ``[N, d]`` each."""
        (drafter,), target, head = self.drafter, self.target, self._head
        ids, dtype = drafter.draft_vocab, target.lm_head.weight.dtype
        scaled = isinstance(drafter, Eagle) and drafter.lm_head is None  # DFlash trains without

        def of_chunk(outs: Tensor, states: Tensor, accepted: Tensor, scale: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = target.logits(states.to(cast(torch.dtype, dtype)))
                if ids is not None:
                    scale = scale * (to_draft_ids(wanted.argmax(-1), ids, outside=-1) >= 0)
                    wanted = wanted[:, ids]
                log_p = wanted.float().log_softmax(-1)
            own = head(outs.to(head.weight.dtype))
            log_q = (target.after_head(own) if scaled else own).float().log_softmax(-1)
            weight = torch.where(accepted[:, None], log_p, log_q).exp()  # of the distribution that the mean is over
            sign = torch.where(accepted, scale, -scale)
            each = sign * (weight * (log_p - log_q)).sum(-1)
            return torch.stack([(each * accepted).sum(), (each * ~accepted).sum()])

        return in_chunks(of_chunk, target.vocab_size, outs, states, accepted, scale)

    @property
    def _head(self) -> Any:
        return self.drafter[0].draft_head(self.target.lm_head)

    @torch.no_grad()
    def check(self, length: int) -> None:
        """Raises ValueError: the target is spread over processes; or drafts beside a text of ``length`` tokens do not
        get the hidden states that they get inside it."""
        if sharded.spreads():
            raise ValueError("drafter.replay drafts before each step: launch without ZeRO-3 and FSDP")
        begin = length - self.drafts - 2
        if begin < 0:
            raise ValueError(f"drafter.replay: rows of {length} tokens hold no step of {self.drafts} drafts")
        target = self.target
        tokens = 1 + torch.arange(length, device=target.device)[None] % min(60, target.vocab_size - 1)
        chosen, drafts = torch.full_like(tokens[:, :1], begin), tokens[:, None, : self.drafts]
        beside = self.states({"tokens": tokens}, chosen, drafts)[1][0, 0].float()
        inside = torch.cat((tokens[:, : begin + 2], drafts[:, 0, :-1]), 1)
        wanted = target.hidden(inside)[0, begin + 1 :].float()
        if not (beside - wanted).norm() < 0.05 * wanted.norm():  # far above rounding
            raise ValueError(
                f"drafter.replay: this target does not run drafts beside a text of {length} tokens as inside of it; "
                "lower data.max_length if its attention has a window, else leave drafter.replay out"
            )


def steps_of(starts: Tensor, begins: Tensor, accepted: Tensor) -> Tensor:
    """Where decoding begins a step, ``[B, T]`` bool: at the ``starts``, and behind the ``accepted`` drafts of a step
    and the target's own token, where a step can begin (``begins``). All are ``[B, T]``."""
    places = torch.arange(starts.shape[1], device=starts.device).expand_as(accepted)
    to = places + accepted + 1
    after = to.clamp(max=starts.shape[1] - 1)
    to = torch.where((to == after) & begins.gather(1, after), to, places)
    reached = starts.long()
    for _ in range(starts.shape[1].bit_length()):  # twice as many steps each time
        reached = reached.scatter_reduce(1, to, reached, "amax")
        to = to.gather(1, to)
    return reached > 0


def replay_mask(chosen: Tensor, segment: Tensor | None, length: int, drafts: int) -> Tensor:
    """What the tokens of a text and the drafts of its steps see, ``[B, 1, L, L]`` bool: the text itself before them in
    their sample; a draft also those before it of its own step, and no text behind its root, at index ``chosen`` + 1.
    ``chosen``: ``[B, P]``; ``segment``: as :func:`dense_mask` takes it; ``drafts``: of a step."""
    rows, steps = chosen.shape
    places = torch.arange(length, device=chosen.device).expand(rows, -1)
    roots = (chosen + 1).clamp(max=length - 1).repeat_interleave(drafts, 1)
    text = dense_mask(torch.cat((places, roots), 1), segment, length)  # [B, L, T]
    step = torch.arange(steps * drafts, device=chosen.device)
    own = (step[:, None] // drafts == step // drafts) & (step[:, None] >= step)
    return torch.cat((text, F.pad(own, (0, 0, length, 0)).expand(rows, -1, -1)), 2)[:, None]
