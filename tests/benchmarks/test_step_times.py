"""Steps of step_times.py: their trees, the state before each, the least that they could take; what does not fit."""

import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from draftsmith.benchmarks import shapes, step_times
from draftsmith.benchmarks.shapes import grow_tree, random_heads, random_target, totals, works_of_step
from draftsmith.benchmarks.step_times import Case, take_turns
from draftsmith.inference.engine.runner import ATTENTION
from draftsmith.inference.verify.tree import Topology

pytestmark = pytest.mark.measurement

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def required_work(*step):
    return totals(works_of_step(*step))


def small_target():
    return random_target("small", 100, torch.float32, CPU)


@pytest.fixture(autouse=True)
def small_shape(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "small", SMALL)


@pytest.fixture
def running():
    """``running(target)``: enter the contexts that a step needs, until the test ends; returns the target."""
    with torch.inference_mode(), ExitStack() as stack:
        yield lambda target: stack.enter_context(target.attention(ATTENTION)) or target


# ---- trees


@pytest.mark.parametrize(("nodes", "heads"), [(1, 5), (2, 1), (4, 2), (11, 1), (64, 5), (200, 3)])
def test_a_tree_has_as_many_nodes_as_asked_for(nodes, heads):
    tree = grow_tree(nodes, heads)
    assert tree.num_nodes == nodes
    assert tree.max_depth <= heads and tree.max_rank < shapes.MAX_RANK


def test_a_tree_holds_the_likeliest_paths():
    def probability(path):
        return 0.55 ** len(path) * 0.45 ** sum(path)

    tree = grow_tree(30, 3)
    every = [(a, b, c)[:depth] for a in range(10) for b in range(10) for c in range(10) for depth in (1, 2, 3)]
    best = sorted(map(probability, set(every)), reverse=True)[:29]
    assert sorted(map(probability, tree.paths), reverse=True) == pytest.approx(best)


# ---- shapes


def test_shapes_have_the_sizes_of_their_models():
    from transformers import AutoModelForCausalLM

    sizes = {"llama2-7b": 6_738_415_616, "llama3-8b": 8_030_261_248}  # as published
    for name, size in sizes.items():
        with torch.device("meta"):
            assert AutoModelForCausalLM.from_config(LlamaConfig(**shapes.SHAPES[name])).num_parameters() == size
    assert LlamaConfig(**shapes.SHAPES["llama3-8b"]).rope_parameters["rope_theta"] == 5e5


# ---- the least that a step could take


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_required_work_by_hand(dtype):
    """Two layers, width 32, MLP 48, 4 heads and 2 K/V heads of width 8, vocabulary 61."""
    target = random_target("small", 100, dtype, CPU)
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48  # q, k + v, o, MLP
    matrices = 2 * layer + 61 * 32
    norms = (2 * 2 + 1) * 32
    kv = 2 * 2 * 2 * 8  # elements of a token: layers, K and V, heads, width

    def attention(keys):  # q · k, then times v, in both layers
        return 2 * 2 * keys * 4 * 8

    plain = required_work(target, None, Topology(()), 3, 10)
    assert plain == (dtype.itemsize * (matrices + norms + 3 * 10 * kv), 2 * 3 * (matrices + attention(10 + 1)))

    tree = Topology(((0,), (0, 0), (1,)))  # four nodes that see 1, 2, 3 and 2 nodes; two of the heads are run
    for projection in ("shared", "own"):
        size, flops = required_work(target, random_heads(target, 5, projection), tree, 3, 10)
        blocks, logits = 2 * 32 * 32, 2 * 61 * 32
        own = logits if projection == "own" else 61 * 32  # a shared LM head is read again
        assert size == plain[0] + dtype.itemsize * (blocks + 2 * 32 + own)
        assert flops == 2 * 3 * (4 * matrices + attention(4 * 10 + 8) + blocks + logits)


def test_required_work_of_other_families(make_target):
    """A tied LM head counts once, and embeddings not at all; windows limit what has to be read."""
    target = make_target("gpt2")
    layer = 4 * 32 * 32 + 4 * 32 + 8 * 32 * 32 + 5 * 32 + 4 * 32  # matrices and biases, two norms
    assert required_work(target, None, Topology(()), 1, 10)[0] == 4 * (2 * layer + 2 * 32 + 61 * 32 + 10 * 2 * 2 * 32)
    mistral = make_target("mistral")  # a window of 8
    assert required_work(mistral, None, Topology(()), 1, 100) == required_work(mistral, None, Topology(()), 1, 8)


# ---- steps


@pytest.mark.parametrize(("nodes", "batch"), [(1, 1), (1, 2), (6, 1), (6, 2)])
def test_every_step_sees_the_context(running, nodes, batch):
    """Every timed step starts with the asked number of cached tokens and the same roots and features."""
    target = running(small_target())
    torch.manual_seed(0)
    heads = random_heads(target, 3, "own") if nodes > 1 else None
    case = Case(target, heads, grow_tree(nodes, 3), batch, 20)
    propose, began, ended = case.step.drafter.propose, [], []

    def watch(state):
        began.append((state.length.tolist(), state.root.tolist(), state.feature.clone()))
        return propose(state)

    case.step.drafter.propose = watch
    run = case.step.run
    case.step.run = lambda *observe: (run(*observe), ended.append(case.step.cache.lengths.tolist()))
    (times,) = take_turns([case], 8)
    assert len(times) == 8 and min(times) > 0
    phases = case.phases(2)
    assert len(began) == 3 + 8 + 3
    for lengths, roots, feature in began:
        assert lengths == [20] * batch and roots == case.root.tolist()
        assert torch.equal(feature, case.feature)
    assert all(min(lengths) > 20 for lengths in ended), "each step committed something"
    assert set(phases) == {"draft", "verify", "accept", "commit", "other"} and min(phases.values()) > 0
    assert case.step.cache.capacity >= 20 + nodes + 2 * (case.topology.max_depth + 1)
    for layer in case.step.cache.layers:  # the prefix is not left empty
        for part in (layer.keys, layer.values):
            assert part[:, :, :20].count_nonzero() == batch * 2 * 20 * 8 and 0.8 < part[:, :, :20].std() < 1.2


@pytest.mark.parametrize("batch", [1, 2])
def test_the_commit_moves_nodes(running, batch):
    target = running(small_target())
    tree = grow_tree(9, 3)
    case = Case(target, random_heads(target, 3, "shared"), tree, batch, 20)
    before = case.step.cache.layers[1].keys.clone()
    commit, given = case.step.cache.commit, []
    case.step.cache.commit = lambda path, length: (commit(path, length), given.append((path, length)))
    moved, seconds = case.moving_commit(1)
    paths = [[0]]
    for node, above in enumerate(tree.parents[1:], 1):
        paths.append([*paths[above], node])
    (path,) = [p for p in paths if sum(a != b for a, b in enumerate(p)) == moved][:1]
    assert moved == max(sum(a != b for a, b in enumerate(p)) for p in paths) >= 2 and seconds > 0
    ((_, length),) = given  # which is all that a kernel looks at
    assert length.tolist() == [len(path) - 1] * batch
    after = case.step.cache.layers[1].keys
    assert torch.equal(after[:, :, 20 : 20 + len(path)], before[:, :, [20 + node for node in path]])
    assert torch.equal(after[:, :, :20], before[:, :, :20])


def test_cases_are_timed_in_turn(monkeypatch):
    """Turns of five steps, after three warm-up steps that are not timed."""
    turns = []

    def case(number):
        return SimpleNamespace(take=lambda count: turns.append((number, count)) or [float(number)] * count)

    assert take_turns([case(1), case(2)], 7) == [[1.0] * 7, [2.0] * 7]
    assert turns == [(1, 3), (2, 3), (1, 5), (2, 5), (1, 2), (2, 2)]
    turns.clear()
    assert take_turns([case(1)], 7) == [[1.0] * 7] and turns == [(1, 3), (1, 7)]


# ---- the command


def test_steps_that_are_no_graph_replays_are_refused(running):
    """As --graphs asks. On a GPU a replay does what ``run`` does."""
    case = Case(running(small_target()), None, grow_tree(1, 3), 1, 9)
    case.check_graphs()  # nothing was launched
    case.step.eager, case.step.advance = "", lambda clock: case.step.run()
    case.take(2)
    case.check_graphs()
    case.step.eager = "eager: a capture that failed"
    case.take(1)
    with pytest.raises(ValueError, match=r"^--graphs: 2 of 3 steps .* \(eager: a capture that failed, lean decoder\)"):
        case.check_graphs()


def test_what_does_not_fit_is_left_out(run_main, monkeypatch, tmp_path):
    free = SimpleNamespace(available=200_000)  # bytes: the model has 70 kB, a token's K/V 256 bytes
    monkeypatch.setattr(shapes, "free_bytes", lambda device: free.available)
    out = tmp_path / "step.json"
    common = ["--shape", "small", "--device", "cpu", "--threads", 1, "--repeat", 1, "--nodes", 1, 3, "--out", out]
    code, _, err = run_main(step_times.main, *common, "--contexts", 1000, 9)
    assert (code, err.count("left out")) == (0, 1)
    assert "left out: small, batch 1, context 1000, 1 3 nodes: needs 0.0 GB" in err
    assert [row["context"] for row in json.loads(out.read_text())["rows"]] == [9, 9]
    free.available = 1000
    code, _, err = run_main(step_times.main, *common)
    assert (code, err.count("left out: small: needs")) == (2, 1)
    assert err.endswith("\nerror: nothing fits into memory; take smaller --batches, --contexts or another --dtype\n")
