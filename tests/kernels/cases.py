"""What several tests of kernels make: dtypes, trees, rows that do not touch, sampling parameters."""

import itertools

import torch

from draftsmith.kernels.backend import INTERPRETING

# bfloat16 arithmetic is wrong in the interpreter
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETING else [torch.bfloat16])


def random_parents(nodes, reach, rng):
    """Parents first; each node's parent is one of the ``reach`` before it: 1 makes a chain, many a bush."""
    return [-1] + [rng.randrange(max(0, node - reach), node) for node in range(1, nodes)]


def walk(parents, node):
    """A node and its ancestors, the root last."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


def depths(parents):
    return torch.tensor([len(walk(parents, node)) - 1 for node in range(len(parents))], dtype=torch.int32)


def spread(tensor, device):
    """The same values, with NaN behind each row."""
    padded = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan"), dtype=tensor.dtype)
    padded[..., : tensor.shape[-1]] = tensor
    return padded.to(device)[..., : tensor.shape[-1]]


def sampling_parameters(rows, vocabulary, first=0):
    """Temperature, top-k, top-p and min-p: rows of a list of all combinations, in a mixed order, from number ``first``
    on; k from 1 to beyond V."""
    top_k = [0, 1, 3, min(20, vocabulary - 1), vocabulary, 2**31]
    every = list(itertools.product([1.0, 0.0, 0.4, 2.5], top_k, [1.0, 0.95, 0.6, 1e-6], [0.0, 0.03, 0.4]))  # 288
    chosen = [every[(first + row) * 103 % len(every)] for row in range(rows)]
    return [torch.tensor(column) for column in zip(*chosen, strict=True)]


def in_a_graph(step, device):
    """``step``, in a CUDA graph where there is one: each call replays it."""
    if device.type != "cuda":
        return step
    from draftsmith.common.command import no_collection

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.graph(graph):
        captured = step()

    def run():
        graph.replay()
        return captured

    return run
