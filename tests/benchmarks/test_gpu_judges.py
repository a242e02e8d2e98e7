"""The judges of the GPU parts: goals by the roofline, wrong results, what a killed part has not measured."""

import json

import pytest

from draftsmith.benchmarks.gpu import judges

pytestmark = pytest.mark.measurement

LIMITS = {"bandwidth": 4e12, "matmul_rate": 1e15}
REPORT = {  # of decode.py
    "execution": "cuda graph, lean decoder",
    "mean_accepted_length": 2.0,
    "speedup": 1.5,
    "lossless": {"passed": True, "checked": 99, "near_ties": 1, "mismatches": 0},
}
TOLD = "τ 2.00, 1.50 × plain, cuda graph, lean decoder, 99 tokens checked, 1 near-ties"  # of it


@pytest.fixture
def write(tmp_path):
    """``write(place, content)``: a file of results below tmp_path."""

    def write(place, content):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(json.dumps(content))

    return write


def step_row(nodes, projection, median, ratio=1.0, operations=1e12):
    """12 GB of products at 4 TB/s and 330 kernels: 3 ms + 429 µs; attention of 4 GB, or of so many operations."""
    products = {"moved": 12e9, "operations": 1e9, "launches": 330}
    work = [products, {"moved": 4e9, "operations": operations, "launches": 0}]
    case = {"shape": "llama3-8b", "context": 1024, "nodes": nodes, "projection": projection}
    return case | {"median": median, "ratio": ratio, "work": work}


def kernel_row(kernel, way, shape, us, moved, operations=0.0, difference=0.0):
    row = {"kernel": kernel, "way": way, "shape": shape, "median_us": us}
    return row | {"moved": moved, "operations": operations, "difference": difference}


def test_goals_of_steps(tmp_path, write):
    """Bytes at 87 % of the bandwidth (3 ms: 3.45 ms), products at 60 % of the rate (2 ms: 3.33 ms), and kernels."""

    def judged(plain, many, other=0.0, **more):
        rows = [
            step_row(1, None, plain),
            step_row(16, "shared", other),
            step_row(64, "shared", many, many / plain, 2e12),
            step_row(64, "own", 0.0),
        ]
        write("step/step.json", {"rows": rows, "limits": {"llama3-8b": LIMITS}, "planned": 4} | more)
        return judges.judge_step(tmp_path, False)

    found = judged(5.0e-3, 7.2e-3)
    assert found.met and found.value == (
        "llama3-8b at 1024: plain 5.00 ms = 1.13 × floor (goal 1.13); 64 nodes 7.20 ms = 1.33 × floor, 1.44 × plain "
        "(goal 1.43); 4 of 4 steps at their goals"
    )
    assert not judged(5.03e-3, 7.2e-3).met and not judged(5.0e-3, 7.22e-3).met
    found = judged(5.0e-3, 7.2e-3, 5.1e-3)
    assert not found.met and "; 16 nodes 5.10 ms = 1.15 × floor, 1.00 × plain (goal 1.00); 64 nodes 7.20" in found.value
    found = judged(5.0e-3, 7.2e-3, planned=20)
    assert found.met and found.missing == "16 of 20 figures are missing"


def test_goals_beside_steps(tmp_path, write):
    ours = [step_row(1, None, 5e-3), step_row(64, "shared", 6e-3)]
    write("step/step.json", {"rows": ours})
    for more, met in ((1e-5, True), (-1e-5, False)):
        theirs = [ours[0] | {"median": ours[0]["median"] + 1e-5}, ours[1] | {"median": ours[1]["median"] + more}]
        write("lean/step.json", {"rows": theirs, "planned": 4})
        found = judges.judge_lean(tmp_path, False)
        assert found.met is met and found.missing == "2 of 4 figures are missing"
    write("lean/step.json", {"rows": []})
    with pytest.raises(ValueError, match="no step was measured both ways"):
        judges.judge_lean(tmp_path, False)


def test_goal_of_kernels_in_a_step(tmp_path, write):
    """15 in each of 32 layers and 40 around them."""
    for kernels, met in ((520, True), (521, False)):
        rows = [{"nodes": 1, "median": 4e-3, "profile": {"kernels": n, "seconds": 3e-3}} for n in (100, kernels)]
        write("profile/step.json", {"rows": rows})
        found = judges.judge_profile(tmp_path, False)
        assert found.met is met and f"1 nodes: {kernels}, 3.00 ms in them, step 4.00 ms" in found.value


def test_a_product_is_whole(tmp_path, write):
    """The parts that another kernel adds up are not compared with torch.mm."""
    ways = {"torch.mm": 12.0, "4 x 64": 10.0, "parts: 4 x 64": 8.0}
    rows = [kernel_row("few_rows", way, {"M": 1, "K": 4096}, us, moved=28e6) for way, us in ways.items()]
    write("products/kernels.json", {"bandwidth": 4e12, "shapes": {"done": 1, "planned": 1}, "rows": rows})
    found = judges.judge_products(tmp_path, False)
    assert found.value == "1 rows: 70%–70% of the bandwidth, 1.20–1.20 × torch.mm"


def test_goals_of_kernels(tmp_path, write):
    """K and V of 4 GB at 4 TB/s: 1 ms; products of 2 T at 1 P/s: 2 ms; what takes less than 30 µs is not judged."""

    def row(way, nodes, ms, difference=0.01, context=8192, moved=4e9, operations=1e11):
        shape = {"B": 1, "L": context} | ({"N": nodes} if nodes else {"T": 512})
        return kernel_row("attention", way, shape, ms * 1e3, moved, operations, difference)

    def judged(*rows, done=9):
        write("kernel-bench/kernels.json", {"rows": rows, **LIMITS, "shapes": {"done": done, "planned": 9}})
        return judges.judge_kernels(tmp_path, False)

    few = [row("SDPA", 16, 1.3), row("flex_attention", 16, 1.4), row("plan", 16, 9.0)]
    many = [row("SDPA", 64, 4.0), row("flex_attention", 64, 3.85), row("flashinfer", 64, 3.4)]
    small = {"moved": 5e6, "operations": 1.14e9, "context": 1024}  # of 64 nodes: 1.45 µs of products at most
    short = [row("SDPA", 64, 0.02, **small), row("triton", 64, 0.015, **small)]
    found = judged(*few, row("triton", 16, 1.16), *many, row("triton", 64, 3.2, operations=2e12), *short)
    assert found.met and not found.missing
    assert found.value.startswith("86%–86% of the bandwidth; 62%–62% of the matrix rate; below the goal in 0, slower")
    ragged = [row("SDPA, ragged", 16, 1.0), row("triton, ragged", 16, 1.1)]
    found = judged(*few, row("triton", 16, 1.19), *many, row("triton", 64, 3.5, operations=2e12), *ragged, done=5)
    assert not found.met and found.missing == "4 of 9 shapes are missing"
    assert found.facts == {
        "below": ["B=1 L=8192 N=16 (84% of the bandwidth)", "B=1 L=8192 N=64 (57% of the matrix rate)"],
        "slower": ["B=1 L=8192 N=64 (1.03 ×)", "B=1 L=8192 N=16 ragged (1.10 ×)"],
    }
    for wrong in (3.0, float("nan")):
        with pytest.raises(ValueError, match="attention, triton, .*: difference"):
            judged(*few, row("triton", 16, 1.2, wrong))


def test_goals_of_training_and_decoding(tmp_path, write):
    for shares, met in (((0.51, 0.46), True), ((0.49, 0.46), False), ((0.51, 0.44), False), ((0.51,), True)):
        rows = [
            {"stage": stage, "of_matmul_rate": share, "hours_per_70M_tokens": 0.9, "peak_memory_bytes": 4e10}
            for stage, share in zip(("medusa-1", "medusa-2"), shares, strict=False)
        ]
        write("train-step/train.json", {"results": rows, "shape": {"stages": ["medusa-1", "medusa-2"]}})
        found = judges.judge_training(tmp_path, False)
        assert found.met is met and bool(found.missing) is (len(shares) < 2)
    report, judge = REPORT | {"drafter": "draft_model:a/b+ngram"}, judges.judge_decode("decode", 1)
    write("decode/x/report.json", report)
    assert judge(tmp_path, False).value == f"b+ngram: {TOLD}"
    for wrong, message in (
        ({"execution": "eager: no"}, r"b\+ngram: steps ran eager: no"),
        ({"lossless": {**report["lossless"], "passed": False, "mismatches": 3}}, "3 mismatches in 99 tokens"),
    ):
        write("decode/x/report.json", report | wrong)
        with pytest.raises(ValueError, match=message):
            judge(tmp_path, False)
    write("same-bits/report.json", report | {"lossless": {**report["lossless"], "bitwise": False}})
    with pytest.raises(ValueError, match="the bits of a row depended on other rows"):
        judges.judge_decode("same-bits", 1, exact=True)(tmp_path, False)


def test_goals_of_ssms(tmp_path, write):
    def report(place, **more):
        write(f"{place}/report.json", REPORT | {"drafter": "draft_model:a"} | more)

    for two, one, met in ((120.0, 100.0, True), (99.0, 100.0, False)):
        report("ssm-streams/two", tokens_per_second=two)
        report("ssm-streams/one", tokens_per_second=one)
        assert judges.judge_streams(tmp_path, False).met is met
    report("ssm-streams/one", tokens_per_second=100.0, execution="eager: no")
    with pytest.raises(ValueError, match="a: steps ran eager: no"):
        judges.judge_streams(tmp_path, False)
    (tmp_path / "ssm-streams" / "one" / "report.json").unlink()
    found = judges.judge_streams(tmp_path, False)
    assert found.met is None and found.missing == "1 of 2 figures are missing" and found.value.startswith("τ 2.00, ")
    report("ssm-claim", speedup=2.5, execution="eager, transformers decoder")
    found = judges.judge_decode("ssm-claim", 1, graphs=False)(tmp_path, False)
    assert found.value.startswith("draft_model:a: τ 2.00, 2.50 × plain, eager, ") and not found.missing


def test_goals_of_eagle(tmp_path, write):
    """Both trees are the target's own text, in CUDA graphs; seven unrolled steps are as fast, and smaller."""

    def report(tree, **more):
        write(f"eagle-decode/{tree}/report.json", REPORT | {"drafter": "a/eagle"} | more)

    write("models/eagle/tree.json", {"paths": [[0], [0, 0]]})
    metrics = '{"tokens_per_second": 9000, "loss": 1}\n{"simulated_tau": 2.5}\n'
    (tmp_path / "models" / "eagle" / "metrics.jsonl").write_text(metrics)
    found = judges.judge_drafter("eagle", "simulated_tau")(tmp_path, False)
    assert found.met is None and found.value == "simulated τ 2.50, 9,000 tokens/s; calibrated tree of 3 nodes"
    report("fixed")
    assert judges.judge_eagle_decode(tmp_path, False).missing == "1 of 2 figures are missing"
    report("dynamic", speedup=1.25)
    found = judges.judge_eagle_decode(tmp_path, False)
    assert found.met is None and not found.missing
    assert found.value == f"fixed tree: {TOLD}; dynamic tree: {TOLD.replace('1.50', '1.25')}"
    report("dynamic", execution="eager: no")
    with pytest.raises(ValueError, match="eagle: steps ran eager: no"):
        judges.judge_eagle_decode(tmp_path, False)

    def judged(*rows):
        results = [
            {
                "steps": steps,
                "ratio": ratio,
                "seconds": {"draftsmith": 0.1 * ratio, "dense": 0.1},
                "peak_memory_bytes": {"draftsmith": memory, "dense": 2e9 if memory else None},
            }
            for steps, ratio, memory in rows
        ]
        write("eagle-unroll/unroll.json", {"results": results, "shape": {"steps": [1, 7]}})
        return judges.judge_unroll(tmp_path, False)

    found = judged((1, 1.4, 3e9), (7, 1.0, 1.9e9))
    assert found.met and not found.missing
    assert found.value == (
        "1 steps: 140.0 ms = 1.40 × dense attention's, 3.0 GB instead of 2.0; 7 steps: 100.0 ms = 1.00 × dense "
        "attention's, 1.9 GB instead of 2.0"
    )
    assert judged((7, 1.0, 1.9e9)).missing == "1 of 2 figures are missing"
    for wrong in ((7, 1.03, 1.9e9), (7, 0.9, 2e9), (4, 0.5, 1e9), (7, 0.5, None)):
        assert not judged(wrong).met


def test_goals_of_shortlists(tmp_path, write):
    """A fifth of the rows, 0.2 GB at 4 TB/s: 50 µs; the small head's 11 MB take 3 µs, which is not judged."""

    def row(way, vocabulary, width, nodes, us, difference):
        moved = (2e8 if width == 4096 else 1.1e7) * (1 if way == "shortlist" else 5)
        shape = {"V": vocabulary, "d": width, "n": nodes}
        return kernel_row("shortlist", way, shape, us, moved, difference=difference)

    def judged(us, vocabularies=((128256, 262144), (49152,)), rehearsal=False, difference=0.01):
        for width, numbers in zip((4096, 576), vocabularies, strict=True):
            rows = [
                row(way, vocabulary, width, nodes, time, difference)
                for vocabulary in numbers
                for nodes in (1, 8)
                for way, time in (
                    ("full head", 300.0),
                    ("shortlist", us if (vocabulary, nodes) == (262144, 8) else 60.0),
                    ("shortlist, topk", 999.0),
                )
            ]
            shapes = {"done": 2 * len(numbers), "planned": 4 if width == 4096 else 2}
            write(f"shortlist/{width}.json", {"rows": rows, **LIMITS, "shapes": shapes})
        return judges.judge_shortlist(tmp_path, rehearsal)

    found = judged(63.0)
    assert found.met and found.value.startswith("128256 × 4096, 1 nodes: 0.20 × full, 83% of the bandwidth; ")
    assert found.value.endswith("; 49152 × 576, 8 nodes: 0.20 × full") and found.facts is not None
    assert len(found.facts["medians"]) == 18 and found.facts["medians"][2]["way"] == "shortlist, topk"
    found = judged(65.0)
    assert not found.met and found.facts["below"] == ["262144 × 4096, 8 nodes (77% of the bandwidth)"]
    found = judged(63.0, vocabularies=((128256,), (49152,)))  # the larger one did not fit into memory
    assert found.met and found.missing == "2 of 6 shapes are missing"
    for wrong, rehearsal in ((0.06, False), (float("nan"), False), (2e-3, True)):
        with pytest.raises(ValueError, match=r"full head, \{'V': 128256, .*\}: difference"):
            judged(62.0, difference=wrong, rehearsal=rehearsal)
    judged(63.0)
    (tmp_path / "shortlist" / "576.json").unlink()
    assert judges.judge_shortlist(tmp_path, False).missing == "1 of 2 figures are missing"


def test_goals_of_dynaspec(tmp_path, write):
    """The shortlists, the drafter that they are for, and the shortlists on one stream: all their target's text."""
    write("models/dynaspec/provenance.json", {"simulated_tau": 2.4, "whole_simulated_tau": 2.5})

    def report(place, model, **more):
        drafter = str(judges.model_folder(tmp_path, model, False))
        write(f"dynaspec/{place}/report.json", REPORT | {"drafter": drafter} | more)

    report("two/eagle", "eagle", tokens_per_second=500.0, mean_accepted_length=2.1, speedup=1.75)
    report("two/dynaspec", "dynaspec", tokens_per_second=98.0)
    assert judges.judge_dynaspec(tmp_path, False).missing == "1 of 3 figures are missing"  # that on one stream
    for one, met in ((80.0, True), (101.0, True), (102.0, False)):
        report("one", "dynaspec", tokens_per_second=one)
        found = judges.judge_dynaspec(tmp_path, False)
        assert found.met is met
    whole = TOLD.replace("2.00", "2.10").replace("1.50", "1.75")
    assert found.value == (
        f"simulated τ 2.40, with the whole LM head 2.50; shortlists: {TOLD}; whole LM head: {whole}; shortlists on one "
        f"stream: {TOLD}; 98 tokens/s with a stream for the router, 102 without (0.96 ×)"
    )
    report("one", "dynaspec", tokens_per_second=98.0, execution="eager: no")
    with pytest.raises(ValueError, match="dynaspec: steps ran eager: no"):
        judges.judge_dynaspec(tmp_path, False)
    report("one", "dynaspec", tokens_per_second=98.0)
    wrong = {**REPORT["lossless"], "passed": False, "mismatches": 3}
    report("two/eagle", "eagle", tokens_per_second=500.0, lossless=wrong)
    with pytest.raises(ValueError, match="eagle: 3 mismatches in 99 tokens"):
        judges.judge_dynaspec(tmp_path, False)


def test_serving(tmp_path, write):
    """Every sentence is reported; texts are plain decoding's, and steps run in graphs."""
    right = {
        "batches": [{"sentences": ["1 row: pays"]}, {"sentences": ["8 rows: does not"]}],
        "texts": {"eagle": {"mismatches": 0}},
        "execution": {"eagle": "cuda graph, lean decoder"},
        "planned": 2,
    }
    write("serving/serving.json", right)
    assert judges.judge_serving(tmp_path, False).value == "1 row: pays; 8 rows: does not"
    write("serving/serving.json", right | {"texts": {}, "batches": right["batches"][:1]})
    assert judges.judge_serving(tmp_path, False).missing == "2 of 3 figures are missing"
    for wrong, message in (
        ({"texts": {"eagle": {"mismatches": 2}}}, "2 mismatches"),
        ({"execution": {"eagle": "eager: no"}}, "eager: no"),
    ):
        write("serving/serving.json", right | wrong)
        with pytest.raises(ValueError, match=message):
            judges.judge_serving(tmp_path, False)


def test_budget(tmp_path, write):
    """The lower ends of the intervals are judged, over all kinds of text; steps run in graphs."""

    def row(speedup, low, **more):
        speeds = {"budget": {"speedup": speedup, "interval": None if low is None else [low, 2.0]}}
        setting = {"drafter": "eagle", "temperature": 0.0, "batch": 8, "kind": "all", "nodes": 3.25}
        return setting | {"speeds": speeds, "execution": "cuda graph, lean decoder"} | more

    rows = [row(1.4, 1.2), row(0.5, 0.4, kind="code"), row(1.0, 0.98, temperature=0.7, batch=32)]
    write("budget/budget.json", {"rows": rows, "planned": 2})
    found = judges.judge_budget(tmp_path, False)
    assert found.value == "8 rows: 1.40 ×, 3.2 nodes; T 0.7, 32 rows: 1.00 ×, 3.2 nodes"
    assert (found.met, found.missing) == (True, "")
    write("budget/budget.json", {"rows": [*rows[:2], row(1.0, 0.96)], "planned": 3})
    found = judges.judge_budget(tmp_path, False)
    assert (found.met, found.missing) == (False, "1 of 3 figures are missing")
    write("budget/budget.json", {"rows": [row(1.2, None, execution="eager: no")], "planned": 1})
    with pytest.raises(ValueError, match="eagle: steps ran eager: no"):
        judges.judge_budget(tmp_path, False)


def test_magicdec(tmp_path, write):
    """The best setting of each batch size and context; steps run in graphs."""

    def row(batch, speedup, **more):
        setting = {"batch": batch, "context": 1024, "selector": "snapkv", "entries": 256}
        figures = {"speedup": speedup, "predicted": 1.5, "execution": "cuda graph, lean decoder"}
        return setting | figures | more

    write("magicdec/compressed.json", {"rows": [row(1, 0.9), row(1, 1.1), row(64, 1.75), row(64, 1.25)]})
    found = judges.judge_magicdec(tmp_path, False)
    assert found.value == "1 × 1024: 1.10 × (1.50 predicted); 64 × 1024: 1.75 × (1.50 predicted)"
    assert (found.met, found.missing) == (None, "")
    write("magicdec/compressed.json", {"rows": []})
    assert judges.judge_magicdec(tmp_path, False).missing
    write("magicdec/compressed.json", {"rows": [row(1, 1.0, execution="eager")]})
    with pytest.raises(ValueError, match="snapkv:256: steps ran eager"):
        judges.judge_magicdec(tmp_path, False)


def test_kernels_around_the_products(tmp_path, write):
    """Sampling verification over its floor, the other kernels' gains: one way's figure is not another's goal."""

    def row(kernel, way, vocabulary, us, nodes=64):
        return kernel_row(kernel, way, {"B": 1, "N": nodes, "V": vocabulary}, us, 14.8e6)

    kinds = {"one-hot": 50.0, "one-hot, top-k and top-p": 300.0, "drawn": 90.0}
    rows = [
        row("verify", f"{way}, {kind}", 128256, us * (1 if way == "triton" else 10), nodes)
        for kind, us in kinds.items()
        for nodes in (16, 64)
        for way in ("plain PyTorch", "triton")
    ]
    rows += [row("fused", "plain PyTorch, gated", 1, 30.0), row("fused", "triton, gated", 1, 10.0)]
    write("around/kernels.json", {**LIMITS, "shapes": {"done": 2, "planned": 3}, "rows": rows})
    found = judges.judge_around(tmp_path, False)
    assert found.met is None and found.missing == "1 of 3 shapes are missing"
    assert found.value.startswith(
        "one-hot, V = 128256: 50 µs = 10.0 × floor; one-hot, top-k and top-p, V = 128256: 300"
    )
    assert found.value.endswith("verify 10.0–10.0 × PyTorch; gated 3.0–3.0 × PyTorch")


def test_tests_in_parallel_processes(tmp_path):
    """Lines of pytest-xdist, which names the result first."""
    log = tmp_path / "log.txt"
    log.write_text(
        "[gw0] [ 10%] PASSED tests/a.py::test_one[1 2] \n[gw11] [ 20%] SKIPPED tests/a.py::test_two \n"
        "tests/a.py::test_three \n[gw0] [100%] PASSED tests/b.py::test_four\n"
    )
    assert judges.judge_tests(log).value == "2 passed, 0 failed, 1 skipped"
    log.write_text("[gw1] [ 33%] ERROR tests/a.py::test_one \n[gw0] [ 66%] FAILED tests/a.py::test_two[a b] \n")
    with pytest.raises(ValueError, match=r"0 passed, 2 failed, 0 skipped; a.py::test_two\[a b\], a.py::test_one"):
        judges.judge_tests(log)
