"""What two processes do that one does not: forward passes inside of each strategy's wrapper, shares of the work, what
the first one says. Forked, but for the last test, which launches as on two machines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training_runs import FORKED, become, both, free_port, make_batch, metrics, write_recipe

from draftsmith.common.recipe import read_recipe
from draftsmith.common.sections import Precision
from draftsmith.data.packing import Rows, Sample, Tokenized
from draftsmith.models.target import Target
from draftsmith.train import checkpoint, features, launch, loop, medusa, sharded
from draftsmith.train.run import Run

ROOT = Path(__file__).parents[2]
STAGE = {"name": "heads", "batch": {"sequences": 8, "micro": 2}, "steps": 2, "optim": {"lr": 1e-2}}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": ""}
LAUNCHED = {  # what accelerate's launcher leaves in the environment
    "ddp": {},
    "zero2": {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
    "zero3-nodes": {**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ROOT / "recipes/accelerate/zero3-nodes.json")},
    "fsdp": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
}


@pytest.fixture(scope="module")
def recipe(tiny_lm, tmp_path_factory):
    drafter = {"num_draft_heads": 2, "projection": "own"}
    return write_recipe(tmp_path_factory.mktemp("runs"), tiny_lm, drafter, [STAGE], evaluate={"every": 2})


class TheSame:
    """Samples that are the same batch at each step."""

    sequential = False

    def __init__(self, vocab_size):
        self.batch = make_batch(vocab_size)

    def __call__(self, numbers):
        return {name: rows[: len(numbers)] for name, rows in self.batch.items()}

    def describe(self, numbers):
        return "the batch"


# ---- precision


class OneHead(nn.Module):
    """A frozen target and a linear layer that trains on its hidden states; what dtypes there are is noted."""

    def __init__(self, target):
        super().__init__()
        self.target, self.model, self.found = target, target.model, {}
        self.out = nn.Linear(target.hidden_size, target.vocab_size)
        self.layer = next(part for name, part in self.model.named_modules() if name.endswith("q_proj"))
        self.out.register_forward_hook(lambda _, inputs, output: self.note("product that trains", output))
        self.layer.register_forward_hook(lambda _, inputs, output: self.note("product of the target", output))
        self.out.weight.register_hook(lambda gradient: self.note("gradient", gradient))

    def note(self, name, tensor):
        self.found.setdefault(name, set()).add(str(tensor.dtype))

    def count(self, batch):
        return batch["supervised"][:, 1:].sum().view(1)

    def forward(self, batch, counts, step):
        with torch.no_grad():
            hidden = self.target.hidden(batch["tokens"].long())
        labels = batch["tokens"][:, 1:].long().masked_fill(~batch["supervised"][:, 1:], -100)
        logits = self.out(hidden[:, :-1].float()).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counts[0]
        self.note("loss", loss)
        return loss, {}


def dtypes_inside(rank, port, recipe, strategy, folder):
    """Train for two steps in bfloat16 autocast; what dtypes there are goes to a file."""
    os.environ.update(LAUNCHED[strategy])
    become(rank, port)
    sharded._plugin.cache_clear()
    # DeepSpeed asks without a device, which means a GPU's autocast; here it is the CPU's.
    asked = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda device="cpu": asked(device)
    read = read_recipe(
        recipe, medusa.MedusaRecipe, ["precision.autocast=bfloat16", "target.dtype=float32", f"run.name={folder.name}"]
    )
    run = Run(read, "medusa", launch.make_accelerator(read.precision), False, "")
    assert run.accelerator.num_processes == 2 and sharded.strategy() == strategy.partition("-")[0].replace(
        "ddp", "none"
    )
    run.folder.mkdir(exist_ok=True)
    module = OneHead(target := run.load_target())
    loop.optimize(run, module, TheSame(target.vocab_size), read.stages[0], lambda module: {"tau": 1.0}, "tau")
    if strategy == "zero3-nodes":
        assert module.layer.weight.ds_secondary_tensor is not None, "a machine has no copy of its own"
    (folder / f"{rank}.json").write_text(json.dumps({name: sorted(dtypes) for name, dtypes in module.found.items()}))


@FORKED
@pytest.mark.parametrize("strategy", LAUNCHED)
def test_bfloat16_reaches_the_products(recipe, tmp_path, strategy):
    """Of what trains and of the frozen target, under every strategy; loss and gradients are float32."""
    assert both(dtypes_inside, recipe, strategy, tmp_path) == [0, 0]
    half, full = ["torch.bfloat16"], ["torch.float32"]
    wanted = {"product that trains": half, "product of the target": half, "loss": full, "gradient": full}
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == wanted


# ---- what processes tell each other


class Toy(nn.Module):
    """With the rank in all its values."""

    def __init__(self, rank):
        super().__init__()
        self.trained, self.frozen = nn.Parameter(torch.full((3,), rank + 1.0)), nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("kept", torch.full((2,), rank + 1.0))
        nn.init.constant_(self.frozen.weight, rank + 1.0)

    def forward(self):
        return self.trained.sum() * self.kept.sum()


def told(rank, port, recipe, folder):
    become(rank, port)
    read = read_recipe(recipe, medusa.MedusaRecipe, [f"run.output_dir={folder / str(rank)}"])
    run = Run(read, "medusa", launch.make_accelerator(Precision(threads=1), 90), False, "")
    toy, group = Toy(rank), torch.distributed.group.WORLD
    found = {"timeout": group._get_backend(torch.device("cpu")).options._timeout.total_seconds()}
    prepared, _ = sharded.prepare(run.accelerator, toy, torch.optim.SGD([toy.trained], 0.1), 1, 1.0)
    prepared().backward()
    found |= {"trained": toy.trained.tolist(), "frozen": toy.frozen.weight[0].tolist(), "kept": toy.kept.tolist()}
    if run.main:
        checkpoint.write_tensors(run.checkpoints / "best/heads", {"trained": torch.arange(3.0)})
    run.accelerator.wait_for_everyone()
    loop._take_best(run, toy, read.stages[0])
    found["best"] = toy.trained.tolist()
    (folder / f"{rank}.json").write_text(json.dumps(found))


@FORKED
def test_what_trains_is_told_and_what_is_frozen_is_not(recipe, tmp_path):
    """Also the best weights, to a process whose machine does not see them yet."""
    assert both(told, recipe, tmp_path) == [0, 0]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {
            "timeout": 90,
            "trained": [1.0] * 3,
            "frozen": [rank + 1.0] * 2,
            "kept": [rank + 1.0] * 2,
            "best": [0.0, 1.0, 2.0],
        }


# ---- kept hidden states


def kept_by(rank, port, target, rows, stored, whole):
    """Keep features with another process; the files that this one writes are noted."""
    become(rank, port)
    accelerator, written, write = launch.make_accelerator(Precision(threads=1)), [], features._write

    def noted(path, batches):
        written.append(path.name)
        write(path, batches)

    features._write = noted
    with torch.no_grad():
        kept = features.hidden_states(target, rows, torch.float32, accelerator, stored, 2)
    assert all(torch.equal(kept[row, :7], whole[row, :7]) for row in (5, 0, 4, 1, 2, 3))
    (stored / f"written-{rank}.json").write_text(json.dumps(written))


@FORKED
@torch.no_grad()
def test_two_processes_keep_hidden_states(make_target, tmp_path, monkeypatch):
    """Each in files of its own, which another number of processes uses."""
    torch.manual_seed(0)
    rows = Rows(
        Tokenized.of(Sample(torch.randint(61, (n,)).tolist(), [True] * n) for n in (9, 5, 7, 3, 6, 8)), 9, share=False
    )
    target, stored, alone = make_target("llama"), tmp_path / "0", launch.make_accelerator(Precision(threads=1))
    whole = features.hidden_states(target, rows, torch.float32, alone, batch_size=2)
    assert both(kept_by, target, rows, stored, whole) == [0, 0]
    written = [json.loads((stored / f"written-{rank}.json").read_text()) for rank in (0, 1)]
    assert written == [["0.bin", "4.bin"], ["2.bin"]]
    (stored / "2.bin").unlink()
    passes, hidden = [], Target.hidden
    monkeypatch.setattr(Target, "hidden", lambda *given: passes.append(len(given[1])) or hidden(*given))
    kept = features.hidden_states(target, rows, torch.float32, alone, stored, 2)
    assert all(torch.equal(kept[row, :], whole[row]) for row in range(6)) and passes == [2, 2], (
        "one that was there, to compare, and the one that was not"
    )


# ---- two machines


def machine(launcher, rank, port):
    """A command of one of two machines, which both are this one, up to the script."""
    if launcher == "accelerate":
        sizes = ["--num_machines", "2", "--num_processes", "2", "--machine_rank", str(rank)]
        where = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
        return [Path(sys.executable).parent / "accelerate", "launch", "--quiet", "--multi_gpu", *sizes, *where]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "draftsmith"]
    return [Path(sys.executable).parent / "torchrun", "--nnodes", "2", "--nproc-per-node", "1", *where]


@pytest.mark.parametrize("launcher", ["accelerate", pytest.param("torchrun", marks=pytest.mark.slow)])
@pytest.mark.whole_runs
def test_two_machines(recipe, launcher, run_main):
    """Two launches over the loopback train as one process does."""
    names, port = ("one", launcher), free_port()
    code, _, err = run_main(medusa.main, recipe, "run.name=one", "--restart")
    assert (code, err) == (0, "")
    given = ["train/medusa.py", recipe, f"run.name={launcher}"]
    runs = [
        subprocess.Popen(
            [*machine(launcher, rank, port), *given],
            cwd=ROOT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    printed = []
    for run in runs:
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, err[-3000:]
        printed.append("precision:" in out + err)
    assert printed == [True, False], "each line once"
    one, two = (recipe.parent / name for name in names)
    assert metrics(two, "loss") == pytest.approx(metrics(one, "loss"), rel=1e-4)
    assert metrics(two, "simulated_tau") == pytest.approx(metrics(one, "simulated_tau"), rel=1e-3)
