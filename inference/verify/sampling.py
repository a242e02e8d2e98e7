"""Sampling parameters, the distribution they define on logits, and random numbers by request.

Shape letters: B rows, N nodes, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from numbers import Integral, Real

import torch
from torch import Tensor

from draftsmith.kernels.coupled import coupled_topk
from draftsmith.kernels.distribution import distribution_reference

MIN_TEMPERATURE = 1e-10  # below it, sampling is greedy: any difference of logits decides
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request.

    They apply in the order of ``transformers`` and vLLM: biases, repetition penalty, frequency and presence penalty,
    temperature, top-k, top-p, min-p. Tokens that tie at a cut-off are all kept, so that the distribution does not
    depend on how a sort breaks ties. At temperature 0 the first four still apply: the likeliest token after them is
    taken.

    temperature: 0 to 1e6; below 1e-10 decoding is greedy.
    top_k: number of tokens kept; 0, or more than the vocabulary, keeps all.
    top_p: above 0, at most 1.
    min_p: at least 0, below 1.
    repetition_penalty: 0.01 to 100; 1 is none. It counts the tokens of the prompt and of the answer.
    presence_penalty, frequency_penalty: −2 to 2; 0 is none. As OpenAI defines them: of a token that the answer holds c
        times (the prompt does not count), the logit is lowered by presence · [c > 0] + frequency · c.
    logit_bias: token id → what is added to its logit, −100 to 100. −100 makes a token unlikely, not impossible: another
        one has to be within 100 of it.
    seed: a whole number from 0 to 2^62 − 1.
    epsilon, delta: above 0, at most 1; thresholds ε and δ of typical acceptance: a token is accepted if its probability
        is above min(ε, δ e^(-entropy)) (arXiv 2401.10774 §2.3.1). δ is √ε where it is None.
    Raises ValueError: a value outside its range, or not a number."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    epsilon: float = 0.09
    delta: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", *PENALTIES, "seed", "epsilon", "delta"):
            value, whole = getattr(self, name), name in ("top_k", "seed")
            if name == "delta" and value is None:
                continue
            if not _is_number(value, Integral if whole else Real):
                raise ValueError(f"{name} {value!r}: must be a {'whole ' if whole else ''}number")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias {self.logit_bias!r}: must be a mapping of token ids to numbers")
        for token, bias in self.logit_bias.items():
            if not (_is_number(token, Integral) and _is_number(bias, Real) and -100 <= bias <= 100):
                raise ValueError(
                    f"logit_bias {{{token!r}: {bias!r}}}: must be a token id and a number from −100 to 100"
                )
        own = {int(token): float(bias) for token, bias in self.logit_bias.items()}  # no change of the given one matters
        object.__setattr__(self, "logit_bias", own)
        # NaN fails every comparison.
        for name, in_range, wanted in (
            ("temperature", 0 <= self.temperature <= 1e6, "at least 0 (greedy) and at most 1e6"),
            ("top_k", self.top_k >= 0, "at least 0 (0: off)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "from 0.01 to 100 (1: off)"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from −2 to 2 (0: off)"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from −2 to 2 (0: off)"),
            ("epsilon", 0 < self.epsilon <= 1, "above 0 and at most 1"),
            ("delta", self.delta is None or 0 < self.delta <= 1, "above 0 and at most 1"),
            ("seed", 0 <= self.seed < 1 << 62, "a whole number from 0 to 2^62 − 1"),
        ):
            if not in_range:
                raise ValueError(f"{name} {getattr(self, name)}: must be {wanted}")

    @property
    def greedy(self) -> bool:
        """Whether the temperature is so low that only the most likely token remains."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def changes_logits(self) -> bool:
        """Whether it has a penalty or a bias, which change what the likeliest token is."""
        return self.repetition_penalty != 1 or self.counts_tokens or any(self.logit_bias.values())

    @property
    def counts_tokens(self) -> bool:
        """Whether it has a presence or a frequency penalty."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    def without_changes(self) -> "Sampling":
        """The same without penalties and biases, for logits that have been through them."""
        return replace(self, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias={})


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


Rows = slice | Tensor  # of a batch: neighbouring ones, or their numbers [b] int64 on the device


def row_numbers(rows: Rows) -> list[int]:
    """The numbers of some rows of a batch."""
    return rows.tolist() if isinstance(rows, Tensor) else [*range(rows.start, rows.stop)]


class Settings:
    """Sampling parameters of a batch as tensors ``[B]`` on a device, with flags on the host of those in use.

    A greedy row's temperature is 0. ``vocabulary``: the size V of the logits, which biases need.
    """

    def __init__(self, samplings: Sequence[Sampling], device: torch.device, vocabulary: int = 0) -> None:
        self._floats = torch.zeros(len(samplings), 8, dtype=torch.float32, device=device)
        self._integers = torch.zeros(len(samplings), 2, dtype=torch.int64, device=device)
        self.vocabulary = vocabulary
        self.bias: Tensor | None = None  # [B, V] float32, from the first bias on
        self._name_columns()
        self.clear_usage()
        self.set_rows(slice(0, len(samplings)), samplings)

    def _name_columns(self) -> None:
        floats = self._floats.unbind(1)  # views
        self.temperature, self.top_p, self.min_p, self.penalty, self.epsilon, self.delta, *counted = floats
        self.presence, self.frequency = counted
        self.seed, self.top_k = self._integers.unbind(1)

    def _mark_used(self, s: Sampling) -> None:
        self.uses_greedy |= s.greedy
        self.uses_top |= s.top_k > 0 or s.top_p < 1
        self.uses_min_p |= s.min_p > 0
        self.uses_penalty |= s.repetition_penalty != 1
        self.uses_counts |= s.counts_tokens
        self.uses_bias |= any(s.logit_bias.values())

    def clear_usage(self) -> None:
        """Clear the usage flags; :meth:`set_rows` sets them again."""
        self.uses_greedy = self.uses_top = self.uses_min_p = False
        self.uses_penalty = self.uses_counts = self.uses_bias = False

    def without_changes(self) -> "Settings":
        """The same without penalties and biases, for a drafter's own logits."""
        part = copy(self)
        part.uses_penalty = part.uses_counts = part.uses_bias = False
        return part

    @property
    def filters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperature, top-k, top-p and min-p, as kernels take them."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    @property
    def uses(self) -> tuple[bool, bool, bool, bool, bool, bool]:
        """Usage flags, which determine the operations of :func:`sampling_distribution` and :class:`Noise`."""
        filters = self.uses_greedy, self.uses_top, self.uses_min_p
        return *filters, self.uses_penalty, self.uses_counts, self.uses_bias

    def set_rows(self, rows: Rows, samplings: Sequence[Sampling]) -> None:
        """Set the parameters of some rows in place."""
        for sampling in samplings:
            self._mark_used(sampling)
        device = self._floats.device
        self._floats[rows] = torch.tensor([_floats(s) for s in samplings], dtype=torch.float32, device=device)
        self._integers[rows] = torch.tensor([_integers(s) for s in samplings], dtype=torch.int64, device=device)
        if self.bias is None and self.uses_bias:
            assert self.vocabulary, "biases need the size of the vocabulary"
            self.bias = torch.zeros(len(self._floats), self.vocabulary, dtype=torch.float32, device=device)
        if self.bias is not None:
            self.bias[rows] = 0
            for row, sampling in zip(row_numbers(rows), samplings, strict=True):
                if sampling.logit_bias:
                    ids = torch.tensor([*sampling.logit_bias], device=device)
                    self.bias[row, ids] = torch.tensor([*sampling.logit_bias.values()], device=device)

    def move(self, source: int, to: int) -> None:
        """Copy the parameters of a row to another row."""
        for columns in (self._floats, self._integers, self.bias):
            if columns is not None:
                columns[to] = columns[source]

    def __getitem__(self, rows: Rows) -> "Settings":
        """The parameters of some of the rows (views of neighbouring ones)."""
        part = copy(self)
        part._floats, part._integers = self._floats[rows], self._integers[rows]
        part.bias = None if self.bias is None else self.bias[rows]
        part._name_columns()
        return part


# Estimated acceptance under noise: softmax((s_1, s_2, …, s_8, s_1 + c·m) / c) of a node's best scores, the last entry
# standing for all other tokens. Were q = p, the best one would be certain. c and m were chosen among a few pairs on 904
# drafts of models/smollm2-eagle3 (chains of ten held-out chats, T = 0.7 and 1.0): 1.60 nats a draft, where neighbours
# have 1.59 to 1.62, and c = 1 without others 3.28. The first three tokens are estimated to be accepted in 0.40, 0.13
# and 0.07 of the cases at T = 0.7, and were in 0.50, 0.13 and 0.07; at T = 1.0 in 0.33, 0.14, 0.09; 0.35, 0.15, 0.07.
_RIVALS, _SPREAD, _OTHERS = 8, 1.4, -0.5


@dataclass(frozen=True)
class Noise:
    """The noise of a batch's texts, by which the target and its drafters choose tokens in coupled sampling."""

    settings: Settings
    lengths: Tensor  # [B] int64, the position of each row's root

    def best(
        self, logits: Tensor, depth: Tensor | int, count: int = 1, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of highest score after nodes, the first of them the token that a text continues with.

        Args:
            logits: ``[B, N, V]``, penalised already if they are the target's.
            depth: of the nodes, int32 or int64 of a shape that broadcasts to ``[B, N]``; 0 is the root.
            tokens: the target's token of each logit, as :func:`~draftsmith.kernels.coupled.coupled_topk` takes them.

        Returns:
            As there: a number that is finite iff the logits are ``[B, N]``, scores and tokens ``[B, N, k]``.
        """
        s = self.settings
        positions = (self.lengths[:, None] + depth).expand(logits.shape[:2])
        return coupled_topk(logits, *s.filters, s.seed, positions, count, tokens, s.uses[:3])

    def draft(
        self, logits: Tensor, depth: Tensor | int, count: int, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The log of the estimated acceptance probability, given their parents', of a drafter's ``count`` tokens of
        highest score after nodes, and these tokens: ``[B, N, k]`` each, float32 and int64. Arguments as :meth:`best`.

        Were its distribution the target's, the first one would be the target's token. The smaller the gaps between
        scores, the smaller an error of the distribution has to be for another one to be it.
        """
        rivals = min(max(count, _RIVALS), logits.shape[2])
        _, scores, found = self.best(logits, depth, rivals, tokens)
        scaled = scores / _SPREAD
        every = torch.cat((scaled, scaled[..., :1] + _OTHERS), -1).logsumexp(-1, keepdim=True)
        return scaled[..., :count] - every, found[..., :count]


def _floats(s: Sampling) -> tuple[float, ...]:
    temperature = 0.0 if s.greedy else s.temperature
    delta = s.epsilon**0.5 if s.delta is None else s.delta
    counted = s.presence_penalty, s.frequency_penalty
    return temperature, s.top_p, s.min_p, s.repetition_penalty, s.epsilon, delta, *counted


def _integers(s: Sampling) -> tuple[int, int]:
    return s.seed, min(s.top_k, 1 << 31)  # more than any vocabulary; larger numbers may overflow int64


@dataclass(frozen=True)
class Seen:
    """The tokens that penalties count: of each row's text, and of the path to each node of its tree.

    text: ``[B, 1, V]`` bool, tokens of the text, prompt and root included; read if a repetition penalty is in use.
    counts: ``[B, 1, V]`` integers, how often each of the text's tokens was generated, the root included; read if a
        presence or frequency penalty is in use.
    tokens: ``[B, n]`` int64, drafted tokens; None: there are none, and the others may be ``[B, N, V]``, of each node.
    path: ``[B, N, n]`` bool, which of them lie on the path to each node.
    """

    text: Tensor | None
    counts: Tensor | None = None
    tokens: Tensor | None = None
    path: Tensor | None = None


def penalised(logits: Tensor, settings: Settings, seen: Seen | None) -> Tensor:
    """The logits ``[B, N, V]`` after biases and penalties, float32; the same tensor if none is in use. ``seen`` is
    needed if a penalty is in use.

    A row's counts hold for all nodes of its tree but for the tokens of the path to a node. These few are computed anew.
    """
    s = settings
    if not (s.uses_bias or s.uses_penalty or s.uses_counts):
        return logits
    seen, bias = seen or Seen(None), s.bias[:, None] if s.bias is not None and s.uses_bias else None
    text, counts, tokens, path = seen.text, seen.counts, seen.tokens, seen.path
    changed = _changed(logits, s, bias, text, counts)
    if tokens is None or path is None:
        return changed
    # Products of 0 and 1 in float32 are exact. Equal tokens get equal values, so that any of them may be written last.
    drafted = path.float() @ (tokens[:, :, None] == tokens[:, None]).float()  # [B, N, n], how often on each path
    at = tokens[:, None].expand(-1, logits.shape[1], -1)  # [B, N, n]
    of_row = tokens[:, None]
    bias = None if bias is None else bias.gather(2, of_row)
    text = None if text is None else text.gather(2, of_row) | (drafted > 0)
    counts = None if counts is None else counts.gather(2, of_row) + drafted
    return changed.scatter_(2, at, _changed(logits.gather(2, at), s, bias, text, counts))


def _changed(logits: Tensor, s: Settings, bias: Tensor | None, text: Tensor | None, counts: Tensor | None) -> Tensor:
    """Logits ``[B, N, n]`` in float32 after bias, repetition penalty, frequency and presence penalty, element by
    element, from what broadcasts to their shape. An unpenalised token's stays as it is, to the bit."""
    x = logits.float()
    if bias is not None:
        x = x + bias
    if s.uses_penalty:
        assert text is not None
        factor = torch.where(text, s.penalty[:, None, None], 1.0)
        x = torch.where(x > 0, x / factor, x * factor)
    if s.uses_counts:
        assert counts is not None
        x = x - (s.frequency[:, None, None] * counts + s.presence[:, None, None] * (counts > 0))
    return x


def sampling_distribution(logits: Tensor, settings: Settings, seen: Seen | None = None) -> Tensor:
    """The distribution that plain sampling draws from (algorithms.md §2, C4): logits ``[B, N, V]`` → float32, each row
    sums to 1. A row whose logits hold NaN or +∞, or −∞ only, is NaN throughout. ``seen``: see :func:`penalised`."""
    return distribution_reference(penalised(logits, settings, seen), *settings.filters, settings.uses[:3])
