"""Tiny DFlash drafters, with random weights or fitted to the texts of the suite."""

import functools

import lossless_suite
import torch
from lossless_suite import NONE, STARTS
from tiny_models import some_ids

from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.models.dflash import DFlash
from draftsmith.models.target import Target


def untrained_block(target: Target, draft_vocab: bool = False, tied: bool = False, spread: float = 0.2) -> DFlash:
    """Blocks of three drafts and two layers, of random weights, of norms too."""
    ids = some_ids(target)
    shape = {"block_size": 4, "num_layers": 2, "mask_token_id": target.vocab_size - 1, "tie_k_norm": tied}
    dflash = DFlash.for_target(target, **shape, draft_vocab_size=len(ids) if draft_vocab else None)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in dflash.parameters():
            noise = torch.randn(weight.shape, generator=generator).to(weight.device)
            weight.copy_(1 + 0.3 * noise if weight.dim() == 1 else spread * noise)
    if draft_vocab:
        dflash.draft_from(ids, target)
    return dflash.eval().requires_grad_(False)


@functools.cache
def _fitted(draft_vocab: bool, make_target) -> dict[str, torch.Tensor]:
    """Weights fitted to the first five texts of the suite, which takes about two seconds."""
    target = lossless_suite.phrases(make_target)
    dflash = untrained_block(target, draft_vocab, spread=0.1).requires_grad_(True)
    texts = SpeculativeDecoder(target).generate(STARTS[:5], 60, stop_ids=NONE)
    rows = torch.tensor([(start + text.tokens)[:60] for start, text in zip(STARTS, texts, strict=False)])
    rows = rows.to(target.device)
    with torch.no_grad():
        features = target.features(rows, dflash.config.captured_layers)
        ids = dflash.tokens(torch.arange(dflash.config.outputs)).tolist()
        known = {token: place for place, token in enumerate(ids)}
    labels = torch.tensor([[known.get(token, -1) for token in row] for row in rows.tolist()], device=rows.device)
    head, anchors = dflash.draft_head(target.lm_head), torch.arange(1, 57, device=rows.device).expand(len(rows), -1)
    optimizer = torch.optim.Adam(dflash.parameters(), 5e-3)
    for _ in range(120):
        logits = head(dflash.draft(features, target.embeddings, rows, anchors))  # [B, P, K, S]
        wanted = torch.stack([labels.gather(1, anchors + k) for k in (1, 2, 3)], 2)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 2), wanted.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return dflash.stored()


def fitted_block(target: Target, make_target, draft_vocab: bool = False) -> DFlash:
    """A drafter that continues most of the suite's texts; random weights for the small vocabulary."""
    dflash = untrained_block(target, draft_vocab)
    if target.vocab_size != lossless_suite.SMALL:
        dflash.load_state_dict(_fitted(draft_vocab, make_target))
    return dflash
