"""The table of what each program reads: in the document, and by the sources that `make serve-check` installs."""

import pytest

from draftsmith.benchmarks import readers
from draftsmith.benchmarks.documents import between
from draftsmith.models.serving.readers import READERS


def test_the_document_has_the_table():
    text = (readers.ROOT / "docs/export.md").read_text()
    assert between(text, "export.md", readers.BEGIN, readers.END)[1] == readers.block()


@pytest.mark.parametrize("key", READERS)
def test_as_the_sources_say(key):
    source = readers.source_of(READERS[key], readers.ROOT)
    if not source:
        pytest.skip(f"no source of {READERS[key].name} here: make serve-check installs it")
    assert not readers.faults(key, source)


def test_what_differs_is_found(tmp_path, run_main):
    """A field that is named nowhere any more, one that is read now, and files that moved."""
    folder = tmp_path / ".venv-serve-sources/llama.cpp"
    for file in READERS["llamacpp"].files:
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text("fc_norm, my_norm_before_fc")
    code, printed, _ = run_main(readers.main, "--root", tmp_path)
    assert code == 1 and "norm_before_fc is named nowhere in the source of llama.cpp" in printed
    assert "fc_norm is named, and said to be left out, in the source of llama.cpp" in printed
    (folder / READERS["llamacpp"].files[1]).unlink()
    assert "has no src/models/eagle3.cpp" in run_main(readers.main, "--root", tmp_path)[2]
    code, printed, _ = run_main(readers.main, "--root", tmp_path / "none")
    assert code == 1 and "the sources of: none" in printed
