"""The same logits, parameters, draws and uniforms into the kernels and into the reference, compared token for token."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import occurs
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import StaticTree, Topology
from draftsmith.inference.verify.verify import Verifier
from draftsmith.kernels import sampling as sampling_kernels
from draftsmith.kernels import verify as verify_kernels
from draftsmith.kernels.sampling import distribution_reference
from draftsmith.kernels.verify import (
    IID,
    ONE_HOT,
    WITHOUT_REPLACEMENT,
    acceptances_reference,
    entries_of,
    verify_logits,
    verify_logits_reference,
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


def logits_of(p, temperature, rng, dtype=torch.float32):
    """Logits of these distributions at temperature 1 (any other sharpens or flattens them); −∞ where p is 0."""
    shift = torch.tensor([rng.uniform(-20, 20) for _ in range(len(p))])[:, None, None]
    logits = (p.log() + shift).to(dtype)
    return (logits * 4).round() / 4 if dtype == torch.float16 else logits  # in 16 bits many tie


def explained(inputs, row, path, length):
    """Whether some uniform of the walk, the last one, or a cut lies at a border."""
    logits, temperature, top_k, top_p, min_p, tokens, child, kind, q_row, q, uniforms, bonus_uniform = inputs[:12]
    ids, uses = inputs[13:]
    p = distribution_reference(logits, temperature, top_k, top_p, min_p, uses)
    q = None if q is None else q.double()
    acceptance, residual = acceptances_reference(p.double(), tokens, child, kind, q_row, q, ids)
    nodes = path[row, : length[row] + 1]
    if acceptance.shape[-1] and float((uniforms[row, nodes] - acceptance[row, nodes]).abs().min()) < NEAR:
        return True
    sums = residual[row, nodes[-1]].cumsum(-1)
    if float((sums / sums[-1] - bonus_uniform[row]).abs().min()) < NEAR:
        return True
    kept = []
    for factor in (1 - NEAR, 1 + NEAR):
        moved = torch.where(top_p < 1, top_p * factor, top_p)
        kept.append(distribution_reference(logits, temperature, top_k, moved, min_p * factor, uses)[row, nodes] > 0)
    return not torch.equal(*kept)


def compare(
    device,
    rng,
    rows,
    nodes,
    most,
    size,
    num_q,
    kinds,
    block,
    bonus_uniform=None,
    ids=None,
    parameters=None,
    dtype=torch.float32,
):
    """Returns how many rows differed, each within rounding of a border, and the accepted lengths."""
    p, tokens, child, kind, q_row, q, deepest = random_rows(rng, rows, nodes, most, size, num_q, kinds, ids)
    temperature, top_k, top_p, min_p, uses = parameters or plain_parameters(rows)
    logits = logits_of(p, temperature, rng, dtype)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 32))
    uniforms = torch.rand(rows, nodes, most, generator=generator)
    if bonus_uniform is None:
        bonus_uniform = torch.rand(rows, 3, generator=generator)[:, -1]  # a column, as the engine's is
    inputs = (
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        tokens,
        child,
        kind,
        q_row,
        q,
        uniforms,
        bonus_uniform,
        deepest,
        ids,
        uses,
    )
    wanted = verify_logits_reference(*inputs)
    there: list[Any] = [x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs]
    got = [x.cpu() for x in verify_logits(*there, block=block)]
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(got, wanted, strict=True))
    same = torch.stack([(a == b).reshape(rows, -1).all(1) for a, b in zip(got, wanted, strict=True)]).all(0)
    for row in (~same).nonzero()[:, 0].tolist():
        assert explained(inputs, row, wanted[0], wanted[1]), (row, got, wanted)
    p = distribution_reference(logits, temperature, top_k, top_p, min_p, uses)
    assert (p[torch.arange(rows), got[2], got[3]] > 0).all()  # what has probability 0 never comes
    assert got[4].all()
    return int((~same).sum()), wanted[1].tolist()


ANY = [ONE_HOT, IID, WITHOUT_REPLACEMENT]


seeds = pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])


@seeds
@pytest.mark.parametrize(
    ("rows", "nodes", "most", "size", "num_q", "kinds", "block"),
    [
        (20, 4, 3, 7, 2, ANY, 8),
        (6, 4, 4, 33, 2, ANY, 16),
        (6, 4, 3, 70, 3, ANY, 0),
        (10, 4, 5, 20, 2, [IID], 32),
        (10, 4, 5, 13, 1, [WITHOUT_REPLACEMENT], 16),
        (20, 3, 1, 16, 1, [IID, WITHOUT_REPLACEMENT], 16),
    ],
)
def test_replay(device, seed, rows, nodes, most, size, num_q, kinds, block):
    """Draws of every kind; vocabularies below, at and above a block's size."""
    differed, lengths = compare(device, random.Random(seed), rows, nodes, most, size, num_q, kinds, block)
    assert differed <= 1 and len(lengths) == rows
    occurs(set(range(3 if rows == 20 else 2)) <= set(lengths))


@seeds
@pytest.mark.parametrize("shared", [(), ("rows",), ("num_q",), ("rows", "num_q")], ids="-".join)
@pytest.mark.parametrize(
    ("rows", "nodes", "most", "size", "reduced", "num_q", "kinds", "block"),
    [(12, 3, 2, 7, 3, 2, ANY, 8), (4, 3, 3, 33, 17, 2, ANY, 64), (4, 3, 3, 13, 5, 2, [WITHOUT_REPLACEMENT], 16)],
)
def test_replay_of_reduced_vocabularies(device, seed, rows, nodes, most, size, reduced, num_q, kinds, block, shared):
    """Distributions over a subset of the target's tokens, and one-hot draws of any token."""
    rng = random.Random(seed)
    ids = random_ids(rng, rows, num_q, size, reduced, shared)
    differed, lengths = compare(device, rng, rows, nodes, most, size, num_q, kinds, block, ids=ids)
    assert differed <= 1 and len(lengths) == rows
    occurs(rows < 10 or len(set(lengths)) > 1)


@seeds
@pytest.mark.parametrize("shared", [(), ("rows", "num_q")], ids="-".join)
@pytest.mark.parametrize(
    ("rows", "nodes", "most", "size", "num_q", "kinds", "block"), [(10, 3, 2, 7, 3, ANY, 8), (6, 3, 3, 33, 2, ANY, 64)]
)
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
    assert differed <= 1
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
    there = [x.to(device) for x in inputs]
    found = verify_logits(*there, max_depth=1, ids=ids.to(device), uses=uses, block=4)
    _, length, node, bonus, _ = (x.cpu() for x in found)
    first, second = uniforms[:, 0, 0] < 0.3, uniforms[:, 0, 1] < 4 / 7 / 0.8
    assert torch.equal(node, torch.where(first, 1, torch.where(second, 2, 0)))
    assert len(set(node.tolist())) == 3 and torch.equal(length, (node > 0).long())
    assert (bonus[node == 0] == 1).all(), "(r − q)+ is left of token 1 alone"


@seeds
@pytest.mark.parametrize(
    ("rows", "nodes", "most", "size", "block", "longest"),
    [(40, 4, 3, 5, 8, 2), (8, 5, 10, 40, 16, 1), (12, 3, 4, 70, 0, 1)],
)
def test_replay_of_one_hot_draws(device, seed, rows, nodes, most, size, block, longest):
    """Draws that are all one-hot, two draws of a node often the same token."""
    differed, lengths = compare(device, random.Random(seed), rows, nodes, most, size, 0, [ONE_HOT], block)
    assert differed <= 1 and len(lengths) == rows
    occurs(set(range(longest + 1)) <= set(lengths))


@seeds
@pytest.mark.parametrize(
    ("rows", "nodes", "most", "size", "num_q", "kinds", "block", "dtype"),
    [
        (24, 2, 2, 8, 0, [ONE_HOT], 8, torch.float16),
        (10, 3, 3, 33, 0, [ONE_HOT], 64, torch.float32),
        (10, 3, 3, 9, 2, ANY, 16, torch.float16),
        (3, 2, 2, 1000, 0, [ONE_HOT], 512, torch.float32),
        (3, 2, 2, 5003, 1, ANY, 0, torch.float16),
        (2, 2, 1, 33, 1, [IID], 8, torch.float32),
    ],
)
def test_replay_with_parameters(device, seed, rows, nodes, most, size, num_q, kinds, block, dtype):
    """Rows of temperature 0 beside others, top-k, top-p and min-p; in float16 most of the logits tie."""
    rng = random.Random(seed + size)
    parameters = random_parameters(rng, rows, size)
    occurs(rows < 20 or len(set(zip(*(part.tolist() for part in parameters[:4]), strict=True))) > 15)
    differed, lengths = compare(
        device, rng, rows, nodes, most, size, num_q, kinds, block, parameters=parameters, dtype=dtype
    )
    assert differed <= 1
    occurs(rows < 20 or len(set(lengths)) > 1)


@pytest.mark.parametrize("last", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("num_q", [0, 2])
def test_bonus_uniforms_at_both_ends_of_their_range(device, last, num_q):
    kinds = ANY if num_q else [ONE_HOT]
    compare(device, random.Random(2), 8, 2, 2, 20, num_q, kinds, 16, torch.full((8,), last))


def test_impossible_tokens_are_never_drawn(device):
    """At both ends of the range and at a border of two tokens; whole parts of the vocabulary are impossible."""
    uniforms = torch.tensor([0.0, 0.5, 0.5 + 1e-6, 1 - 2**-24])
    logits = torch.full((4, 1, 33), -torch.inf)
    logits[..., [9, 21]] = 3.0
    *parameters, uses = plain_parameters(4)
    none = torch.zeros(4, 1, 0, dtype=torch.int64)
    there = (logits, *parameters, none[..., 0:0].sum(-1), none, none, none, None, none, uniforms)
    moved: list[Any] = [x if x is None else x.to(device) for x in there]
    for block in (8, 64):
        assert verify_logits(*moved, max_depth=0, uses=uses, block=block)[3].tolist() == [9, 21, 21, 21]


def test_no_draws(device):
    """Plain decoding: a lone root, no draws at all."""
    differed, lengths = compare(device, random.Random(3), 8, 1, 0, 70, 0, [ONE_HOT], 32)
    assert differed <= 1 and set(lengths) == {0}


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
    there = [x.to(device) for x in (p.log(), *parameters, tokens, child, kind, q_row, q, uniforms, torch.rand(rows))]
    path, length, node, _, _ = verify_logits(*there, max_depth=1, uses=uses, block=32)
    assert length.tolist() == node.tolist() == [1] * rows and path.tolist() == [[0, 1]] * rows


@pytest.mark.parametrize("num_q", [0, 2])
def test_logits_that_are_not_finite(device, num_q):
    """NaN, +∞, or nothing but −∞ at one node: the walks are the reference's, ``finite`` tells whether they met it, and
    the bonus token is a token."""
    rng, rows, size = random.Random(4), 12, 20
    p, tokens, child, kind, q_row, q, depth = random_rows(rng, rows, 3, 2, size, num_q, ANY if num_q else [ONE_HOT])
    temperature, top_k, top_p, min_p, uses = random_parameters(rng, rows, size)
    logits = p.log()
    bad = torch.tensor([rng.randrange(3) for _ in range(rows)])
    for row in range(rows):
        value = (torch.nan, torch.inf, -torch.inf)[row % 3]
        where = slice(None) if row % 3 == 2 else rng.randrange(size)
        logits[row, bad[row], where] = value
    arguments = (
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        tokens,
        child,
        kind,
        q_row,
        q,
        torch.rand(rows, 3, 2),
        torch.rand(rows),
        depth,
        None,
        uses,
    )
    theirs = verify_logits_reference(*arguments)
    there: list[Any] = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]
    ours = [x.cpu() for x in verify_logits(*there, block=32)]
    met = (ours[0] == bad[:, None]) & (torch.arange(depth + 1) <= ours[1][:, None])
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(ours[4], ~met.any(1)) and torch.equal(theirs[4], ours[4])
    occurs(2 < int(ours[4].sum()) < rows - 2)
    assert int(ours[3].min()) >= 0 and int(ours[3].max()) < size
    assert torch.equal(ours[3][ours[4]], theirs[3][ours[4]])


class Operations(TorchDispatchMode):
    """Names of PyTorch's operations but views and allocations, which launch nothing."""

    FREE = {"view", "slice", "select", "unsqueeze", "expand", "as_strided", "unbind", "detach", "alias", "empty"}

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") not in self.FREE:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def count_launches(monkeypatch, names):
    """Append the name of each kernel launched from now on."""

    class Counted:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            def launch(*arguments, **named):
                names.append(self.name)
                with _disable_current_modes():  # the interpreter's copies are no operations of the caller
                    return self.kernel[grid](*arguments, **named)

            return launch

    for module in (sampling_kernels, verify_kernels):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Counted(name, getattr(module, name)))


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
    with monkeypatch.context() as patch:
        launched: list[str] = []
        count_launches(patch, launched)
        with Operations() as operations:
            first = fast.first_tokens(logits[:, 0], slice(0, rows), lengths)
        assert launched == ["_philox_kernel", "_distribution_kernel", "_walk_kernel", "_draw_kernel"]
        assert operations.names == ["aten::where"] or operations.names == ["aten::scalar_tensor", "aten::where"]
        launched.clear()
        with Operations() as operations:
            verdict = fast.verify(tree, tree.mask, logits, 2)
        assert launched == ["_philox_kernel", "_distribution_kernel", "_walk_kernel", "_draw_kernel"]
        assert operations.names == ["aten::add_"]
    with monkeypatch.context() as patch:
        for module in ("verify", "sampling"):
            patch.setattr(f"draftsmith.kernels.{module}.why_not_triton", lambda tensor: "left out")
        assert torch.equal(first, plain.first_tokens(logits[:, 0], slice(0, rows), lengths))
        expected = plain.verify(tree, tree.mask, logits, 2)
    for name in ("path", "length", "node", "bonus", "finite"):
        assert torch.equal(getattr(verdict, name), getattr(expected, name)), name
    assert int(verdict.length.sum()) > 0
