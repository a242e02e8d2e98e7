"""The plan of ``tree_attention_cached`` (kernels/tree_attention.py): the tiles of all rows, divided among a fixed
number of *items* (flash decoding) on the device, once per forward pass.

Shape letters: B batch, I items, T tree keys, L the cached length of a row.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.kernels.backend import constant, jit, next_power, tl, why_not_triton

TILE = 64  # slots; the bits of a tile of tree keys are one word
KERNEL_TILE = constant(TILE)
MIN_SHARE = 2  # tiles of an item of a row that is split, at least


class Plan(NamedTuple):
    """The items of ``tree_attention_cached``: ranges of tiles, divided among the rows by :func:`make_plan`.

    items: ``[I, 3]`` int32: row (−1: the item is not in use), first tile, end tile. The tiles of a row are those of its
        prefix, from the first slot that some query sees, and then those of its tree.
    first, count: ``[B]`` int32, each row's first item and its number of items. Rows with several items come first.
    """

    items: Tensor
    first: Tensor
    count: Tensor


def make_plan_reference(
    lengths: Tensor, num_tree_keys: int, num_items: int, window: int = 0, min_share: int = MIN_SHARE
) -> Plan:
    """The definition of :func:`make_plan`."""
    first_slot = (lengths - window + 1).clamp(min=0) if window else 0
    tiles = (lengths - first_slot + TILE - 1) // TILE + -(-num_tree_keys // TILE)  # [B]
    parts = num_items - len(lengths) + 1
    count = torch.minimum(tiles * parts // tiles.sum(), tiles // min_share).clamp(min=1)
    split = count > 1
    among_split, among_whole = (torch.where(part, count, 0) for part in (split, ~split))
    first = torch.where(split, among_split.cumsum(0), among_split.sum() + among_whole.cumsum(0)) - count
    number = torch.arange(num_items, device=lengths.device)[:, None] - first  # [I, B], within the row
    inside = (number >= 0) & (number < count)
    row = inside.int().argmax(1)
    number, of_row, many = number.gather(1, row[:, None])[:, 0], tiles[row], count[row]
    items = torch.stack((row, number * of_row // many, (number + 1) * of_row // many), 1)
    items = torch.where(inside.any(1, keepdim=True), items, torch.tensor([-1, 0, 0], device=items.device))
    return Plan(items.int(), first.int(), count.int())


@jit(do_not_specialize="rows num_tree_keys num_items")
def _plan_kernel(
    lengths, plan, rows, num_tree_keys, num_items, WINDOW: tl.constexpr, MIN_SHARE: tl.constexpr, BLOCK_B: tl.constexpr
):
    """One program per item; each looks at all rows, and the first one writes what is known of them."""
    items, first, count = plan
    item = tl.program_id(0)
    row = tl.arange(0, BLOCK_B)
    exists = row < rows
    length = tl.load(lengths + row, mask=exists, other=0)
    if WINDOW:
        length = tl.minimum(length, WINDOW - 1)
    tiles = tl.where(exists, tl.cdiv(length, KERNEL_TILE) + tl.cdiv(num_tree_keys, KERNEL_TILE), 0).to(tl.int64)
    parts = tiles * (num_items - rows + 1) // tl.sum(tiles, 0)
    parts = tl.maximum(tl.minimum(parts, tiles // MIN_SHARE), 1).to(tl.int32)
    among_split, among_whole = tl.where(exists & (parts > 1), parts, 0), tl.where(exists & (parts == 1), 1, 0)
    before = tl.cumsum(among_whole, 0) + tl.sum(among_split, 0)
    start = tl.where(parts > 1, tl.cumsum(among_split, 0), before) - parts
    if item == 0:
        tl.store(first + row, start, mask=exists)
        tl.store(count + row, parts, mask=exists)

    mine = exists & (item >= start) & (item < start + parts)
    many = tl.sum(tl.where(mine, parts, 0), 0)  # 0: the item is not in use
    number = tl.sum(tl.where(mine, item - start, 0), 0)
    of_row = tl.sum(tl.where(mine, tiles, 0), 0)
    tl.store(items + item * 3, tl.where(many > 0, tl.sum(tl.where(mine, row, 0), 0), -1))
    tl.store(items + item * 3 + 1, (number * of_row // tl.maximum(many, 1)).to(tl.int32))
    tl.store(items + item * 3 + 2, ((number + 1) * of_row // tl.maximum(many, 1)).to(tl.int32))


def make_plan(lengths: Tensor, num_tree_keys: int, num_items: int, window: int = 0, min_share: int = MIN_SHARE) -> Plan:
    """Divide the tiles of all rows among a fixed number of items, without host synchronisation.

    A row has ⌊(I − B + 1) · its tiles / all tiles⌋ items of about equal size, but at least one, and none of fewer than
    ``min_share`` tiles unless that is all the row has. Rows that are split have at most I − B + 1 items together.

    Args:
        lengths: ``[B]`` int64, cached tokens per row (L).
        num_tree_keys: T.
        num_items: I ≥ B, see :func:`draftsmith.kernels.tree_attention.attention_items`.
        window: as in ``tree_attention_cached``.
        min_share: tiles.
    """
    rows = len(lengths)
    assert num_items >= rows
    if why_not_triton(lengths):
        return make_plan_reference(lengths, num_tree_keys, num_items, window, min_share)
    items, first, count = (lengths.new_empty(size, dtype=torch.int32) for size in ((num_items, 3), rows, rows))
    tile = {"WINDOW": window, "MIN_SHARE": min_share, "BLOCK_B": next_power(rows, 32), "num_warps": 1}
    with torch.cuda.device_of(lengths):
        _plan_kernel[(num_items,)](lengths, (items, first, count), rows, num_tree_keys, num_items, **tile)
    return Plan(items, first, count)


class Plans:
    """The plans of a step's forward passes, those of drafters too, each made when it is first asked for.

    A plan also serves passes of shorter prefixes and fewer tree keys: the kernel reads no tile beyond a row's own.
    ``lengths``: ``[B]`` int64, the longest prefix of each row in any of the passes; unchanged until the last one.
    """

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths
        self.made: dict[tuple[int, int, int], Plan] = {}

    def plan(self, num_tree_keys: int, num_items: int, window: int = 0) -> Plan | None:
        """:func:`make_plan` for at least ``num_tree_keys`` tree keys; None if no row is split."""
        if num_items == len(self.lengths):
            return None
        key = -(-num_tree_keys // TILE) * TILE, num_items, window
        if key not in self.made:
            self.made[key] = make_plan(self.lengths, *key)
        return self.made[key]
