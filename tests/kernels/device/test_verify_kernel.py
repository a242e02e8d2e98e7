"""The same distributions, draws and uniforms into the kernels and into the reference, compared token for token."""

import itertools
import random

import pytest
import torch

from draftsmith.inference.tree import Draws, TokenTree
from draftsmith.kernels.verify import (
    IID,
    ONE_HOT,
    WITHOUT_REPLACEMENT,
    acceptances_reference,
    entries_of,
    verify_sample,
    verify_sample_reference,
    widened,
)

NEAR = 1e-5  # a uniform so close to a border may fall on either side of it


def random_distribution(rng, size, sharp):
    """Some zeros, as top-p leaves them; ``sharp`` distributions have most of their mass on one token."""
    weights = [0.0 if rng.random() < 0.3 else rng.random() ** (6 if sharp else 1) for _ in range(size)]
    weights[rng.randrange(size)] += 5 if sharp else 0.5
    return torch.tensor(weights).double().div(sum(weights)).float()


def random_ids(rng, rows, num_q, size, reduced, shared):
    """Reduced vocabularies of ``reduced`` tokens, in any order; ``shared``: by all rows, by all rows of q."""
    ids = torch.tensor([[rng.sample(range(size), reduced) for _ in range(num_q)] for _ in range(rows)])
    return ids[: 1 if "rows" in shared else rows, : 1 if "num_q" in shared else num_q]


def random_rows(rng, rows, nodes, most, size, num_q, kinds, ids=None):
    """``rows`` trees whose draws come from the distributions they name: p, tokens, child, kind, row of q, q, depth.

    ids: of a reduced vocabulary, to which the distributions are cut.
    """
    p, q = torch.empty(rows, nodes, size), torch.empty(rows, max(num_q, 1), size)
    tokens = torch.zeros(rows, nodes, dtype=torch.int64)
    child = torch.full((rows, nodes, most), -1)
    kind, q_row = torch.zeros(rows, nodes, most, dtype=torch.int8), torch.zeros(rows, nodes, most, dtype=torch.int64)
    deepest = 0
    for row in range(rows):
        base = random_distribution(rng, size, rng.random() < 0.5)
        if ids is not None:  # most of the mass where drafts come from
            kept = ids[row % len(ids), 0]
            base[kept[kept >= 0]] += 0.2
            base /= base.sum()
        for node in range(nodes):  # near one another, so that something is accepted
            mixed = 0.6 * base + 0.4 * random_distribution(rng, size, rng.random() < 0.5)
            p[row, node] = mixed / mixed.sum()
        for source in range(max(num_q, 1)):
            choice = rng.random()
            q[row, source] = (
                base
                if choice < 0.5
                else p[row, rng.randrange(nodes)]
                if choice < 0.7
                else random_distribution(rng, size, False)
            )
            if ids is not None:
                kept = ids[row % len(ids), source % ids.shape[1]]
                kept = kept[kept >= 0]
                q[row, source] = torch.zeros(size).scatter(0, kept, q[row, source][kept] + 0.01)
                q[row, source] /= q[row, source].sum()
        depth, used = [0], 1
        for node in range(nodes):
            if node >= used:
                p[row, node] = base  # no such node; nothing leads there
                continue
            below: dict[int, int] = {}
            gone: dict[int, list[int]] = {}
            for turn in range(rng.randint(0, most)):
                its_kind, source = rng.choice(kinds), rng.randrange(max(num_q, 1))
                weights = (q[row, source] if num_q else p[row, node]).clone()
                if its_kind == ONE_HOT:
                    weights = 0.5 * weights + 0.5 * p[row, node] + 1e-3
                elif its_kind == WITHOUT_REPLACEMENT:
                    weights[gone.get(source, [])] = 0
                    if weights.sum() < 1e-3:
                        break
                token = rng.choices(range(size), weights.tolist())[0]
                if its_kind == WITHOUT_REPLACEMENT:
                    gone.setdefault(source, []).append(token)
                if token not in below:
                    if used == nodes:
                        break
                    below[token], used = used, used + 1
                    depth.append(depth[node] + 1)
                    tokens[row, below[token]] = token
                child[row, node, turn], kind[row, node, turn], q_row[row, node, turn] = below[token], its_kind, source
        deepest = max(deepest, *depth)
    if ids is not None:
        padding = (ids < 0).expand(rows, num_q, -1)
        q = q.gather(2, ids.clamp(min=0).expand(rows, num_q, -1)).masked_fill(padding, 0.0)
    return p, tokens, child, kind, q_row, q if num_q else None, deepest


def explained(tree, p, uniforms, bonus_uniform, row, path, length):
    """Whether some uniform of the walk, or the last one, lies at a border, computed in float64."""
    d = tree.draws
    q = None if d.q is None else d.q.double()
    acceptance, residual = acceptances_reference(p.double(), tree.tokens, d.child, d.kind, d.q_row, q, d.ids)
    nodes = path[row, : length[row] + 1]
    if acceptance.shape[-1] and float((uniforms[row, nodes] - acceptance[row, nodes]).abs().min()) < NEAR:
        return True
    sums = residual[row, nodes[-1]].cumsum(-1)
    return float((sums / sums[-1] - bonus_uniform[row]).abs().min()) < NEAR


def compare(device, rng, rows, nodes, most, size, num_q, kinds, block, bonus_uniform=None, ids=None):
    """Returns how many rows differed, each within rounding of a border, and the accepted lengths."""
    p, tokens, child, kind, q_row, q, deepest = random_rows(rng, rows, nodes, most, size, num_q, kinds, ids)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 32))
    uniforms = torch.rand(rows, nodes, most, generator=generator)
    if bonus_uniform is None:
        bonus_uniform = torch.rand(rows, 3, generator=generator)[:, -1]  # a column, as the engine's is
    none = torch.zeros(rows, nodes, dtype=torch.int32)
    tree = TokenTree(tokens, none, none, none[..., None].long(), none == 0, draws=Draws(child, kind, q_row, q, ids))
    wanted = verify_sample_reference(p, tokens, child, kind, q_row, q, uniforms, bonus_uniform, deepest, ids)
    there = [x if x is None else x.to(device) for x in (p, tokens, child, kind, q_row, q, uniforms, bonus_uniform)]
    its_ids = None if ids is None else ids.to(device)
    got = [x.cpu() for x in verify_sample(*there, deepest, block=block, ids=its_ids)]
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(got, wanted, strict=True))
    same = torch.stack([(a == b).reshape(rows, -1).all(1) for a, b in zip(got, wanted, strict=True)]).all(0)
    for row in (~same).nonzero()[:, 0].tolist():
        assert explained(tree, p, uniforms, bonus_uniform, row, wanted[0], wanted[1]), (row, got, wanted)
    assert (p[torch.arange(rows), got[2], got[3]] > 0).all()  # what has probability 0 never comes
    return int((~same).sum()), wanted[1].tolist()


ANY = [ONE_HOT, IID, WITHOUT_REPLACEMENT]


seeds = pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])


@seeds
@pytest.mark.parametrize(("rows", "nodes", "most", "size", "num_q", "kinds", "block"), [
    (25, 4, 3, 7, 2, ANY, 8), (10, 6, 4, 33, 2, ANY, 16), (20, 4, 3, 64, 1, [WITHOUT_REPLACEMENT], 64),
    (20, 4, 3, 70, 3, ANY, 0), (10, 5, 5, 20, 2, [IID], 32), (10, 5, 5, 13, 1, [WITHOUT_REPLACEMENT], 16),
    (25, 4, 1, 16, 1, [IID, WITHOUT_REPLACEMENT], 16),
])  # fmt: skip
def test_replay(device, seed, rows, nodes, most, size, num_q, kinds, block):
    """Draws of every kind; vocabularies below, at and above a block's size."""
    differed, lengths = compare(device, random.Random(seed), rows, nodes, most, size, num_q, kinds, block)
    assert differed <= 1 and len(lengths) == rows
    assert {0, 1, 2} <= set(lengths)


@seeds
@pytest.mark.parametrize("shared", [(), ("rows",), ("num_q",), ("rows", "num_q")], ids="-".join)
@pytest.mark.parametrize(("rows", "nodes", "most", "size", "reduced", "num_q", "kinds", "block"), [
    (40, 3, 2, 7, 3, 2, ANY, 8), (8, 4, 3, 33, 17, 2, ANY, 32), (7, 3, 3, 70, 33, 3, ANY, 0),
    (10, 4, 3, 13, 5, 2, [WITHOUT_REPLACEMENT], 16),
])  # fmt: skip
def test_replay_of_reduced_vocabularies(device, seed, rows, nodes, most, size, reduced, num_q, kinds, block, shared):
    """Distributions over a subset of the target's tokens, and one-hot draws of any token."""
    rng = random.Random(seed)
    ids = random_ids(rng, rows, num_q, size, reduced, shared)
    differed, lengths = compare(device, rng, rows, nodes, most, size, num_q, kinds, block, ids=ids)
    assert differed <= 1 and len(lengths) == rows
    assert len(set(lengths)) > 1


@seeds
@pytest.mark.parametrize("shared", [(), ("rows", "num_q")], ids="-".join)
@pytest.mark.parametrize(("rows", "nodes", "most", "size", "num_q", "kinds", "block"), [
    (30, 3, 2, 7, 3, ANY, 8), (10, 4, 3, 33, 2, ANY, 16), (10, 4, 3, 13, 2, [WITHOUT_REPLACEMENT], 16),
])  # fmt: skip
def test_replay_of_padded_vocabularies(device, seed, rows, nodes, most, size, num_q, kinds, block, shared):
    """Vocabularies of different lengths, padded with −1: equal to the distributions over the target's tokens."""
    rng = random.Random(seed)
    ids = random_ids(rng, rows, num_q, size, size - 1, shared)
    for of_q in ids.flatten(0, 1):
        of_q[rng.randint(2, size - 1) :] = -1
    wide, entries = torch.rand(rows, num_q, size), entries_of(ids.to(device), size).cpu()
    reduced = wide.gather(2, ids.clamp(min=0).expand(rows, num_q, -1)).masked_fill(ids < 0, 0)
    for row, source in itertools.product(range(rows), range(num_q)):
        kept = ids[row % len(ids), source % ids.shape[1]].tolist()
        right = [kept.index(token) if token in kept else -1 for token in range(size)]
        assert entries[row % len(ids), source % ids.shape[1]].tolist() == right
        values = [float(wide[row, source, token]) if token in kept else 0.0 for token in range(size)]
        assert widened(reduced, ids, size)[row, source].tolist() == values
    differed, lengths = compare(device, rng, rows, nodes, most, size, num_q, kinds, block, ids=ids)
    assert differed <= 1 and len(set(lengths)) > 1


def test_a_draw_outside_the_reduced_vocabulary(device):
    """A one-hot draw's token has no entry in q; then r = (1, 2, 0, 4) / 7, and 3 is drawn with q(3) = 0.8."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4]).repeat(30, 3, 1)
    q, ids = torch.tensor([[[0.8, 0.2]]]).repeat(30, 1, 1), torch.tensor([[[3, 0]]])
    tokens = torch.tensor([[0, 2, 3]]).repeat(30, 1)
    child = torch.tensor([[[1, 2], [-1, -1], [-1, -1]]]).repeat(30, 1, 1)
    kind = torch.tensor([ONE_HOT, IID], dtype=torch.int8).expand_as(child)
    number = torch.arange(30)
    uniforms = (torch.stack([number, number * 7 % 30], 1)[:, None] / 30 + 1e-3).repeat(1, 3, 1)
    there = [x.to(device) for x in (p, tokens, child, kind, torch.zeros_like(child), q, uniforms, number / 30)]
    _, length, node, bonus = (x.cpu() for x in verify_sample(*there, 1, block=2, ids=ids.to(device)))
    first, second = uniforms[:, 0, 0] < 0.3, uniforms[:, 0, 1] < 4 / 7 / 0.8
    assert torch.equal(node, torch.where(first, 1, torch.where(second, 2, 0)))
    assert len(set(node.tolist())) == 3 and torch.equal(length, (node > 0).long())
    assert (bonus[node == 0] == 1).all(), "(r − q)+ is left of token 1 alone"


@seeds
@pytest.mark.parametrize(
    ("rows", "nodes", "most", "size", "block", "longest"),
    [(50, 4, 3, 5, 4, 2), (45, 5, 9, 40, 16, 2), (45, 4, 4, 70, 0, 1)],
)
def test_replay_of_one_hot_draws(device, seed, rows, nodes, most, size, block, longest):
    """Draws that are all one-hot, two draws of a node often the same token."""
    differed, lengths = compare(device, random.Random(seed), rows, nodes, most, size, 0, [ONE_HOT], block)
    assert differed <= 1 and len(lengths) == rows
    assert set(range(longest + 1)) <= set(lengths)


@pytest.mark.parametrize("last", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("num_q", [0, 2])
def test_bonus_uniforms_at_both_ends_of_their_range(device, last, num_q):
    kinds = ANY if num_q else [ONE_HOT]
    compare(device, random.Random(2), 12, 3, 2, 20, num_q, kinds, 16, torch.full((12,), last))


def test_no_draws(device):
    """Plain decoding: a lone root, no draws at all."""
    differed, lengths = compare(device, random.Random(3), 40, 1, 0, 70, 0, [ONE_HOT], 32)
    assert differed <= 1 and set(lengths) == {0}


def test_a_draft_from_the_target_distribution_is_always_accepted(device):
    """(r − q)+ is empty: accepted whatever the uniform, also where rounding leaves r a little below q."""
    p = torch.stack([random_distribution(random.Random(row), 30, False) for row in range(20)])[:, None].repeat(1, 2, 1)
    q = p[:, :1].clone()
    tokens = torch.stack([torch.zeros(20), p[:, 0].argmax(-1)], 1).long()
    child = torch.tensor([[[1], [-1]]]).expand(20, -1, -1)
    kind, q_row = torch.full_like(child, IID), torch.zeros_like(child)
    uniforms, last = torch.full((20, 2, 1), 1 - 2**-24), torch.rand(20)
    p[10:] *= 1 - 2**-20
    there = [x.to(device) for x in (p, tokens, child, kind, q_row, q, uniforms, last)]
    path, length, node, _ = verify_sample(*there, 1, block=16)
    assert length.tolist() == node.tolist() == [1] * 20 and path.tolist() == [[0, 1]] * 20


@pytest.mark.parametrize("num_q", [0, 2])
def test_a_distribution_of_nan(device, num_q):
    """The paths are the reference's, so that what is looked at for NaN is the same; the bonus token is a token."""
    rng = random.Random(4)
    p, tokens, child, kind, q_row, q, depth = random_rows(rng, 30, 4, 2, 20, num_q, ANY if num_q else [ONE_HOT])
    bad = torch.tensor([rng.randrange(4) for _ in range(30)])
    p[torch.arange(30), bad] = torch.nan
    uniforms, last = torch.rand(30, 4, 2), torch.rand(30)
    arguments = [x if x is None else x.to(device) for x in (p, tokens, child, kind, q_row, q, uniforms, last)]
    ours = verify_sample(*arguments, depth, block=16)
    theirs = verify_sample_reference(*arguments, depth)
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(mine, other)
    assert int(ours[3].min()) >= 0 and int(ours[3].max()) < 20
    met = (ours[0].cpu() == bad[:, None]) & (torch.arange(depth + 1) <= ours[1].cpu()[:, None])
    assert 5 < int(met.any(1).sum()) < 30
