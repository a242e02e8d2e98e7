"""Uploads, against a local server that speaks as much of the Hub's protocol as an upload needs."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest

from draftsmith.models.artifact import push


class Hub(BaseHTTPRequestHandler):
    created: list
    files: dict

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Authorization"] == "Bearer hf_secret"
        if self.server.refuse:
            return self.answer(403, {"error": "You do not have the rights to create a model here"})
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(content))
            return self.answer(200, {"url": f"http://{self.headers['Host']}/somebody/drafter"})
        if self.path.endswith("/preupload/main"):
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for f in json.loads(content)["files"]]  # fmt: skip
            return self.answer(200, {"files": files})
        if self.path.endswith("/commit/main"):
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer(
                200, {"commitUrl": f"http://{self.headers['Host']}/somebody/drafter/commit/1", "commitOid": "1",
                      "success": True})  # fmt: skip
        return self.answer(200, {"errors": [], "warnings": []})  # validate-yaml

    def do_GET(self):
        self.answer(200, {"id": "somebody/drafter", "sha": "1" * 40, "siblings": []})

    def answer(self, code, content):
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.created, server.files, server.refuse = [], {}, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()


@pytest.fixture
def folder(tmp_path):
    files = ["config.json", "model.safetensors", "README.md", "tree.json", "recipe.yaml", "metrics.jsonl", "wandb_id",
             "checkpoints/step-1/model.safetensors", "answers/train-0/model.safetensors", "answers/train-0/lock",
             "held_out/model.safetensors", "streams/0.json", "wandb/x", ".writable"]  # fmt: skip
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"content of {name}")
    return tmp_path


def test_the_artifact_and_nothing_else(hub, folder):
    push(folder, "somebody/drafter", private=True)
    assert hub.created[0]["name"] == "drafter" and hub.created[0]["organization"] == "somebody"
    assert hub.created[0].get("private") is True or hub.created[0].get("visibility") == "private"
    assert set(hub.files) == {
        "config.json", "model.safetensors", "README.md", "tree.json", "recipe.yaml", "metrics.jsonl"
    }  # fmt: skip
    assert hub.files["tree.json"] == b"content of tree.json"


def test_a_refusal_is_one_line(hub, folder):
    hub.refuse = True
    with pytest.raises(ValueError) as error:
        push(folder, "somebody/drafter", private=True)
    said = str(error.value)
    assert "\n" not in said and "somebody/drafter failed (" in said and "hf auth login" in said
    assert "hf_secret" not in said
    assert (folder / "model.safetensors").exists()
