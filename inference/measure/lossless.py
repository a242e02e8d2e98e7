"""Checks of lossless output: equal to plain decoding if greedy (algorithms.md §11.7) or by coupled sampling, equal in
distribution by multi-step sampling.

Forward passes of one row and of N rows round differently, so two tokens of nearly equal logits may swap. An output that
differs from plain decoding is therefore run through the target by ``transformers``: the logit of each of its tokens
must be within a tolerance of the maximum, in one pass over the text or, if it is not there, token by token, which takes
a hundred times as long on a GPU: after a few texts with mismatches the check has failed anyway, and one pass decides.
Where the bits of a row do not depend on the other rows (on a CPU with a compiler),
there are no near-ties: any difference is a mismatch.

    tolerance = min(max(e, t), 4t) + u

t: |Δlogit| between two shapes of ``transformers``' forward pass, one token at a time and all at once. e: the larger of
|Δlogit| between two shapes of the engine's and between the engine and ``transformers``. Each is the 99.9th percentile
over one text, measured on this device. u: one unit in the last place of the largest logit. A defect of the engine does
not excuse itself, since e counts up to 4t only.

In 16 bits a text has several times as many near-ties, and implementations may round more differently than t says. There
a token beyond the tolerance is confirmed in float32, by the same weights: it is a mismatch if its logit is further from
the maximum than 2h + u, where h is |Δlogit| between ``transformers``' passes in 16 bits and in float32 (so far may each
of two tied tokens be moved), and u is that of the 16 bits.

In coupled sampling, scores (log p + noise, times the temperature) stand for logits. A token at the edge of top-k, top-p
or min-p may be kept in one pass and not in another, so far as the tolerance may move it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.prompts import PREFILL_CHUNK, Chunk
from draftsmith.inference.engine.runner import Runner, engine_attention
from draftsmith.inference.engine.step import on_device, static_by_default
from draftsmith.inference.verify.sampling import Sampling, Seen, Settings, penalised, sampling_distribution
from draftsmith.inference.verify.tree import StaticTree, chain
from draftsmith.kernels.coupled import gumbel
from draftsmith.kernels.linear import prefill_products
from draftsmith.models.target import Target, cache_argument

WIDE = 16  # tokens of the engine's wider forward pass
CONFIRMED = 4  # texts with mismatches by passes token by token, after which one pass over a text decides


@dataclass
class TextCheck:
    """Result of the check of greedy output, or of coupled sampling's.

    near_ties: tokens that differ from the argmax, or the first one of a text that differs from plain decoding, with a
        logit within the tolerance of the maximum; in 16 bits also those that are near-ties in float32.
    mismatches: tokens with a logit further from the maximum, in 16 bits if float32 confirms it or the weights cannot be
        run in float32 (quantized or offloaded); and outputs that end too early or too late.
    """

    checked: int = 0  # number of tokens
    identical: bool = True  # whether every output equals plain decoding
    near_ties: int = 0
    mismatches: int = 0
    tolerance: float = 0.0  # in logits, of the target's own dtype; 0 if it was not needed
    bitwise: bool = False  # the bits of a row do not depend on the other rows, so that no near-tie was allowed
    mode: str = "greedy"  # or sample
    experts: bool = False  # the target is a mixture of experts

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "p_value": None}

    @property
    def passed(self) -> bool:
        return self.mismatches == 0


SAMPLES, BINS, LEVEL = 256, 20, 1e-6  # samples per prompt; bins of the χ² test; significance level


@dataclass
class SampleCheck:
    """Result of the check of multi-step sampling."""

    checked: int = 0  # number of tokens
    mismatches: int = 0  # tokens whose probability is 0
    p_value: float = 1.0  # of the χ² test that the tokens have the target's distribution

    def to_dict(self) -> dict[str, Any]:
        known = {"identical": None, "near_ties": 0, "tolerance": None, "bitwise": False, "experts": False}
        return {"mode": "mss", **asdict(self), **known}

    @property
    def passed(self) -> bool:
        return self.mismatches == 0 and self.p_value > LEVEL


@torch.inference_mode()
def check_distribution(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    batch_size: int = 32,
    on_prompt: Callable[[int], None] | None = None,
) -> SampleCheck:
    """Sample each prompt many times by multi-step sampling, and test the distribution of the first two tokens after the
    prefill's.

    The randomised probability integral transform of each token (the mass of all likelier tokens plus a uniform share of
    its own) is uniform if its distribution is right, whatever came before: samples of all prompts make one test.
    ``on_prompt`` is called with the number of prompts done, after each.
    """
    from scipy.stats import chisquare  # takes half a second to import

    target, result = decoder.target, SampleCheck()
    transforms: list[list[float]] = [[], []]  # of the first and the second token
    noise = torch.Generator().manual_seed(sampling.seed)
    for number, prompt in enumerate(prompts):
        for first in range(0, SAMPLES, batch_size):
            rows, base = range(first, min(first + batch_size, SAMPLES)), sampling.seed + 1_000_003 * (number + 1)
            seeds = [replace(sampling, seed=(base + row) % (1 << 62)) for row in rows]
            outputs = decoder.generate([prompt] * len(rows), 3, mode="mss", sampling=seeds, stop_ids=frozenset())
            texts = torch.tensor([[*prompt, *output.tokens] for output in outputs], device=target.device)
            logits = target.logits(target.hidden(texts[:, :-1])[:, len(prompt) :])  # after the prefill's token
            for place in range(logits.shape[1]):  # fewer than two if the context ends
                at = len(prompt) + 1 + place
                seen = seen_before(texts[:, :at], len(prompt), logits.shape[2])
                settings = Settings(seeds, target.device, logits.shape[2])
                p = sampling_distribution(logits[:, place : place + 1], settings, seen)[:, 0].double()
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


def seen_before(texts: Tensor, prompt: int, vocabulary: int) -> Seen:
    """What penalties count of whole texts ``[B, T]``, of which the first ``prompt`` tokens are prompts."""
    found = torch.zeros(2, len(texts), vocabulary, dtype=torch.int32, device=texts.device)
    found[0].scatter_add_(1, texts, torch.ones_like(texts, dtype=torch.int32))
    found[1].scatter_add_(1, texts[:, prompt:], torch.ones_like(texts[:, prompt:], dtype=torch.int32))
    return Seen(found[0, :, None] > 0, found[1, :, None])


def _plain_logits(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Logits ``[len(tokens), V]`` of plain decoding forced along ``tokens``, one token per forward pass."""
    cache, argument = DynamicCache(), cache_argument(target.decoder)
    step = torch.tensor([list(prompt)], device=target.device)
    rows: list[Tensor] = []
    for token in tokens:
        hidden = target.decoder(input_ids=step, use_cache=True, **{argument: cache}).last_hidden_state
        rows.append(target.logits(hidden[0, -1]))
        step = torch.tensor([[token]], device=target.device)
    return torch.stack(rows)


def _text_logits(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Logits ``[len(tokens), V]`` along ``tokens``, of the whole text in one forward pass of ``transformers``."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=target.device)
    return target.logits(target.hidden(ids)[0, len(prompt) - 1 :])


def _engine_logits(target: Target, prompt: Sequence[int], tokens: Sequence[int], nodes: int) -> Tensor:
    """Logits ``[len(tokens), V]`` of the engine forced along ``tokens``, ``nodes`` of them in each forward pass."""
    texts = [prompt[-1], *tokens[:-1]]
    cache = KVCache(target, 1, len(prompt) + len(tokens) + nodes)
    runner = Runner(target, cache, static_by_default(target))
    rows: list[Tensor] = []
    with engine_attention([target]), on_device(target.device), prefill_products():
        for start in range(0, len(prompt) - 1, PREFILL_CHUNK):
            part = 0, start, prompt[:-1][start : start + PREFILL_CHUNK]
            runner.forward_prompts(Chunk.of([part], target.device))
        for start in range(0, len(texts), nodes):
            step = torch.tensor([texts[start : start + nodes]], device=target.device)
            tree = StaticTree(chain(step.shape[1] - 1).parents, target.device)
            cache.lengths.fill_(len(prompt) - 1 + start)
            hidden, _ = runner.forward_nodes(step, cache.lengths, tree.ancestors, tree.depth, mask=tree.mask)
            rows.append(target.logits(hidden)[0])
    return torch.cat(rows)


def _difference(one: Tensor, other: Tensor) -> float:
    """99.9th percentile of |Δ| of two tensors of logits."""
    return float(torch.quantile((one.float() - other.float()).abs().flatten()[: 1 << 23], 0.999))


def _last_place(logits: Tensor) -> float:
    """One unit in the last place of the largest logit, in the logits' dtype."""
    info = torch.finfo(logits.dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(float(logits.abs().max()), info.tiny)))


def tolerance(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """How far from the maximum the logit of a correct token may be, measured along a text; in logits."""
    one_by_one = _plain_logits(target, prompt, tokens)
    theirs = _difference(one_by_one, _text_logits(target, prompt, tokens))
    engine = _engine_logits(target, prompt, tokens, 1)
    own = max(_difference(engine, one_by_one), _difference(engine, _engine_logits(target, prompt, tokens, WIDE)))
    return min(max(own, theirs), 4 * theirs) + _last_place(one_by_one)


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Context in which a model of 16 bits computes in float32: each module's own weights are converted while it runs,
    and no longer."""
    kept: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def widen(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        kept[module] = [(weight, weight.data) for weight in own if weight.dtype in (torch.bfloat16, torch.float16)]
        for weight, data in kept[module]:
            weight.data = data.float()
        return tuple(each.float() if isinstance(each, Tensor) and each.is_floating_point() else each for each in args)

    def narrow(module: nn.Module, *_: Any) -> None:
        for weight, data in kept.pop(module, []):
            weight.data = data

    with ExitStack() as hooks:  # a handle removes its hook
        for module in model.modules():
            if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                hooks.enter_context(module.register_forward_pre_hook(widen))
                hooks.enter_context(module.register_forward_hook(narrow, always_call=True))
        yield


def _float32_logits(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor | None:
    """Logits ``[len(tokens), V]`` along ``tokens`` by the same weights in float32; None if they cannot be converted."""
    if target.spread or getattr(target.model, "hf_quantizer", None) is not None:
        return None
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=target.device)
    with _in_float32(target.model):
        return target.after_head(target.lm_head(target.hidden(ids)[0, len(prompt) - 1 :]))


def _ends_wrongly(output: Sequence[int], reference: Sequence[int], stops: frozenset[int]) -> bool:
    """Whether an output continues after a stop id or the limit, or ends before either."""
    if len(output) < len(reference) and not stops.intersection(output[-1:]):
        return True
    return not stops.isdisjoint(output[:-1]) or (len(output) > len(reference) and reference[-1] not in stops)


def _scores(logits: Tensor, prompt: Sequence[int], tokens: Sequence[int], s: Sampling, loose: float) -> Tensor:
    """The scores ``[n, V]`` by which coupled sampling takes each of ``tokens``, times the temperature, from the logits
    ``[n, V]`` before each. ``loose``: how far these may have been moved, by which filters keep more tokens; fewer, if
    negative."""
    count, device = len(tokens), logits.device
    settings = Settings([s], device, logits.shape[1])
    if s.changes_logits:
        text, rows = torch.tensor([[*prompt, *tokens]], device=device), []
        for place, row in enumerate(logits):
            seen = seen_before(text[:, : len(prompt) + place], len(prompt), logits.shape[1])
            rows.append(penalised(row[None, None], settings, seen)[0, 0])
        logits = torch.stack(rows)
    if s.greedy:
        return logits.float()
    share = loose / s.temperature
    top_p, min_p = min(1.0, s.top_p * math.exp(2 * share)), min(s.min_p * math.exp(-2 * share), 0.99)
    wider = replace(s.without_changes(), top_p=top_p, min_p=min_p)  # the logits are penalised already
    kept = sampling_distribution(logits[None], Settings([wider], device))[0] > 0
    if loose < 0:  # those that no other token may come before
        kept = logits > torch.where(kept, -torch.inf, logits).amax(-1, keepdim=True) - 2 * loose
    else:
        kept = logits >= torch.where(kept, logits, torch.inf).amin(-1, keepdim=True) - 2 * loose
    kept |= logits == logits.amax(-1, keepdim=True)
    positions = torch.arange(count, device=device)[:, None] + len(prompt) - 1  # of the tokens before
    ids = torch.arange(logits.shape[1], device=device)
    noise = gumbel(settings.seed[:, None], positions, ids)
    return torch.where(kept, logits.float() + s.temperature * noise, -torch.inf)


def _judge(
    target: Target,
    prompt: Sequence[int],
    output: Sequence[int],
    reference: Sequence[int],
    tolerance: float,
    sampling: Sampling,
    *,
    one_pass: bool = False,
) -> tuple[int, int]:
    """The numbers of near-ties and of mismatches of an output. ``one_pass``: not token by token."""

    def beyond(logits: Tensor, tolerance: float) -> Tensor:
        highest = _scores(logits, prompt, output, sampling, -tolerance).amax(-1, keepdim=True)
        return highest - _scores(logits, prompt, output, sampling, tolerance).gather(1, chosen) > tolerance

    chosen = torch.tensor(output, device=target.device)[:, None]
    differs = wrong = torch.zeros(0)
    for way in (_text_logits,) if one_pass else (_text_logits, _plain_logits):
        logits = way(target, prompt, output)
        differs = _scores(logits, prompt, output, sampling, 0.0).argmax(-1, keepdim=True) != chosen
        for place, (token, plain_token) in enumerate(zip(output, reference, strict=False)):
            if token != plain_token:  # counts even if the reference took the token of lower logit
                differs[place] = True
                break
        wrong = beyond(logits.float(), tolerance)
        if logits.dtype.itemsize == 2 and wrong.any():
            exact = _float32_logits(target, prompt, output)
            if exact is not None:
                wrong &= beyond(exact, 2 * _difference(logits, exact) + _last_place(logits))
        if not wrong.any():
            break
    return int((differs & ~wrong).sum()), int(wrong.sum())


@torch.inference_mode()
def check_texts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    on_prompt: Callable[[int], None] | None = None,
    bitwise: bool = False,
    samplings: Sequence[Sampling] | None = None,
) -> TextCheck:
    """Compare outputs with plain decoding of the same prompts by the same engine: greedy, or by coupled sampling.

    Args:
        outputs, plain: the new tokens of the drafter's run, and those of plain decoding, per prompt.
        on_prompt: called with the number of prompts done, after each.
        bitwise: both runs had the bits of a row independent of the other rows: ``SpeculativeDecoder.bitwise``.
        samplings: of each prompt; greedy if left out.
    """
    result = TextCheck(bitwise=bitwise, mode="greedy" if samplings is None else "sample")
    result.experts = any(name.rpartition(".")[2] == "experts" for name, _ in target.model.named_modules())
    given = samplings or [Sampling(0.0)] * len(prompts)
    confirmed = 0
    for number, (prompt, output, reference, sampling) in enumerate(zip(prompts, outputs, plain, given, strict=True)):
        result.checked += len(output)
        if list(output) != list(reference):
            result.identical = False
            if bitwise:
                pairs = zip(output, reference, strict=False)
                differs = sum(token != plain_token for token, plain_token in pairs)
                result.mismatches += max(differs, len(output) != len(reference))
            else:
                if not result.tolerance:
                    result.tolerance = tolerance(target, prompt, reference)
                result.mismatches += _ends_wrongly(output, reference, target.stop_ids)
                if output:
                    texts, one_pass = (prompt, output, reference), confirmed >= CONFIRMED
                    near_ties, wrong = _judge(target, *texts, result.tolerance, sampling, one_pass=one_pass)
                    result.near_ties += near_ties
                    result.mismatches += wrong
                    confirmed += wrong > 0
        if on_prompt:
            on_prompt(number + 1)
    return result
