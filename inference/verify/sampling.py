"""Sampling parameters, the distribution they define on logits, and random numbers by request.

Shape letters: B rows, N nodes, V vocabulary.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from draftsmith.kernels.coupled import coupled_topk
from draftsmith.kernels.distribution import distribution_reference

MIN_TEMPERATURE = 1e-10  # below it, sampling is greedy: any difference of logits decides


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request.

    They apply in the order of ``transformers``: repetition penalty, temperature, top-k, top-p, min-p. Tokens that tie
    at a cut-off are all kept, so that the distribution does not depend on how a sort breaks ties.

    temperature: 0 to 1e6; below 1e-10 decoding is greedy.
    top_k: number of tokens kept; 0, or more than the vocabulary, keeps all.
    top_p: above 0, at most 1.
    min_p: at least 0, below 1.
    repetition_penalty: 0.01 to 100; 1 is none.
    seed: a whole number from 0 to 2^62 − 1.
    epsilon, delta: above 0, at most 1; thresholds ε and δ of typical acceptance: a token is accepted if its probability
        is above min(ε, δ e^(-entropy)) (arXiv 2401.10774 §2.3.1). δ is √ε where it is None.

    Raises:
        ValueError: a value outside its range, or not a number.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    epsilon: float = 0.09
    delta: float | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "epsilon", "delta"):
            value, whole = getattr(self, name), name in ("top_k", "seed")
            if name == "delta" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
                raise ValueError(f"{name} {value!r}: must be a {'whole ' if whole else ''}number")
        # NaN fails every comparison.
        for name, in_range, wanted in (
            ("temperature", 0 <= self.temperature <= 1e6, "at least 0 (greedy) and at most 1e6"),
            ("top_k", self.top_k >= 0, "at least 0 (0: off)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "from 0.01 to 100 (1: off)"),
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


Rows = slice | Tensor  # of a batch: neighbouring ones, or their numbers [b] int64 on the device


def row_numbers(rows: Rows) -> list[int]:
    """The numbers of some rows of a batch."""
    return rows.tolist() if isinstance(rows, Tensor) else [*range(rows.start, rows.stop)]


class Settings:
    """Sampling parameters of a batch as tensors ``[B]`` on a device, with flags on the host of those in use.

    A greedy row's temperature is 0.
    """

    def __init__(self, samplings: Sequence[Sampling], device: torch.device) -> None:
        self._floats = torch.tensor([_floats(s) for s in samplings], dtype=torch.float32, device=device)  # [B, 6]
        self._integers = torch.tensor([_integers(s) for s in samplings], dtype=torch.int64, device=device)  # [B, 2]
        self._name_columns()
        self.clear_usage()
        for sampling in samplings:
            self._mark_used(sampling)

    def _name_columns(self) -> None:
        floats = self._floats.unbind(1)  # views
        self.temperature, self.top_p, self.min_p, self.penalty, self.epsilon, self.delta = floats
        self.seed, self.top_k = self._integers.unbind(1)

    def _mark_used(self, s: Sampling) -> None:
        self.uses_greedy |= s.greedy
        self.uses_top |= s.top_k > 0 or s.top_p < 1
        self.uses_min_p |= s.min_p > 0
        self.uses_penalty |= s.repetition_penalty != 1

    def clear_usage(self) -> None:
        """Clear the usage flags; :meth:`set_rows` sets them again."""
        self.uses_greedy = self.uses_top = self.uses_min_p = self.uses_penalty = False

    @property
    def filters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperature, top-k, top-p and min-p, as kernels take them."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    @property
    def uses(self) -> tuple[bool, bool, bool, bool]:
        """Usage flags, which determine the operations of :func:`sampling_distribution` and :class:`Noise`."""
        return self.uses_greedy, self.uses_top, self.uses_min_p, self.uses_penalty

    def set_rows(self, rows: Rows, samplings: Sequence[Sampling]) -> None:
        """Set the parameters of some rows in place."""
        for sampling in samplings:
            self._mark_used(sampling)
        device = self._floats.device
        self._floats[rows] = torch.tensor([_floats(s) for s in samplings], dtype=torch.float32, device=device)
        self._integers[rows] = torch.tensor([_integers(s) for s in samplings], dtype=torch.int64, device=device)

    def move(self, source: int, to: int) -> None:
        """Copy the parameters of a row to another row."""
        for columns in (self._floats, self._integers):
            columns[to] = columns[source]

    def __getitem__(self, rows: Rows) -> "Settings":
        """The parameters of some of the rows (views of neighbouring ones)."""
        part = copy(self)
        part._floats, part._integers = self._floats[rows], self._integers[rows]
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
    return temperature, s.top_p, s.min_p, s.repetition_penalty, s.epsilon, delta


def _integers(s: Sampling) -> tuple[int, int]:
    return s.seed, min(s.top_k, 1 << 31)  # more than any vocabulary; larger numbers may overflow int64


def penalised(logits: Tensor, settings: Settings, seen: Tensor | None) -> Tensor:
    """The logits ``[B, N, V]`` after the repetition penalty; the same tensor if none is in use. ``seen``: as many bool,
    the tokens of the text and of the path to each node; needed if a penalty is in use."""
    if not settings.uses_penalty:
        return logits
    assert seen is not None
    x, penalty = logits.float(), settings.penalty[:, None, None]
    return torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)


def sampling_distribution(logits: Tensor, settings: Settings, seen: Tensor | None = None) -> Tensor:
    """The distribution that plain sampling draws from (algorithms.md §2, C4): logits ``[B, N, V]`` → float32, each row
    sums to 1. A row whose logits hold NaN or +∞, or −∞ only, is NaN throughout. ``seen``: see :func:`penalised`."""
    return distribution_reference(penalised(logits, settings, seen), *settings.filters, settings.uses[:3])
