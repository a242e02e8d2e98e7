"""Tiny EAGLE drafters of every kind, with random weights or fitted to the texts of the suite."""

import functools

import lossless_suite
import torch
from lossless_suite import NONE, STARTS
from tiny_models import SPARSE, some_ids

from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.models.eagle import Eagle
from draftsmith.models.target import Target

TREES = {"chain": (1, 1, 1), "sparse": SPARSE, "dynamic": DynamicShape(3, 3, 9)}
IMPORTED = ("norm_before_residual", "attention_bias", "own_embeddings")
KINDS = {
    "eagle1": {"version": 1, "projection": "shared"},
    "eagle3": {"version": 3, "projection": "own"},
    "shared": {"version": 3, "projection": "shared", "norm_before_fc": True},
    "normed": {"version": 3, "projection": "own", "norm_output": True, "fc_norm": True},
    "imported": {"version": 3, "projection": "own"} | dict.fromkeys(IMPORTED, True),
    "layers": {"version": 3, "projection": "own", "num_layers": 3},
}

PARALLEL = {  # P-EAGLE
    "parallel": {"version": 3, "projection": "own", "parallel": 3},
    "parallel layers": {"version": 3, "projection": "own", "parallel": 3, "num_layers": 2},
}


def untrained(target: Target, kind: str = "eagle3", draft_vocab: bool = False, spread: float = 0.2) -> Eagle:
    """Random weights, of norms too; the draft vocabulary has four fifths of the ids."""
    ids = some_ids(target)
    eagle = Eagle.for_target(target, draft_vocab_size=len(ids) if draft_vocab else None, **(KINDS | PARALLEL)[kind])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in eagle.named_parameters():
            noise = torch.randn(weight.shape, generator=generator).to(weight.device)
            if weight.dim() == 1:
                weight.copy_(0.3 * noise + ("norm" in name))
            elif "lm_head" not in name:
                weight.copy_(spread * noise)
    if draft_vocab:
        eagle.draft_from(ids, target)
    return eagle.eval().requires_grad_(False)


@functools.cache
def _fitted(kind: str, draft_vocab: bool, make_target) -> dict[str, torch.Tensor]:
    """Weights fitted to the first five texts of the suite: about one and a half seconds."""
    target = lossless_suite.phrases(make_target)
    eagle = untrained(target, kind, draft_vocab, 0.1).requires_grad_(True)
    texts = SpeculativeDecoder(target).generate(STARTS[:5], 60, stop_ids=NONE)
    rows = torch.tensor([(start + text.tokens)[:60] for start, text in zip(STARTS, texts, strict=False)])
    rows = rows.to(target.device)
    with torch.no_grad():
        features = target.features(rows, eagle.config.captured_layers)
        ids = eagle.tokens(torch.arange(eagle.config.outputs)).tolist()
        known = {token: place for place, token in enumerate(ids)}
    labels = torch.tensor([[known.get(token, -1) for token in row] for row in rows.tolist()], device=rows.device)
    head = eagle.draft_head(target.lm_head)
    optimizer = torch.optim.Adam(eagle.parameters(), 5e-3)
    for _ in range(120):
        loss = torch.zeros((), device=rows.device)
        for depth, out in enumerate(eagle.unroll(features, target.embeddings, rows, 3)):
            logits = head(out)[:, : -depth - 2].flatten(0, 1)
            loss = loss + torch.nn.functional.cross_entropy(logits, labels[:, depth + 2 :].flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return eagle.state_dict()


def fitted(target: Target, make_target, kind: str = "eagle3", draft_vocab: bool = False) -> Eagle:
    """A drafter that continues most of the suite's texts; random weights for the small vocabulary."""
    eagle = untrained(target, kind, draft_vocab)
    if target.vocab_size != lossless_suite.SMALL:
        eagle.load_state_dict(_fitted(kind, draft_vocab, make_target))
    return eagle
