"""Token streams cut into rows of one length, and the order in which rows are seen.

Shape letters: S rows, T tokens in a row.
"""

from collections.abc import Sequence

import numpy as np
import torch


def pack(documents: Sequence[Sequence[int]], length: int, separator: int) -> torch.Tensor:
    """Join documents with ``separator`` and cut the stream into rows; the tail that fills no row is dropped.

    Returns:
        ``[S, length]`` int32 (vocabularies fit, and it halves the memory).

    Raises:
        ValueError: the documents do not fill one row.
    """
    stream: list[int] = []
    for document in documents:
        stream.extend(document)
        stream.append(separator)
    rows = len(stream) // length
    if rows == 0:
        raise ValueError(f"the data set is empty: {len(stream)} tokens do not fill one row of {length}; add sources")
    return torch.tensor(stream[: rows * length], dtype=torch.int32).view(rows, length)


def schedule(sizes: Sequence[int], weights: Sequence[float], samples: int, seed: int) -> np.ndarray:
    """Which row of which source each sample is: ``[samples, 2]`` int64 of (source, row).

    A source is drawn by weight; its rows are walked in a fresh permutation per epoch. A pure function of its
    arguments, so that a resumed run needs only the step it had reached.
    """
    share = np.asarray(weights, dtype=np.float64)
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(sizes), size=samples, p=share / share.sum())
    order = np.empty((samples, 2), dtype=np.int64)
    order[:, 0] = chosen
    for source, size in enumerate(sizes):
        places = np.flatnonzero(chosen == source)
        epochs = -(-len(places) // size)
        rows = np.concatenate([rng.permutation(size) for _ in range(epochs)]) if epochs else np.empty(0, np.int64)
        order[places, 1] = rows[: len(places)]
    return order
