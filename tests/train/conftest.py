import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # training_runs.py
pytest.register_assert_rewrite("training_runs")


@pytest.fixture(scope="module")
def train(request, recipe, run_main):
    """Runs of the module's command ``MAIN`` by its fixture ``recipe``."""
    from training_runs import Runs

    return Runs(request.module.MAIN, recipe, run_main)
