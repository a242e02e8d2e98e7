"""The judges of the GPU parts: goals by the roofline, wrong results, what a killed part has not measured."""

import json

import pytest

from draftsmith.benchmarks.gpu import judges, kernel_judges

pytestmark = pytest.mark.measurement

LIMITS = {"bandwidth": 4e12, "matmul_rate": 1e15}
REPORT = {  # of decode.py
    "execution": "cuda graph, lean decoder",
    "mean_accepted_length": 2.0,
    "speedup": 1.5,
    "lossless": {"passed": True, "bitwise": True, "checked": 99, "near_ties": 1, "mismatches": 0},
}
TOLD = "τ 2.00, 1.50 × plain, cuda graph, lean decoder, 99 tokens checked, 1 near-ties"  # of it
WRONG = {  # what is wrong with a report, and what is said
    "steps ran eager": {"execution": "eager: no"},
    "3 mismatches in 99 tokens": {"lossless": {**REPORT["lossless"], "passed": False, "mismatches": 3}},
}


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
        rows = [step_row(1, None, plain), step_row(16, "shared", other)]
        rows += [step_row(64, "shared", many, many / plain, 2e12), step_row(64, "own", 0.0)]
        write("step/step.json", {"rows": rows, "limits": {"llama3-8b": LIMITS}, "planned": 4} | more)
        return kernel_judges.judge_step(tmp_path, False)

    found = judged(5.0e-3, 7.2e-3)
    assert found.met and "plain 5.00 ms = 1.13 × floor (goal 1.13); 64 nodes 7.20 ms = 1.33 × floor" in found.value
    assert not judged(5.03e-3, 7.2e-3).met and not judged(5.0e-3, 7.22e-3).met
    found = judged(5.0e-3, 7.2e-3, 5.1e-3)
    assert not found.met and "; 16 nodes 5.10 ms = 1.15 × floor" in found.value
    assert judged(5.0e-3, 7.2e-3, planned=20).missing == "16 of 20 figures are missing"


def test_goals_beside_steps(tmp_path, write):
    """The lean decoder against transformers; what is off by default against the default, to within 2 %."""
    ours = [step_row(1, None, 5e-3), step_row(64, "shared", 6e-3)]
    write("step/step.json", {"rows": ours})
    for more, met in ((1e-5, True), (-1e-5, False)):
        theirs = [ours[0] | {"median": ours[0]["median"] + 1e-5}, ours[1] | {"median": ours[1]["median"] + more}]
        write("lean/step.json", {"rows": theirs, "planned": 4})
        found = kernel_judges.judge_lean(tmp_path, False)
        assert found.met is met and found.missing == "2 of 4 figures are missing"
    write("lean/step.json", {"rows": []})
    with pytest.raises(ValueError, match="no step was measured both ways"):
        kernel_judges.judge_lean(tmp_path, False)
    for pdl, merged, met in ((4.95e-3, 99.0, True), (4.8e-3, 99.0, False), (5e-3, 90.0, False)):
        for name, median in (("default", 5e-3), ("pdl", pdl), ("logits", 5e-3), ("same-bits", 9e-3)):
            write(f"switches/{name}.json", {"rows": [step_row(1, None, median)]})
        ways = {"triton": 100.0, "triton, last program merges": merged}
        rows = [kernel_row("attention", way, {"B": 1}, us, 1.0) for way, us in ways.items()]
        write("switches/attention.json", {"rows": rows})
        assert kernel_judges.judge_switches(tmp_path, False).met is (merged > 98 and met)


def test_goal_of_kernels_in_a_step(tmp_path, write):
    """15 in each of 32 layers and 40 around them."""
    for kernels, met in ((520, True), (521, False)):
        rows = [{"nodes": 1, "median": 4e-3, "profile": {"kernels": n, "seconds": 3e-3}} for n in (100, kernels)]
        write("profile/step.json", {"rows": rows})
        assert kernel_judges.judge_profile(tmp_path, False).met is met


def test_a_product_is_whole(tmp_path, write):
    """The parts that another kernel adds up are not compared with torch.mm."""
    ways = {"torch.mm": 12.0, "4 x 64": 10.0, "parts: 4 x 64": 8.0}
    rows = [kernel_row("few_rows", way, {"M": 1, "K": 4096}, us, moved=28e6) for way, us in ways.items()]
    write("products/kernels.json", {"bandwidth": 4e12, "shapes": {"done": 1, "planned": 1}, "rows": rows})
    found = kernel_judges.judge_products(tmp_path, False)
    assert found.value == "1 rows: 70%–70% of the bandwidth, 1.20–1.20 × torch.mm"


def test_goals_of_kernels(tmp_path, write):
    """K and V of 4 GB at 4 TB/s: 1 ms; products of 2 T at 1 P/s: 2 ms; what takes less than 30 µs is not judged."""

    def row(way, nodes, ms, difference=0.01, context=8192, moved=4e9, operations=1e11):
        return kernel_row("attention", way, {"L": context, "N": nodes}, ms * 1e3, moved, operations, difference)

    def judged(*rows, done=9):
        write("kernel-bench/kernels.json", {"rows": rows, **LIMITS, "shapes": {"done": done, "planned": 9}})
        return kernel_judges.judge_kernels(tmp_path, False)

    few = [row("SDPA", 16, 1.3), row("flex_attention", 16, 1.4), row("plan", 16, 9.0)]
    many = [row("SDPA", 64, 4.0), row("flex_attention", 64, 3.85), row("flashinfer", 64, 3.4)]
    small = {"moved": 5e6, "operations": 1.14e9, "context": 1024}  # of 64 nodes: 1.45 µs of products at most
    short = [row("SDPA", 64, 0.02, **small), row("triton", 64, 0.015, **small)]
    found = judged(*few, row("triton", 16, 1.16), *many, row("triton", 64, 3.2, operations=2e12), *short)
    assert found.met and not found.missing and found.value.startswith("86%–86% of the bandwidth; 62%–62% of the matrix")
    ragged = [row("SDPA, ragged", 16, 1.0), row("triton, ragged", 16, 1.1)]
    found = judged(*few, row("triton", 16, 1.19), *many, row("triton", 64, 3.5, operations=2e12), *ragged, done=5)
    assert not found.met and found.missing == "4 of 9 shapes are missing"
    assert found.facts == {
        "below": ["L=8192 N=16 (84% of the bandwidth)", "L=8192 N=64 (57% of the matrix rate)"],
        "slower": ["L=8192 N=64 (1.03 ×)", "L=8192 N=16 ragged (1.10 ×)"],
    }
    for wrong in (3.0, float("nan")):
        with pytest.raises(ValueError, match="attention, triton, .*: difference"):
            judged(*few, row("triton", 16, 1.2, wrong))


def test_goals_of_training_eagle(tmp_path, write):
    for short, long, met in ((0.46, 0.36, True), (0.44, 0.36, False), (0.46, 0.34, False), (0.46, None, True)):
        for name, share in (("short", short), ("long", long)):
            (tmp_path / f"eagle-step/{name}.json").unlink(missing_ok=True)
            if share:
                write(f"eagle-step/{name}.json", {"results": [{"of_matmul_rate": share, "peak_memory_bytes": 4e10}]})
        found = kernel_judges.judge_eagle_training(tmp_path, False)
        assert found.met is met and bool(found.missing) is (long is None) and "40 GB" in found.value


def test_goals_of_training(tmp_path, write):
    for shares, met in (((0.51, 0.46), True), ((0.49, 0.46), False), ((0.51, 0.44), False), ((0.51,), True)):
        rows = [
            {"stage": stage, "of_matmul_rate": share, "hours_per_70M_tokens": 0.9, "peak_memory_bytes": 4e10}
            for stage, share in zip(("medusa-1", "medusa-2"), shares, strict=False)
        ]
        write("train-step/train.json", {"results": rows, "shape": {"stages": ["medusa-1", "medusa-2"]}})
        found = kernel_judges.judge_training(tmp_path, False)
        assert found.met is met and bool(found.missing) is (len(shares) < 2)
    write("models/eagle/tree.json", {"paths": [[0], [0, 0]]})
    metrics = '{"tokens_per_second": 9000, "loss": 1}\n{"simulated_tau": 2.5}\n'
    (tmp_path / "models" / "eagle" / "metrics.jsonl").write_text(metrics)
    found = judges.judge_drafter("eagle", "simulated_tau")(tmp_path, False)
    assert found.met is None and found.value == "simulated τ 2.50, 9,000 tokens/s; calibrated tree of 3 nodes"


# Judges of reports of decode.py, and where these are.
DECODED = [
    (judges.judge_decode("decode", 1), ["decode/x"]),
    (judges.judge_decode("same-bits", 1, exact=True), ["same-bits"]),
    (judges.judge_streams, ["ssm-streams/two", "ssm-streams/one"]),
    (judges.judge_eagle_decode, ["eagle-decode/fixed", "eagle-decode/dynamic"]),
    (judges.judge_dynaspec, ["dynaspec/two/eagle", "dynaspec/two/dynaspec", "dynaspec/one"]),
]


@pytest.mark.parametrize("said", WRONG)
@pytest.mark.parametrize("judge, places", DECODED, ids=[places[0] for _, places in DECODED])
def test_wrong_texts_and_steps_outside_graphs(tmp_path, write, judge, places, said):
    """Whichever report has them; without one, a figure is missing."""
    write("models/dynaspec/provenance.json", {"simulated_tau": 2.4, "whole_simulated_tau": 2.5})

    def report(place, **more):
        model = "eagle" if place.endswith("eagle") else "dynaspec"
        drafter = str(judges.model_folder(tmp_path, model, False))
        write(f"{place}/report.json", REPORT | {"drafter": drafter, "tokens_per_second": 9.0} | more)

    for number, place in enumerate(places):
        lost = f"{len(places) - number} of {len(places)} figures are missing"
        assert not number or judge(tmp_path, False).missing == lost
        report(place)
    found = judge(tmp_path, False)
    assert (not found.missing and TOLD in found.value) or judge is judges.judge_streams
    for place in places:
        report(place, **WRONG[said])
        with pytest.raises(ValueError, match=said):
            judge(tmp_path, False)
        report(place)
    if places == ["same-bits"]:
        report("same-bits", lossless={**REPORT["lossless"], "bitwise": False})
        with pytest.raises(ValueError, match="the bits of a row depended on other rows"):
            judge(tmp_path, False)


def test_goals_of_streams(tmp_path, write):
    """Two SSMs are faster on two streams; shortlists not slower, to within 3 %."""
    write("models/dynaspec/provenance.json", {"simulated_tau": 2.4, "whole_simulated_tau": 2.5})
    for part, name, judge, goals in (
        ("ssm-streams", "two", judges.judge_streams, ((120.0, 100.0, True), (99.0, 100.0, False))),
        ("dynaspec", "two/x", judges.judge_dynaspec, ((98.0, 101.0, True), (98.0, 102.0, False))),
    ):
        drafter = str(judges.model_folder(tmp_path, "dynaspec", False))
        for two, one, met in goals:
            for place, speed in ((name, two), ("one", one)):
                report = REPORT | {"drafter": drafter, "tokens_per_second": speed}
                write(f"{part}/{place}/report.json", report)
            assert judge(tmp_path, False).met is met
    write("ssm-claim/report.json", REPORT | {"drafter": "draft_model:a/b", "execution": "eager, on a CPU"})
    found = judges.judge_decode("ssm-claim", 1, graphs=False)(tmp_path, False)
    assert found.value.startswith("b: τ 2.00, 1.50 × plain, eager, ") and not found.missing


def test_goals_of_unrolled_steps(tmp_path, write):
    """Seven are as fast as with dense attention, to within 2 %, and take less memory."""
    for steps, ratio, memory, met in ((7, 1.0, 1.9e9, True), (7, 1.03, 1.9e9, False), (7, 0.9, 2e9, False),
                                      (4, 0.5, 1e9, False), (7, 0.5, None, False)):  # fmt: skip
        row = {"steps": steps, "ratio": ratio, "seconds": {"draftsmith": 0.1 * ratio, "dense": 0.1}}
        row |= {"peak_memory_bytes": {"draftsmith": memory, "dense": 2e9 if memory else None}}
        write("eagle-unroll/unroll.json", {"results": [row], "shape": {"steps": [1, 7]}})
        found = kernel_judges.judge_unroll(tmp_path, False)
        assert found.met is met and found.missing == "1 of 2 figures are missing"


def test_goals_of_shortlists(tmp_path, write):
    """A fifth of the rows, 0.2 GB at 4 TB/s: 50 µs; the small head's 11 MB take 3 µs, which is not judged."""

    def judged(us, rehearsal=False, difference=0.01, planned=2):
        for width, vocabulary in ((4096, 262144), (576, 49152)):
            moved, shape = (2e8 if width == 4096 else 1.1e7), {"V": vocabulary, "d": width, "n": 8}
            times = {"full head": 300.0, "shortlist": us, "shortlist, topk": 999.0}
            rows = [kernel_row("shortlist", way, shape, t, moved, difference=difference) for way, t in times.items()]
            write(f"shortlist/{width}.json", {"rows": rows, **LIMITS, "shapes": {"done": 1, "planned": planned - 1}})
        return kernel_judges.judge_shortlist(tmp_path, rehearsal)

    found = judged(62.0)
    assert (
        found.met and not found.missing and "262144 × 4096, 8 nodes: 0.21 × full, 81% of the bandwidth" in found.value
    )
    found = judged(65.0, planned=3)
    assert not found.met and found.facts["below"] == ["262144 × 4096, 8 nodes (77% of the bandwidth)"]
    assert found.missing == "2 of 4 shapes are missing"
    for wrong, rehearsal in ((0.06, False), (float("nan"), False), (2e-3, True)):
        with pytest.raises(ValueError, match=r"full head, \{'V': 262144, .*\}: difference"):
            judged(62.0, difference=wrong, rehearsal=rehearsal)
    judged(62.0)
    (tmp_path / "shortlist" / "576.json").unlink()
    assert kernel_judges.judge_shortlist(tmp_path, False).missing == "1 of 2 figures are missing"


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
    for wrong in ({"texts": {"eagle": {"mismatches": 2}}}, {"execution": {"eagle": "eager: no"}}):
        write("serving/serving.json", right | wrong)
        with pytest.raises(ValueError, match="2 mismatches|eager: no"):
            judges.judge_serving(tmp_path, False)


def test_coder(tmp_path, write):
    """Goals on HumanEval; n-grams alone, and beside a drafter, cost at most 3 %."""

    def judged(**speeds):
        humaneval = {"speedup": 1.95, "mean_accepted_length": 2.1}
        for name, speed in speeds.items():
            drafter = "+".join(f"runs/{each}" if each != "ngram" else each for each in name.split("_"))
            report = REPORT | {"drafter": drafter, "speedup": speed, "kinds": {"humaneval": humaneval}}
            write(f"coder-0.5b/report/{name}/report.json", report)
        write("coder-0.5b/data.json", {"answer_tokens": 1000})
        return judges.judge_coder("coder-0.5b")(tmp_path, False)

    found = judged(eagle3=1.5, eagle3_ngram=1.46, medusa=1.3, medusa_ngram=1.5, ngram=0.97)
    assert found.met and not found.missing and "n-grams" not in found.value
    for name, speed in (("eagle3_ngram", 1.45), ("ngram", 0.96)):
        found = judged(**{"eagle3_ngram": 1.46, "ngram": 0.97, name: speed})
        assert not found.met and f"{name.replace('_', '+')} is slower than without n-grams" in found.value
        assert found.value.count("slower") == 1
    assert not judges.slower({"eagle3": 1.5, "eagle3+ngram": None, "ngram": None}), "not timed is not slower"


def test_budget_and_magicdec(tmp_path, write):
    """The lower ends of the intervals are judged, over all kinds of text; the best setting is shown; steps run in
    graphs."""

    def row(speedup, low, **more):
        speeds = {"budget": {"speedup": speedup, "interval": None if low is None else [low, 2.0]}}
        setting = {"drafter": "eagle", "temperature": 0.0, "batch": 8, "kind": "all", "nodes": 3.25}
        return setting | {"speeds": speeds, "execution": "cuda graph, lean decoder"} | more

    for rows, met in (
        ([row(1.4, 1.2), row(0.5, 0.4, kind="code"), row(1.0, 0.98, temperature=0.7)], True),
        ([row(1.4, 1.2), row(1.0, 0.96)], False),
    ):
        write("budget/budget.json", {"rows": rows, "planned": 3})
        found = judges.judge_budget(tmp_path, False)
        assert (found.met, found.missing) == (met, "1 of 3 figures are missing")
    setting = {"batch": 1, "context": 1024, "selector": "snapkv", "entries": 256, "predicted": 1.5}
    best = [setting | {"speedup": speedup, "execution": "cuda graph"} for speedup in (0.9, 1.1, 1.0)]
    write("magicdec/compressed.json", {"rows": best})
    assert judges.judge_magicdec(tmp_path, False).value == "1 × 1024: 1.10 × (1.50 predicted)"
    write("magicdec/compressed.json", {"rows": [best[0] | {"execution": "eager"}]})
    write("budget/budget.json", {"rows": [row(1.2, None, execution="eager: no")], "planned": 1})
    for judge in (judges.judge_budget, judges.judge_magicdec):
        with pytest.raises(ValueError, match="steps ran eager"):
            judge(tmp_path, False)


def test_kernels_around_the_products(tmp_path, write):
    """Sampling verification over its floor, the other kernels' gains: one way's figure is not another's goal."""
    rows = [
        kernel_row("verify", f"{way}, {kind}", {"N": nodes, "V": 128256}, us, 14.8e6)
        for kind, ours in {"one-hot": 50.0, "one-hot, top-k and top-p": 300.0}.items()
        for nodes in (16, 64)
        for way, us in (("plain PyTorch", 10 * ours), ("triton", ours))
    ]
    rows += [
        kernel_row("fused", f"{way}, gated", {"N": 1}, us, 1.0)
        for way, us in (("plain PyTorch", 30.0), ("triton", 10.0))
    ]
    write("around/kernels.json", {**LIMITS, "shapes": {"done": 2, "planned": 3}, "rows": rows})
    found = kernel_judges.judge_around(tmp_path, False)
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
