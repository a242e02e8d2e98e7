"""Batches that workers make ahead: the same ones in the same order, and no worker left, however a run ends."""

import json
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from test_loop import FORKED, LENGTH, Samples, Toy, fit, job, same, samples, stage, weights
from torch.utils.data import _utils

from draftsmith.common.command import raised_by_us
from draftsmith.common.files import parse_json
from draftsmith.data.packing import Rows, Sample, Tokenized
from draftsmith.train import loading as module
from draftsmith.train import loop
from draftsmith.train.loading import MicroBatches, loading
from draftsmith.train.samples import Sampler, WithHidden

pytestmark = [FORKED, pytest.mark.filterwarnings("ignore:This DataLoader will create")]
CPU = torch.device("cpu")


def with_workers(run, workers):
    data = run.recipe.data.model_copy(update={"workers": workers})
    run.recipe = run.recipe.model_copy(update={"data": data})
    return run


def rows(count=11):
    sizes = [5 + 7 * n % 9 for n in range(count)]
    made = (Sample(list(range(n, n + size)), [True] * size) for n, size in enumerate(sizes))
    return Rows(Tokenized.of(made), 16, share=False)


def children():
    return [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(children())
    yield
    assert set(children()) <= before


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_each_step_has_its_batches(workers):
    """Those of the second of two processes, from step 3 on; features stay with their rows."""
    kept = rows()
    hidden = torch.randn(11, kept.length, 2).bfloat16()
    made = Sampler([WithHidden(kept, hidden), WithHidden(rows(5), hidden[:5])], [1.0, 1.0], 4, ["a", "b"]).stage(80)
    with loading(MicroBatches(made, 8, 2, 2, 1), 3, 10, workers, CPU) as next_batches:
        for step in range(3, 10):
            for place, batch in enumerate(next_batches()):
                begin = step * 8 + 4 + 2 * place
                wanted = made(range(begin, begin + 2))
                assert batch.keys() == wanted.keys() >= {"tokens", "hidden"}
                assert all(torch.equal(batch[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_no_bit(tmp_path, workers):
    """Dropout draws the same numbers as without; a run with workers goes on from one without."""
    found = []
    for name, counts in (("alone", (0, 0)), ("with", (workers, workers)), ("mixed", (0, workers))):
        (tmp_path / name).mkdir()
        for resume, count, steps in ((False, counts[0], 8), (True, counts[1], 12)):
            torch.manual_seed(5)
            toy = Toy(dropout=0.3)
            torch.manual_seed(5)
            fit(with_workers(job(tmp_path / name, resume=resume), count), toy, stage(steps=steps, accumulate=2))
        found.append(weights(toy))
    assert same(found[0], found[1]) and same(found[0], found[2])
    assert not same(found[0], weights(Toy()))


@pytest.mark.parametrize("workers", [0, 1])
def test_no_random_number_is_drawn(workers):
    """PyTorch's loader draws one for its workers, by default from the numbers that dropout takes next."""
    before = torch.get_rng_state()
    with loading(MicroBatches(Samples(samples), 4, 4, 1, 0), 0, 3, workers, CPU) as next_batches:
        next_batches()
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_in_a_worker_is_the_error(tmp_path):
    """As it was raised, without the worker's traceback in its message; that of a mistake of ours keeps it."""

    def broken(numbers):
        return samples(numbers) if numbers.start < 12 else parse_json("{", "a.jsonl, row 3")

    said = []
    for workers in (0, 2):
        with pytest.raises(ValueError) as caught:
            fit(with_workers(job(tmp_path), workers), Toy(), stage(), broken)
        said.append(str(caught.value))
        assert raised_by_us(caught.value.__traceback__), "one line for the user"
    assert said[0] == said[1] and said[0].startswith("a.jsonl, row 3: not valid JSON") and "\n" not in said[0]
    with pytest.raises(ValueError, match="(?s)Caught ValueError in DataLoader worker.*invalid literal for int"):
        fit(with_workers(job(tmp_path), 2), Toy(), stage(), lambda numbers: int("x"))


def test_a_worker_that_dies_is_one_line(tmp_path):
    def killed(numbers):
        if numbers.start >= 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return samples(numbers)

    said = r"a process that makes batches has ended \((DataLoader worker .*|[A-Z]\w+)\); give it more .*data.workers=0"
    with pytest.raises(ValueError, match=said):
        fit(with_workers(job(tmp_path), 2), Toy(), stage(steps=2000), killed)


def test_a_worker_that_waits_does_not_keep_the_process(monkeypatch):
    """As one whose server hangs: an error of the main process ends it."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    began = time.monotonic()
    made = Sampler([rows()], [1.0], 4, ["a"]).stage(80)
    monkeypatch.setattr(type(made), "__call__", lambda self, numbers: time.sleep(300))
    waiting = MicroBatches(made, 8, 1, 2, 0)
    with pytest.raises(ZeroDivisionError), loading(waiting, 3, 10, 1, CPU):
        time.sleep(0.5)
        raise ZeroDivisionError
    assert time.monotonic() - began < 100 and not children()


def slowly(numbers):
    time.sleep(0.01)
    return samples(numbers)


def group_of_its_own(folder, checked_every):
    """A process whose run has two workers."""
    os.setsid()
    _utils.worker.MP_STATUS_CHECK_INTERVAL = checked_every
    try:
        fit(with_workers(job(folder, every=5), 2), Toy(), stage(steps=100_000), slowly)
    except KeyboardInterrupt as stopped:
        (folder / "said").write_text(str(stopped))


def begun(folder):
    """Such a process, after its first checkpoint; and its workers."""
    process = multiprocessing.get_context("fork").Process(target=group_of_its_own, args=(folder, 0.1))
    process.start()
    while not list(folder.glob("checkpoints/step-*")):
        time.sleep(0.01)
        assert process.is_alive()
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    return process, workers


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_ends_the_step_and_saves(tmp_path, how):
    """As a terminal's Ctrl-C, or a scheduler that ends a job."""
    process, workers = begun(tmp_path)
    os.killpg(process.pid, how)
    process.join(20)
    assert process.exitcode == 0
    said = (tmp_path / "said").read_text()
    assert said.startswith("stopped at step ") and said.endswith("saved. Go on with --resume")
    assert not psutil.wait_procs(workers, 5)[1]


def test_workers_end_with_a_process_that_is_killed(tmp_path):
    process, workers = begun(tmp_path)
    process.kill()
    process.join()
    assert not psutil.wait_procs(workers, 20)[1]


def test_the_share_of_time_that_waits_for_data(tmp_path, monkeypatch):
    """Of a step's 2 seconds 0.5, for its batches; evaluations and checkpoints are no part of it."""
    clock = [100.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])

    def take(numbers):
        clock[0] += 0.5
        return samples(numbers)

    class Slow(Toy):
        def forward(self, batch, counts, step):
            clock[0] += 1.5
            return super().forward(batch, counts, step)

    def long(module):
        if module.training:
            raise AssertionError
        clock[0] += 1000
        return {"validation_loss": 1.0}

    run = job(tmp_path, evaluate_every=5)
    fit(run, Slow(), stage(steps=20), take, long)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "data_wait" in line]
    assert [(line["step"], line["data_wait"]) for line in logged] == [(10, 0.25), (20, 0.25)]
    assert [line["tokens_per_second"] for line in logged] == [4 * LENGTH // 2] * 2


def test_workers_make_batches_during_a_step():
    """A step's micro-batches are there when it begins: the ones that are asked for were made before."""
    seen = multiprocessing.get_context("fork").Value("i", 0)

    def counted(numbers):
        with seen.get_lock():
            seen.value = max(seen.value, numbers.stop)
        return samples(numbers)

    with loading(MicroBatches(Samples(counted), 8, 2, 4, 0), 0, 9, 2, CPU) as next_batches:
        next_batches()
        began = time.monotonic()
        while seen.value < 16 and time.monotonic() - began < 20:  # no step asks for anything meanwhile
            time.sleep(0.01)
        assert 16 <= seen.value < 72, "the next step's, and not the whole stage"


def test_how_many_workers_there_are(monkeypatch, capsys):
    """None on a CPU; on a GPU two, if cores and shared memory suffice."""
    monkeypatch.setattr("draftsmith.train.launch.available_cores", lambda: 16)
    made, gpu = MicroBatches(Samples(samples), 8, 2, 4, 0), torch.device("cuda")
    assert module._workers(made, range(4), 5, CPU) == 0
    assert module._workers(made, range(4), 5, gpu) == module.WORKERS == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert module._workers(made, range(4), 5, gpu) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert module._workers(made, range(4), 5, gpu) == 0
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=900))
    assert module._workers(made, range(4), 5, gpu) == 0
    assert "batches are made without workers: a step's take" in capsys.readouterr().out


def test_rows_of_a_stream_have_one_worker():
    streamed = Samples(samples)
    streamed.sequential = True
    with loading(MicroBatches(streamed, 4, 4, 1, 0), 0, 3, 3, CPU) as next_batches:
        next_batches()
        assert len(psutil.Process().children()) == 1
