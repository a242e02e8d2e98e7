"""The miniature Hub answers the Hub's own client as the Hub does."""

from pathlib import Path

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from server import TOKEN, USER, hub_of_this_process


@pytest.fixture
def hub(tmp_path, monkeypatch):
    for name in ("models/a/b", "datasets/a/b", "models/a/gated"):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(name)
        (tmp_path / name / "data" / "x.txt").write_text("0123456789")
    with hub_of_this_process(tmp_path, monkeypatch) as server:
        server.gated = {"models/a/gated": {TOKEN}}
        yield server


def test_reading(hub, tmp_path):
    api, cache = HfApi(hub.endpoint, token=False), tmp_path / "cache"
    for kind in ("model", "dataset"):
        found = api.repo_info("a/b", repo_type=kind)
        assert {file.rfilename for file in found.siblings} == {"config.json", "data/x.txt"}
        assert [entry.path for entry in api.list_repo_tree("a/b", repo_type=kind)] == ["config.json", "data"]
        tree = api.list_repo_tree("a/b", repo_type=kind, recursive=True)
        assert {entry.path for entry in tree} == {"config.json", "data", "data/x.txt"}
        (info,) = api.get_paths_info("a/b", ["config.json", "nothing"], repo_type=kind)
        assert info.size == len(f"{kind}s/a/b")
        path = api.hf_hub_download("a/b", "config.json", repo_type=kind, cache_dir=cache)
        assert Path(path).read_text() == f"{kind}s/a/b"
    folder = api.snapshot_download("a/b", cache_dir=cache, ignore_patterns=["*.json"])
    assert hub.requested("models/a/b") == {"config.json", "data/x.txt"} and folder.endswith(hub.commit("models/a/b"))


def test_refusals(hub, tmp_path):
    api = HfApi(hub.endpoint, token=False)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("a/none")
    with pytest.raises(RevisionNotFoundError):
        api.model_info("a/b", revision="other")
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download("a/b", "nothing.json", cache_dir=tmp_path / "cache")
    assert [entry.path for entry in api.list_repo_tree("a/gated")] == ["config.json", "data"]
    for token, code in ((False, 401), ("hf_other", 403)):
        with pytest.raises(GatedRepoError) as error:
            api.hf_hub_download("a/gated", "config.json", token=token, cache_dir=tmp_path / "cache")
        assert error.value.response.status_code == code
    assert hub.requested("models/a/gated") == set()
    api.hf_hub_download("a/gated", "config.json", token=TOKEN, cache_dir=tmp_path / "cache")
    assert hub.requested("models/a/gated") == {"config.json"}


def test_writing(hub, tmp_path):
    api = HfApi(hub.endpoint, token=TOKEN)
    assert api.whoami()["name"] == USER
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "weights.bin").write_bytes(bytes(range(256)))
    for _ in range(2):
        api.create_repo(f"{USER}/new", exist_ok=True, private=True)
    before = hub.commit(f"models/{USER}/new")
    api.upload_folder(repo_id=f"{USER}/new", folder_path=tmp_path / "new")
    assert hub.files(f"models/{USER}/new")["weights.bin"].read_bytes() == bytes(range(256))
    assert hub.commit(f"models/{USER}/new") != before
