import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # made.py

from server import Hub, hub_of_this_process


@pytest.fixture
def hub(tmp_path_factory, monkeypatch) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(folder / "cache"))
    with hub_of_this_process(folder, monkeypatch) as server:
        yield server


@pytest.fixture
def refused(run_main) -> Callable[..., str]:
    """``refused(module.main, *arguments)`` → the one line of a command that ends with exit code 2."""

    def run(main: Callable[[], None], *arguments: object) -> str:
        code, _, err = run_main(main, *arguments)
        assert code == 2 and err.count("\n") == 1, err
        return err

    return run
