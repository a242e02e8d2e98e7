"""The preallocated K/V cache, a ``transformers`` ``Cache``, with each row's length on the device.

Shape letters: B rows, Hkv key/value heads, S slots, D head width, N new tokens, A depth of the deepest node + 1.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftsmith.kernels.commit import commit
from draftsmith.models.sizes import kv_bytes
from draftsmith.models.target import Target

CGROUP = Path("/sys/fs/cgroup")  # of this process's container


def free_bytes(device: torch.device) -> int:
    """Memory that is left on a device; main memory within the limit of a container (cgroup 2, where files that are kept
    in memory count as used)."""
    if device.type != "cuda":
        left = psutil.virtual_memory().available
        with suppress(OSError, ValueError, KeyError):  # no limit, or none that can be read
            limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
            facts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
            left = min(left, limit - used + int(facts["active_file"]) + int(facts["inactive_file"]))
        return max(0, left)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


class _Layer(CacheLayerMixin):
    """One layer of the cache: ``update`` writes new keys and values and returns the slots in use."""

    is_sliding = False  # windows are part of the mask; all keys are kept

    def __init__(self, owner: "KVCache") -> None:
        super().__init__()
        self.owner = owner
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the storage is already allocated."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values, rows = self.keys, self.values, self.owner.of_tokens  # rows: in a pass of prompts
        assert keys is not None and values is not None
        slots = self.owner.slots.to(keys.device)  # elsewhere in a target spread over several devices
        if rows is None and slots.shape[0] == 1:  # one row, or the same slots in every row
            keys.index_copy_(2, slots[0], key_states)
            values.index_copy_(2, slots[0], value_states)
        else:
            # Not scatter_, for which torch.compile would copy the whole cache.
            if rows is None:
                rows = torch.arange(len(slots), device=slots.device)[:, None]
            place = (rows.to(slots.device), slots)
            keys.transpose(1, 2).index_put_(place, key_states.transpose(1, 2))
            values.transpose(1, 2).index_put_(place, value_states.transpose(1, 2))
        return keys[:, :, : self.owner.seen], values[:, :, : self.owner.seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.seen, 0

    def get_seq_length(self) -> int:
        return 0  # positions are always given, never derived from this

    def get_max_length(self) -> int:
        return self.owner.capacity

    # transformers < 5.20 calls this in place of get_max_length.
    get_max_cache_shape = get_max_length


class KVCache(Cache):
    """K and V of all layers for B rows of up to ``capacity`` slots.

    lengths: ``[B]`` int64 on the device: committed tokens per row.
    slots: ``[B or 1, N]`` int64: slots that the next forward pass writes; set by the engine before it.
    of_tokens: ``[1, N]`` int64: if that is a pass of prompts, the row of each of its tokens; else None.
    seen: number of slots, from the first, that the next forward pass attends to.
    positions: number of positions that its tokens may have: its capacity, or more where it holds some tokens of a text.
    Raises ValueError: it does not fit into the memory that is left; says how many rows would."""

    def __init__(self, target: Target, rows: int, capacity: int, positions: int | None = None) -> None:
        places, device, dtype = list(zip(target.kv_shapes, target.kv_devices, strict=True)), target.device, target.dtype
        each = [capacity * size for size in kv_bytes(target.kv_shapes, dtype.itemsize)]  # bytes of a row
        for place in {*target.kv_devices}:
            row = sum(size for size, other in zip(each, target.kv_devices, strict=True) if other == place)
            free = free_bytes(place)
            if rows * row > free:
                raise ValueError(
                    f"{rows} texts of {capacity:,} tokens need {rows * row / 1e9:.1f} GB for keys and values on "
                    f"{place}, where {free / 1e9:.1f} GB are free: at most {free // row} at a time; take a smaller "
                    "batch size, or shorter texts"
                )
        super().__init__(layers=[_Layer(self) for _ in places])
        self.rows, self.capacity, self.seen = rows, capacity, 0  # rows: that passes run on, see run_on
        self.positions = positions or capacity
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.slots = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.of_tokens: Tensor | None = None
        # Layers of one shape and device share one storage, so that a commit moves all of them at once.
        storages: list[Tensor] = []
        self._numbers: list[list[int]] = []  # of the layers in each storage
        for place in sorted(set(places), key=str):
            numbers = [number for number, other in enumerate(places) if other == place]
            (heads, width), layer_device = place
            shape = len(numbers), 2, rows, heads, capacity, width
            storages.append(torch.zeros(shape, dtype=dtype, device=layer_device))
            self._numbers.append(numbers)
        self._whole = storages
        self._use(storages)

    def run_on(self, rows: int) -> None:
        """Run forward passes on the first ``rows`` rows alone, from now on; the caller sets ``lengths``."""
        self.rows = rows
        self._use([storage[:, :, :rows] for storage in self._whole])

    def _use(self, storages: list[Tensor]) -> None:
        """Read and write these storages, ``[layers, 2, B, Hkv, S, D]`` each, from now on."""
        self._storages = storages
        self._written = [list(storage.permute(0, 2, 4, 1, 3, 5).unbind(0)) for storage in storages]  # [B, S, 2, Hkv, D]
        for storage, numbers in zip(storages, self._numbers, strict=True):
            for number, (keys, values) in zip(numbers, storage, strict=True):
                layer = cast(CacheLayerMixin, self.layers[number])
                layer.keys, layer.values = keys, values

    def views(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Views of each layer: keys and values together ``[B, S, 2, Hkv, D]``, for writing; keys and values
        ``[B, Hkv, seen, D]``, for reading. A few operations for all layers of one shape."""
        by_layer: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for storage, written, layers in zip(self._storages, self._written, self._numbers, strict=True):
            keys_values = storage[..., : self.seen, :].flatten(0, 1).unbind(0)
            by_layer |= zip(layers, zip(written, keys_values[::2], keys_values[1::2], strict=True), strict=True)
        return [by_layer[number] for number in range(len(self.layers))]

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, ``[B, Hkv, S, D]`` each."""
        layer = cast(CacheLayerMixin, self.layers[number])
        assert layer.keys is not None and layer.values is not None
        return layer.keys, layer.values

    def take(self, other: "KVCache") -> None:
        """Copy all K/V and the lengths of a cache of the same shape."""
        self.lengths.copy_(other.lengths)
        for to, source in zip(self._storages, other._storages, strict=True):
            to.copy_(source)

    def copy_row(self, source: int, row: int, end: int) -> None:
        """Copy the K/V of a row's first ``end`` slots to another row."""
        for storage in self._storages:
            storage[:, :, row, :, :end] = storage[:, :, source, :, :end]

    def copy(self, other: "KVCache", places: Tensor, slots: Tensor) -> None:
        """Copy K/V of another cache of the same model and rows, in every layer, from ``places`` there to ``slots``
        here: ``[B, A]`` int64 each."""
        for to, source in zip(self._storages, other._storages, strict=True):
            at = torch.arange(self.rows, device=to.device)[:, None]
            place, slot = places.to(to.device), slots.to(to.device)
            mine, others = (each.permute(2, 4, 0, 1, 3, 5) for each in (to, source))  # [B, S, layers, 2, Hkv, D]
            mine.index_put_((at, slot), others[at, place])

    def of_row(self, row: int, start: int, end: int) -> list[Tensor]:
        """Views of a row's slots from ``start`` to ``end``, by shape of layers: ``[layers, 2, Hkv, ·, D]``."""
        return [storage[:, :, row, :, start:end] for storage in self._storages]

    def commit(self, path: Tensor, length: Tensor) -> None:
        """Move the accepted nodes' K/V next to the prefix, in every layer: slot L + path[d] → L + d. ``path [B, A]``
        and ``length [B]`` are those of a ``Verdict``; entries of a path beyond the length are not read."""
        for storage in self._storages:
            parts = (part.to(storage.device) for part in (self.lengths, path, length))
            commit(storage, *parts)
