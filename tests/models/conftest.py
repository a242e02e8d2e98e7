import sys
from collections.abc import Iterator
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
