"""A target that a server runs: features as our own, whole runs on them, and what is wrong said in one line. The server
here speaks as vLLM does; a file and an answer that vLLM wrote are in recorded/."""

import fcntl
import json
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import Runs, metrics, write_recipe

from draftsmith.common.sections import Features, TargetSection
from draftsmith.models.eagle import layers_to_capture
from draftsmith.models.target import load_target
from draftsmith.train import dflash, dynaspec, eagle, medusa, ssm
from draftsmith.train.served import load_served, server_command

STAGE = {"batch": {"sequences": 8, "accumulate": 2}, "optim": {"lr": 1e-2, "schedule": "constant"}, "steps": 4}
CHATS = Path(__file__).parents[2] / "data/samples.jsonl"
LAYERS = [0, 1, 2]  # of two layers: what goes into both, and what leaves the last


class Server(ThreadingHTTPServer):
    """Answers requests for one token with the place of their hidden states; a file is written after the answer."""

    daemon_threads = True

    def __init__(self, target, folder, layers):
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.folder, self.layers, self.asked, self.spoil = target, folder, layers, [], {}
        self.lock = threading.Lock()  # hooks see what another thread's pass does
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    @torch.no_grad()
    def states(self, ids):
        """``[T, layers, d]``, before the final norm, and the next token."""
        before = []
        handle = self.target.decoder.norm.register_forward_pre_hook(lambda _, given: before.append(given[0]))
        try:
            found = self.target.features(torch.tensor([ids]), [n for n in self.layers if n < 2])[0]
        finally:
            handle.remove()
        last, *inputs = found.unflatten(-1, (-1, self.target.hidden_size)).unbind(1)
        token = int(self.target.logits(last[-1:]).argmax())
        return torch.stack([*inputs, *([before[0][0]] if 2 in self.layers else [])], 1), token


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        self.reply({"data": [{"id": "the model"}]})

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.asked.append(body)
        with server.lock:
            states, token = server.states(body["prompt"])
        path = server.folder / f"{len(server.asked)}-{threading.get_ident()}.safetensors"
        lock = (server.folder / f"{path.name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        ids = torch.tensor(server.spoil.get("ids", body["prompt"]))
        parameters = {"hidden_states_path": str(server.spoil.get("path", path))}
        choice = {"index": 0, "text": "", "token_ids": [server.spoil.get("token", token)]}
        answer = {"choices": [choice], "kv_transfer_params": server.spoil.get("parameters", parameters)}
        self.reply(answer)
        time.sleep(0.01)
        save_file({"hidden_states": states, "token_ids": ids}, path)
        lock.close()

    def reply(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve(tiny_lm, tmp_path):
    """``serve(layers)`` → a server of the tiny model."""
    servers, folder = [], tmp_path / "written"
    folder.mkdir()

    def start(layers=LAYERS):
        servers.append(Server(load_target(str(tiny_lm)), folder, layers))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def section(tiny_lm, server, **asked):
    return TargetSection(name=str(tiny_lm), dtype="float32", features=Features(url=server.url, **asked))


def test_features_are_those_of_the_target(serve, tiny_lm, tmp_path):
    """Rows of several samples, captured layers in another order than the server's, and no file left."""
    server = serve()
    served, target = load_served(section(tiny_lm, server), "cpu"), load_target(str(tiny_lm))
    assert sum(p.numel() for n, p in served.model.named_parameters() if "layers" in n) == 0
    assert (served.fingerprint, served.stop_ids) == (target.fingerprint, target.stop_ids)
    assert served.config.num_hidden_layers == 2
    tokens = torch.randint(5, 250, (2, 12))
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
    for captures in ([0, 1], [1, 0]):
        with torch.no_grad():
            wanted = target.features(tokens, captures, positions)
        torch.testing.assert_close(served.features(tokens, captures, positions), wanted, rtol=1e-4, atol=1e-4)
    assert sorted(len(body["prompt"]) for body in server.asked[-4:]) == [3, 5, 7, 9]
    assert server.asked[-1]["model"] == "the model" and server.asked[-1]["max_tokens"] == 1
    deadline = time.monotonic() + 10
    while list((tmp_path / "written").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not list((tmp_path / "written").iterdir())


@pytest.mark.parametrize("kind", ["eagle", "medusa", "dflash"])
def test_a_run_on_served_features(kind, serve, tiny_lm, tmp_path, run_main):
    """Losses, evaluations, config and weights are those of a run with the whole target, which decodes with them; no
    padding is asked for."""
    captured = [] if kind == "medusa" else [0, 1]
    sizes = {"medusa": {"num_draft_heads": 3}, "eagle": {"version": 3, "unroll": 2}, "dflash": {"block_size": 4}}
    drafter = sizes[kind]
    drafter |= {"captured_layers": captured} if captured else {}
    server, source = serve([*captured, 2]), [{"source": str(CHATS)}]
    data = {"train": source, "validation": source, "max_length": 128, "packing": True}
    recipe = write_recipe(tmp_path, tiny_lm, drafter, [{"name": kind, **STAGE}], data=data, evaluate={"every": 2})
    runs = Runs({"eagle": eagle, "medusa": medusa, "dflash": dflash}[kind].main, recipe, run_main)
    whole, served = runs("whole"), runs("served", f"target.features={{url: '{server.url}'}}")
    for key in ("loss", "simulated_tau"):
        assert metrics(served, key) == pytest.approx(metrics(whole, key), rel=1e-4), key
    weights = load_file(whole / "model.safetensors")
    for name, weight in load_file(served / "model.safetensors").items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-4, msg=name)
    assert len(server.asked) > 16
    configs = [json.loads((folder / "config.json").read_text()) for folder in (whole, served)]
    assert configs[0] == configs[1]
    if captured:  # else drafters know no positions
        assert configs[0]["max_position_embeddings"] == load_target(str(tiny_lm)).context


def test_the_scale_of_hidden_states(serve, tmp_path, tiny_lm):
    """With a final norm whose weights are uneven, as those of real targets are."""
    shutil.copytree(tiny_lm, tmp_path / "uneven")
    weights = load_file(tmp_path / "uneven/model.safetensors")
    weights["model.norm.weight"] = torch.linspace(0.1, 4, len(weights["model.norm.weight"]))
    save_file(weights, tmp_path / "uneven/model.safetensors", {"format": "pt"})
    server = serve()
    server.target = load_target(str(tmp_path / "uneven"))
    served = load_served(section(tmp_path / "uneven", server), "cpu")
    assert served.hidden_scale() == pytest.approx(server.target.hidden_scale(), rel=1e-5)


def test_what_a_server_does_wrong_is_one_line(serve, tiny_lm, tmp_path):
    def refused(make=lambda: load_served(section(tiny_lm, server, timeout=0.5), "cpu")):
        with pytest.raises(ValueError) as error:
            make()
        assert str(error.value).startswith(f"target.features.url={server.url}: ")
        return str(error.value)

    server = serve([1, 2])
    served = load_served(section(tiny_lm, server), "cpu")
    wrong = refused(lambda: served.features(torch.arange(5, 9)[None], [0, 1]))
    assert "writes the states of 2 layers, and [0, 1, 2] are needed; start it by: vllm serve" in wrong
    for spoiled, words in (
        ({"token": 250}, "by the weights here"),
        ({"parameters": None}, "writes no hidden states; start it, for EAGLE-3, by: vllm serve"),
        ({"ids": [1, 2]}, "holds other tokens than were asked for"),
        ({"path": tmp_path / "elsewhere"}, "which is not here: both have to see its shared_storage_path"),
    ):
        server.spoil = spoiled
        assert words in refused()
    save_file({"weight": torch.ones(2)}, tmp_path / "own.safetensors")
    server.spoil = {"path": tmp_path / "own.safetensors"}
    assert "is no file of hidden states" in refused() and (tmp_path / "own.safetensors").exists()
    server.spoil = {}
    held = (tmp_path / "held.lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    server.spoil = {"path": tmp_path / "held"}
    assert "is not written after 0.5 seconds" in refused()


def test_the_final_norm_is_ours(serve, tiny_lm):
    """A server whose last layer is not the last one is found before training."""
    with pytest.raises(ValueError, match="by the weights here"):
        load_served(section(tiny_lm, serve([0])), "cpu")


def test_the_command_for_the_server():
    command = server_command("a/model", [2, 14, 25, 28])
    assert command.startswith("vllm serve a/model --speculative-config ") and "[2, 14, 25, 28]" in command


@pytest.mark.parametrize(
    ("module", "drafter", "stage", "overrides", "words"),
    [
        (eagle, {"version": 3}, {}, ["target.quantize=4bit"], "target.quantize=4bit needs the target's layers here"),
        (eagle, {"version": 3}, {}, ["evaluate={every: 2, decode: 2}"], "evaluate.decode=2 needs"),
        (eagle, {"version": 3}, {}, [], "['stdlib']: answers needs"),
        (medusa, {}, {"joint": {}}, ["data.train=X", "data.validation=X"], "a joint stage trains"),
        (ssm, {"layers": [0]}, {}, ["data.train=X", "data.validation=X"], "SSMs train on the target's answers"),
        (dynaspec, {}, {}, ["data.train=X", "data.validation=X"], "measured beside the target itself"),
    ],
)
def test_recipes_that_need_the_layers_are_refused(
    module, drafter, stage, overrides, words, tiny_lm, tmp_path, run_main
):
    recipe = write_recipe(tmp_path, tiny_lm, drafter, [{"name": "one", **STAGE, **stage}])
    overrides = [each.replace("X", f"[{{source: {CHATS}}}]") for each in overrides]
    features = "target.features={url: 'http://127.0.0.1:9/v1'}"
    assert words in Runs(module.main, recipe, run_main).refused("refused", features, *overrides)


RECORDED = Path(__file__).parent / "recorded"


def test_a_file_that_vllm_wrote(serve, monkeypatch, tmp_path):
    """Numbering of layers, the state before the final norm, names and shapes, of models/tiny-lm; what
    ``benchmarks/served_features.py --record`` kept."""
    answer = json.loads((RECORDED / "answer.json").read_text())
    ids, copy = load_file(RECORDED / "hidden_states.safetensors")["token_ids"], tmp_path / "copy.safetensors"
    answer["kv_transfer_params"]["hidden_states_path"] = str(copy)

    def replay(handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        assert body["prompt"] == ids.tolist()
        copy.write_bytes((RECORDED / "hidden_states.safetensors").read_bytes())
        handler.reply(answer)

    monkeypatch.setattr(Handler, "do_POST", replay)
    name = str(CHATS.parents[1] / "models/tiny-lm")
    served = load_served(TargetSection(name=name, dtype="float32", features=Features(url=serve().url)), "cpu")
    target, layers = load_target(name, dtype="float32"), layers_to_capture(12)
    with torch.no_grad():
        ours, theirs = (each.features(ids[None], layers) for each in (target, served))
        beside = [target.features(ids[None], [layer + by for layer in layers]) for by in (-1, 1)]
    bound = 1e-4 * float(ours.abs().max())
    assert (ours - theirs).abs().max() <= bound
    d = target.hidden_size
    assert all((ours - other)[..., d:].abs().max() > 100 * bound for other in beside), "another numbering would show"
