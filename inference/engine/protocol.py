"""The drafter protocol: what the engine calls on a drafter, and the state that a drafter reads.

Shape letters: B rows of the batch, b rows that begin, T prompt tokens, N nodes, d hidden width, F features per token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.prompts import Chunk
from draftsmith.inference.verify.sampling import Noise, Rows, Settings
from draftsmith.inference.verify.tree import StaticTree, TokenTree
from draftsmith.inference.verify.verify import Verdict
from draftsmith.kernels.attention_plan import Plans
from draftsmith.models.target import Target

if TYPE_CHECKING:
    from draftsmith.inference.engine.budget import Budget


class Clock(Protocol):
    """Times of steps, given to the engine from outside: it reads no clock by itself."""

    def now(self) -> float:
        """Seconds, from any fixed moment on."""
        ...

    def timed(self, call: Callable[[], object], device: torch.device) -> Callable[[], float]:
        """Run a call. Returns a function for its seconds, which on a GPU waits for what the call queued."""
        ...


class Costs(Clock, Protocol):
    """What the target's steps take on this machine, measured elsewhere.

    again: measures once more; None: not now. For a budget that finds real steps far faster than these costs say.
    """

    @property
    def again(self) -> "Callable[[], Costs] | None": ...

    def seconds(self, batch: int, cached: float, nodes: int) -> float:
        """t(B, S, N): of B rows with S cached tokens each and trees of N nodes."""
        ...


@dataclass
class State:
    """Device buffers per row that a drafter reads.

    feature: ``[B, F]``, the target's last hidden state that predicted the root, then the inputs of the captured layers.
    settings: sampling parameters by row, for a drafter that draws at random (multi-step sampling); None otherwise.
    step: ``[B]`` int64, number of steps of each row's text so far; with the seed it selects the random numbers.
    plans: of the attention kernel for this step, whose forward passes have prefixes of at most ``length``.
    noise: of coupled sampling, under which a drafter proposes its best tokens; None in other modes.
    """

    root: Tensor  # [B] int64, the last committed token, whose K/V is not cached yet
    length: Tensor  # [B] int64, cached tokens
    feature: Tensor
    active: Tensor  # [B] bool, False in rows without a text; their trees are ignored, and what they hold stays
    settings: Settings | None
    step: Tensor
    stream: int = 1  # number of the drafter's random stream, at least 1 (the verifier's is 0)
    needs_acceptance: bool = True  # whether the tree's acceptance is read; else a drafter may leave it out
    plans: Plans | None = None
    noise: Noise | None = None
    budget: "Budget | None" = None  # what decides how many nodes an eager step drafts; None: all
    source: int = 0  # the drafter's number in it
    merged: bool = False  # another drafter merges the tree with others
    alone: int | None = None  # of a merge in a static step, the number of the only drafter that is asked; None: all are


class Drafter(Protocol):
    """A proposer of token trees. Only ``propose`` is required; the other methods are for drafters with state.

    A drafter with caches or buffers belongs to one decoder at a time.

    static: ``propose`` and ``absorb`` can run with fixed shapes and without host synchronisation (if ``allocate`` asks
        for it), so that a CUDA graph can capture them.
    random: in multi-step sampling its nodes are drawn at random, and its trees carry ``draws`` with distributions.
    sources: names of the proposers, by which the report counts; if there are any, its trees carry ``source``, unless
        ``State.alone`` names the only one.
    self_correcting, self_correcting_sources: whether it, or each of its sources if it merges several, corrects the
        acceptance probabilities of its nodes by what comes true in a text itself.
    costs, clock: with the costs of the target's steps, eager steps leave out the nodes that do not pay; with a clock,
        static ones do. Without, all nodes of the trees are verified.
    own_counts: for static steps, nodes at most (root included) that each drafter of a merge proposes if it is asked
        alone, as ``State.alone`` says; by its number, empty unless it merges several.
    reads_own_path: ``absorb`` reads ``Verdict.own_path``.
    keeps_rows: it keeps state by row, or its nodes are chosen by what a step of all rows takes: steps then run on all
        rows of the batch, also where few have a text.
    assistant: a causal LM that drafts over the whole text and vocabulary, as assisted generation takes it; else None.
    reuses: a prompt may begin with tokens that are not read again, see :meth:`reuse`.
    """

    num_nodes: int  # of its trees, root included, at most
    max_depth: int  # of its trees
    branching: int  # draws of a node, at most
    static: bool
    captures: Sequence[int] = ()  # layers of the target whose input it also reads; F = d · (1 + number of layers)
    models: Sequence[Target] = ()  # other causal LMs that it runs; the engine installs its attention in them
    sources: Sequence[str] = ()
    random: bool = False
    self_correcting: bool = False
    self_correcting_sources: Sequence[bool] = ()
    costs: Costs | None = None
    clock: Clock | None = None
    has_acceptance: bool = True  # its trees have acceptance where the state asks for it
    own_counts: Mapping[int, int] = MappingProxyType({})
    reads_own_path: bool = True
    keeps_rows: bool = True
    assistant: Target | None = None
    reuses: bool = False

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        """Allocate caches and buffers for the rows and capacity of the target's cache, whose ``lengths`` may be shared:
        before the first text, and again when the engine's own buffers change. ``max_depth``: of any tree the engine
        verifies; in a merge another drafter's may be deeper. ``static``: as described for the class."""

    def buffers(self) -> Sequence[Tensor]:
        """Tensors that a step changes and the next one reads, except K/V beyond a row's length: restoring them undoes
        the steps that warm up a graph capture."""
        return ()

    def prefill(self, features: Tensor, chunk: Chunk) -> None:
        """Read parts of prompts, and the features ``[T, F]`` of their tokens. Each prompt's parts come in order, in
        rows without a text; steps of the other rows may be between them, in which these rows are not active."""

    def reusable(self, source: int, common: int, read: int) -> int:
        """How many of the first tokens of the text in row ``source`` need not be read again in a text that has the
        first ``common`` of them. ``read``: how many of its tokens :meth:`prefill` has read. It may wait for the
        device."""
        return common

    def reuse(self, source: int, row: int, tokens: Sequence[int]) -> None:
        """Let the next text of ``row`` begin with these tokens, with which the text of row ``source`` begins, the same
        row or another: as many as are :meth:`reusable`, or a whole prompt. What :meth:`prefill` reads next comes
        after them."""

    def begin(self, rows: Rows) -> None:
        """Start the texts of these rows, whose prompts have been read."""

    def prepare(self, state: State) -> None:
        """Before each step, outside of a CUDA graph, what cannot be part of one. In a merge ``state`` is the
        engine's as well: its features may be those of further layers."""

    def propose(self, state: State) -> TokenTree: ...

    def skip(self, state: State) -> None:
        """Instead of ``propose``, in a step with the root alone: keep up with the text. ``absorb`` follows."""
        self.propose(state)

    @property
    def absorbs(self) -> bool:
        """Whether :meth:`absorb` does anything; a merge leaves it out otherwise."""
        return type(self).absorb is not Drafter.absorb

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        """Update the drafter's state after verification; ``state`` is still that of ``propose``. If the verdict has an
        ``own_path``, ``tree`` also holds other drafters' nodes. ``features``: ``[B, N, F]``, of the tree's nodes."""

    def end(self, row: int) -> None:
        """End the text in this row, in which steps continue: what they write is behind the row's length."""


class PlainDrafter(Drafter):
    """Proposes the root alone: plain decoding, the baseline of every speed-up."""

    num_nodes, max_depth, branching, static = 1, 0, 0, True
    keeps_rows = False
    reuses = True

    def __init__(self, device: torch.device) -> None:
        self.tree = StaticTree([-1], device)

    def propose(self, state: State) -> TokenTree:
        return self.tree.fill(state.root[:, None])
