"""Dynamic trees against a reference on Python lists; node order, connectivity, optimality, shapes and their errors."""

import itertools
import json
import math
import random

import pytest
import torch
from draws import occurs
from tiny_models import paths_of

from draftsmith.inference import calibrate
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.protocol import State
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure import calibrations, tree_calibration, tree_search
from draftsmith.inference.measure.tree_search import COMPARED_TOKENS, SHAPES, ComparedTree, Watch, compare_dynamic
from draftsmith.inference.trees.dynamic import DynamicShape, DynamicTree, Frontier, Proposals, read_dynamic
from draftsmith.inference.verify.tree import chain, one_hot_draws
from draftsmith.kernels.tree_attention import ancestor_mask
from draftsmith.models.artifact import read_drafter, write_drafter
from draftsmith.models.eagle import Eagle
from draftsmith.models.target import load_target

TOKENS, WIDTH = 50, 3


def quarters(seed):
    """log q by row and path: multiples of ¼, so that sums are exact, with many ties and some zeros."""

    def proposals(row, path, k):
        chooser = random.Random(f"{seed} {row} {path}")
        values = sorted((-0.25 * chooser.randrange(4) for _ in range(k)), reverse=True)
        return list(zip(chooser.sample(range(TOKENS), k), values, strict=True))

    return proposals


def certain(row, path, k):
    """Every token has log q = 0: every value of the tree is equal."""
    return [(rank, 0.0) for rank in range(k)]


def few(row, path, k):
    """Two tokens of each node are candidates (−∞ and NaN are none), and in row 1 one of the root's."""
    count = 1 if row == 1 and not path else 2
    return [(rank, -0.5 * (rank + 1) if rank < count else (-math.inf, math.nan)[rank % 2]) for rank in range(k)]


def reference(row, table, shape):
    """All candidates (path, value) in order, and the tree's nodes, sorted: the root, then the likeliest."""
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    found = list(frontier)
    for _ in range(shape.depth):
        level = [
            ((*path, token), value + log_q)
            for path, value in frontier
            for token, log_q in table(row, path, shape.top_k)
        ]
        level = [(path, -math.inf if math.isnan(value) else value) for path, value in level]
        found += level
        frontier = sorted(level, key=lambda each: -each[1])[: shape.top_k]
    order = sorted((n for n, (_, value) in enumerate(found) if value > -math.inf), key=lambda n: -found[n][1])
    return found, [found[number] for number in sorted(order[: shape.nodes])]


def proposals_of(table, paths, k):
    """What the nodes at these paths (by row) propose; ``hidden`` is a number that stands for the path."""
    each = [[table(row, path, k) for path in level] for row, level in enumerate(paths)]
    tokens = [[[token for token, _ in node] for node in row] for row in each]
    log_q = [[[value for _, value in node] for node in row] for row in each]
    hidden = torch.tensor([[[float(code(path))] * WIDTH for path in row] for row in paths], dtype=torch.float64)
    return Proposals(torch.tensor(tokens), torch.tensor(log_q), hidden)


def code(path):
    return sum((token + 1) * (TOKENS + 1) ** place for place, token in enumerate(path)) % 1_000_003


def grow(shape, table, rows=1, budget=None, active=(True,)):
    """Grow trees of which every pass finds its nodes' paths by what it is given, and checks it.

    Returns:
        The tree, and the number of passes.
    """
    device = torch.device("cpu")
    zeros = torch.zeros(rows, dtype=torch.int64)
    state = State(100 + zeros, zeros, torch.zeros(rows, WIDTH), (zeros == 0) & torch.tensor(active), None, zeros)
    state.budget = budget
    ran: list[list[tuple[int, ...]]] = [[] for _ in range(rows)]  # paths by number

    def run(frontier: Frontier):
        tokens, hidden, bitsets = frontier.tokens.tolist(), frontier.hidden.tolist(), frontier.ancestors
        total = frontier.first + shape.top_k
        seen = ancestor_mask(bitsets, total).tolist()
        assert frontier.first == len(ran[0]) == shape.top_k * (int(frontier.depth[0, 0]) - 1)
        assert bool((frontier.depth == frontier.depth[0, 0]).all()) and frontier.depth.dtype == torch.int32
        for row in range(rows):
            for place in range(shape.top_k):
                above = [number for number in range(frontier.first) if seen[row][place][number]]
                path = (*(ran[row][above[-1]] if above else ()), tokens[row][place])
                assert [ran[row][number] for number in above] == [path[:end] for end in range(1, len(path))]
                assert [n for n in range(frontier.first, total) if seen[row][place][n]] == [frontier.first + place]
                assert hidden[row][place] == [code(path[:-1])] * WIDTH
                ran[row].append(path)
        return proposals_of(table, [paths[-shape.top_k :] for paths in ran], shape.top_k)

    dynamic = DynamicTree(shape, rows, device)
    tree = dynamic.grow(state, proposals_of(table, [[()]] * rows, shape.top_k), run)
    return tree, 1 + len(ran[0]) // shape.top_k


SIZES = [(1, 1, 2), (1, 5, 4), (3, 1, 3), (3, 3, 9), (4, 4, 40), (2, 6, 23), (8, 4, 65), (6, 5, 129), (10, 6, 60)]


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("table", [quarters(0), quarters(1), certain, few], ids=["0", "1", "certain", "few"])
def test_a_tree_is_the_references(shape, table):
    shape = DynamicShape(*shape)
    tree, passes = grow(shape, table, rows=3)
    assert passes == shape.depth
    assert tree.tokens.shape == (3, shape.nodes) and tree.ancestors.shape[2] == -(-shape.nodes // 64)
    assert tree.acceptance is not None
    for row in range(3):
        expected = reference(row, table, shape)[1]
        assert paths_of(tree, row, 100) == [path for path, _ in expected]
        acceptance = tree.acceptance[row].tolist()
        assert acceptance[: len(expected)] == pytest.approx([math.exp(value) for _, value in expected])
        assert not any(acceptance[len(expected) :])


def test_no_connected_subset_of_the_candidates_is_likelier():
    shape = DynamicShape(2, 3, 5)
    for seed in range(20):
        table = quarters(seed)
        candidates, _ = reference(0, table, shape)
        probability = {path: math.exp(value) for path, value in candidates}
        best = max(
            sum(map(probability.__getitem__, subset))
            for subset in itertools.combinations(probability, shape.nodes)
            if () in subset and all(not path or path[:-1] in subset for path in subset)
        )
        tree, _ = grow(shape, table)
        assert sum(map(probability.__getitem__, paths_of(tree, 0, 100))) == pytest.approx(best)


def test_a_log_probability_above_0_counts_as_0():
    """As rounding may give: otherwise a child could be chosen without its parent."""

    def above(row, path, k):
        return [(rank, 1e-6 if len(path) else -0.1) for rank in range(k)]

    tree, _ = grow(DynamicShape(3, 3, 6), above)
    assert paths_of(tree, 0, 100) == [(), (0,), (1,), (2,), (0, 0), (0, 1)]


def test_a_trees_nodes_are_draws_of_at_most_branching():
    for shape in (DynamicShape(4, 3, 3), DynamicShape(4, 3, 20)):
        tree, _ = grow(shape, quarters(3))
        child = one_hot_draws(tree.parent, tree.valid, shape.branching).child
        assert sorted(child[child >= 0].tolist()) == list(range(1, shape.nodes))


class Levels:
    """A budget that allows a number of levels, and keeps what it was given."""

    def __init__(self, levels):
        self.levels, self.given = levels, []

    def another_level(self, source, acceptance, depth):
        self.given.append((source, acceptance, depth))
        return len(self.given) < self.levels


@pytest.mark.parametrize("levels", [1, 2, 3, 9])
def test_trees_end_where_the_budget_says(levels):
    """It is given the acceptance probabilities of all candidates so far, with their depth; the last level is not asked
    for."""
    shape, table, budget = DynamicShape(3, 4, 20), quarters(0), Levels(levels)
    tree, passes = grow(shape, table, rows=2, budget=budget)
    depth = min(levels, shape.depth)
    assert passes == depth and len(budget.given) == min(levels, shape.depth - 1)
    ended = DynamicShape(3, depth, min(20, DynamicShape(3, depth, 2).candidates))
    for row in range(2):
        candidates, kept = reference(row, table, ended)
        assert paths_of(tree, row, 100) == [path for path, _ in kept]
        for number, (source, acceptance, depths) in enumerate(budget.given, 1):
            known = [each for each in candidates if len(each[0]) <= number]
            assert source == 0 and acceptance.shape[1] == depths.shape[1] == len(known)
            assert acceptance[row].tolist() == pytest.approx([math.exp(value) for _, value in known])
            assert depths[0].tolist() == [len(path) for path, _ in known]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 1, 2), "top_k is 0; it has to be a whole number of at least 1"),
        ((2, 0, 2), "depth is 0; it has to be a whole number of at least 1"),
        ((2, 2, 1), "nodes is 1; it has to be a whole number of at least 2"),
        ((2, 2, 4.0), "nodes is 4.0; it has to be a whole number of at least 2"),
        ((True, 2, 4), "top_k is True"),
        ((2, 2, 8), "nodes is 8, but with top_k 2 and depth 2 there are only 7"),
        ((70, 2, 4097), "4097 nodes, of which at most 4096 can be verified"),
    ],
    ids=str,
)
def test_invalid_shapes(shape, message):
    with pytest.raises(ValueError, match="dynamic tree: ") as error:
        DynamicShape(*shape)
    assert message in str(error.value)


def test_more_tokens_than_the_draft_vocabulary_has():
    DynamicShape(4, 2, 8).check_outputs(4)
    with pytest.raises(ValueError, match="dynamic tree: top_k is 4, but the drafter chooses from 3 tokens"):
        DynamicShape(4, 2, 8).check_outputs(3)


def test_read_dynamic(tmp_path):
    path = tmp_path / "tree.json"
    with pytest.raises(FileNotFoundError, match=r"there is no such tree; make one with inference/calibrate\.py"):
        read_dynamic(path)
    for text in ("[[0], [0, 0]]", '{"paths": [[0]]}', "(0,), (0, 1)"):
        path.write_text(text)
        assert read_dynamic(path) is None
    shape = {"top_k": 3, "depth": 2, "nodes": 9}
    path.write_text(json.dumps({"paths": [[0]], "dynamic": shape}))
    assert read_dynamic(path) == DynamicShape(3, 2, 9)
    for wrong in ([3, 2, 9], None, {"top_k": 3, "depth": 2}, {**shape, "width": 3}, {**shape, "nodes": 90}):
        path.write_text(json.dumps({"dynamic": wrong}))
        with pytest.raises(ValueError, match="dynamic") as error:
            read_dynamic(path)
        assert str(error.value).startswith(f"{path}: ")


@pytest.fixture(scope="module")
def folder(tiny_lm, tmp_path_factory):
    """An untrained EAGLE drafter without a tree."""
    torch.manual_seed(1)
    target = load_target(str(tiny_lm), device="cpu", dtype="float32")
    untrained = Eagle.for_target(target, 3, "shared")
    folder = tmp_path_factory.mktemp("runs") / "eagle"
    write_drafter(folder, "eagle", untrained.config.to_dict(), untrained.state_dict(), target, {})
    return folder


@pytest.mark.parametrize(
    ("speeds", "chosen"), [((0.9, 1.1, 1.3, 1.2), 2), ((0.9, 1.01, 1.015, 1.0), None)], ids=["faster", "tied"]
)
def test_calibration_writes_a_dynamic_tree_that_is_faster(run_main, folder, tmp_path, monkeypatch, speeds, chosen):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "import os"}\n{"prompt": "def f("}\n')
    found: list[list[int]] = []

    def compare(target, drafters, texts, watch, lean):
        found.append([drafter.num_nodes for drafter in drafters])
        return [ComparedTree(shape, 1.5, speed) for shape, speed in zip(SHAPES, speeds, strict=True)]

    monkeypatch.setattr(tree_calibration, "compare_dynamic", compare)
    options = ("--prompts", prompts, "--max-new-tokens", 24, "--seconds", 1, "--device", "cpu")
    code, out, err = run_main(calibrate.main, folder, *options)
    assert code == 0, err
    tree = json.loads((folder / "tree.json").read_text())
    assert found == [[len(tree["paths"]) + 1, *(shape.nodes for shape in SHAPES)]]
    known = tree["calibration"]["dynamic"]
    assert [each["speedup_over_fixed"] for each in known] == list(speeds)
    shape = None if chosen is None else SHAPES[chosen]
    assert read_dynamic(folder / "tree.json") == shape and ("uses a dynamic tree" in out) == (shape is not None)
    _, drafter = load_drafter(str(folder), device="cpu", dtype="float32")
    assert drafter is not None
    assert drafter.num_nodes == (len(tree["paths"]) + 1 if shape is None else shape.nodes)
    code, out, err = run_main(calibrate.main, folder, *options, "--nodes", 4)
    assert code == 0 and len(found) == 1, err
    occurs(len(json.loads((folder / "tree.json").read_text())["paths"]) == 3, "fewer ranks were right")


def test_an_interrupted_comparison_keeps_the_fixed_tree(run_main, folder, tmp_path, monkeypatch):
    """Ctrl-C once ranks are counted loses no tree."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "import os"}\n{"prompt": "def f("}\n')

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tree_calibration, "compare_dynamic", interrupted)
    (folder / "tree.json").unlink(missing_ok=True)
    options = ("--prompts", prompts, "--max-new-tokens", 24, "--seconds", 1, "--device", "cpu")
    code, out, err = run_main(calibrate.main, folder, *options)
    assert code != 0 and "not compared with it: it was interrupted" in out and "Traceback" not in err, err
    assert read_dynamic(folder / "tree.json") is None and f"{folder / 'tree.json'}: " in out
    _, drafter = load_drafter(str(folder), device="cpu", dtype="float32")
    assert drafter is not None and drafter.num_nodes == len(json.loads((folder / "tree.json").read_text())["paths"]) + 1


def test_trees_are_compared_on_the_same_texts(folder, monkeypatch):
    target = load_target(read_drafter(str(folder))[1]["target"]["name_or_path"], device="cpu", dtype="float32")
    _, config, weights = read_drafter(str(folder))
    decoding = calibrations.eagle(folder, config, weights).decoding
    assert decoding is not None
    monkeypatch.setattr(tree_search, "SHAPES", (DynamicShape(30, 1, 31), DynamicShape(60, 2, 121)))
    prompts, calls = [[5, 6, 7, 8], [9, 8, 7], [4]], []
    trees = [chain(2), *tree_search.SHAPES]

    class TwoPrompts(Watch):
        def is_up(self):
            calls.append(None)
            return len(calls) == 2

    drafters = [decoding(target, tree) for tree in trees]
    compared = compare_dynamic(target, drafters, prompts, TwoPrompts(math.inf))
    assert 1.05 < compared[0].tau < compared[1].tau
    for shape, each in zip(tree_search.SHAPES, compared, strict=True):
        decoder = SpeculativeDecoder(target, decoding(target, shape))
        results = decoder.generate(prompts[:2], COMPARED_TOKENS, stop_ids=frozenset())
        assert each.shape == shape and each.speed > 0
        assert each.tau == 2 * (COMPARED_TOKENS - 1) / sum(len(result.accepted) for result in results)
    assert compare_dynamic(target, drafters, prompts, Watch(0.0)) == [], "no time for two prompts"
    assert compare_dynamic(target, drafters, prompts, Watch(60.0, 0.0)) == [], "no time to set up a second"
