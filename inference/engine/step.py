"""One step of a batch, on buffers that are allocated once: draft → target's forward pass → verify → commit.

    step:  tree    = drafter.propose(state)               # root + drafted nodes
           hidden  = target(tree after the cached prefix) # one forward pass of N tokens
           verdict = verify(tree, logits(hidden))         # longest path that the target accepts, and a bonus token
           cache.commit(verdict.path)                     # keep the K/V of that path

A *static* step has the same shapes every time, or those of one of a few tree sizes, and never synchronises with the
host: it attends to the whole cache, masked by each row's length on the device. On a GPU it is captured in a CUDA graph,
one for each size, and the host launches the next step before it reads what the last one committed. Other steps attend
only to the slots in use.

Shape letters: B rows, N nodes, D depth of the deepest node, d hidden width, V vocabulary.
"""

import os
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from draftsmith.common.command import no_collection
from draftsmith.inference.engine.budget import Budget, TypicalBudget
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.first_rows import FirstRows
from draftsmith.inference.engine.logprobs import StepLogprobs
from draftsmith.inference.engine.prefill import PREFILL_TOKENS, Prefill
from draftsmith.inference.engine.prompts import Prompt
from draftsmith.inference.engine.protocol import Clock, Drafter, State
from draftsmith.inference.engine.request import Counts
from draftsmith.inference.engine.runner import Runner, joined_features, refuse_synchronisation, why_no_graph
from draftsmith.inference.engine.static_budget import ROOT, WHOLE, ExpectedTokens, StaticBudget, StepSize, node_counts
from draftsmith.inference.verify.sampling import Noise, Sampling
from draftsmith.inference.verify.tree import StaticTree, TokenTree, likeliest
from draftsmith.inference.verify.verify import MODES, Mode, Verdict, Verifier
from draftsmith.kernels.accept_greedy import accept_greedy, advance
from draftsmith.kernels.attention_plan import Plans
from draftsmith.kernels.head_topk import head_argmax
from draftsmith.kernels.linear import kernel_weight
from draftsmith.kernels.tree_attention import ancestor_mask
from draftsmith.models.lean import NO_KERNELS
from draftsmith.models.target import Target

WRITE_LOGITS = "DRAFTSMITH_WRITE_LOGITS"  # environment variable, for benchmarks: if it is set, greedy steps do, too

# The rows of ``committed``, and where a text asks for them the log-probabilities, see :meth:`StepLogprobs.copied`.
ReadCommitted = Callable[[], tuple[list[list[int]], Tensor | None]]
# Called after each phase of a step, by its name, with the tree and the verdict on it, once there are any. An observed
# step runs eagerly; a static one then has all nodes.
Observe = Callable[[str, TokenTree | None, Verdict | None], None]
PHASES = ("prefill", "draft", "verify", "accept", "commit", "other")

# The step that a drafter's caches and buffers were last allocated for.
_STEP_OF: MutableMapping[Drafter, "weakref.ref[Step]"] = WeakIdKeyDictionary()


def capacity_for(max_length: int, drafter: Drafter) -> int:
    """Cache slots for texts of up to ``max_length`` tokens, answers included: an ended row runs for one more step."""
    return max_length + drafter.num_nodes + 2 * (drafter.max_depth + 1)


def static_by_default(target: Target) -> bool:
    """Whether steps have fixed shapes where nothing else is asked for: on a GPU that holds the whole target."""
    return target.device.type == "cuda" and not target.spread


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which a GPU is the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Step:
    """State of a batch of B rows on the device, and the step that advances all of them.

    Args:
        capacity: slots of the cache, see :func:`capacity_for`.
        static: use the same shapes at every step (of a tree size), and on a GPU a CUDA graph.
        lean: see :class:`Runner`.

    Raises:
        ValueError: the mode is none of ``MODES``, or the lean decoder is asked for and there is none.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        mode: Mode,
        rows: int,
        capacity: int,
        *,
        static: bool = False,
        lean: bool | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode {mode!r}: must be one of {', '.join(MODES)}")
        device = self.device = target.device  # transformers finds it by a walk over the modules: once
        self.target, self.drafter, self.mode = target, drafter, mode
        self.rows, self.capacity, self.static = rows, capacity, static
        self.counts = Counts()
        self.cache = KVCache(target, rows, capacity)
        self.runner = Runner(target, self.cache, static, lean)
        self.captures = tuple(drafter.captures)
        width = target.hidden_size * (1 + len(self.captures))
        feature = torch.zeros(rows, width, dtype=target.dtype, device=device)
        self.active = torch.zeros(rows, dtype=torch.bool, device=device)
        self.verifier = Verifier(mode, rows, target, drafter.branching)
        self.logprobs = StepLogprobs(target, self.verifier, rows, drafter.max_depth)
        root, lengths = torch.zeros(rows, dtype=torch.int64, device=device), self.cache.lengths
        noise = Noise(self.verifier.settings, lengths) if mode == "sample" else None
        settings = self.verifier.settings if mode == "mss" else None
        self.state = State(root, lengths, feature, self.active, settings, self.verifier.step, noise=noise)
        # By row: the number of tokens the step commits (−1: the target's logits are not finite), D drafted tokens (the
        # accepted path first), the bonus token. If the drafter names its sources, also: the source bits of each of the
        # D tokens, the number of drafted nodes, and how many of them each source proposed. If steps choose their size,
        # at last the expected tokens of each size.
        self.num_sources = len(drafter.sources)
        first_source = drafter.max_depth + 2
        first_size = first_source + (drafter.max_depth + 1 + self.num_sources if self.num_sources else 0)
        # A text of multi-step sampling depends on the trees' sizes through its random numbers: they have one size, so
        # that a seed gives one text. One of typical acceptance depends on them directly: the text chooses them.
        any_size = mode in ("greedy", "sample")
        self.bounds: list[int | None] = [None] * rows  # of each row's text: its ``max_draft_nodes``
        can_choose = any_size and drafter.has_acceptance and drafter.num_nodes > 1
        self.static_budget: StaticBudget | None = None
        columns = first_size
        if can_choose and static and drafter.clock is not None:
            counts = node_counts(drafter)
            self.static_budget, self.expected_tokens = StaticBudget(counts), ExpectedTokens(counts, device)
            columns += self.expected_tokens.columns
        self.committed = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        self.counts_and_tokens = self.committed[:, :first_source]
        self.tokens, self.by_source = self.counts_and_tokens[:, 1:], self.committed[:, first_source:first_size]
        self.expected = self.committed[:, first_size:]
        self.source_bits = torch.arange(self.num_sources, device=device)
        # Of steps that one drafter of a merge drafts alone, by its number: ``by_source`` is the first of these plus the
        # tree's nodes times the second.
        self.of_source: list[tuple[Tensor, Tensor]] = []
        for number in range(self.num_sources):
            fixed, by_nodes = torch.zeros(2, first_size - first_source, dtype=torch.int64)
            counted = [drafter.max_depth, drafter.max_depth + 1 + number]
            fixed[: drafter.max_depth], fixed[counted], by_nodes[counted] = 1 << number, -1, 1
            self.of_source.append((fixed.to(device), by_nodes.to(device)))
        self.can_be_bounded = any_size and (not static or self.static_budget is not None or drafter.num_nodes == 1)
        self.budget: Budget | None = None
        costs = None if static else drafter.costs
        if can_choose and costs is not None:
            correcting = drafter.self_correcting_sources or [drafter.self_correcting]
            shape = rows, correcting, drafter.max_depth, drafter.num_nodes
            self.budget = self.state.budget = Budget(costs.seconds, *shape, costs.now)
        self.typical: TypicalBudget | None = None
        if mode == "typical" and drafter.has_acceptance and costs is not None:
            self.typical = TypicalBudget(costs.seconds, drafter.num_nodes)
        self.state.needs_acceptance = self.prunes_nodes
        self.root_tree = StaticTree([-1], device)
        self.zeros, self.ones = (torch.full((rows, 1), value, device=device) for value in (0, 1.0))
        self.prefill = Prefill(self)
        drafter.allocate(self.cache, drafter.max_depth, static)
        _STEP_OF[drafter] = weakref.ref(self)
        self.depths = torch.arange(drafter.max_depth + 1, device=device)
        graph = static and device.type == "cuda" and drafter.static
        self.eager = "" if graph else "eager"  # for `execution`; empty if steps run in a CUDA graph
        self.nodes = 0  # of the trees of the step last launched
        self.first_rows = FirstRows(self)
        self.choice = WHOLE  # what the next static step drafts
        # By :attr:`_graph_key`, with the number of nodes. Graphs share their memory: one is replayed at a time, and
        # what is read afterwards is not part of it.
        self._graphs: dict[tuple[tuple[int, ...], StepSize, int], tuple[torch.cuda.CUDAGraph, int]] = {}
        self._graph_memory: Any = None
        if device.type == "cuda":
            self._host = [torch.empty(self.committed.shape, dtype=torch.int64, pin_memory=True) for _ in range(2)]

    @property
    def prunes_nodes(self) -> bool:
        """Whether steps choose how many nodes they verify."""
        return (self.budget or self.static_budget or self.typical) is not None

    @property
    def running(self) -> int:
        """Number of rows that steps run on, the first ones."""
        return self.cache.rows

    @property
    def owns_drafter(self) -> bool:
        """Whether the drafter's caches and buffers are still this step's: another decoder may have taken it over."""
        return _STEP_OF[self.drafter]() is self

    @property
    def execution(self) -> str:
        """How steps run: CUDA graph or eager, the decoder, and why it is not the lean one."""
        graph = self.eager or "cuda graph"
        lean = self.runner.lean
        if lean is not None:
            fused = "" if lean.not_fused in ("", NO_KERNELS) else f" (layers not fused: {lean.not_fused})"
            return f"{graph}, lean decoder{fused}"
        return f"{graph}, transformers decoder ({self.runner.lean_or_reason})"

    def begin(
        self, numbers: Sequence[int], prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
    ) -> list[int]:
        """Prefill new texts into rows, by these ``numbers``, without a step in between. Returns each row's first token;
        −1 where the target's logits are not finite."""
        self.first_rows.use(self.rows)
        waiting = [Prompt(*each) for each in zip(numbers, prompts, samplings, strict=True)]
        for prompt in waiting:
            self.prefill.prefixes.begin(prompt.row, prompt.tokens)
        first: dict[int, int] = {}
        while waiting:
            first |= {prompt.row: token for prompt, token in self.prefill.run(waiting, PREFILL_TOKENS)}
            waiting = [prompt for prompt in waiting if prompt.left]
        return [first[number] for number in numbers]

    def reset(self) -> None:
        """Empty all rows; texts that an error cut short end here."""
        self.counts = Counts()
        self.first_rows.use(self.rows)
        self.active.zero_()
        self.bounds = [None] * self.rows
        self.cache.lengths.zero_()
        self.prefill.prefixes.clear()
        self.verifier.settings.clear_usage()
        self.logprobs.reset()
        for row in range(self.rows):
            self.drafter.end(row)

    def end(self, row: int, answer: Sequence[int] = ()) -> None:
        """End the text in this row, see :meth:`Drafter.end`. ``answer``: its new tokens."""
        self.active[row], self.bounds[row] = False, None
        self.logprobs.end(row)
        self.drafter.end(row)
        self.prefill.end(row, answer)

    def _commit(self, verdict: Verdict) -> None:
        """Move the K/V of accepted paths; one of nodes 0, 1, 2, … is already in place."""
        if self.nodes > 1 and (self.static or bool((verdict.path != self.depths).any())):
            path = verdict.path if self.static else verdict.path[:, : int(verdict.length.max()) + 1]
            self.cache.commit(path, verdict.length)

    @property
    def most_nodes(self) -> int | None:
        """Nodes of the next step's trees, at most, roots included: the smallest of the rows' bounds."""
        bounds = [bound for bound in self.bounds if bound is not None]
        return 1 + min(bounds) if bounds else None

    def run(self, *observers: Observe) -> None:
        """Advance all rows by one step: draft a tree, run the target on all of its nodes in one forward pass, accept a
        path, and keep what belongs to it. ``committed`` then holds the step's tokens."""
        cache, state = self.cache, self.state
        if self.budget:
            observers = (self.budget.observe, *observers)

        def observe(phase: str, tree: TokenTree, verdict: Verdict | None) -> None:
            for each in observers:
                each(phase, tree, verdict)

        state.plans = Plans(cache.lengths)
        tree, chosen = self._propose()
        observe("draft", tree, None)
        hidden, captured, mask = self._forward(tree)
        scores = self._likeliest(hidden) if self.mode == "greedy" else self.target.logits(hidden)
        observe("verify", tree, None)
        verdict = self._verify(tree, mask, scores, hidden)
        observe("accept", tree, verdict)
        self._commit(verdict)
        features = joined_features(hidden, captured)
        self.drafter.absorb(state, self._with_own_path(verdict, chosen), tree, features)
        outcome = verdict.node, verdict.bonus, verdict.length
        advance(cache.lengths, state.root, state.feature, features, *outcome, self.active)
        observe("commit", tree, verdict)

    def _forward(self, tree: TokenTree) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Run the target on a tree's nodes: hidden states ``[B, N, d]``, the inputs of the captured layers, and the
        tree's mask where it is needed."""
        count = self.nodes = tree.tokens.shape[1]
        by_argmax, mask = self.mode in ("greedy", "sample"), tree.mask
        if mask is None and not (self.runner.kernel and by_argmax and not self.verifier.penalises):
            mask = ancestor_mask(tree.ancestors, count)
        nodes = tree.tokens, self.cache.lengths, tree.ancestors, tree.depth
        fixed, sees_all = tree.static is not None, count == 1
        options: dict[str, Any] = {"captures": self.captures, "plans": self.state.plans}
        return *self.runner.forward_nodes(*nodes, mask=mask, fixed=fixed, sees_all=sees_all, **options), mask

    def _with_own_path(self, verdict: Verdict, chosen: Tensor | None) -> Verdict:
        """The verdict with its path in the drafter's own numbers, if ``chosen`` says which of its nodes were kept."""
        if chosen is None or not self.drafter.reads_own_path:
            return verdict
        numbers = chosen.gather(1, verdict.path.clamp(max=self.nodes - 1))
        return replace(verdict, own_path=torch.where(self.depths <= verdict.length[:, None], numbers, -1))

    def _propose(self) -> tuple[TokenTree, Tensor | None]:
        """The tree to verify, and ``[B, N]`` the numbers of its nodes in the drafter's tree, if some of that are left
        out."""
        drafter, state, budget = self.drafter, self.state, self.budget
        most, state.alone = (self.choice.nodes or None, self.choice.alone) if self.static else (self.most_nodes, None)
        if budget is None:
            texts = self.cache.lengths, self.active
            if most == 1 or (self.typical and not self.typical.drafts(*texts)):
                drafter.skip(state)
                return self._root_alone(), None
            tree = drafter.propose(state)
            if self.typical:
                return self.typical.prune(tree, *texts)
            if self.static_budget:
                self.expected.copy_(self.expected_tokens.of(tree, state.alone))
            return self._prune(tree, tree.acceptance, most)
        several = len(drafter.sources) > 1  # of which a merge asks each
        budget.start(self.cache.lengths.tolist(), self.active.tolist(), most)
        if not several and not budget.asks(0):
            drafter.skip(state)
            return self._root_alone(), None
        tree = drafter.propose(state)
        acceptance = tree.acceptance
        if acceptance is None or budget.kept or tree.tokens.shape[1] == 1:
            return self._prune(tree, acceptance, most)
        if not several:
            acceptance = budget.corrected(0, acceptance, tree.depth)
            budget.proposed(0, acceptance)
        return self._prune(replace(tree, acceptance=acceptance), acceptance, budget.keep(acceptance))

    def _prune(self, tree: TokenTree, acceptance: Tensor | None, most: int | None) -> tuple[TokenTree, Tensor | None]:
        """Keep the ``most`` nodes that are likeliest to be accepted or, without acceptance probabilities, the first.
        Also returns their numbers ``[B, most]``; None if all are kept."""
        count = tree.tokens.shape[1]
        if most is None or most >= count:
            return tree, None
        if acceptance is None:  # parents come first
            acceptance = torch.arange(count, 0, -1, device=tree.tokens.device).expand(tree.tokens.shape).float()
        return likeliest(tree, acceptance, most, fixed=self.static)

    def _root_alone(self) -> TokenTree:
        return self.root_tree.fill(self.state.root[:, None], self.zeros if self.num_sources else None, self.ones)

    def _likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The target's highest logit after each node and its token ``[B, N]``, without the logits where a kernel knows
        the LM head."""
        changes = self.target.changes_logits or os.environ.get(WRITE_LOGITS)
        weight = None if changes else kernel_weight(self.target.lm_head, hidden)
        return self.target.logits(hidden).max(-1) if weight is None else head_argmax(hidden, weight)

    def _verify(
        self, tree: TokenTree, mask: Tensor | None, scores: Tensor | tuple[Tensor, Tensor], hidden: Tensor
    ) -> Verdict:
        """The verdict on a tree, from :meth:`_likeliest` or the logits; writes ``committed`` and log-probabilities."""
        logits = scores if isinstance(scores, Tensor) else None
        if self.mode == "sample":
            assert isinstance(scores, Tensor)
            scores = self.verifier.coupled(tree, mask, scores, self.cache.lengths)
        depth, count = self.drafter.max_depth, tree.tokens.shape[1]
        if not isinstance(scores, Tensor):
            best, choice = scores
            parts = tree.tokens, tree.parent, tree.depth, tree.ancestors, tree.valid
            verdict = Verdict(*accept_greedy(choice, best, *parts, self.active, self.committed, depth, mask))
        else:
            assert mask is not None
            verdict = self.verifier.verify(tree, mask, scores, depth)
            number = torch.where(verdict.finite, (verdict.length + 1) * self.active, -1)
            tokens = tree.tokens.gather(1, verdict.path[:, 1:].clamp(max=count - 1))
            torch.cat([number[:, None], tokens, verdict.bonus[:, None]], 1, out=self.counts_and_tokens)
        if self.logprobs.count is not None:
            self.logprobs.write(hidden, logits, self.tokens, verdict)
        self.verifier.mark_seen(self.tokens, verdict.length)
        alone = self.state.alone
        if self.num_sources and count == 1:
            self.by_source.zero_()
        elif alone is not None:
            fixed, by_nodes = (each.expand(self.running, -1) for each in self.of_source[alone])
            if tree.static is not None:  # all are valid
                torch.add(fixed, by_nodes, alpha=count, out=self.by_source)
            else:
                torch.addcmul(fixed, by_nodes, tree.valid.sum(1, keepdim=True), out=self.by_source)
        elif self.num_sources:
            assert tree.source is not None
            by_node = tree.source[..., None] >> self.source_bits & 1  # [B, N, sources]
            drafted_by = tree.source.gather(1, verdict.path[:, 1:].clamp(max=count - 1))
            parts = [drafted_by, (tree.source != 0).sum(1, keepdim=True), by_node.sum(1)]
            torch.cat(parts, 1, out=self.by_source)
        return verdict

    def launch(self, observe: Observe | None = None) -> ReadCommitted:
        """Run a step without waiting for it. Returns a function that waits for it and returns what it committed; to be
        called before the next but one launch."""
        cuda, most = self.device.type == "cuda", self.most_nodes
        if self.budget and self.budget.costs_stale:
            self._measure_again(self.budget)
        self.state.needs_acceptance = self.prunes_nodes or (self.drafter.has_acceptance and most is not None)
        # Observed steps, and eager ones on a GPU, are not timed: they have all nodes.
        budget, self.choice = None if observe or (cuda and self.eager) else self.static_budget, WHOLE
        if budget is not None:
            self.choice = budget.choose(most)
        elif self.static_budget and most is not None:
            self.choice = max(choice for choice in self.static_budget.sets[None].choices if choice.nodes <= most)
        choice = self.choice
        self.drafter.prepare(self.state)
        seconds = self.run(observe) if observe else self.advance(None if budget is None else self.drafter.clock)

        def record(committed: list[list[int]]) -> list[list[int]]:
            if budget is not None and seconds is not None:
                budget.timed(choice, seconds())
                expected = [] if choice == ROOT else [self.expected_tokens.read(row) for row in committed]
                budget.committed(choice, [row[0] for row in committed], expected)
            return committed

        if not cuda:
            committed = record(self.committed.tolist()), self.logprobs.copied(self.running, self.nodes)
            return lambda: committed
        self._host.reverse()
        host, done = self._host[0][: self.running], torch.cuda.Event()
        host.copy_(self.committed, non_blocking=True)
        logprobs = self.logprobs.copied(self.running, self.nodes)
        done.record(torch.cuda.current_stream(self.device))

        def read() -> tuple[list[list[int]], Tensor | None]:
            done.synchronize()
            return record(host.tolist()), logprobs

        return read

    def _measure_again(self, budget: Budget) -> None:
        """Have the costs measured again, which takes a second or two, since real steps were far faster."""
        budget.costs_stale = False
        if self.drafter.costs is not None and self.drafter.costs.again is not None:
            self.drafter.costs = self.drafter.costs.again()
            budget.measured_again(self.drafter.costs.seconds)

    def buffers(self) -> list[Tensor]:
        """Tensors that a step changes and the next one reads, except K/V beyond a row's length; the lengths first."""
        state = self.cache.lengths, self.state.root, self.state.feature, self.committed
        return [*state, *self.verifier.buffers(), *self.drafter.buffers()]

    @property
    def _graph_key(self) -> tuple[tuple[int, ...], StepSize, int]:
        """What the operations of the next step depend on: the verifier and the log-probabilities, what is drafted, the
        rows."""
        return (*self.verifier.graph_key, *self.logprobs.graph_key), self.choice, self.running

    def advance(self, clock: Clock | None = None) -> Callable[[], float] | None:
        """Run a step, or replay its graph, which is captured first where there is none. With a clock, returns a
        function for the seconds that it took; None for a step on a GPU that no graph could hold."""
        key, step = self._graph_key, self.run
        if not (self.eager or (key not in self._graphs and not self._capture())):
            graph, self.nodes = self._graphs[key]
            step = graph.replay
        elif self.device.type == "cuda":
            clock = None
        if clock is not None:
            return clock.timed(step, self.device)
        step()
        return None

    def warm_up(self) -> None:
        """Run three steps on the present state, so that later ones neither compile nor measure anything. Before the
        first graph also a step of each choice, the smallest first, since products are measured in the order of their
        first use. The lengths stay, other ``buffers()`` change."""
        lengths, choice = self.cache.lengths.clone(), self.choice
        choices = [] if self.static_budget is None or self._graphs else self.static_budget.choices
        others = sorted(choices, key=lambda each: each.nodes)
        for self.choice in (*others, choice, choice, choice):
            self.run()
            self.cache.lengths.copy_(lengths)  # rows must not outgrow the cache

    def _capture(self) -> bool:
        """Capture a step in a CUDA graph; warm-up steps run on the present state, which is restored afterwards.
        Returns False if a graph cannot hold the step; ``execution`` then says why. Any other error is raised."""
        buffers = self.buffers()
        kept = [buffer.clone() for buffer in buffers]
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        stream = torch.cuda.Stream()
        stream.wait_stream(current)
        captured = True
        try:
            with torch.cuda.stream(stream):
                self.warm_up()
                # A target that synchronises with the host (some mixtures of experts) fails here: a capture that fails
                # half-way would leave the process in a bad state.
                with refuse_synchronisation():
                    self.run()
                self.cache.lengths.copy_(kept[0])
                if self._graph_memory is None:
                    self._graph_memory = torch.cuda.graph_pool_handle()
                memory = self._graph_memory
                with no_collection(), torch.cuda.graph(graph, memory, stream, capture_error_mode="thread_local"):
                    self.run()
        except RuntimeError as error:
            reason = why_no_graph(error)
            if reason is None:
                raise
            self.eager, captured = f"eager: {reason}", False
        current.wait_stream(stream)
        for buffer, before in zip(buffers, kept, strict=True):
            buffer.copy_(before)
        torch.cuda.synchronize()  # an error of the device shows here, not in a later step
        if captured:
            self._graphs[self._graph_key] = graph, self.nodes
        return captured
