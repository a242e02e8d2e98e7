"""The commit in a drafter's provenance."""

import subprocess

import pytest

from draftsmith.models.artifact import commit_of, provenance


@pytest.fixture
def repository(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", tmp_path, *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "site-packages/draftsmith/models").mkdir(parents=True)
    (tmp_path / "site-packages/draftsmith/models/artifact.py").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    return tmp_path, git("rev-parse", "HEAD")


def test_commit_of_a_repository(repository, tmp_path_factory):
    folder, commit = repository
    assert commit.startswith(commit_of(folder))
    link = tmp_path_factory.mktemp("elsewhere") / "link"
    link.symlink_to(folder)
    assert commit_of(link) == commit_of(folder)
    (folder / "site-packages/draftsmith/models/artifact.py").write_text("2")
    assert commit_of(folder).endswith("-dirty")


def test_no_commit_of_a_surrounding_repository(repository):
    folder, _ = repository
    assert commit_of(folder / "site-packages/draftsmith") is None


def test_no_repository_or_no_git(tmp_path, monkeypatch):
    assert commit_of(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path) is None
    assert provenance(command="x")["git_commit"] is None
