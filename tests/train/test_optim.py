import copy

import pytest
import torch
from torch import nn

from draftsmith.common.recipe import read_recipe
from draftsmith.common.sections import Optim
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.shortlist import ShortlistConfig, ShortlistHead
from draftsmith.models.ssm import model_of_layers
from draftsmith.models.target import Target
from draftsmith.train.dynaspec import RouterTraining
from draftsmith.train.eagle import EagleTraining
from draftsmith.train.lm import LanguageModel, Lookahead
from draftsmith.train.medusa import Medusa1
from draftsmith.train.optim import MuonAdamW, make_optimizer
from draftsmith.train.sections.eagle import EagleRecipe
from draftsmith.train.ssm import Ssm


class Tied(nn.Module):
    """An embedding that is also the output layer, a matrix, a stack of matrices, a norm's weight, a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)
        self.stack = nn.Parameter(torch.randn(2, 4, 4) / 4)
        self.norm = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self) -> torch.Tensor:
        x = self.inner(self.embedding(torch.tensor([1, 2, 3]))) * self.norm @ self.stack[0] @ self.stack[1]
        return nn.functional.cross_entropy(self.head(x), torch.tensor([2, 3, 4]))


def names(module, group):
    known = {p: n for n, p in module.named_parameters()}
    return {known[p] for p in group["params"]}


def test_muon_gets_the_matrices_and_adamw_the_rest():
    module = Tied()
    optimizer = make_optimizer(module, Optim(name="muon", lr=0.01, weight_decay=0.1))
    matrices, rest, plain = optimizer.param_groups
    assert names(module, matrices) == {"inner.weight", "stack"}
    assert names(module, rest) == {"embedding.weight"}
    assert names(module, plain) == {"inner.bias", "norm"}
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.1, 0.0]


def test_of_medusa_heads_muon_gets_the_residual_blocks(make_target):
    """Stacks of matrices; their biases are stacks, too, and projections are output layers."""
    target = make_target("llama")
    module = Medusa1(target, MedusaHeads.for_target(target, 3, 2, "own"))
    target.model.requires_grad_(False)
    for name, groups in {"muon": ["heads.weight", "heads.projection", "heads.bias"], "adamw": None}.items():
        optimizer = make_optimizer(module, Optim(name=name, lr=0.01, weight_decay=0.1))
        decay = {n: g["weight_decay"] for g in optimizer.param_groups for n in names(module, g)}
        assert decay == {"heads.weight": 0.1, "heads.projection": 0.1, "heads.bias": 0.0}
        assert groups is None or [names(module, g) for g in optimizer.param_groups] == [{n} for n in groups]


def training_module(family, target):
    """What a family trains, with output layers of its own."""
    if family == "medusa":
        return Medusa1(target, MedusaHeads.for_target(target, 3, 2, "own"))
    if family == "eagle":
        recipe = read_recipe("recipes/tiny-eagle3.yaml", EagleRecipe, ["drafter.unroll=2"])
        return EagleTraining(target, Eagle.for_target(target, 3, "own"), recipe)
    if family == "ssm":
        return Ssm(Target(model_of_layers(target, [0]), None, "ssm", ""), target, None, "kl", frozen=False)
    if family == "router":
        head = ShortlistHead(ShortlistConfig("dynaspec", 61, (30,), (5,), 9, 16, 32, 32))
        head.order.copy_(torch.arange(61))
        head.starts.copy_(torch.tensor([*range(9), 61]))
        return RouterTraining(head, nn.Embedding(61, 32), "mass")
    return LanguageModel(target.model.requires_grad_(), Lookahead(num_heads=2))


@pytest.mark.parametrize("family", ["medusa", "eagle", "ssm", "router", "lm"])
def test_muon_gets_no_output_layer(make_target, family):
    """Each name in a module's ``output_layers`` is one of its parameters', and AdamW's."""
    target = make_target("llama", tie_word_embeddings=family == "lm")
    target.model.requires_grad_(False)
    module = training_module(family, target)
    matrices, *others = (names(module, g) for g in make_optimizer(module, Optim(name="muon", lr=0.01)).param_groups)
    assert not {name for name in matrices if "lm_head" in name or "embed" in name}
    assert matrices or family == "router"
    assert len(module.output_layers) == 1
    for start in module.output_layers:
        own = {name for name, _ in module.named_parameters() if name.startswith(start)}
        assert own and own <= set.union(*others), start


@pytest.mark.parametrize("bfloat16", [True, False])
def test_each_part_steps_as_it_would_alone(monkeypatch, bfloat16):
    """Muon as PyTorch's, which computes in bfloat16; in float32 where that is slow."""
    monkeypatch.setattr("draftsmith.train.optim.lacking", lambda dtype, device: "" if bfloat16 else "this CPU has none")
    torch.manual_seed(0)
    module, twin = Tied(), Tied()
    twin.load_state_dict(module.state_dict())
    optimizer = make_optimizer(module, Optim(name="muon", lr=0.01, weight_decay=0.1, betas=(0.9, 0.95)))
    slices = [nn.Parameter(matrix) for matrix in twin.stack.data]  # PyTorch's Muon takes no stacks
    muon = torch.optim.Muon([twin.inner.weight, *slices], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [
            {"params": [twin.embedding.weight], "weight_decay": 0.1},
            {"params": [twin.inner.bias, twin.norm], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for rate in (0.01, 0.004, 0.002):
        for group in (*optimizer.param_groups, *muon.param_groups, *adamw.param_groups):
            group["lr"] = rate
        for one, steps in ((module, [optimizer]), (twin, [muon, adamw])):
            one.zero_grad()
            one.loss().backward()
            for matrix, slope in zip(slices, twin.stack.grad if one is twin else [], strict=False):
                matrix.grad = slope
            for step in steps:
                step.step()
    for (name, mine), theirs in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6 if bfloat16 else 1e-3), name
    assert torch.allclose(module.inner.weight, twin.inner.weight, atol=1e-6) == bfloat16


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_loaded_state_goes_on_alike(name):
    torch.manual_seed(0)
    module = Tied()
    optimizer = make_optimizer(module, Optim(name=name, lr=0.01, weight_decay=0.1))

    def run(module, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            module.loss().backward()
            optimizer.step()

    run(module, optimizer)
    other = Tied()
    other.load_state_dict(module.state_dict())
    resumed = make_optimizer(other, Optim(name=name, lr=0.01, weight_decay=0.1))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(module, optimizer)
    run(other, resumed)
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    if isinstance(resumed, MuonAdamW):
        assert "momentum_buffer" in resumed.state[other.inner.weight]


def test_eight_bits(tmp_path):
    """8-bit AdamW: about the same steps as AdamW, a state that survives a checkpoint bit for bit."""
    from draftsmith.train import checkpoint

    def module():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.Linear(96, 96))

    def steps(model, optimizer, count):
        for n in range(count):
            torch.manual_seed(n)
            model(torch.randn(8, 96)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    optim = Optim(lr=1e-2, eight_bit=True)
    whole, full = module(), module()
    eight = make_optimizer(whole, optim)
    steps(whole, eight, 4)
    steps(full, make_optimizer(full, Optim(lr=1e-2)), 4)
    assert any(value.dtype == torch.uint8 for value in eight.state[whole[0].weight].values() if torch.is_tensor(value))
    moved = (full[0].weight - module()[0].weight).norm()
    assert 0 < (whole[0].weight - full[0].weight).norm() < 0.2 * moved
    folder = checkpoint.save(tmp_path, 4, whole, eight, {"stage": "toy", "best": 0.0}, keep=1)
    other = module()
    resumed = make_optimizer(other, optim)
    checkpoint.restore(folder, other, resumed)
    steps(whole, eight, 2)
    steps(other, resumed, 2)
    assert torch.equal(whole[0].weight, other[0].weight)
    with pytest.raises(ValueError, match="eight_bit is for adamw, not for muon"):
        Optim(name="muon", lr=1e-2, eight_bit=True)
