"""The command step_times.py: its trees, the state before each step, the lower bound, what is written."""

import json
import shlex
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from draftsmith.benchmarks import step_times
from draftsmith.benchmarks.kernel_times import Device, quantiles
from draftsmith.benchmarks.step_times import Case, grow_tree, random_heads, take_turns, totals, works_of_step
from draftsmith.inference.engine.runner import ATTENTION
from draftsmith.inference.verify.tree import Topology
from draftsmith.kernels import cpu

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
    return step_times.random_target("small", 100, torch.float32, CPU)


@pytest.fixture(autouse=True)
def small_shape(monkeypatch):
    monkeypatch.setitem(step_times.SHAPES, "small", SMALL)


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
    assert tree.max_depth <= heads and tree.max_rank < step_times.MAX_RANK


def test_a_tree_holds_the_likeliest_paths():
    def probability(path):
        return 0.55 ** len(path) * 0.45 ** sum(path)

    tree = grow_tree(30, 3)
    every = [(a, b, c)[:depth] for a in range(10) for b in range(10) for c in range(10) for depth in (1, 2, 3)]
    best = sorted(map(probability, set(every)), reverse=True)[:29]
    assert sorted(map(probability, tree.paths), reverse=True) == pytest.approx(best)


def test_an_impossible_tree():
    with pytest.raises(ValueError, match="--nodes 12: 1 heads give trees of at most 11 nodes; raise --heads"):
        grow_tree(12, 1)


# ---- shapes


def test_shapes_have_the_sizes_of_their_models():
    from transformers import AutoModelForCausalLM

    sizes = {"llama2-7b": 6_738_415_616, "llama3-8b": 8_030_261_248}  # as published
    for name, size in sizes.items():
        with torch.device("meta"):
            assert AutoModelForCausalLM.from_config(LlamaConfig(**step_times.SHAPES[name])).num_parameters() == size
    assert LlamaConfig(**step_times.SHAPES["llama3-8b"]).rope_parameters["rope_theta"] == 5e5


def test_the_bundled_shape():
    target = step_times.random_target("tiny-lm", 500, torch.float32, CPU)
    config = json.loads((Path(__file__).parents[2] / "models/tiny-lm/config.json").read_text())
    for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"):
        assert getattr(target.config, field) == config[field]
    assert (target.context, target.dtype, target.lm_head.weight.std() > 0.01) == (500, torch.float32, True)


def test_what_does_not_fit_is_a_memory_error(monkeypatch):
    monkeypatch.setattr(step_times.psutil, "virtual_memory", lambda: SimpleNamespace(available=1e9))
    with pytest.raises(MemoryError, match=r"^needs 27.0 GB, 1.0 GB are free$"):
        step_times.random_target("llama2-7b", 100, torch.float32, CPU)


# ---- the least that a step could take


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_required_work_by_hand(dtype):
    """Two layers, width 32, MLP 48, 4 heads and 2 K/V heads of width 8, vocabulary 61."""
    target = step_times.random_target("small", 100, dtype, CPU)
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


def test_the_target_runs_a_whole_tree(running):
    target = running(small_target())
    case, seen = Case(target, random_heads(target, 3, "shared"), grow_tree(7, 3), 2, 20), []
    target.decoder.embed_tokens.register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
    case.take(1)
    assert seen == [(2, 7)]


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
    assert length.tolist() == [tree.depths[paths.index(path)]] * batch
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


def test_a_chain_moves_nothing(running):
    target = running(small_target())
    case = Case(target, random_heads(target, 3, "shared"), grow_tree(3, 3), 1, 20)
    assert case.topology.paths == ((0,), (0, 0)) and case.moving_commit(2) == (0, None)


def test_quantiles():
    assert quantiles([4.0, 0.0, 3.0, 1.0, 2.0, 10.0]) == pytest.approx((2.5, 1.0, 4.0))


# ---- the command


@pytest.fixture
def quick(monkeypatch):
    """Known limits, and no garbage collection, which is slow in a large process."""
    monkeypatch.setattr(step_times, "release", lambda: None)
    monkeypatch.setattr(step_times, "measure_device", lambda *args: Device(5e9, 7e9))


def test_the_command(run_main, quick, tmp_path):
    out = tmp_path / "new" / "step.json"
    arguments = ["--shape", "small", "--device", "cpu", "--threads", 1, "--nodes", 6, 3, "--batches", 1, 2,
                 "--contexts", 9, 17, "--projection", "own", "shared", "--heads", 3, "--repeat", 3,
                 "--out", out]  # fmt: skip
    code, printed, err = run_main(step_times.main, *arguments)
    assert code == 0 and "left out" not in err and f"wrote {out}" in err
    assert "phases" in printed and "measured" not in printed, "the tables alone are on stdout"
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    report = json.loads(out.read_text())
    assert report["limits"] == {"small": {"bandwidth": 5e9, "matmul_rate": 7e9}}
    assert report["dtype"] == "float32" and report["device"].endswith("1 threads")
    assert "torch" in report["versions"]
    assert report["command"] == "python benchmarks/step_times.py " + shlex.join(map(str, arguments))
    rows = report["rows"]
    wanted = [
        (batch, context, projection, nodes)
        for batch in (1, 2)
        for context in (9, 17)
        for projection, nodes in ((None, 1), ("own", 3), ("own", 6), ("shared", 3), ("shared", 6))
    ]
    assert [(r["batch"], r["context"], r["projection"], r["nodes"]) for r in rows] == wanted
    target = small_target()
    for row in rows:
        (plain,) = (r for r in rows if (r["batch"], r["context"], r["nodes"]) == (row["batch"], row["context"], 1))
        assert row["ratio"] == row["median"] / plain["median"]
        assert 0 < row["low"] <= row["median"] <= row["high"]
        tree = grow_tree(row["nodes"], 3)
        heads = random_heads(target, 3, row["projection"]) if row["projection"] else None
        assert (row["bytes"], row["flops"]) == required_work(target, heads, tree, row["batch"], row["context"])
        assert row["depth"] == tree.max_depth and row["execution"] == "eager, lean decoder"
        assert row["bound"] == pytest.approx(max(row["bytes"] / 5e9, row["flops"] / 7e9))
        assert row["bound_by"] == ("bytes" if row["bytes"] / 5e9 > row["flops"] / 7e9 else "flops")
        assert row["of_bound"] == pytest.approx(row["bound"] / row["median"])
        assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["median"])
        assert row["flops_per_second"] == pytest.approx(row["flops"] / row["median"])
        seconds = row["seconds"]
        others = seconds["draft"] + seconds["accept"] + seconds["commit"] + seconds["other"]
        assert row["outside_target"] == pytest.approx(others / (others + seconds["verify"]))
        moving = row["moving_commit"]
        assert (moving["nodes"] > 0) == (row["nodes"] == 6) == (moving["seconds"] is not None)  # the others are chains
    assert {row["bound_by"] for row in rows} == {"bytes", "flops"}, "both limits were met"


def test_steps_that_are_no_graph_replays_are_refused_on_request(run_main, quick, running, tmp_path):
    """A step on the CPU is no graph replay."""
    out = tmp_path / "step.json"
    common = ["--shape", "small", "--device", "cpu", "--threads", 1, "--repeat", 2, "--contexts", 9, "--heads", 3]
    code, _, err = run_main(step_times.main, *common, "--nodes", 3, "--graphs", "--out", out)
    assert code == 2 and not out.exists()
    assert err.splitlines()[-1] == (
        "error: --graphs: 0 of 5 steps with 1 nodes were replayed from a CUDA graph (eager, lean decoder); leave out "
        "--graphs to measure them anyway"
    )
    target = running(small_target())
    case = Case(target, None, grow_tree(1, 3), 1, 9)
    case.check_graphs()  # nothing was launched
    case.step.eager, case.step.advance = "", case.step.run  # as on a GPU, where a replay does what ``run`` does
    case.take(2)
    assert (case.steps, case.replays) == (2, 2)
    case.check_graphs()
    case.step.eager = "eager: a capture that failed"
    case.take(1)
    with pytest.raises(ValueError, match=r"^--graphs: 2 of 3 steps .* \(eager: a capture that failed, lean decoder\)"):
        case.check_graphs()


def test_a_profile(run_main, quick, monkeypatch, tmp_path):
    """Of PyTorch's operations; those of kernels/cpu.cpp are one call, which no profile sees."""
    monkeypatch.setattr(cpu, "runs", lambda tensor: False)
    out, profile = tmp_path / "step.json", tmp_path / "new" / "profile.txt"
    common = "--shape small --device cpu --threads 1 --repeat 1 --contexts 9 --nodes 3 --heads 3".split()
    code, _, _ = run_main(step_times.main, *common, "--profile", profile, "--out", out)
    assert code == 0
    text, rows = profile.read_text(), json.loads(out.read_text())["rows"]
    for row in rows:
        found = row["profile"]
        title = f"small, eager, lean decoder, batch 1, context 9, {row['nodes']} nodes: one eager step, "
        assert f"{title}{found['kernels']} kernels, {found['seconds'] * 1e3:.3f} ms in them\n" in text
        assert found["kernels"] > 50 and 0 < found["seconds"] < 10
    assert rows[1]["profile"]["kernels"] > rows[0]["profile"]["kernels"], "drafting and acceptance come on top"
    assert text.count("aten::mm") + text.count("aten::addmm") >= 2


def test_a_stored_target(run_main, quick, tiny_lm):
    common = ["--target", tiny_lm, "--device", "cpu", "--threads", 1, "--repeat", 1, "--nodes", 1]
    code, printed, err = run_main(step_times.main, *common, "--contexts", 255)
    assert code == 0 and " 255  1 " in printed
    code, _, err = run_main(step_times.main, *common, "--contexts", 256)
    assert code == 2 and err.startswith("precision: float32 weights (") and len(err.splitlines()) == 2
    assert err.endswith("\nerror: --contexts 256: with the tree this exceeds the target's context of 256; lower it\n")


def test_what_does_not_fit_is_left_out(run_main, quick, monkeypatch, tmp_path):
    free = SimpleNamespace(available=200_000)  # bytes: the model has 70 kB, a token's K/V 256 bytes
    monkeypatch.setattr(step_times.psutil, "virtual_memory", lambda: free)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--shape llama9", f"--shape llama9: unknown; use {', '.join([*step_times.SHAPES, 'small'])}"),
        ("--target no/such/folder", "'no/such/folder': there is no such folder, and a Hub id would be USER/NAME"),
        ("--shape small --repeat 0", "--repeat 0: must be at least 1"),
        ("--shape small --heads 1 --nodes 99", "--nodes 99: 1 heads give trees of at most 11 nodes; raise --heads"),
        ("--shape small --device gpu", "device 'gpu': unknown; use cpu, cuda or cuda:N"),
        ("--shape small --nodes 5000", "--nodes 5000: must be at most 4096"),
        ("--shape small --contexts 1000000000000", "--contexts 1000000000000: must be at most 2147483647"),
        ("--shape small --out x.png", "--out x.png: name a .json file"),
    ],
)
def test_bad_input(run_main, arguments, message):
    assert run_main(step_times.main, "--device", "cpu", *arguments.split()) == (2, "", f"error: {message}\n")


def test_without_a_gpu(run_main):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    code, _, err = run_main(step_times.main, "--shape", "small", "--device", "cuda")
    assert code == 2 and err.startswith("error: device 'cuda': this torch sees no GPU; ") and err.count("\n") == 1


def test_what_a_cpu_can_do():
    best = step_times.measure_device(CPU, torch.float32, 1 << 20)
    assert 1e5 < best.bandwidth < 1e13 and 1e5 < best.matmul_rate < 1e14, "whatever else the machine does"
