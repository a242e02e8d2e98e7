"""Log-probabilities of committed tokens and of a prompt's, by the distributions of plain decoding.

Those of a committed token are the target's own after the node before it on the accepted path, so that they are the same
with drafts and without: bit for bit where a row's bits do not depend on the other rows, else up to rounding.

Shape letters: B rows, b some of them, T prompt tokens, N nodes, D depth of the deepest node, P nodes of a path (at most
D + 1), K most likely tokens, d hidden width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from draftsmith.inference.engine.prompts import Chunk, Prompt, to_device
from draftsmith.inference.verify.sampling import Rows
from draftsmith.inference.verify.verify import Verdict, Verifier
from draftsmith.models.target import Target

MOST = 20  # likely tokens of each position, as in OpenAI's protocol
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
LOGPROBS_MODES: tuple[LogprobsMode, ...] = get_args(LogprobsMode)
_AT_ONCE = 1 << 27  # log-probabilities in memory at a time: 512 MiB


@dataclass
class TokenLogprobs:
    """Natural logarithms of probabilities, float32, of a text's tokens and of the most likely tokens in their places.

    mode: ``raw_logprobs``: of the softmax of the target's logits. ``processed_logprobs``: of what plain decoding draws
        from, after penalties, temperature, top-k, top-p and min-p; a greedy text's temperature counts as 1. (The names
        are vLLM's.)
    token_logprobs: of each token; None for a prompt's first one, which nothing comes before.
    top_ids, top_logprobs: of each place, the ids of the most likely tokens, the likeliest first, and theirs: as many as
        were asked for, or fewer if fewer have a probability above 0. Tokens that tie are in any order.
    """

    mode: LogprobsMode = "raw_logprobs"
    token_logprobs: list[float | None] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)

    def add(self, packed: Tensor, count: int) -> None:
        """Append places, each with ``count`` likely tokens at most. ``packed``: see :func:`pack`, on the CPU."""
        most = packed.shape[1] // 2
        values, ids = packed[:, : 1 + most].view(torch.float32), packed[:, 1 + most :][:, :count]
        self.token_logprobs += values[:, 0].tolist()
        for row, found in zip(values[:, 1 : 1 + count].tolist(), ids.tolist(), strict=True):
            possible = sum(value > -torch.inf for value in row)  # the likeliest come first
            self.top_ids.append(found[:possible])
            self.top_logprobs.append(row[:possible])

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON has them: numbers in the fewest digits that give the same float32 again, and null for −∞
        (of a token whose probability is 0) as for None."""

        def short(values: Sequence[float | None]) -> list[float | None]:
            finite = [None if value is None or value == -torch.inf else value for value in values]
            return [value if value is None else float(str(np.float32(value))) for value in finite]

        top = [short(row) for row in self.top_logprobs]
        fields = {"token_logprobs": short(self.token_logprobs), "top_ids": self.top_ids, "top_logprobs": top}
        return {"mode": self.mode, **fields}


def pack(logprobs: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Of log-probabilities ``[..., V]`` float32 those of ``tokens [...]``, the K = ``count`` highest ones, and the ids
    of these: ``[..., 1 + 2 K]`` int32, the first 1 + K of them the bits of float32."""
    top = logprobs.topk(count)
    values = torch.cat((logprobs.gather(-1, tokens[..., None]), top.values), -1)
    return torch.cat((values.view(torch.int32), top.indices.int()), -1)


class StepLogprobs:
    """The log-probabilities that a batch's texts ask for: nothing is computed or copied while none does.

    count: K of the next step; None if no row asks. It is :data:`MOST` or 0, so that of tokens that tie, those that a
        text gets do not depend on what other texts ask for.
    """

    def __init__(self, target: Target, verifier: Verifier, rows: int, depth: int) -> None:
        self.target, self.verifier, self.rows, self.places = target, verifier, rows, depth + 1
        self.most = min(MOST, target.vocab_size)
        self._some = max(1, _AT_ONCE // target.vocab_size)
        self._packed: Tensor | None = None  # of a step, flat; allocated when a text asks
        self._host: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self.counts: list[int | None] = [None] * self.rows
        self.processed = [False] * self.rows  # of rows that ask
        self._prompts: dict[int, tuple[int, list[Tensor]]] = {}  # by row: K, and the packed log-probabilities so far
        self._first: dict[int, Tensor] = {}
        self._update()

    def begin(self, row: int, logprobs: int | None, prompt_logprobs: int | None, mode: LogprobsMode) -> None:
        """Start a text in this row; the arguments are a request's."""
        self.end(row)
        if prompt_logprobs is not None:
            self._prompts[row] = prompt_logprobs, []
        if logprobs is not None:
            self._allocate()
            self.counts[row] = logprobs
            self.processed[row] = mode == "processed_logprobs" and self.verifier.mode != "greedy"
            self._is_processed[row] = self.processed[row]
            self._update()

    def end(self, row: int) -> None:
        """End the text in this row."""
        if self.counts[row] is not None:
            self.counts[row], self.processed[row] = None, False
            self._update()

    def move(self, source: int, to: int) -> None:
        """The text in a row moves to another one."""
        self.counts[to], self.processed[to] = self.counts[source], self.processed[source]
        if self._packed is not None:
            self._is_processed[to] = self._is_processed[source]
        self.end(source)
        self._update()

    def _update(self) -> None:
        asked = [count for count in self.counts if count is not None]
        self.count = (self.most if any(asked) else 0) if asked else None

    def _allocate(self) -> None:
        if self._packed is None:
            device, size = self.target.device, self.rows * self.places * (1 + 2 * self.most)
            self._packed = torch.empty(size, dtype=torch.int32, device=device)
            self._is_processed = torch.zeros(self.rows, dtype=torch.bool, device=device)
            if device.type == "cuda":
                self._host = [torch.empty(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]

    @property
    def graph_key(self) -> tuple[int, ...]:
        """What the operations of :meth:`write` depend on; empty if it is not called."""
        return () if self.count is None else (self.count, any(self.processed), self._all_processed)

    @property
    def _all_processed(self) -> bool:
        return all(own for own, count in zip(self.processed, self.counts, strict=True) if count is not None)

    def _view(self, packed: Tensor | None, rows: int, places: int) -> Tensor:
        """The part of a flat buffer that a step of so many rows and ``places`` has, ``[B, P, 1 + 2 K]``."""
        assert packed is not None and self.count is not None
        shape = rows, places, 1 + 2 * self.count
        return packed[: shape[0] * shape[1] * shape[2]].view(shape)

    def write(self, hidden: Tensor, logits: Tensor | None, tokens: Tensor, verdict: Verdict) -> None:
        """Write the log-probabilities of a step's tokens into a buffer, before they count as seen.

        Args:
            hidden: ``[B, N, d]``, after each node.
            logits: ``[B, N, V]``; None where they were not computed: then those of the path are.
            tokens: ``[B, D + 1]``, the drafted tokens, the accepted ones first, and the bonus token.
        """
        assert self.count is not None
        count, places = len(hidden), min(hidden.shape[1], self.places)
        path = verdict.path[:, :places].clamp(max=hidden.shape[1] - 1)
        depth = torch.arange(places, device=path.device)
        committed = torch.where(depth < verdict.length[:, None], tokens[:, :places], tokens[:, -1:])
        out = self._view(self._packed, count, places)
        after = hidden if logits is None else logits
        some = max(1, self._some // places)
        for first in range(0, count, some):
            rows = slice(first, min(first + some, count))
            on_path = after[rows].gather(1, path[rows, :, None].expand(-1, -1, after.shape[2]))
            on_path = self.target.logits(on_path) if logits is None else on_path
            out[rows] = pack(self._of(on_path, rows, tokens[rows]), committed[rows], self.count)

    def _of(self, logits: Tensor, rows: Rows, tokens: Tensor) -> Tensor:
        """Log-probabilities ``[b, P, V]`` float32 after the places of some rows' paths, whose first P − 1 ``tokens``
        follow their roots; by each row's own mode."""
        if any(self.processed):
            processed = self.verifier.processed(logits, rows, tokens[:, : logits.shape[1] - 1])
            if self._all_processed:
                return processed
            return torch.where(self._is_processed[rows, None, None], processed, _raw(logits))
        return _raw(logits)

    def copied(self, rows: int, nodes: int) -> Tensor | None:
        """The log-probabilities of the step that has been launched, of so many rows with trees of ``nodes``, ``[B, P,
        1 + 2 K]`` on the CPU; None if no row asks. On a GPU they are copied without waiting, and valid until the next
        but one call."""
        if self.count is None:
            return None
        packed = self._view(self._packed, rows, min(nodes, self.places))
        if packed.device.type == "cpu":
            return packed.clone()
        self._host.reverse()
        host = self._view(self._host[0], rows, packed.shape[1])
        host.copy_(packed, non_blocking=True)
        return host

    # ---- prompts

    def read_prompts(self, prompts: Sequence[Prompt], chunk: Chunk, features: Tensor) -> None:
        """Read parts of some of these prompts: ``features [T, F]`` of the chunk's tokens, hidden states first."""
        tokens_of = {prompt.row: prompt.tokens for prompt in prompts}
        for part, first in zip(chunk.parts, chunk.firsts, strict=False):
            if part.row not in self._prompts:
                continue
            count, found = self._prompts[part.row]
            following = to_device(tokens_of[part.row][part.start + 1 : part.end + 1], features.device)
            hidden = features[first : first + len(following), : self.target.hidden_size]  # not of the prompt's last
            for some, tokens in zip(hidden.split(self._some), following.split(self._some), strict=True):
                found.append(pack(_raw(self.target.logits(some)), tokens, self.most if count else 0))

    def read_first(self, numbers: Sequence[int], rows: Rows, logits: Tensor) -> Callable[[Tensor], None]:
        """Read the ``logits [b, V]`` after the prompts in some ``rows``, before the tokens that they bring count as
        seen. Returns a function to be called with these tokens, ``[b]``."""
        if all(self.counts[number] is None for number in numbers):
            return lambda tokens: None
        logprobs = self._of(logits[:, None], rows, logits.new_zeros(len(logits), 0, dtype=torch.int64))

        def keep(tokens: Tensor) -> None:
            assert self.count is not None
            packed = pack(logprobs, tokens[:, None].clamp(min=0), self.count)
            self._first.update(zip(numbers, packed, strict=True))

        return keep

    def of_prompt(self, row: int) -> tuple[TokenLogprobs | None, Tensor | None]:
        """Of the text that has just begun in this row: those of its prompt, and of its first token packed ``[1, 1 +
        2 K]`` on the CPU; None if they were not asked for."""
        prompt, first = None, self._first.pop(row, None)
        if row in self._prompts:
            prompt = TokenLogprobs("raw_logprobs", [None], [[]], [[]])
            count, found = self._prompts.pop(row)
            for packed in found:
                prompt.add(packed.cpu(), count)
        return prompt, None if first is None or self.counts[row] is None else first.cpu()


def _raw(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.float32)  # row by row: other rows do not change a row's bits
