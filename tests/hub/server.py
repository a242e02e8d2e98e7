"""A miniature Hub: the part of its HTTP protocol that huggingface_hub and datasets use, over folders on this machine.

    with Hub(folder) as hub:
        environment["HF_ENDPOINT"] = hub.endpoint

``folder/models/USER/NAME`` and ``folder/datasets/USER/NAME`` are the repositories, one revision (``main``) each.
What is uploaded is written there; what is asked for is kept in ``hub.requests``.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

TOKEN, USER = "hf_secret", "somebody"
_KINDS = {"models": "", "datasets": "datasets/"}  # kind → prefix of its pages


class Hub:
    """The server, and what a test may set or look at.

    gated: repositories (``models/USER/NAME``) → the tokens of those who accepted the licence.
    refuse: answer every upload with 403.
    failing: step of an upload (``create``, ``preupload``, ``commit``) → the status that answers it; 0: the connection
        is closed without an answer.
    requests: (method, ``models/USER/NAME/FILE``) of every file asked for by somebody who may have it, in order.
    created: the content of every request for a new repository.
    unknown: requests that this server has no answer to; a test should find none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gated: dict[str, set[str]] = {}
        self.refuse = False
        self.failing: dict[str, int] = {}
        self.requests: list[tuple[str, str]] = []
        self.created: list[dict[str, Any]] = []
        self.unknown: list[str] = []

    def __enter__(self) -> "Hub":
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self  # type: ignore[attr-defined]
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def files(self, repository: str) -> dict[str, Path]:
        """The files of ``models/USER/NAME``, by their names in it."""
        root = self.folder / repository
        return {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}

    def requested(self, repository: str) -> set[str]:
        """The names of a repository's files whose content was asked for."""
        begin = f"{repository}/"
        return {name.removeprefix(begin) for how, name in self.requests if how == "GET" and name.startswith(begin)}

    def commit(self, repository: str) -> str:
        """The hash of what the repository holds now."""
        known = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in self.files(repository).items()]
        return hashlib.sha1(repr(known).encode()).hexdigest()


@contextlib.contextmanager
def hub_of_this_process(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A miniature over ``folder`` in the place of the Hub, and a cache of downloads of its own."""
    with Hub(folder) as hub:
        for name, value in {
            "ENDPOINT": hub.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(folder / "downloads"),
        }.items():
            patch.setattr(huggingface_hub.constants, name, value)
        patch.setenv("HF_TOKEN", TOKEN)
        yield hub
        assert hub.unknown == []


def _blob(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _file(name: str, path: Path) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _blob(path)}


def _directory(name: str) -> dict[str, Any]:
    return {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # clients keep their connections

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass

    # ---- answers

    def answer(self, code: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def deny(self, code: int, error: str, message: str, headers: dict[str, str] | None = None) -> None:
        self.answer(code, {"error": message}, {"X-Error-Code": error, "X-Error-Message": message} | (headers or {}))

    # ---- requests

    def token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def repository(self, kind: str, name: str) -> str | None:
        """``models/USER/NAME`` if there is such a repository; else the answer has been given."""
        repository = f"{kind}/{name}"
        if (self.hub.folder / repository).is_dir():
            return repository
        if self.token() is None:  # so that nobody learns which private ones there are
            self.deny(401, "RepoNotFound", "Invalid username or password.")
        else:
            self.deny(404, "RepoNotFound", "Repository not found")
        return None

    def revision(self, repository: str, revision: str) -> str | None:
        commit = self.hub.commit(repository)
        if revision in ("main", commit):
            return commit
        self.deny(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return None

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        path, query = urllib.parse.unquote(url.path), urllib.parse.parse_qs(url.query)
        if path == "/api/whoami-v2":
            if self.token() != TOKEN:
                return self.deny(401, "InvalidToken", "Invalid user token.")
            return self.answer(200, {"type": "user", "name": USER, "fullname": USER, "orgs": [], "auth": {}})
        if path == "/api/agent-harnesses":  # the client asks once a day
            return self.answer(200, {"standardEnvVars": [], "harnesses": {}})
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            prefix, name, revision, file = found.groups()
            return self.resolve("datasets" if prefix else "models", name, revision, file)
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", path):
            kind, name, revision, folder = found.groups()
            return self.tree(kind, name, revision, folder or "", query.get("recursive", [""])[0].lower() == "true")
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            kind, name, revision = found.groups()
            return self.info(kind, name, revision or "main")
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/refs", path):
            if repository := self.repository(*found.groups()):
                branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": self.hub.commit(repository)}
                self.answer(200, {"branches": [branch], "tags": [], "converts": [], "pullRequests": []})
            return None
        return self.no_page(path)

    def no_page(self, path: str) -> None:
        self.hub.unknown.append(f"{self.command} {path}")
        self.deny(404, "EntryNotFound", f"{path}: this miniature has no such page")

    def info(self, kind: str, name: str, revision: str) -> None:
        repository = self.repository(kind, name)
        if repository is None or (commit := self.revision(repository, revision)) is None:
            return
        siblings = [{"rfilename": file} for file in self.hub.files(repository)]
        about = {"id": name, "author": name.split("/")[0], "sha": commit, "siblings": siblings}
        about |= {"private": False, "gated": "manual" if repository in self.hub.gated else False, "disabled": False}
        self.answer(200, about | {"tags": [], "downloads": 0, "likes": 0})

    def tree(self, kind: str, name: str, revision: str, folder: str, recursive: bool) -> None:
        """A gated repository's list of files is open to all; their content is not."""
        repository = self.repository(kind, name)
        if repository is None or self.revision(repository, revision) is None:
            return
        begin = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for file, path in self.hub.files(repository).items():
            if not file.startswith(begin):
                continue
            parts = file.removeprefix(begin).split("/")
            for depth in range(1, len(parts) if recursive else min(2, len(parts))):
                inner = begin + "/".join(parts[:depth])
                entries[inner] = _directory(inner)
            if recursive or len(parts) == 1:
                entries[file] = _file(file, path)
        if folder and not entries:
            return self.deny(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        self.answer(200, list(entries.values()))

    def resolve(self, kind: str, name: str, revision: str, file: str) -> None:
        repository = self.repository(kind, name)
        if repository is None or (commit := self.revision(repository, revision)) is None:
            return
        page = f"{self.hub.endpoint}/{_KINDS[kind]}{name}"
        if repository in self.hub.gated and self.token() not in self.hub.gated[repository]:
            code, why = 403, f" and you are not in the authorized list. Visit {page} to ask for access."
            if self.token() is None:
                code, why = 401, ". You must have access to it and be authenticated to access it. Please log in."
            return self.deny(code, "GatedRepo", f"Access to {kind.removesuffix('s')} {name} is restricted{why}")
        self.hub.requests.append((self.command, f"{repository}/{file}"))
        path = self.hub.files(repository).get(file)
        headers = {"X-Repo-Commit": commit}
        if path is None:
            return self.deny(404, "EntryNotFound", "Entry not found", headers)
        content = path.read_bytes()
        headers |= {"ETag": f'"{_blob(path)}"', "Accept-Ranges": "bytes"}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            begin, end = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
            return self.answer(206, content[begin : end + 1], headers)
        self.answer(200, content, headers)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/paths-info/([^/]+)", path):
            kind, name, revision = found.groups()
            return self.paths_info(kind, name, revision, urllib.parse.parse_qs(content.decode()).get("paths", []))
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        # What follows changes something.
        if self.token() != TOKEN:
            return self.deny(401, "InvalidToken", "Invalid username or password.")
        if self.hub.refuse:
            return self.answer(403, {"error": "You do not have the rights to create a model here"})
        step = "create" if path == "/api/repos/create" else path.removesuffix("/main").rpartition("/")[2]
        if (status := self.hub.failing.get(step)) is not None:
            self.close_connection = True
            said, closed = {"error": "Internal Error - We're working hard to fix this"}, {"Connection": "close"}
            return self.answer(status, said, closed) if status else None
        if path == "/api/repos/create":
            asked = json.loads(content)
            self.hub.created.append(asked)
            name = f"{asked.get('organization') or USER}/{asked['name']}"
            if not name.startswith(f"{USER}/"):
                return self.deny_namespace(name)
            url = f"{self.hub.endpoint}/{name}"
            folder = self.hub.folder / f"{asked.get('type') or 'model'}s" / name
            if folder.exists():
                return self.answer(409, {"error": "You already created this repo", "url": url})
            folder.mkdir(parents=True)
            return self.answer(200, {"url": url, "name": name, "id": name})
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/(preupload|commit)/main", path):
            kind, name, what = found.groups()
            if not name.startswith(f"{USER}/"):
                return self.deny_namespace(name)
            if repository := self.repository(kind, name):
                getattr(self, what)(repository, name, content)
            return None
        return self.no_page(path)

    def deny_namespace(self, name: str) -> None:
        said = f'You don\'t have the rights to create a model under the namespace "{name.partition("/")[0]}"'
        self.answer(403, {"error": said}, {"X-Error-Message": said})

    def paths_info(self, kind: str, name: str, revision: str, paths: list[str]) -> None:
        repository = self.repository(kind, name)
        if repository is None or self.revision(repository, revision) is None:
            return
        files = self.hub.files(repository)
        found = [_file(path, files[path]) for path in paths if path in files]
        for path in paths:
            if any(file.startswith(f"{path}/") for file in files):
                found.append(_directory(path))
        self.answer(200, found)

    def preupload(self, repository: str, name: str, content: bytes) -> None:
        files = json.loads(content)["files"]
        self.answer(
            200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        )

    def commit(self, repository: str, name: str, content: bytes) -> None:
        for line in map(json.loads, content.splitlines()):
            if line["key"] == "file":
                path = self.hub.folder / repository / line["value"]["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(line["value"]["content"]))
            elif line["key"] == "deletedFile":
                (self.hub.folder / repository / line["value"]["path"]).unlink()
        oid = self.hub.commit(repository)
        self.answer(200, {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{oid}", "commitOid": oid, "success": True})
