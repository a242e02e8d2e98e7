"""The timing of kernels: bounded however slow a call is; what is written of a command that is killed."""

import json
import time

import pytest
import torch

from draftsmith.benchmarks import kernel_cases, kernel_times, kernel_timing

pytestmark = pytest.mark.measurement


def slow(seconds):
    """A call that takes so long, on the device where there is one."""
    if torch.cuda.is_available():
        cycles = int(seconds * 1.5e9)  # about as long
        return lambda: torch.cuda._sleep(cycles)
    return lambda: time.sleep(seconds)


@pytest.mark.parametrize(("calls", "most"), [(1, 1.0), (4, 2.5)])
def test_slow_calls_are_repeated_less_often(calls, most):
    began = time.perf_counter()
    median, low, high = kernel_timing.seconds([slow(0.05)] * calls, limit=0.3)
    assert time.perf_counter() - began < most, "thirty repeats of ten rounds would take many seconds"
    assert 0.02 < low <= median <= high < 0.2, "the time of one call"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shortlists_beside_the_full_head(run_main, tmp_path, monkeypatch, dtype):
    """Measured on a CPU too; each way's result is compared with the definition's."""
    pack, counts = kernel_cases.pack_shortlist, []

    def counted(*arguments):
        found = pack(*arguments)
        counts.append(int(found.count.sum()))
        return found

    monkeypatch.setattr(kernel_cases, "pack_shortlist", counted)
    file = tmp_path / "kernels.json"
    words = "shortlist --batches 2 --level 3 --hidden 32 --vocabulary 500 60".split()
    code, out, err = run_main(kernel_times.main, *words, "--dtype", dtype, "--out", file)
    assert code == 0, err
    report = json.loads(file.read_text())
    rows = report["rows"]
    ways = ("full head", "shortlist", "full head, topk", "shortlist, topk", "choice of rows")
    assert [row["way"] for row in rows] == [*ways] * 2
    assert {row["kernel"] for row in rows} == {"shortlist"} and len(out.splitlines()) == 2 + len(rows)
    assert {(row["shape"]["V"], row["shape"]["C"]) for row in rows} == {(500, 100), (60, 12)}
    assert max(row["difference"] for row in rows) < (1e-5 if dtype == "float32" else 0.05)
    assert all(0 < row["low_us"] <= row["median_us"] <= row["high_us"] for row in rows)
    full, short = rows[0]["moved"], rows[1]["moved"]
    assert full == 500 * 32 * (4 if dtype == "float32" else 2) and 0.2 * full < short <= 0.4 * full, "two texts"
    assert set(counts[:10]) == {200} and short / full == pytest.approx(200 / 500), "ten lists, all of them full"
    bound = max(short / report["bandwidth"], rows[1]["operations"] / report["matmul_rate"])
    assert rows[1]["of_bound"] == pytest.approx(bound / rows[1]["median_us"] * 1e6)


def test_a_killed_command_keeps_its_rows(tmp_path):
    """Whatever was measured before it was killed, also within a shape."""
    file, seen = tmp_path / "rows.json", []
    sizes = ["--contexts", "8", "9", "--batches", "1", "2"]
    args = kernel_times.parser().parse_args(["attention", "--out", str(file), *sizes])
    planned = kernel_times.benches_of(["attention", "commit"], args)
    assert len(planned) == 2 * (1 + 3 * (2 + 1)) + 3 * 2, (
        "batches (a chunk, nodes (contexts, a commit)), and ragged rows"
    )

    def shape(args, table, number):
        for way in ("one", "two"):
            table.add("k", way, {"n": number}, [lambda: None], kernel_timing.Work(1.0, 1.0), 0.0)
            seen.append(json.loads(file.read_text()))

    kernel_timing.Table(kernel_timing.Device(1e9, 1e12), "here", args).run([(shape, (1,)), (shape, (2,))])
    assert [len(report["rows"]) for report in seen] == [1, 2, 3, 4]
    assert [report["shapes"]["done"] for report in seen] == [0, 0, 1, 1]
    assert json.loads(file.read_text())["shapes"] == {"done": 2, "planned": 2}
    assert seen[-1]["bandwidth"] == 1e9 and seen[-1]["matmul_rate"] == 1e12
