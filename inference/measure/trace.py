"""What every step of a text held: its token tree, and what the target accepted of it. For the report's page."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.text import TextStream
from draftsmith.inference.verify.tree import TokenTree
from draftsmith.inference.verify.verify import Verdict

PER_KIND, TEXTS, OF_ALL = 2, 8, 16  # prompts of a kind of text; prompts in all; texts of all drafters together
Ranks = tuple[int, ...]


@dataclass
class Trace:
    """A text and its steps.

    tokens: of each token its text (empty where a later one completes a character), the bits of the sources that drafted
        it (0: the target's own), the number of its step (−1: the prefill) and its place among what the step committed.
    steps: of each step its nodes, parents first: number of the parent (−1 at the root), token text, source bits, and
        whether it was accepted.
    """

    tokens: list[tuple[str, int, int, int]] = field(default_factory=list)
    steps: list[list[tuple[int, str, int, bool]]] = field(default_factory=list)


def traced(kinds: Sequence[str | None], drafters: int = 1) -> list[int]:
    """The numbers of the prompts to trace: the first two of each kind of text, or the first ones if there is one kind;
    at most 8, and of several drafters fewer, because each of them decodes them once more."""
    seen, each = Counter[str | None](), PER_KIND if len(set(kinds)) > 1 else TEXTS
    places = list[tuple[int, int]]()
    for number, kind in enumerate(kinds):
        seen[kind] += 1
        if seen[kind] <= each:
            places.append((seen[kind], number))
    count = min(TEXTS, max(1, OF_ALL // drafters))
    return sorted(number for _, number in sorted(places)[:count])


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The part of an answer's text that each of its tokens completes, perhaps none; without a tokenizer, its number."""
    if tokenizer is None:
        return [f"⟨{token}⟩" for token in tokens]
    stream = TextStream(tokenizer)
    texts = [stream.add([token]) for token in tokens]
    return [*texts[:-1], texts[-1] + stream.end()] if texts else []


def trace(decoder: SpeculativeDecoder, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> Trace:
    """Decode a prompt once more, and keep each step's tree. ``options``: of ``SpeculativeDecoder.generate``."""
    tokenizer, names_sources = decoder.target.tokenizer, bool(decoder.drafter.sources)
    found = Trace()

    def text_of(token: int) -> str:
        return str(tokenizer.decode([token])) if tokenizer is not None else f"⟨{token}⟩"

    def keep(phase: str, tree: TokenTree | None, verdict: Verdict | None) -> None:
        if phase != "accept" or tree is None or verdict is None:
            return
        path = set(verdict.path[0, : int(verdict.length[0]) + 1].tolist())
        tokens, parents, valid = tree.tokens[0].tolist(), tree.parent[0].tolist(), tree.valid[0].tolist()
        bits = tree.source[0].tolist() if names_sources and tree.source is not None else [0] + [1] * (len(tokens) - 1)
        kept = [number for number in range(len(tokens)) if valid[number]]  # the others are padding
        numbers = {-1: -1} | {number: place for place, number in enumerate(kept)}
        found.steps.append([(numbers[parents[n]], text_of(tokens[n]), bits[n], n in path) for n in kept])

    (result,) = decoder.generate([prompt], max_new_tokens, batch_size=1, observe=keep, **options)
    del found.steps[len(result.accepted) :]  # static steps run on when a text has ended
    places = [(-1, 0)] + [(step, place) for step, count in enumerate(result.accepted) for place in range(count)]
    for text, bits, place in zip(token_texts(tokenizer, result.tokens), result.drafted_by, places, strict=True):
        found.tokens.append((text, bits, *place))
    return found


def acceptance_by_ranks(traces: Sequence[Trace]) -> dict[Ranks, tuple[int, int]]:
    """In how many steps the trees held the node of these ranks, and in how many it was accepted. A node's rank is its
    number among its parent's children, in the drafter's order; the root has none."""
    held, accepted = Counter[Ranks](), Counter[Ranks]()
    for step in (step for each in traces for step in each.steps):
        ranks: list[Ranks] = []
        children = Counter[int]()
        for parent, _, _, hit in step:
            ranks.append((*ranks[parent], children[parent]) if parent >= 0 else ())
            children[parent] += 1
            held[ranks[-1]] += 1
            accepted[ranks[-1]] += hit
    return {path: (count, accepted[path]) for path, count in held.items()}
