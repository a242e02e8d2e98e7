"""The same logits, parameters, draws and uniforms into the kernels and into the reference, compared token for token."""

import collections
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import occurs
from launches import Launches

from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import StaticTree, Topology
from draftsmith.inference.verify.verify import Verifier
from draftsmith.kernels.distribution import distribution_reference
from draftsmith.kernels.multi_step import (
    IID,
    ONE_HOT,
    WITHOUT_REPLACEMENT,
    acceptances_reference,
    entries_of,
    verify_logits,
    verify_logits_reference,
    widened,
)

Inputs = collections.namedtuple(
    "Inputs", "logits temperature top_k top_p min_p tokens child kind q_row q uniforms bonus_uniform max_depth ids uses"
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
            q[row, source], choice = base, rng.random()
            if choice >= 0.5:
                near = choice < 0.7
                q[row, source] = p[row, rng.randrange(nodes)] if near else random_distribution(rng, size, False)
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


def plain_parameters(rows):
    """Temperature 1 and nothing else, not even looked at."""
    ones = torch.ones(rows)
    return ones, torch.zeros(rows, dtype=torch.int64), ones, ones * 0, (False, False, False)


def random_parameters(rng, rows, size):
    """Every combination of greedy rows, temperature, top-k (beyond the vocabulary too), top-p and min-p."""
    temperature = torch.tensor([rng.choice([0.0, 0.3, 0.8, 1.0, 1.7]) for _ in range(rows)])
    top_k = torch.tensor([rng.choice([0, 0, 1, 2, 5, size - 1, size, size + 3]) for _ in range(rows)])
    top_p = torch.tensor([rng.choice([1.0, 1.0, 0.95, 0.6, 0.2, 1e-6]) for _ in range(rows)])
    min_p = torch.tensor([rng.choice([0.0, 0.0, 0.05, 0.3]) for _ in range(rows)])
    return temperature, top_k, top_p, min_p, (True, True, True)


def logits_of(p, rng, dtype):
    """Logits of these distributions at temperature 1 (any other sharpens or flattens them); −∞ where p is 0."""
    shift = torch.tensor([rng.uniform(-20, 20) for _ in range(len(p))])[:, None, None]
    logits = (p.log() + shift).to(dtype)
    return (logits * 4).round() / 4 if dtype == torch.float16 else logits  # in 16 bits many tie


def there(device, inputs):
    """The inputs where the kernels run."""
    return [part.to(device) if isinstance(part, torch.Tensor) else part for part in inputs]


def explained(i, row, path, length):
    """Whether some uniform of the walk, the last one, or a cut lies at a border."""
    p = distribution_reference(i.logits, i.temperature, i.top_k, i.top_p, i.min_p, i.uses)
    q = None if i.q is None else i.q.double()
    acceptance, residual = acceptances_reference(p.double(), i.tokens, i.child, i.kind, i.q_row, q, i.ids)
    nodes = path[row, : length[row] + 1]
    if acceptance.shape[-1] and float((i.uniforms[row, nodes] - acceptance[row, nodes]).abs().min()) < NEAR:
        return True
    sums = residual[row, nodes[-1]].cumsum(-1)
    if float((sums / sums[-1] - i.bonus_uniform[row]).abs().min()) < NEAR:
        return True
    kept = []
    for factor in (1 - NEAR, 1 + NEAR):
        top_p = torch.where(i.top_p < 1, i.top_p * factor, i.top_p)
        p = distribution_reference(i.logits, i.temperature, i.top_k, top_p, i.min_p * factor, i.uses)
        kept.append(p[row, nodes] > 0)
    return not torch.equal(*kept)


def compare(device, rng, shape, bonus_uniform=None, ids=None, parameters=None, dtype=torch.float32):
    """``shape``: arguments of random_rows, and the block. Returns the accepted lengths; at most one row differs, within
    rounding of a border."""
    rows, nodes, most, *others, block = shape
    p, *draws, deepest = random_rows(rng, rows, nodes, most, *others, ids)
    *values, uses = parameters or plain_parameters(rows)
    logits = logits_of(p, rng, dtype)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 32))
    uniforms = torch.rand(rows, nodes, most, generator=generator)
    if bonus_uniform is None:
        bonus_uniform = torch.rand(rows, 3, generator=generator)[:, -1]  # a column, as the engine's is
    inputs = Inputs(logits, *values, *draws, uniforms, bonus_uniform, deepest, ids, uses)
    wanted = verify_logits_reference(*inputs)
    got = [x.cpu() for x in verify_logits(*there(device, inputs), block=block)]
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(got, wanted, strict=True))
    same = torch.stack([(a == b).reshape(rows, -1).all(1) for a, b in zip(got, wanted, strict=True)]).all(0)
    for row in (~same).nonzero()[:, 0].tolist():
        assert explained(inputs, row, wanted[0], wanted[1]), (row, got, wanted)
    p = distribution_reference(logits, *values, uses)
    assert (p[torch.arange(rows), got[2], got[3]] > 0).all()  # what has probability 0 never comes
    assert got[4].all() and int((~same).sum()) <= 1 and len(wanted[1]) == rows
    return wanted[1].tolist()


ANY = [ONE_HOT, IID, WITHOUT_REPLACEMENT]


seeds = pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])


@seeds
@pytest.mark.parametrize(
    ("shape", "longest"),  # rows, nodes, draws of a node, tokens, distributions, kinds of draws; block
    [
        ((20, 4, 3, 7, 2, ANY, 8), 2),
        ((6, 4, 4, 33, 2, ANY, 16), 1),
        ((6, 4, 3, 70, 3, ANY, 0), 1),
        ((10, 4, 5, 20, 2, [IID], 32), 1),
        ((10, 4, 5, 13, 1, [WITHOUT_REPLACEMENT], 16), 1),
        ((20, 3, 1, 16, 1, [IID, WITHOUT_REPLACEMENT], 16), 2),
        ((40, 4, 3, 5, 0, [ONE_HOT], 8), 2),
        ((8, 5, 10, 40, 0, [ONE_HOT], 16), 1),
        ((12, 3, 4, 70, 0, [ONE_HOT], 0), 1),
        ((8, 1, 0, 70, 0, [ONE_HOT], 32), 0),
    ],
)
def test_replay(device, seed, shape, longest):
    """Draws of every kind, draws that are all one-hot, two of a node often the same token, and none at all, as in plain
    decoding; vocabularies below, at and above a block's size."""
    lengths = compare(device, random.Random(seed), shape)
    occurs(set(range(longest + 1)) <= set(lengths))


@seeds
@pytest.mark.parametrize("shared", [(), ("rows",), ("num_q",), ("rows", "num_q")], ids="-".join)
@pytest.mark.parametrize(
    ("shape", "reduced"),
    [((12, 3, 2, 7, 2, ANY, 8), 3), ((4, 3, 3, 33, 2, ANY, 64), 17), ((4, 3, 3, 13, 2, [WITHOUT_REPLACEMENT], 16), 5)],
)
def test_replay_of_reduced_vocabularies(device, seed, shape, reduced, shared):
    """Distributions over a subset of the target's tokens, and one-hot draws of any token."""
    rng, (rows, _, _, size, num_q, *_) = random.Random(seed), shape
    lengths = compare(device, rng, shape, ids=random_ids(rng, rows, num_q, size, reduced, shared))
    occurs(rows < 10 or len(set(lengths)) > 1)


@seeds
@pytest.mark.parametrize("shared", [(), ("rows", "num_q")], ids="-".join)
@pytest.mark.parametrize("shape", [(10, 3, 2, 7, 3, ANY, 8), (6, 3, 3, 33, 2, ANY, 64)])
def test_replay_of_padded_vocabularies(device, seed, shape, shared):
    """Vocabularies of different lengths, padded with −1: equal to the distributions over the target's tokens."""
    rng, (rows, _, _, size, num_q, *_) = random.Random(seed), shape
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
    lengths = compare(device, rng, shape, ids=ids)
    occurs(rows < 10 or len(set(lengths)) > 1)


def test_a_draw_outside_the_reduced_vocabulary(device):
    """A one-hot draw's token has no entry in q; then r = (1, 2, 0, 4) / 7, and 3 is drawn with q(3) = 0.8."""
    rows = 16
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().repeat(rows, 3, 1)
    q, ids = torch.tensor([[[0.8, 0.2]]]).repeat(rows, 1, 1), torch.tensor([[[3, 0]]])
    tokens = torch.tensor([[0, 2, 3]]).repeat(rows, 1)
    child = torch.tensor([[[1, 2], [-1, -1], [-1, -1]]]).expand(rows, -1, -1)
    kind = torch.tensor([ONE_HOT, IID], dtype=torch.int8).expand_as(child)
    number = torch.arange(rows)
    uniforms = (torch.stack([number, number * 7 % rows], 1)[:, None] / rows + 1e-3).repeat(1, 3, 1)
    *parameters, uses = plain_parameters(rows)
    inputs = (logits, *parameters, tokens, child, kind, torch.zeros_like(child), q, uniforms, number / rows)
    found = verify_logits(*there(device, inputs), max_depth=1, ids=ids.to(device), uses=uses, block=4)
    _, length, node, bonus, _ = (x.cpu() for x in found)
    first, second = uniforms[:, 0, 0] < 0.3, uniforms[:, 0, 1] < 4 / 7 / 0.8
    assert torch.equal(node, torch.where(first, 1, torch.where(second, 2, 0)))
    assert len(set(node.tolist())) == 3 and torch.equal(length, (node > 0).long())
    assert (bonus[node == 0] == 1).all(), "(r − q)+ is left of token 1 alone"


@seeds
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((24, 2, 2, 8, 0, [ONE_HOT], 8), torch.float16),
        ((10, 3, 3, 33, 0, [ONE_HOT], 64), torch.float32),
        ((10, 3, 3, 9, 2, ANY, 16), torch.float16),
        ((3, 2, 2, 1000, 0, [ONE_HOT], 512), torch.float32),
        ((3, 2, 2, 5003, 1, ANY, 0), torch.float16),
        ((2, 2, 1, 33, 1, [IID], 8), torch.float32),
    ],
)
def test_replay_with_parameters(device, seed, shape, dtype):
    """Rows of temperature 0 beside others, top-k, top-p and min-p; in float16 most of the logits tie."""
    rows, _, _, size, *_ = shape
    rng = random.Random(seed + size)
    parameters = random_parameters(rng, rows, size)
    occurs(rows < 20 or len(set(zip(*(part.tolist() for part in parameters[:4]), strict=True))) > 15)
    lengths = compare(device, rng, shape, parameters=parameters, dtype=dtype)
    occurs(rows < 20 or len(set(lengths)) > 1)


@pytest.mark.parametrize("last", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("num_q", [0, 2])
def test_bonus_uniforms_at_both_ends_of_their_range(device, last, num_q):
    kinds = ANY if num_q else [ONE_HOT]
    compare(device, random.Random(2), (8, 2, 2, 20, num_q, kinds, 16), torch.full((8,), last))


def test_impossible_tokens_are_never_drawn(device):
    """At both ends of the range and at a border of two tokens; whole parts of the vocabulary are impossible."""
    uniforms = torch.tensor([0.0, 0.5, 0.5 + 1e-6, 1 - 2**-24])
    logits = torch.full((4, 1, 33), -torch.inf)
    logits[..., [9, 21]] = 3.0
    *parameters, uses = plain_parameters(4)
    none = torch.zeros(4, 1, 0, dtype=torch.int64)
    inputs = (logits, *parameters, none[..., 0:0].sum(-1), none, none, none, None, none, uniforms)
    for block in (8, 64):
        assert verify_logits(*there(device, inputs), max_depth=0, uses=uses, block=block)[3].tolist() == [9, 21, 21, 21]


def test_a_draft_from_the_target_distribution_is_always_accepted(device):
    """(r − q)+ is empty: accepted whatever the uniform. Where q is p but for rounding, all but a sliver is accepted."""
    rows = 10
    p = torch.stack([random_distribution(random.Random(row), 30, False) for row in range(rows)])
    p = p[:, None].repeat(1, 2, 1)
    p[:5] = torch.tensor([0.5, 0.25, 0.0, 0.25] + [0.0] * 26)  # without rounding
    q = p[:, :1].clone()
    tokens = torch.stack([torch.zeros(rows), p[:, 0].argmax(-1)], 1).long()
    child = torch.tensor([[[1], [-1]]]).expand(rows, -1, -1)
    kind, q_row = torch.full_like(child, IID), torch.zeros_like(child)
    uniforms = torch.where(torch.arange(rows) < 5, 1 - 2**-24, 1 - 1e-5)[:, None, None].expand(-1, 2, 1)
    *parameters, uses = plain_parameters(rows)
    inputs = (p.log(), *parameters, tokens, child, kind, q_row, q, uniforms, torch.rand(rows))
    path, length, node, _, _ = verify_logits(*there(device, inputs), max_depth=1, uses=uses, block=32)
    assert length.tolist() == node.tolist() == [1] * rows and path.tolist() == [[0, 1]] * rows


@pytest.mark.parametrize("num_q", [0, 2])
def test_logits_that_are_not_finite(device, num_q):
    """NaN, +∞, or nothing but −∞ at one node: the walks are the reference's, ``finite`` tells whether they met it, and
    the bonus token is a token."""
    rng, rows, size = random.Random(4), 12, 20
    p, *draws, depth = random_rows(rng, rows, 3, 2, size, num_q, ANY if num_q else [ONE_HOT])
    *parameters, uses = random_parameters(rng, rows, size)
    logits = p.log()
    bad = torch.tensor([rng.randrange(3) for _ in range(rows)])
    for row in range(rows):
        value = (torch.nan, torch.inf, -torch.inf)[row % 3]
        where = slice(None) if row % 3 == 2 else rng.randrange(size)
        logits[row, bad[row], where] = value
    inputs = Inputs(logits, *parameters, *draws, torch.rand(rows, 3, 2), torch.rand(rows), depth, None, uses)
    theirs = verify_logits_reference(*inputs)
    ours = [x.cpu() for x in verify_logits(*there(device, inputs), block=32)]
    met = (ours[0] == bad[:, None]) & (torch.arange(depth + 1) <= ours[1][:, None])
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(ours[4], ~met.any(1)) and torch.equal(theirs[4], ours[4])
    occurs(2 < int(ours[4].sum()) < rows - 2)
    assert int(ours[3].min()) >= 0 and int(ours[3].max()) < size
    assert torch.equal(ours[3][ours[4]], theirs[3][ours[4]])


def test_multi_step_sampling_takes_five_launches(device, monkeypatch):
    """After the logits, one-hot drafts: the step count, the uniforms, p and phase A, the walk, the draw. Verdict and
    first tokens are those of plain PyTorch."""
    torch.use_deterministic_algorithms(False)  # would fill what is allocated
    rows, size = 3, 40
    shape = StaticTree(Topology(((0,), (0, 0), (0, 1), (1,))).parents, device)
    target: Any = SimpleNamespace(device=device, vocab_size=size)
    samplings = [Sampling(top_p=0.8, seed=1), Sampling(temperature=0, seed=2), Sampling(top_k=3, min_p=0.01, seed=3)]
    fast, plain = Verifier("mss", rows, target, 2), Verifier("mss", rows, target, 2)
    for verifier in (fast, plain):
        verifier.begin(slice(0, rows), [[0]] * rows, samplings)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, 5, size, generator=generator) * 3).to(device)
    tree = shape.fill(logits.argmax(-1)[:, [0, 0, 1, 1, 0]].contiguous())
    assert tree.mask is not None
    lengths = torch.zeros(rows, dtype=torch.int64, device=device)
    kernels = ["_philox_kernel", "_distribution_kernel", "_walk_kernel", "_draw_kernel"]

    def counted(run, *arguments):
        """Result and PyTorch's operations; the kernels are those above, once each, in their order."""
        launches = Launches()
        with launches.counting():
            result = run(*arguments)
        assert [name for name in launches.seen if name.endswith("_kernel")] == kernels
        assert set(launches.seen.values()) == {1}
        return result, set(launches.seen) - set(kernels)

    first, operations = counted(fast.first_tokens, logits[:, 0], slice(0, rows), lengths)
    assert {"where"} <= operations <= {"where", "scalar_tensor"}
    verdict, operations = counted(fast.verify, tree, tree.mask, logits, 2)
    assert operations == {"add_"}
    with monkeypatch.context() as patch:
        for module in ("multi_step", "distribution"):
            patch.setattr(f"draftsmith.kernels.{module}.why_not_triton", lambda tensor: "left out")
        assert torch.equal(first, plain.first_tokens(logits[:, 0], slice(0, rows), lengths))
        expected = plain.verify(tree, tree.mask, logits, 2)
    for name in ("path", "length", "node", "bonus", "finite"):
        assert torch.equal(getattr(verdict, name), getattr(expected, name)), name
    assert int(verdict.length.sum()) > 0
