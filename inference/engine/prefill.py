"""Prefill: prompts into the rows of a step, chunk by chunk, and what of them the cache holds already.

Shape letters: B rows, b rows that begin, T prompt tokens, F features per token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.engine import prompts as prompting
from draftsmith.inference.engine.prefixes import Prefixes
from draftsmith.inference.engine.prompts import Prompt, next_chunk, to_device
from draftsmith.inference.engine.runner import joined_features
from draftsmith.kernels.linear import prefill_products

PREFILL_TOKENS = 16_384  # of prompts that run in one pass, while no text is decoded


class Prefill:
    """Prefill for a ``Step``, which imports this file. prefixes: what its cache holds."""

    def __init__(self, step: Any) -> None:
        self.step, self.prefixes = step, Prefixes(step.rows, step.capacity)
        self.last = torch.zeros_like(step.state.feature)  # [B, F], of each row's prompt the feature of the last token

    @property
    def alone(self) -> bool:
        """Whether a prompt runs without others: where a text is a function of its request alone, and the bits of a row
        do not depend on the other rows. Those of a prompt then do not either."""
        return self.step.runner.bitwise and self.step.mode in ("greedy", "sample")

    @prefill_products()
    def run(self, prompts: Sequence[Prompt], most: int) -> list[tuple[Prompt, int]]:
        """Run the next chunk of prompts, as :func:`~draftsmith.inference.engine.prompts.next_chunk` makes it. Steps may
        run between two chunks: what they write in these rows is behind what the cache holds of the prompts. Returns the
        prompts whose texts begin now, with their first tokens; −1 where the target's logits are not finite."""
        step = self.step
        chunk = next_chunk(prompts, most, self.alone, step.device)
        hidden, captured = step.runner.forward_prompts(chunk, step.captures)
        features = joined_features(hidden, captured)[0]  # [T, F]
        step.drafter.prefill(features, chunk)
        step.logprobs.read_prompts(prompts, chunk, features)
        ends = {part.row: (part.end, after - 1) for part, after in zip(chunk.parts, chunk.firsts[1:], strict=True)}
        step.counts.prefill_passes += 1
        step.counts.prefilled_tokens += len(features)
        complete: list[Prompt] = []
        for prompt in prompts:
            if prompt.row in ends:
                prompt.done = self.prefixes.held[prompt.row] = ends[prompt.row][0]
                complete += [] if prompt.left else [prompt]
        rows, lengths = to_device([[*ends], [end for end, _ in ends.values()]], step.device)
        step.cache.lengths[rows] = lengths
        if not complete:
            return []
        last = to_device([ends[prompt.row][1] for prompt in complete], step.device)
        return [*zip(complete, self._begin(complete, features[last]), strict=True)]

    @prefill_products()
    def reuse(self, prompt: Prompt, source: int, count: int, common: int) -> int | None:
        """Let a prompt begin with its first ``count`` tokens as row ``source`` holds them, which has ``common``, or
        with as many as the drafter can. If they are all, the text begins: returns its first token, or −1 where the
        logits are not finite."""
        step, prefixes, whole = self.step, self.prefixes, count == len(prompt.tokens)
        usable = step.drafter.reusable(source, common, int(prefixes.read[source] or prefixes.held[source]))
        if not whole:
            count = min(count, usable)
            count -= count % prompting.PREFILL_CHUNK if self.alone else 0
        elif not usable:
            count = 0
        if source == prompt.row:
            prefixes.begin(prompt.row, prompt.tokens, count)
        if not count:
            return None
        if source != prompt.row:
            step.cache.copy_row(source, prompt.row, count)
            prefixes.held[prompt.row] = count
            # Steps then write behind the next token as well, whose keys a drafter may have copied, too.
            step.cache.lengths[prompt.row] = count + 1
        step.drafter.reuse(source, prompt.row, prompt.tokens[:count])
        prompt.done = count
        step.counts.reused_tokens += count
        if not whole:
            return None
        step.cache.lengths[prompt.row] = count
        return self._begin([prompt], self.last[source : source + 1])[0]

    def _begin(self, prompts: Sequence[Prompt], feature: Tensor) -> list[int]:
        """Begin the texts of prompts that are prefilled, from the features ``[b, F]`` of their last tokens; returns
        their first tokens."""
        step = self.step
        numbers = [prompt.row for prompt in prompts]
        adjacent = numbers == [*range(numbers[0], numbers[0] + len(numbers))]
        rows = slice(numbers[0], numbers[-1] + 1) if adjacent else to_device(numbers, step.device)
        step.verifier.begin(rows, [prompt.tokens for prompt in prompts], [prompt.sampling for prompt in prompts])
        step.drafter.begin(rows)
        if step.budget:
            step.budget.begin(rows)
        step.state.feature[rows] = self.last[rows] = feature
        for prompt in prompts:
            self.prefixes.read[prompt.row] = len(prompt.tokens)
        logits = step.target.logits(feature[:, : step.target.hidden_size])
        keep_logprobs = step.logprobs.read_first(numbers, rows, logits)
        step.state.root[rows] = step.verifier.first_tokens(logits, rows, step.cache.lengths[rows])
        keep_logprobs(step.state.root[rows])
        step.active[rows] = True
        return step.state.root[rows].tolist()

    def end(self, row: int, answer: Sequence[int]) -> None:
        """The text in this row ends, with these new tokens. What the cache holds of prompt and answer is kept for a
        text that begins alike, if the drafter can do so; steps write behind it."""
        held = self.prefixes.end(row, answer[:-1])  # the last token's keys and values need not be there
        self.step.cache.lengths[row] = held
        if not self.step.drafter.reuses:
            self.forget([row])

    def forget(self, rows: Sequence[int]) -> None:
        """Keep nothing of the texts that ended in these rows, which then cost a step little."""
        rows = [row for row in rows if self.prefixes.held[row]]
        if rows:
            self.prefixes.held[rows] = self.prefixes.coming[rows] = 0
            self.step.cache.lengths[to_device(rows, self.step.device)] = 0
