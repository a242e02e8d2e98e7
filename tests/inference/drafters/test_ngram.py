"""The n-gram drafter, against a plain Python reference, and through the checks of every drafter."""

import random

import lossless_suite
import pytest
import torch
from draws import occurs

from draftsmith.inference.drafters.ngram import CLASS_STARTS, PRIOR, PRIOR_COUNT, NgramDrafter
from draftsmith.inference.engine import budget
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.prompts import Chunk
from draftsmith.inference.engine.protocol import State
from draftsmith.inference.measure.step_costs import StepCosts
from draftsmith.inference.verify.sampling import row_numbers
from draftsmith.inference.verify.verify import Verdict
from draftsmith.kernels.tree_attention import ancestor_mask

CAPACITY = 160
MODES = pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
FREE = StepCosts({1: 1.0, 30_000: 2.0})  # additional nodes cost little, even in a batch of thousands


class Reference:
    """Plain Python reference: the candidates of one text, and their counts."""

    def __init__(self, max_match, min_match, depth, branches):
        self.max_match, self.min_match, self.depth, self.branches = max_match, min_match, depth, branches
        self.right = [share * PRIOR_COUNT for share in PRIOR]
        self.tried = [PRIOR_COUNT] * len(PRIOR)

    def matches(self, text):
        """(length of the match, its last position), the best first."""
        found = []
        for end in range(len(text) - 1):
            length = 0
            while length < min(self.max_match, end + 1) and text[end - length] == text[len(text) - 1 - length]:
                length += 1
            if length >= self.min_match:
                found.append((length, end))
        return sorted(found, reverse=True)[: self.branches]

    def nodes(self, text):
        """Path → (acceptance probability, class), in node order."""
        nodes = {}
        for turn, (length, end) in enumerate(self.matches(text)):
            path, acceptance, own = (), 1.0, turn == 0
            for k in range(self.depth):
                path += (text[end + 1 + k % (len(text) - 1 - end)],)
                if path not in nodes:
                    kind = max(n for n, begin in enumerate(CLASS_STARTS) if begin <= length + k)
                    kind += 0 if own else len(CLASS_STARTS)
                    own = True
                    nodes[path] = (acceptance * self.right[kind] / self.tried[kind], kind)
                acceptance = nodes[path][0]
        return nodes

    def absorb(self, nodes, committed):
        for path, (_, kind) in nodes.items():
            if len(path) <= len(committed) and list(path[:-1]) == committed[: len(path) - 1]:
                self.tried[kind] += 1
                self.right[kind] += path[-1] == committed[len(path) - 1]


class Driver:
    """Runs a drafter step by step on known texts."""

    def __init__(self, target, rows, static, **options):
        self.drafter, self.target = NgramDrafter(target, **options), target
        self.cache = KVCache(target, rows, CAPACITY)
        self.root = torch.zeros(rows, dtype=torch.int64)
        self.drafter.allocate(self.cache, self.drafter.max_depth, static)

    def begin(self, rows, prompts, chunk=7):
        """Prefill the prompts without their last tokens, which are the roots."""
        for start in range(0, max(map(len, prompts)) - 1, chunk):
            each = zip(row_numbers(rows), prompts, strict=True)
            parts = [(row, start, prompt[:-1][start : start + chunk]) for row, prompt in each]
            part = Chunk.of([each for each in parts if each[2]], self.root.device)
            self.drafter.prefill(torch.zeros(len(part.tokens), 1), part)
        self.drafter.begin(rows)
        self.cache.lengths[rows] = torch.tensor([len(prompt) - 1 for prompt in prompts])
        self.root[rows] = torch.tensor([prompt[-1] for prompt in prompts])

    def end(self, row):
        self.cache.lengths[row] = 0
        self.drafter.end(row)

    def propose(self):
        lengths = self.cache.lengths
        self.state = State(self.root, lengths, torch.zeros(len(lengths), 1), lengths > 0, None, lengths)
        self.tree = self.drafter.propose(self.state)
        return [self.paths(row) for row in range(len(lengths))]

    def paths(self, row):
        """Path → (acceptance probability, node) of a row's valid nodes but the root; checks all fields of the tree."""
        tree, found, names = self.tree, {}, {0: ()}
        rows, nodes = tree.tokens.shape
        assert nodes <= self.drafter.num_nodes and tree.ancestors.shape[2] == -(-nodes // 64)
        assert tree.parent.dtype == tree.depth.dtype == torch.int32
        assert tree.tokens.shape == tree.valid.shape == tree.source.shape == tree.acceptance.shape == (rows, nodes)
        assert bool((tree.tokens[row] >= 0).all())
        mask = ancestor_mask(tree.ancestors, nodes)
        if tree.mask is not None:
            assert torch.equal(mask, tree.mask)
        assert bool(mask[row, :, 0].all()), "every node sees the root"
        assert int(tree.parent[row, 0]) == -1 and float(tree.acceptance[row, 0]) == 1 and int(tree.source[row, 0]) == 0
        above = {0: {0}}
        for node in range(1, nodes):
            if not tree.valid[row, node]:
                assert float(tree.acceptance[row, node]) == 0 and int(tree.source[row, node]) == 0
                continue
            parent = int(tree.parent[row, node])
            names[node] = (*names[parent], int(tree.tokens[row, node]))
            above[node] = above[parent] | {node}
            assert int(tree.depth[row, node]) == len(names[node]) and int(tree.source[row, node]) == 1
            assert set(mask[row, node].nonzero().flatten().tolist()) == above[node]
            assert names[node] not in found, "two nodes for one path"
            found[names[node]] = (float(tree.acceptance[row, node]), node)
        return found

    def absorb(self, futures):
        """Accept the drafted tokens that agree with the futures; returns the committed tokens of each row."""
        depth = self.drafter.max_depth
        paths, lengths, committed = [], [], []
        for row, future in enumerate(futures):
            nodes, path = self.paths(row), [0]
            while len(path) <= depth and tuple(future[: len(path)]) in nodes:
                path.append(nodes[tuple(future[: len(path)])][1])
            lengths.append(len(path) - 1)
            paths.append(path + list(range(len(path), depth + 1)))
            committed.append(list(future[: len(path)]) if self.cache.lengths[row] else [])
        length, path = torch.tensor(lengths), torch.tensor(paths)
        bonus = torch.tensor([future[n] for future, n in zip(futures, lengths, strict=True)])
        node = path.gather(1, length[:, None])[:, 0]
        verdict = Verdict(path, length, node, bonus, torch.ones_like(node, dtype=torch.bool))
        self.drafter.absorb(self.state, verdict, self.tree, torch.zeros(*self.tree.tokens.shape, 1))
        self.cache.lengths += (length + 1) * (self.cache.lengths > 0)
        self.root.copy_(bonus)
        return committed


def repetitive(rng, count, alphabet):
    """A random text, half of it copied from earlier parts, sometimes periodically."""
    text = [rng.randrange(alphabet)]
    while len(text) < count:
        if rng.random() < 0.5:
            text.append(rng.randrange(alphabet))
        else:
            back = rng.randint(1, len(text))
            text += [text[len(text) - back + k % back] for k in range(rng.choice([1, 3, 6, 12, 50]))]
    return text[:count]


@MODES
@pytest.mark.parametrize(
    "options",
    [
        {"max_match": 10, "min_match": 2, "depth": 10, "branches": 2},
        {"max_match": 4, "min_match": 1, "depth": 5, "branches": 3},
        {"max_match": 1, "min_match": 1, "depth": 1, "branches": 1},
        {"max_match": 6, "min_match": 3, "depth": 23, "branches": 3},  # 70 nodes: two words
    ],
    ids=str,
)
def test_reference(make_target, options, static):
    """Candidates, their order and acceptance probabilities, in a ragged batch with refilled rows."""
    rng, rows = random.Random(repr(options)), 3
    driver = Driver(make_target("llama"), rows, static, **options)
    texts, done, references = [[] for _ in range(rows)], [0] * rows, [Reference(**options) for _ in range(rows)]
    seen = {"nothing": 0, "forks": 0, "periodic": 0, "accepted": 0, "all": 0}
    for step in range(60):
        for row in range(rows):
            if not driver.cache.lengths[row] and (step == 0 or rng.random() < 0.7):
                texts[row] = repetitive(rng, 140, rng.choice([2, 3, 6]))
                done[row] = rng.choice([1, 2, 9, 40, 80])  # known tokens, root included
                references[row] = Reference(**options)
                driver.begin(slice(row, row + 1), [texts[row][: done[row]]])
                if done[row] == 1:  # the root alone, without a prefix: an ended row
                    driver.end(row)
        found = driver.propose()
        assert not static or driver.tree.tokens.shape[1] == driver.drafter.num_nodes
        wanted = []
        for row, reference in enumerate(references):
            text = texts[row][: done[row]] if driver.cache.lengths[row] else []
            wanted.append(reference.nodes(text) if text else {})
            assert list(found[row]) == list(wanted[row]), f"step {step}, row {row}"
            for path, (acceptance, _) in wanted[row].items():
                assert found[row][path][0] == pytest.approx(acceptance, rel=1e-5)
            seen["nothing"] += not found[row]
            seen["forks"] += len(found[row]) > options["depth"]
            seen["periodic"] += any(len(text) - 1 - end < options["depth"] for _, end in reference.matches(text))
        committed = driver.absorb([texts[row][done[row] :] + [0] * 30 for row in range(rows)])
        for row, reference in enumerate(references):
            reference.absorb(wanted[row], committed[row])
            done[row] += len(committed[row])
            seen["accepted"] += len(committed[row]) > 1
            seen["all"] += len(committed[row]) == options["depth"] + 1
            if driver.cache.lengths[row] and done[row] > 140 - 26:
                driver.end(row)
    impossible = {"forks", "periodic"} if options["depth"] == options["branches"] == 1 else set()
    assert not any(seen[what] for what in impossible), seen
    occurs({what for what, count in seen.items() if not count} == impossible, str(seen))


def proposed(make_target, static, text, before=(), **options):
    """Proposed paths for a text, in a row that has held other texts before."""
    driver = Driver(make_target("llama"), 1, static, **options)
    for each in (*before, text):
        driver.begin(slice(0, 1), [list(each)])
        (found,) = driver.propose()
    return list(found)


def chain(*tokens):
    return [tokens[:count] for count in range(1, len(tokens) + 1)]


@MODES
def test_matches_and_their_order(make_target, static):
    options = {"depth": 2, "min_match": 1, "max_match": 3}

    def one(text, branches=1, **more):
        return proposed(make_target, static, text, branches=branches, **(options | more))

    # The longest match, though others are more recent.
    assert one([1, 2, 3, 7, 7, 9, 3, 8, 8, 1, 2, 3]) == chain(7, 7)
    assert one([1, 2, 3, 7, 7, 9, 3, 8, 8, 1, 2, 3], max_match=1) == chain(8, 8)  # both count as one token
    # Of equally long ones the most recent; the other one is the second branch.
    assert one([2, 3, 7, 7, 2, 3, 8, 8, 5, 2, 3]) == chain(8, 8)
    assert one([2, 3, 7, 7, 2, 3, 8, 8, 5, 2, 3], branches=2) == chain(8, 8) + chain(7, 7)
    # At least `min_match`.
    assert one([4, 3, 7, 7, 5, 3], min_match=2) == []
    assert one([5, 3, 7, 7, 5, 3], min_match=2) == chain(7, 7)
    # A match ends with the text's first token.
    assert one([3, 7, 7, 5, 3]) == chain(7, 7)
    assert one([3, 7, 7, 5, 3], min_match=2) == []
    # Continuations into the text's end go on from the match again.
    assert one([9, 1, 2, 1, 2], depth=5) == chain(1, 2, 1, 2, 1)
    assert one([5, 5], depth=3) == chain(5, 5, 5)
    # Branches share the nodes of the path that they have in common.
    assert one([3, 7, 8, 6, 3, 7, 9, 6, 3], branches=2) == [*chain(7, 9), (7, 8)]
    assert one([3, 7, 8, 6, 3, 7, 8, 6, 4, 3], branches=2) == chain(7, 8)
    assert one([3, 1, 1, 3, 7, 8, 6, 3, 7, 9, 6, 3], branches=3) == [*chain(7, 9), (7, 8), *chain(1, 1)]


@MODES
def test_tokens_beyond_the_text_are_ignored(make_target, static):
    """Padding (equal to the root here), and tokens of an earlier text in the row."""
    options = {"depth": 3, "min_match": 1}
    assert proposed(make_target, static, [1, 2, 3], before=[[3, 4] * 20], **options) == []
    driver = Driver(make_target("llama"), 2, static, **options)
    driver.begin(slice(0, 2), [[1, 2, 3], [4, 5, 6, 7, 8, 6]])
    assert [list(paths) for paths in driver.propose()] == [[], chain(7, 8, 6)]
    driver.end(1)
    assert [list(paths) for paths in driver.propose()] == [[], []]


@MODES
def test_acceptance_probabilities_follow_the_text(make_target, static):
    """It starts from the prior, and soon reflects a loop or a text without repetition; a new text starts anew."""
    options = {"max_match": 4, "min_match": 1, "depth": 3, "branches": 1}
    driver = Driver(make_target("llama"), 1, static, **options)
    never = [token for number in range(6, 46) for token in (number, 5)]  # after a 5 never the same token again
    always = [1, 2] * 60
    for text, first in ((never, 5), (always, 2), (never, 5)):
        driver.begin(slice(0, 1), [[first, text[0], first]])
        (found,) = driver.propose()
        assert next(iter(found.values()))[0] == pytest.approx(PRIOR[0]), "counts of the previous text remain"
        place, steps = 2, 0
        while steps < 20 or int(driver.root) != first:
            driver.propose()
            place += len(driver.absorb([text[place : place + 4]])[0])
            steps += 1
        (found,) = driver.propose()
        acceptance = next(iter(found.values()))[0]
        assert acceptance < 0.6 * PRIOR[0] if text is never else acceptance > 0.85


@MODES
def test_buffers(make_target, static):
    """Restoring the buffers undoes a step."""
    driver, text = Driver(make_target("llama"), 1, static, min_match=1), [1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1]
    driver.begin(slice(0, 1), [text])
    before = driver.propose()
    buffers = [*driver.drafter.buffers(), driver.cache.lengths, driver.root]
    kept = [buffer.clone() for buffer in buffers]
    driver.absorb([[2, 3, 1, 2, 3, 1, 2, 4, 2, 6, 1, 1]])
    assert driver.propose() != before
    for buffer, old in zip(buffers, kept, strict=True):
        buffer.copy_(old)
    assert driver.propose() == before


def test_lossless_by_cost(make_target, monkeypatch):
    """Trees of changing size and depth."""
    monkeypatch.setattr(budget, "FEWEST", 10**9)  # it is asked in every step

    def make(target):
        drafter = NgramDrafter(target, depth=4, min_match=1)
        drafter.costs = StepCosts({1: 1.0, 9: 1.4, 27: 2.0})
        return drafter

    lossless_suite.check_static(make_target, make)
    assert len(lossless_suite.check_greedy(make_target, make, own=False)) > 3
    lossless_suite.check_coupled(make_target, make, own=False)


def test_they_are_asked_where_they_find_nothing(make_target, monkeypatch):
    """A search that is cheap is made in every step: also after steps without a match, whose time counts, too."""
    target, asked = make_target("llama"), []
    drafter = NgramDrafter(target, depth=4, min_match=2)
    drafter.costs = StepCosts({1: 1e3, 9: 1.4e3, 27: 2e3})  # seconds: any search is cheap beside them
    monkeypatch.setattr(budget.Budget, "ran", lambda *_: None)  # which would correct them
    asks = budget.Budget.asks
    monkeypatch.setattr(budget.Budget, "asks", lambda *given: asked.append(asks(*given)) or asked[-1])
    found = NgramDrafter._find
    nothing = lambda self, row, root, length: found(self, row, root, 0)  # noqa: E731
    monkeypatch.setattr(NgramDrafter, "_find", nothing)
    SpeculativeDecoder(target, drafter, static=False).generate([[7, 3, 19]], 40, stop_ids=frozenset())
    assert len(asked) > 30 and all(asked)


def test_numbers_are_checked(make_target):
    target = make_target("llama")
    with pytest.raises(ValueError, match="min_match 3, max_match 2: must be 1 ≤ min_match ≤ max_match"):
        NgramDrafter(target, min_match=3, max_match=2)
    with pytest.raises(ValueError, match="min_match 0"):
        NgramDrafter(target, min_match=0)
    with pytest.raises(
        ValueError, match="n-grams of at least 999 tokens: the context of target 'tiny-llama' holds 256"
    ):
        NgramDrafter(target, min_match=999, max_match=1000)
    assert NgramDrafter(target, max_match=10**12).max_match == target.context
    with pytest.raises(ValueError, match="depth 0, branches 2: each must be at least 1"):
        NgramDrafter(target, depth=0)
