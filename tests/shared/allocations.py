"""How much memory a call takes on the CPU."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_of(call: Callable[[], object]) -> int:
    """The most bytes that a call holds at a time, beside those that were there: PyTorch's own count of each allocation
    and release, also of those inside an operation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    changes = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak
