"""Merged SSMs, which often propose the same nodes: each keeps its draw, and the distribution is the target's."""

from dataclasses import replace

import lossless_suite
import pytest
import torch
from lossless_suite import check_apart, check_coupled, check_greedy, check_sampling, check_static, check_warm_up
from tiny_models import perturbed

from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.engine.runner import engine_attention
from draftsmith.inference.engine.step import Step, on_device
from draftsmith.inference.trees.merged import ONE_STREAM, MergedDrafter
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import TokenTree
from draftsmith.models.target import Target


def draft_model(target: Target, seed: int, expansion: list[int], **options) -> DraftModelDrafter:
    noise = 0.02 if target.vocab_size == lossless_suite.SMALL else 0.04
    return DraftModelDrafter(perturbed(target, noise, seed=seed), target, expansion, **options)


# By name: of each SSM its expansion, its seed, and what its logits are multiplied by.
SSMS = {
    "two SSMs": [([2, 1], 1, 1.0), ([1, 2], 2, 1.0)],
    "three SSMs": [([1, 1], 1, 2.0), ([1, 2], 2, 2.0), ([1, 1], 3, 2.0)],
    "one confident, two not": [([1, 1], 1, 1.0), ([1, 1], 1, 0.3), ([1, 1], 1, 0.3)],
    "i.i.d. draws": [([3, 1], 1, 0.5), ([1, 1], 1, 0.5)],
}


class Watched(MergedDrafter):
    """Counts, if asked to, the nodes that more than one SSM proposed, and the draws that lead to a node that another
    one of the same parent leads to."""

    counts, shared, again = False, 0, 0
    change = staticmethod(lambda tree: tree)

    def propose(self, state):
        tree = super().propose(state)
        if not self.counts or tree.source is None:  # one drafter alone
            return self.change(tree)
        bits = tree.source[state.active]
        self.shared += int((bits & (bits - 1) > 0).sum())
        if tree.draws is not None and tree.draws.q is not None:
            self.again += int(_again(tree.draws.child)[state.active].sum())
        return self.change(tree)


def _again(child: torch.Tensor) -> torch.Tensor:
    """Draws ``[B, N, K]`` that lead to the same child as an earlier draw of their node."""
    equal = (child[..., :, None] == child[..., None, :]) & (child >= 0)[..., None]
    return equal.tril(-1).any(-1)


def ensemble(name: str, made: list | None = None, change=lambda tree: tree):
    """Copies of the target with noise, merged; the merges are added to ``made``."""
    draws = "iid" if "i.i.d." in name else "without_replacement"

    def make(target: Target) -> MergedDrafter:
        members = {}
        for number, (expansion, seed, scale) in enumerate(SSMS[name]):
            members[f"ssm-{number}"] = draft_model(target, seed, expansion, draws=draws)
            with torch.no_grad():
                members[f"ssm-{number}"].model.lm_head.weight.mul_(scale)
        merged = Watched(members, target, 40)
        merged.change = change
        if made is not None:
            merged.counts = True
            made.append(merged)
        return merged

    return make


def test_merged_ssms_that_overlap(make_target):
    """Two SSMs that often propose the same nodes."""
    made: list[Watched] = []
    make = ensemble("two SSMs", made)
    check_static(make_target, ensemble("two SSMs"))
    check_warm_up(make_target, ensemble("two SSMs"))
    check_greedy(make_target, make)
    check_coupled(make_target, make)
    check_apart(make_target, make)
    assert sum(each.shared for each in made) > 100, "they rarely propose the same node"
    made.clear()
    check_sampling(make_target, make, "cut", static=True, count=3000, rows=3000)
    assert made[0].again > 1000, "two draws rarely lead to one node"


def merged_to_a_set(tree: TokenTree) -> TokenTree:
    """Wrong variant: of the draws that lead to one child, only the first is kept, with its q."""
    draws = tree.draws
    return replace(tree, draws=replace(draws, child=draws.child.masked_fill(_again(draws.child), -1)))


@pytest.mark.fixed_seed("4,000 texts reject it in most draws, not in all")
@pytest.mark.parametrize("name", ["one confident, two not", "i.i.d. draws"])
def test_draws_merged_to_a_set_are_rejected(make_target, name):
    """The suite rejects the wrong variants: equal tokens of two SSMs, or equal i.i.d. draws of one, as one draw."""
    check_sampling(make_target, ensemble(name), "cut", count=4000, rows=4000)
    with pytest.raises(AssertionError, match="do not have the target's distribution"):
        check_sampling(make_target, ensemble(name, change=merged_to_a_set), "cut", count=4000, rows=4000)


@pytest.mark.parametrize("mode", ["greedy", "sample", "mss"])
def test_ssms_propose_on_streams(make_target, device, mode):
    """On a GPU, static steps: the second and third SSM propose on streams of their own, after what was launched before
    and before what is launched next, however long they take. Elsewhere there are no streams."""
    target = lossless_suite.soft(make_target)
    ran_on: list[list] = []

    def steps(one_stream: bool, static: bool = True) -> list[list[int]]:
        merged = ensemble("three SSMs")(target)
        with pytest.MonkeyPatch.context() as patch:
            if one_stream:
                patch.setenv(ONE_STREAM, "1")
            step = Step(target, merged, mode, 2, 512, static=static)
        assert len(merged.streams) == (2 if device.type == "cuda" and static and not one_stream else 0)
        ran_on.append([])
        for drafter in merged.drafters:
            if device.type == "cuda":
                _slow(drafter, ran_on[-1])
        committed = []
        with torch.inference_mode(), engine_attention([target, *merged.models]), on_device(device):
            step.reset()
            step.begin(range(0, 2), [[3, 1, 4], [1, 4]], [Sampling(seed=1), Sampling(seed=2)])
            for _ in range(8):
                if device.type == "cuda":
                    torch.cuda._sleep(2_000_000)  # the roots are written late
                step.launch()()
                committed.append(step.committed[:, 0].tolist() + step.state.root.tolist())
            assert device.type != "cuda" or not static or step.execution.startswith("cuda graph"), step.execution
        return committed

    assert steps(False) == steps(True) == steps(False, static=False)
    if device.type == "cuda":
        assert [len(set(streams)) for streams in ran_on] == [3, 1, 1]


def _slow(drafter: DraftModelDrafter, ran_on: list) -> None:
    """Its tree is late, and the streams it is proposed on are noted."""
    propose = drafter.propose

    def late(state):
        ran_on.append(torch.cuda.current_stream().cuda_stream)
        torch.cuda._sleep(2_000_000)
        return propose(state)

    drafter.propose = late
