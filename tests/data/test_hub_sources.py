"""Data sets of the Hub, asked for at a miniature one: which of their files, and a line that helps if there is none."""

import json
import os
import subprocess
import sys

import pytest
from server import Hub

READ = """
import json, sys
from draftsmith.data.rows import rows
from draftsmith.common.data_sections import (Source)
for fields in json.loads(sys.argv[1]):
    try:
        print(json.dumps([row for _, row in rows(Source(**fields))[0]]))
    except ValueError as error:
        print(error)
"""


def read(endpoint, folder, sources, **environment):
    """What is said of each source, by a process of its own: the Hub's address is read at import."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(folder), **environment}
    command = [sys.executable, "-c", READ, json.dumps(sources)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def hub(tmp_path):
    for name in ("a/several", "a/terms"):
        (tmp_path / "datasets" / name).mkdir(parents=True)
        (tmp_path / "datasets" / name / "one.json").write_text('[{"text": "x"}, {"text": "y"}]')
        (tmp_path / "datasets" / name / "two.json").write_text('[{"other": 1}]')
    with Hub(tmp_path) as hub:
        hub.gated = {"datasets/a/terms": {"hf_somebody"}}
        yield hub


def test_files_of_a_data_set(hub, tmp_path):
    several = {"source": "a/several", "files": "one.json"}
    whole, part, streamed, missing, unknown, gated, split = read(
        hub.endpoint,
        tmp_path / "home",
        [
            several,
            several | {"split": "train[1:]"},
            several | {"streaming": True},
            several | {"files": "none.json"},
            {"source": "a/nothing"},
            {"source": "a/terms"},
            several | {"split": "dev"},
        ],
        HF_HUB_OFFLINE="0",
    )
    rows = [{"text": "x"}, {"text": "y"}]
    assert (json.loads(whole), json.loads(part), json.loads(streamed)) == (rows, rows[1:], rows)
    assert missing.startswith("data source 'a/several (train)': cannot be read (")
    assert missing.endswith("; check files=none.json")
    assert unknown.endswith("; check its name (for a private one: hf auth login)")
    assert gated.endswith("; accept its terms on its page on the Hub, then log in with: hf auth login")
    assert "Unknown split" in split and "check files" not in split


def test_no_network(tmp_path):
    (said,) = read("http://127.0.0.1:9", tmp_path / "home", [{"source": "a/401-gated"}], HF_HUB_OFFLINE="1")
    assert said.endswith("; check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or name a downloaded file instead")
