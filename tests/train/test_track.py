"""Trackers: what they get, and that they cannot stop a run."""

import socket
import threading
import time

import pytest
import wandb

from draftsmith.common.sections import Track
from draftsmith.train import track

LINES = [{"step": 10, "stage": "a", "loss": 2.5, "best": True}, {"step": 20, "stage": "a", "loss": 1.5}]


def test_tensorboard_gets_every_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = track.Trackers(Track(tensorboard=True), tmp_path, {})
    for line in LINES:
        trackers.log(line)
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(10, 2.5), (20, 1.5)]


def test_wandb_offline(tmp_path):
    trackers = track.Trackers(Track(wandb=True, offline=True), tmp_path, {"steps": 20})
    for line in LINES:
        trackers.log(line)
    trackers.close()
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    identity = (tmp_path / "wandb_id").read_text()
    ends = time.monotonic() + 60  # wandb's own process writes the file, at the latest when it ends
    while b"loss" not in kept.read_bytes() and time.monotonic() < ends:
        time.sleep(0.1)
    assert identity in kept.name and b"loss" in kept.read_bytes()
    again = track.Trackers(Track(wandb=True, offline=True), tmp_path, {})
    again.close()
    assert (tmp_path / "wandb_id").read_text() == identity, "a resumed run goes on in the same chart"


@pytest.mark.whole_runs
def test_a_network_that_hangs_is_cut_off(tmp_path, monkeypatch, capsys):
    """A server that takes connections and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    taken = []

    def accept():
        while True:
            try:
                taken.append(server.accept()[0])
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr(track, "WAIT", 3.0)
    wandb.teardown()  # it would keep the address it had read before
    began = time.monotonic()
    trackers = track.Trackers(Track(wandb=True), tmp_path, {})
    trackers.log(LINES[0])
    trackers.close()
    assert time.monotonic() - began < 40
    server.close()
    out = capsys.readouterr().out
    assert "wandb does not answer" in out and "wandb sync" in out and "0000" not in out
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    assert taken, "it did try"


def test_wandb_without_a_login(tmp_path, monkeypatch, capsys):
    """Nobody is asked for one: the run goes on, offline."""
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "3")
    wandb.teardown()
    trackers = track.Trackers(Track(wandb=True), tmp_path, {})
    trackers.log(LINES[0])
    trackers.close()
    wandb.teardown()
    assert "no login to wandb; writing offline" in capsys.readouterr().out and not asked
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        track.Trackers(Track(tensorboard=True), tmp_path, {})


def test_a_tracker_that_fails_later_is_left(tmp_path, monkeypatch, capsys):
    from torch.utils.tensorboard import SummaryWriter

    def full(*_, **__):
        raise OSError("No space left on device")

    trackers = track.Trackers(Track(tensorboard=True, wandb=True, offline=True), tmp_path, {})
    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    monkeypatch.setattr(type(trackers.run), "log", full)
    for line in LINES:
        trackers.log(line)
    trackers.close()
    said = capsys.readouterr().out
    assert said.count("wandb takes no more lines (No space left") == 1
    assert said.count("TensorBoard takes no more lines (No space left") == 1
