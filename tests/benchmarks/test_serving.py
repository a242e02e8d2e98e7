"""Serving under load: its figures against counts of their own from all requests' times; arrivals, percentiles and
verdicts on made-up numbers; a running server."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from draftsmith.benchmarks import serving, serving_load
from draftsmith.benchmarks.common import ratio_of
from draftsmith.benchmarks.serving_load import Served, Waiting, Workload, load_figures, percentile, percentile_ratio
from draftsmith.inference.engine.engine import Generation, Request, SpeculativeDecoder
from draftsmith.inference.engine.protocol import PlainDrafter
from draftsmith.models.target import load_target

pytestmark = pytest.mark.measurement

NEW, ROWS, LOADS, REQUESTS, ROUNDS = 8, [1, 3], [0.5, 1.5], 7, 2
COMMON = ["--threads", 1, "--device", "cpu", "--max-new-tokens", NEW]


@pytest.fixture(scope="module")
def prompts(write_prompts):
    return write_prompts(["the licence of " * n for n in range(1, 6)])


@pytest.fixture(scope="module")
def found(run_main, drafter, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("serving") / "out.json"
    sizes = ["--batches", *ROWS, "--loads", *reversed(LOADS), "--requests", REQUESTS, "--rounds", ROUNDS]
    words = ["ngram", "--prompts", prompts, *COMMON, *sizes, "--seconds", 9, "--out", out]
    code, printed, err = run_main(serving.main, drafter, *words)
    assert code == 0, err
    return json.loads(out.read_text()) | {"printed": printed, "drafter": str(drafter)}


def measurements(found):
    """(rows, load or None, method, figures) of all; load None: capacity."""
    for batch in found["batches"]:
        yield from ((batch["rows"], None, name, figures) for name, figures in batch["capacity"].items())
        for part in batch["loads"]:
            yield from ((batch["rows"], part["load"], name, figures) for name, figures in part["methods"].items())


def test_methods_get_the_same_requests_at_the_same_times(found):
    drawn, processes = {}, {}
    for rows, load, name, figures in measurements(found):
        requests = [{key: times[key] for key in ("prompt", "limit", "arrival")} for times in figures["times"]]
        assert drawn.setdefault((rows, load), requests) == requests and len(requests) == ROUNDS, name
        assert requests[0] != requests[1], "other requests in each round"
        for number, each in enumerate(requests):
            assert len(set(each["prompt"][:5])) == 5 and all(NEW / 2 <= limit <= NEW for limit in each["limit"])
            if load is None:
                assert not any(each["arrival"])
            else:  # one process, at another rate
                (part,) = (p for b in found["batches"] if b["rows"] == rows for p in b["loads"] if p["load"] == load)
                unit = np.array(each["arrival"]) * part["requests_per_second"]
                assert processes.setdefault(number, unit) == pytest.approx(unit, abs=2e-3)
    assert len(drawn) == len(ROWS) * (1 + len(LOADS))
    for batch in found["batches"]:
        assert list(batch["capacity"]) == ["none", found["drafter"], "ngram"]
        rate = batch["capacity"]["none"]["requests_per_second"]
        assert [part["requests_per_second"] for part in batch["loads"]] == pytest.approx([a * rate for a in LOADS])


def test_figures_of_loads(found):
    """Percentiles and means, from the requests' times, which are in order."""
    for rows, load, name, figures in measurements(found):
        assert figures["answered"] == figures["requests"] == ROUNDS * REQUESTS
        for times, seconds in zip(figures["times"], figures["seconds"], strict=True):
            columns = (times[key] for key in ("arrival", "taken", "first", "last", "tokens", "limit"))
            for arrival, taken, first, last, tokens, limit in zip(*columns, strict=True):
                assert arrival <= taken < first <= last <= seconds + 1e-3
                assert (first < last) == (tokens > 1) and 1 <= tokens <= limit
            for now in times["taken"]:
                inside = [t <= now < end for t, end in zip(times["taken"], times["last"], strict=True)]
                assert sum(inside) <= rows
        if load is None:
            continue
        latency, first, per_token, occupied, waited = [], [], [], 0.0, []
        for times in figures["times"]:
            columns = {key: np.array(value) for key, value in times.items()}
            latency += (columns["last"] - columns["arrival"]).tolist()
            first += (columns["first"] - columns["arrival"]).tolist()
            many = columns["tokens"] > 1
            per_token += ((columns["last"] - columns["first"])[many] / (columns["tokens"][many] - 1)).tolist()
            occupied += (columns["last"] - columns["taken"]).sum()
            late = columns["taken"][:-1] - columns["arrival"][-1]  # of times that were rounded to microseconds
            waited.append((int((late > 2e-6).sum()), int((late > -2e-6).sum())))
        seconds = sum(figures["seconds"])
        for key, values in (("latency", latency), ("first_token", first), ("per_token", per_token)):
            for each, share in (("p50", 50), ("p90", 90), ("p99", 99)):
                expected = np.percentile(values, share, method="inverted_cdf")
                assert figures[key][each] == pytest.approx(expected, abs=3e-6), (name, key, each)
        assert figures["tokens_per_second"] == pytest.approx(figures["tokens"] / seconds, rel=1e-2)
        assert figures["rows"] == pytest.approx(occupied / seconds, rel=1e-2) and 0 < figures["rows"] <= rows
        assert all(least <= n <= most for n, (least, most) in zip(figures["waiting"], waited, strict=True))
        assert figures["grew"] == (sum(figures["waiting"]) > 2 * ROUNDS), "a tenth of 14 is less"
        assert (figures["verdict"] is None) == (name == "none")


def test_capacity(found):
    """Tokens over the time that the rows are kept, each until its own last text has ended."""
    for batch in found["batches"]:
        speeds = {}
        for name, figures in batch["capacity"].items():
            kept = 0.0
            for times in figures["times"]:
                ends = [0.0] * batch["rows"]  # the next request takes the row that is free first
                for last in times["last"]:
                    ends[ends.index(min(ends))] = last
                kept += sum(ends)
            speeds[name] = batch["rows"] * figures["tokens"] / kept
            assert figures["tokens_per_second"] == pytest.approx(speeds[name], rel=1e-3)
            assert figures["over_plain"] == pytest.approx(speeds[name] / speeds["none"], rel=1e-3)
            if name != "none":
                low, high = figures["over_plain_interval"]
                assert low < figures["over_plain"] < high and figures["tau"] >= 1
    texts = {"answers": 84, "different": 0, "near_ties": 0, "mismatches": 0}
    assert found["texts"] == dict.fromkeys(("none", found["drafter"], "ngram"), texts)
    assert found["printed"].count("84 answers, identical to plain decoding") == 3
    assert all(line in found["printed"] for batch in found["batches"] for line in batch["sentences"])


def test_another_text_is_an_error(run_main, tiny_lm, prompts, monkeypatch):
    """A decoder that changes a token with a drafter ends the command with 1."""

    class Wrong(SpeculativeDecoder):
        def serve(self, requests, batch_size, **options):
            results = super().serve(requests, batch_size, **options)
            if results and not isinstance(self.drafter, PlainDrafter):
                results[0].tokens[1] = (results[0].tokens[1] + 1) % 200
            return results

    monkeypatch.setattr(serving, "SpeculativeDecoder", Wrong)
    sizes = ["--batches", 2, "--loads", 1, "--requests", 3, "--rounds", 1]
    code, out, err = run_main(serving.main, "ngram", "--target", tiny_lm, "--prompts", prompts, *COMMON, *sizes)
    assert code == 1 and "ngram: 6 answers, " in out and "differ from plain decoding" in out, err
    assert "plain: 6 answers, identical" in out


def test_overload(run_main, tiny_lm, prompts, tmp_path):
    """Far more requests than can be answered: the measurement ends all the same, and says so."""
    sizes = ["--batches", 2, "--loads", 1e6, "--requests", 5000, "--rounds", 1, "--seconds", 0.2]
    words = ["--target", tiny_lm, "--prompts", prompts, *COMMON, *sizes, "--out", tmp_path / "out.json"]
    code, out, err = run_main(serving.main, "none", *words)
    assert code == 0 and ": the queue grew, " in out and " not answered" in out, err
    (batch,) = json.loads((tmp_path / "out.json").read_text())["batches"]
    figures = batch["loads"][0]["methods"]["none"]
    assert figures["grew"] and figures["requests"] == 5000 > figures["answered"] > 0
    assert figures["latency"]["p99"] is None and figures["per_token"]["p99"] > 0 and figures["seconds"][0] < 9
    (times,) = figures["times"]
    assert times["last"][figures["answered"] - 1] and not any(times["last"][figures["answered"] :])


# ---- requests


def test_arrivals_are_a_poisson_process():
    workload = serving_load.draw_workload(7, 20_000, 9, seed=3)
    gaps = np.diff([0.0, *workload.arrivals])
    assert gaps.mean() == pytest.approx(1, abs=0.03) and gaps.std() == pytest.approx(1, abs=0.05)
    for wait in (0.1, 1, 3):
        assert (gaps > wait).mean() == pytest.approx(math.exp(-wait), abs=0.015)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03
    assert set(workload.limits) == {5, 6, 7, 8, 9}
    assert all(sorted(workload.prompts[n : n + 7]) == list(range(7)) for n in range(0, 19_999, 7))
    assert workload == serving_load.draw_workload(7, 20_000, 9, seed=3)
    assert workload.arrivals != serving_load.draw_workload(7, 20_000, 9, seed=4).arrivals
    workload = Workload([0, 1, 2], [4, 5, 6], [1.0, 2.0, 6.0])
    assert workload.at(4, 1) == Workload([0, 1], [4, 5], [0.25, 0.5])
    assert workload.at(0.1, 3) == Workload([0], [4], [3]), "one request in any case, not later than the end"


def test_requests_are_taken_after_they_have_arrived():
    clock = [0.0]
    waiting = Waiting(["a", "b", "c", "d"], [1, 2, 2, 7], lambda: clock[0], stop=6)
    for now, expected, pause in ((0.5, [], 0.5), (1.5, ["a"], 0.5), (3, ["b", "c"], 4), (6.5, [], None), (8, [], None)):
        clock[0] = now
        assert list(waiting) == expected and waiting.pause() == pause
    assert waiting.taken == [1.5, 3, 3]


@pytest.mark.parametrize("static", [False, True])
def test_requests_that_come_one_by_one(target, greedy_texts, static):
    """The engine is asked again after each pause; answers and times belong to their requests."""
    prompts = [[5, 9, 40], [17], [3, 88, 12, 60], [7, 7]]
    truth = greedy_texts(target, prompts, 12)
    decoder, calls = SpeculativeDecoder(target, static=static), []
    decoder.serve([Request([5], 2)], 2, max_length=16)  # the first call takes longer
    serve = decoder.serve
    decoder.serve = lambda *arguments, **options: calls.append(1) or serve(*arguments, **options)
    workload = Workload([2, 0, 3, 1, 2], [12, 3, 7, 12, 5], [0.0, 0.4, 0.4, 0.7999, 0.8])
    ended = []
    served = serving_load.measure(decoder, prompts, workload, 2, 16, math.inf, ended.append)
    assert len(calls) == 3 and ended == [1, 2, 3, 4, 5]
    for number, (prompt, limit) in enumerate(zip(workload.prompts, workload.limits, strict=True)):
        tokens, expected = served.answers[number].tokens, truth[prompt][:limit]
        assert tokens == expected[: len(tokens)] and (len(tokens) == limit or tokens[-1] in target.stop_ids)
        assert workload.arrivals[number] <= served.taken[number] < served.first[number] <= served.last[number]
        assert served.last[number] < workload.arrivals[number] + 0.4
    assert served.seconds == max(served.last)


# ---- figures on made-up numbers


def served(latency, tokens=4, arrivals=None):
    """A measurement with these latencies; each request is taken as it arrives, and has its first token halfway."""
    arrivals = arrivals or [float(n) for n in range(len(latency))]
    ends = [arrival + each for arrival, each in zip(arrivals, latency, strict=True)]
    first = [arrival + each / 2 for arrival, each in zip(arrivals, latency, strict=True)]
    answers = [Generation([1] * tokens, [tokens - 1]) for _ in latency]
    workload = Workload([0] * len(latency), [tokens] * len(latency), arrivals)
    return Served(workload, list(arrivals), first, ends, answers, max(ends))


def test_percentile():
    values = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0])
    for share, expected in ((0.01, 1), (0.2, 1), (0.21, 2), (0.5, 3), (0.8, 4), (0.9, 5), (0.99, 5), (1, 5)):
        assert float(percentile(values, share)) == expected
    assert float(percentile(torch.tensor([1.0, math.inf]), 0.5)) == 1
    assert float(percentile(torch.tensor([1.0, math.inf]), 0.9)) == math.inf
    assert float(percentile(torch.arange(1.0, 11), 0.7)) == 7, "0.7 · 10 is above 7 in binary"
    assert percentile(torch.tensor([]), 0.5).isnan()


def test_ratio_of_percentiles():
    torch.manual_seed(0)
    base = torch.rand(60) + 0.2
    assert percentile_ratio(base, base, 0.9) == (1, (1, 1))
    assert percentile_ratio(base / 4, base, 0.5) == (0.25, (0.25, 0.25)), "requests are paired"
    ratio, (low, high) = percentile_ratio(base * (1 + 0.2 * torch.randn(60)), base, 0.9)
    assert low < ratio < high and high - low < 0.6
    assert percentile_ratio(base[:4], base[:4], 0.9)[1] is None
    late = torch.where(torch.arange(60) < 30, base, math.inf)
    ratio, interval = percentile_ratio(late, base, 0.9)
    assert ratio == math.inf and interval[1] == math.inf
    ratio, interval = percentile_ratio(late, late, 0.9)
    assert math.isnan(ratio) and interval == (1, 1)


def test_an_interval_holds_the_ratio_as_often_as_it_says():
    """Neighbours that wait for each other: latencies of both methods are sums over the last requests."""
    generator = torch.Generator().manual_seed(0)
    mine, base = torch.rand(2, 150, 67, generator=generator).unfold(-1, 4, 1).sum(-1)  # [150, 64] each, equal in law
    inside = 0
    for one, other in zip(mine, base, strict=True):
        low, high = percentile_ratio(one, other, 0.5)[1]
        inside += low <= 1 <= high
    assert 0.9 <= inside / 150 < 1


def test_capacity_by_row():
    """Two rows: the third request takes the second one's row, which is free first, the fourth the first one's."""
    plain = served([6.0, 4.0, 9.0, 8.0], arrivals=[0.0] * 4)
    fast = served([2.0, 3.0, 4.5], arrivals=[0.0] * 3)
    columns = serving_load.capacity_columns([fast], [plain], 2)
    assert columns.tolist() == [[4, 4, 4], [2, 3, 2.5], [4, 4, 4], [6, 4, 5]], "those that both have answered"
    assert float(ratio_of(columns.sum(-1))) == 2


def test_verdicts():
    plain = [served([1.0 + 0.1 * (n % 7) for n in range(40)])]
    for factor, verdict in ((0.8, "faster"), (1.0, "even"), (1.3, "slower")):
        method = [served([factor * (1.0 + 0.1 * (n % 7)) for n in range(40)])]
        figures = load_figures(method, plain)
        assert figures["verdict"] == verdict and figures["latency_p90_over_plain"] == pytest.approx(factor)
        assert figures["per_token"]["p50"] == pytest.approx(factor * 1.3 / 2 / 3, abs=1e-6)
    assert load_figures(plain, plain)["verdict"] is None
    intervals = (None, (0.8, 0.9), (0.9, 1.0), (1.0, 1.2), (1.1, math.inf))
    assert [*map(serving_load.verdict_of, intervals)] == ["even", "faster", "even", "even", "slower"]


def test_the_queue_grew():
    assert not serving_load.queue_grew([2, 2], 20) and serving_load.queue_grew([2, 3], 20)
    assert not serving_load.queue_grew([10], 100) and serving_load.queue_grew([11], 100)
    late = served([1.0] * 8)
    late.taken[3:] = [20.0] * 5
    assert late.waiting == 4, "the last one itself has only arrived"


@pytest.mark.parametrize(
    "verdicts, said",
    [
        ("fff", "pays at every load measured, up to 1 (p90 latency)"),
        ("fes", "pays up to a load of 0.5 (p90 latency; no clear difference at 0.75; slower at 1)"),
        ("sss", "pays at no load measured (p90 latency; slower at 0.5, 0.75, 1)"),
        ("fsf", "pays at a load of 0.5, 1 (p90 latency; slower at 0.75)"),
    ],
)
def test_sentence(verdicts, said):
    names = {"f": "faster", "e": "even", "s": "slower"}
    by_load = {load: names[each] for load, each in zip((0.5, 0.75, 1.0), verdicts, strict=True)}
    capacity = {"over_plain": 0.934, "over_plain_interval": [0.901, 0.968]}
    assert serving.sentence("runs/x", 8, by_load, capacity) == (
        f"batch 8: speculation with x {said}, and its capacity is 0.93 (0.90–0.97) × plain decoding's"
    )


# ---- a running server


class Answering(BaseHTTPRequestHandler):
    """The bundled target by our engine behind OpenAI's protocol, a token in each part of an answer."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._send(json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.asked.append(asked)
        if server.refused in asked:
            self.send_error(400, f"unknown argument {server.refused}")
            return
        if server.status != 200:
            self.send_error(server.status, f"not now, {self.headers['Authorization']}")
            return
        with server.one_at_a_time:
            (result,) = server.decoder.generate([asked["prompt"]], asked["max_tokens"])
        parts = [{"choices": [{"text": "x", "token_ids": [token + server.wrong]}]} for token in result.tokens]
        if not server.ids:
            parts = [{"choices": [{"text": "x"}]} for _ in result.tokens]
        usage = {"choices": [], "usage": {"completion_tokens": len(result.tokens)}}
        lines = [f"data: {json.dumps(part)}\n\n" for part in [*parts, usage]] + ["data: [DONE]\n\n"]
        self._send("".join(lines[: server.lines]).encode())

    def _send(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    made.decoder = SpeculativeDecoder(load_target("models/tiny-lm"))
    made.one_at_a_time, made.asked = threading.Lock(), []
    made.status, made.ids, made.wrong, made.lines, made.refused = 200, True, 0, None, ""
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def serve(server, run_main, prompts, tmp_path):
    """serve() → exit code, stdout, stderr of a measurement of the server, and its figures."""

    def run(*more):
        words = ["none", "--target", "models/tiny-lm", "--prompts", prompts, *COMMON, "--batches", 2, "--loads", 0.5]
        words += ["--requests", 6, "--rounds", 1, "--seconds", 5, "--out", tmp_path / "out.json"]
        found = run_main(serving.main, *words, "--url", f"http://127.0.0.1:{server.server_port}/v1", *more)
        return *found, json.loads((tmp_path / "out.json").read_text()) if (tmp_path / "out.json").exists() else {}

    return run


def test_a_running_server(server, serve):
    """The same requests as plain decoding's, at the same times; its texts are compared. What it refuses is said."""
    server.refused = "top_k"
    code, printed, err, found = serve()
    assert code == 0 and found["not_sent"] == ["top_k"] and "/v1 refuses top_k: not sent any more" in err, err
    assert "batch 2: the server's capacity is" in printed and "server: 12 answers, identical" in printed
    (batch,) = found["batches"]
    for methods in (batch["capacity"], batch["loads"][0]["methods"]):
        times, plain = (methods[name]["times"][0] for name in ("server", "none"))
        assert all(times[key] == plain[key] for key in ("prompt", "limit", "arrival", "tokens"))
        for arrival, taken, first, last in zip(*(times[k] for k in ("arrival", "taken", "first", "last")), strict=True):
            assert arrival <= taken < first <= last
    assert batch["capacity"]["server"]["tau"] is None and batch["capacity"]["server"]["over_plain"] > 0
    stated = {"model": "tiny", "stream": True, "temperature": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    assert all(asked.items() >= stated.items() for asked in server.asked)
    assert sum("top_k" in asked for asked in server.asked) == 1, "when it was warmed up"


def test_texts_of_a_server(server, serve):
    """Another text is found; a server that returns no ids is measured."""
    server.wrong = 1
    code, printed, *_ = serve()
    assert code == 1 and "mismatches" in printed
    server.ids = False
    code, _, _, found = serve()
    capacity = found["batches"][0]["capacity"]
    assert code == 0 and "server" not in found["texts"]
    assert capacity["server"]["tokens"] == capacity["none"]["tokens"]


@pytest.mark.parametrize(("status", "lines", "message"), [(503, None, "http 503"), (200, 0, "an answer without a")])
def test_a_server_that_does_not_answer_ends_it(server, serve, monkeypatch, status, lines, message):
    """In one line, in which the key is not, though the server repeats it."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    server.status, server.lines = status, lines
    code, _, err, _ = serve()
    assert code != 0 and err.strip().splitlines()[-1].count(message) == 1 and "Traceback" not in err
    assert "secret-key" not in err and (status == 200 or "***" in err)
