"""One miniature Hub, and one user's machine, for the tests of a file."""

from collections.abc import Iterator

import miniatures
import pytest
from recipe_runs import World
from server import TOKEN, Hub


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("hub")
    miniatures.build(folder)
    with Hub(folder) as hub:
        hub.gated = {name: {TOKEN} for name, manifest in miniatures.manifests().items() if manifest.get("gated")}
        world = World(tmp_path_factory.mktemp("machine"), hub)
        yield world
        world.close()
        assert hub.unknown == [], "the miniature Hub lacks something"
