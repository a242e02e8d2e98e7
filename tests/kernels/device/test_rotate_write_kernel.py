"""The kernel that rotates queries and keys and writes them to the cache, against complex numbers in float64."""

import itertools

import pytest
import torch
from bounds import assert_within, roundings_of_sum, sum_bound
from cases import DTYPES

from draftsmith.kernels.rotate_write import rotate_write, rotate_write_reference


def tables(positions, width, dtype):
    """``[positions, 2 · width]`` as LeanDecoder makes them, and the frequencies ``[width / 2]`` in float64."""
    frequency = 1 / 100.0 ** (torch.arange(width // 2).double() / (width // 2))
    angle = torch.arange(positions)[:, None] * frequency
    return torch.cat((angle.cos(), angle.cos(), -angle.sin(), angle.sin()), -1).to(dtype)


def check(
    device, dtype, rows, count, kv_heads, group, width, parts, *, bias=False, norm=None, shared_slots=False, seed=0
):
    generator = torch.Generator().manual_seed(seed + width * 31 + rows * 7 + parts)
    heads, slots_seen, positions_known = kv_heads * group, count + 6, 50
    heads_all = heads + 2 * kv_heads
    buffer = torch.randn(parts, rows * count, heads_all * width + 3, generator=generator)
    qkv = buffer.to(dtype if parts == 1 else torch.float32).to(device)[..., :-3]
    table = tables(positions_known, width, dtype)
    positions = torch.randint(positions_known, (rows, count), generator=generator)
    positions[0, 0] = positions_known - 1
    distinct = [torch.randperm(slots_seen, generator=generator)[:count] for _ in range(rows)]
    slots = torch.stack(distinct[:1] if shared_slots else distinct)
    shift = torch.randn(heads_all * width, generator=generator).to(dtype) if bias else None
    weight = torch.randn(heads + kv_heads, width, generator=generator).to(norm) if norm else None
    eps = 0.1 if norm else 0.0
    # One layer of a cache of two, in the engine's layout.
    empty = torch.full((2, 2, rows, kv_heads, slots_seen, width), float("nan"), dtype=dtype)
    results = []
    for function in (rotate_write, rotate_write_reference):  # both are tested
        storage = empty.clone().to(device)
        cache = storage.permute(0, 2, 4, 1, 3, 5)[1]
        q_out = torch.empty(rows, count, heads, width, dtype=dtype, device=device)
        at = [None if one is None else one.to(device) for one in (qkv, table, positions, slots, shift, weight)]
        function(*at[:4], cache, q_out, bias=at[4], norm=at[5], eps=eps)
        assert storage[0].isnan().all()
        results.append((q_out, cache))

    added = qkv.cpu().double()
    if shift is not None:
        added = torch.cat((added, shift.double().expand(1, *qkv.shape[1:])))
    z, terms = (part.view(rows, count, heads_all, width) for part in (added.sum(0), added.abs().sum(0)))
    qk, v = z[:, :, : heads + kv_heads], z[:, :, heads + kv_heads :]
    qk_terms, v_terms = terms[:, :, : heads + kv_heads], terms[:, :, heads + kv_heads :]
    if weight is not None:
        rms = (qk.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        qk_terms = qk_terms + qk.abs() * qk_terms.norm(dim=-1, keepdim=True) / qk.norm(dim=-1, keepdim=True)
        qk, qk_terms = (part / rms * weight.double() for part in (qk, qk_terms))
    half = width // 2
    turn = torch.complex(table[:, :half].double(), table[:, width + half :].double())[positions][:, :, None]
    turned = torch.complex(qk[..., :half], qk[..., half:]) * turn
    qk = torch.cat((turned.real, turned.imag), -1)
    first, second = qk_terms.abs().split(half, -1)
    cos, sin = turn.real.abs(), turn.imag.abs()
    qk_terms = torch.cat((first * cos + second * sin, second * cos + first * sin), -1)
    roundings = len(added) + 8 + (0 if weight is None else roundings_of_sum(width))
    qk_bound, v_bound = sum_bound(qk, qk_terms, roundings, dtype), sum_bound(v, v_terms, len(added), dtype)

    for q, cache in results:
        assert q.dtype == cache.dtype == dtype
        assert_within(q, qk[:, :, :heads], qk_bound[:, :, :heads])
        untouched = torch.ones(rows, slots_seen, dtype=torch.bool, device=device)
        for row in range(rows):
            at = slots[0 if shared_slots else row].to(device)
            untouched[row, at] = False
            assert_within(cache[row, at, 0], qk[row, :, heads:], qk_bound[row, :, heads:])
            assert_within(cache[row, at, 1], v[row], v_bound[row])
        assert cache[untouched].isnan().all()


SIZES = [(1, 1, 1, 1, 16), (2, 3, 2, 4, 80), (3, 1, 1, 7, 24), (1, 5, 3, 1, 96), (2, 1, 8, 4, 128), (1, 2, 1, 3, 2)]
CASES = [(*size, parts, {}) for size in SIZES for parts in (1, 3)]  # rows, count, key/value heads, group, width, parts
CASES += [
    (2, 2, 2, 3, 24, parts, {"bias": bias, "norm": norm})
    for bias, norm, parts in itertools.product((False, True), (None, "own", "float32"), (1, 2))
]
CASES += [(3, 2, 2, 1, 16, 1, {"shared_slots": True})]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rotate_write(device, dtype, case):
    *sizes, options = case
    norm = {"own": dtype, "float32": torch.float32}.get(options.get("norm"))
    check(device, dtype, *sizes, **{**options, "norm": norm})


def test_values_are_copied(device):
    """Bit by bit, also beside an infinite partner, which a rotation by 0 would turn into NaN."""
    qkv = torch.randn(1, 2, 3 * 8)
    qkv[0, 1, 17] = torch.inf
    table = tables(4, 8, torch.float32)
    cache = torch.zeros(1, 5, 2, 1, 8, device=device)
    numbers, norm = torch.tensor([[3, 1]], device=device), torch.ones(2, 8, device=device)
    q_out = torch.empty(1, 2, 1, 8, device=device)
    rotate_write(qkv.to(device), table.to(device), numbers, numbers, cache, q_out, norm=norm)
    assert torch.equal(cache[0, [3, 1], 1, 0].cpu(), qkv[0, :, 16:])


def test_a_cache_of_more_than_2_to_the_31_elements(device, tmp_path):
    """Offsets of a slot, and of the values, that do not fit 32 bits; on a CPU in a sparse file."""
    slots_seen, width = (1 << 27) + 2, 16
    size = 2 * slots_seen * width
    if device.type == "cuda":
        storage = torch.zeros(size, dtype=torch.float16, device=device)
    else:
        storage = torch.from_file(str(tmp_path / "cache"), shared=True, size=size, dtype=torch.float16)
    cache = storage.view(2, 1, 1, slots_seen, width).permute(1, 3, 0, 2, 4)
    qkv = torch.randn(1, 2, 3 * width).half().to(device)
    place = torch.tensor([[0, slots_seen - 1]], device=device)
    table = tables(1, width, torch.float16).to(device)
    q_out = torch.empty(1, 2, 1, width, dtype=torch.float16, device=device)
    rotate_write(qkv, table, torch.zeros_like(place), place, cache, q_out)
    assert torch.equal(cache[0, place[0], :, 0], qkv[0].view(2, 3, width)[:, 1:])
    assert torch.equal(q_out[0, :, 0], qkv[0, :, :width])
