"""Micro-batches of a stage, made ahead of the step that needs them by the workers of PyTorch's ``DataLoader``."""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from draftsmith.common.processes import or_error
from draftsmith.train.launch import console, own_cores
from draftsmith.train.samples import Batch, StageSamples

WORKERS = 2  # of a process with a GPU, where the recipe does not say how many
SHARED = "/dev/shm"  # where workers put the tensors that they hand over


class MicroBatches(Dataset[Any]):
    """The micro-batches of one process, numbered through all steps: micro-batch i of step s is number
    s · ``accumulate`` + i. An error that a person can correct is returned: the loader would make a traceback of it.

    sequences: of a step, over all processes.
    micro: of a micro-batch.
    process: this one's number.
    """

    def __init__(self, samples: StageSamples, sequences: int, micro: int, accumulate: int, process: int) -> None:
        self.samples, self.sequences, self.micro, self.accumulate = samples, sequences, micro, accumulate
        self.first = process * micro * accumulate

    def __getitem__(self, number: int) -> Batch | Exception:
        step, place = divmod(number, self.accumulate)
        begin = step * self.sequences + self.first + place * self.micro
        return or_error(self.samples, range(begin, begin + self.micro))


@contextlib.contextmanager
def loading(
    batches: MicroBatches, start: int, stop: int, wanted: int | None, device: torch.device
) -> Iterator[Callable[[], list[Batch]]]:
    """Inside, each call of what is yielded returns the micro-batches of the next step, from step ``start`` to the one
    before ``stop``.

    They are made up to a step ahead, in pinned memory where ``device`` is a GPU. Without workers, each is made when it
    is asked for.

    Args:
        wanted: number of workers; None: :data:`WORKERS` on a GPU, if the cores and the shared memory suffice.

    Raises:
        ValueError, OSError: what making a batch raises; a worker has died.
    """
    numbers, ahead = range(start * batches.accumulate, stop * batches.accumulate), batches.accumulate + 1
    workers = _workers(batches, numbers, ahead, device) if wanted is None else wanted
    workers = min(workers, 1) if batches.samples.sequential else workers
    options: dict[str, Any] = {}
    if workers:  # forked: they have the rows without a copy
        options = {"prefetch_factor": max(2, -(-ahead // workers)), "multiprocessing_context": "fork"}
    loaded: Any = iter(
        DataLoader(
            batches,
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # the loader draws from it, and no bit of training may depend on that
            **options,
        )
    )

    def take() -> list[Batch]:
        step: list[Batch] = []
        for _ in range(batches.accumulate):
            try:
                batch = next(loaded)
            except (EOFError, ConnectionError) as error:  # the worker was handing a batch over
                raise _died(type(error).__name__) from None
            if isinstance(batch, Exception):
                raise batch
            step.append(batch)
        return step

    try:
        yield take
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise _died(str(error).split(". ")[0]) from None
    finally:
        if workers:
            # An exception's frames would keep it, and with it the workers. Of one that dies now, torch raises here.
            with contextlib.suppress(RuntimeError):
                loaded._shutdown_workers()
            for worker in loaded._workers:
                if worker.is_alive():  # it waits for a server or a disk, and does not end by the signals it ignores
                    worker.kill()
                    worker.join(5)


def _workers(batches: MicroBatches, numbers: range, ahead: int, device: torch.device) -> int:
    """How many workers a process has if the recipe does not say it."""
    if device.type != "cuda" or not numbers:
        return 0  # a CPU's cores are busy with the step itself
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    workers = min(WORKERS, own_cores() - 1)
    batch = batches[numbers[0]]
    needed = 0 if isinstance(batch, Exception) else ahead * here * sum(value.nbytes for value in batch.values())
    free = shutil.disk_usage(SHARED).free if workers and os.path.isdir(SHARED) else 0
    if workers and needed > 0.5 * free:
        console.print(
            f"  batches are made without workers: a step's take {needed / 1e9:.2f} GB, and {SHARED} has "
            f"{free / 1e9:.2f} GB free (a container's option: --shm-size)"
        )
        return 0
    return workers


def _died(how: str) -> ValueError:
    return ValueError(
        f"a process that makes batches has ended ({how}); give it more memory (a container's {SHARED} too), or set "
        "data.workers=0"
    )


def _ignore_signals(worker: int) -> None:
    """A terminal and a scheduler signal all processes at once, and the main one decides when to stop."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
