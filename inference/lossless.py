"""Checks of lossless output: equal to plain decoding if greedy (ALGORITHMS §11.7), equal in distribution if sampled.

Forward passes of one row and of N rows round differently, so two tokens of nearly equal logits may swap. An output that
differs from plain decoding is therefore run through the target token by token: the logit of each of its tokens must be
within a tolerance of the maximum, where the tolerance is the difference between the two shapes of forward pass,
measured on this device.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from draftsmith.inference.engine import SpeculativeDecoder
from draftsmith.inference.sampling import Sampling, Settings, sampling_distribution
from draftsmith.models.target import Target


@dataclass
class GreedyCheck:
    """Result of the check of greedy output.

    checked: number of tokens.
    identical: whether every output equals plain decoding.
    near_ties: tokens that differ from the argmax, with a logit within the tolerance of the maximum.
    mismatches: tokens with a logit further from the maximum, and outputs that end too early or too late.
    tolerance: in logits; 0 if it was not needed.
    """

    checked: int = 0
    identical: bool = True
    near_ties: int = 0
    mismatches: int = 0
    tolerance: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"mode": "greedy", **asdict(self), "p_value": None}

    @property
    def passed(self) -> bool:
        return self.mismatches == 0


SAMPLES, BINS, LEVEL = 256, 20, 1e-6  # samples per prompt; bins of the χ² test; significance level


@dataclass
class SampleCheck:
    """Result of the check of sampled output.

    checked: number of tokens.
    mismatches: tokens whose probability is 0.
    p_value: of the χ² test that the tokens have the target's distribution.
    """

    checked: int = 0
    mismatches: int = 0
    p_value: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        return {"mode": "sample", **asdict(self), "identical": None, "near_ties": 0, "tolerance": None}

    @property
    def passed(self) -> bool:
        return self.mismatches == 0 and self.p_value > LEVEL


@torch.inference_mode()
def check_sample(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    batch_size: int = 32,
    on_prompt: Callable[[int], None] | None = None,
) -> SampleCheck:
    """Sample each prompt many times and test the distribution of the first two tokens after the prefill's.

    The randomised probability integral transform of each token (the mass of all likelier tokens plus a uniform share of
    its own) is uniform if its distribution is right, whatever came before: samples of all prompts make one test.

    Args:
        on_prompt: called with the number of prompts done, after each.
    """
    from scipy.stats import chisquare  # takes half a second to import

    target, result = decoder.target, SampleCheck()
    transforms: list[list[float]] = [[], []]  # of the first and the second token
    noise = torch.Generator().manual_seed(sampling.seed)
    for number, prompt in enumerate(prompts):
        for first in range(0, SAMPLES, batch_size):
            rows = range(first, min(first + batch_size, SAMPLES))
            seeds = [
                replace(sampling, seed=(sampling.seed + 1_000_003 * (number + 1) + row) % (1 << 62)) for row in rows
            ]
            outputs = decoder.generate(
                [prompt] * len(rows), 3, mode="sample", sampling=seeds, stop_ids=frozenset()
            )  # fmt: skip
            texts = torch.tensor([[*prompt, *output.tokens] for output in outputs], device=target.device)
            logits = target.logits(target.hidden(texts[:, :-1])[:, len(prompt) :])  # after the prefill's token
            for place in range(logits.shape[1]):  # fewer than two if the context ends
                at = len(prompt) + 1 + place
                seen = torch.zeros(len(rows), logits.shape[2], dtype=torch.bool, device=target.device)
                seen.scatter_(1, texts[:, :at], True)
                settings = Settings(seeds, target.device)
                p = sampling_distribution(logits[:, place : place + 1], settings, seen[:, None])[:, 0].double()
                token = texts[:, at, None]
                p_token = p.gather(1, token)
                ranks_above = (p > p_token) | ((p == p_token) & (torch.arange(p.shape[1], device=p.device) < token))
                above = torch.where(ranks_above, p, 0.0).sum(-1)
                uniform = torch.rand(len(rows), generator=noise, dtype=torch.float64).to(p.device)
                transforms[place] += (above + uniform * p_token[:, 0]).tolist()
                result.checked += len(rows)
                result.mismatches += int((p_token[:, 0] == 0).sum())
        if on_prompt:
            on_prompt(number + 1)
    for values in transforms:
        counts = torch.histc(torch.tensor(values).clamp(0, 1 - 1e-9), BINS, 0, 1).numpy()
        p_value = float(chisquare(counts).pvalue) if values else 1.0
        result.p_value = min(result.p_value, len(transforms) * p_value)
    return result


def _plain_logits(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Logits ``[len(tokens), V]`` of plain decoding forced along ``tokens``, one token per forward pass."""
    cache = DynamicCache()
    step = torch.tensor([list(prompt)], device=target.device)
    rows: list[Tensor] = []
    for token in tokens:
        hidden = target.decoder(input_ids=step, past_key_values=cache, use_cache=True).last_hidden_state
        rows.append(target.logits(hidden[0, -1]))
        step = torch.tensor([[token]], device=target.device)
    return torch.stack(rows)


def tolerance(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """99.9th percentile of |Δlogit| between one forward pass over all tokens and one pass per token."""
    one_by_one = _plain_logits(target, prompt, tokens).float()
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=target.device)
    together = target.logits(target.hidden(ids)[0, len(prompt) - 1 :]).float()
    return float(torch.quantile((one_by_one - together).abs().flatten()[: 1 << 23], 0.999))


def _ends_wrongly(output: Sequence[int], reference: Sequence[int], stops: frozenset[int]) -> bool:
    """Whether an output continues after a stop id or the limit, or ends before either."""
    if len(output) < len(reference) and not stops.intersection(output[-1:]):
        return True
    return not stops.isdisjoint(output[:-1]) or (len(output) > len(reference) and reference[-1] not in stops)


@torch.inference_mode()
def check_greedy(
    target: Target,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    on_prompt: Callable[[int], None] | None = None,
) -> GreedyCheck:
    """Compare outputs with plain greedy decoding of the same prompts by the same engine.

    Args:
        outputs: the new tokens of the drafter's run, per prompt.
        plain: those of plain decoding.
        on_prompt: called with the number of prompts done, after each.
    """
    result = GreedyCheck()
    for number, (prompt, output, reference) in enumerate(zip(prompts, outputs, plain, strict=True)):
        result.checked += len(output)
        if list(output) != list(reference):
            result.identical = False
            if not result.tolerance:
                result.tolerance = tolerance(target, prompt, reference)
            result.mismatches += _ends_wrongly(output, reference, target.stop_ids)
            if output:
                logits = _plain_logits(target, prompt, output).float()
                chosen = torch.tensor(output, device=logits.device)
                gap = logits.max(-1).values - logits.gather(1, chosen[:, None])[:, 0]
                differs = logits.argmax(-1) != chosen
                for place, (token, plain_token) in enumerate(zip(output, reference, strict=False)):
                    if token != plain_token:  # counts even if the reference took the token of lower logit
                        differs[place] = True
                        break
                result.near_ties += int((differs & (gap <= result.tolerance)).sum())
                result.mismatches += int((gap > result.tolerance).sum())
        if on_prompt:
            on_prompt(number + 1)
    return result
