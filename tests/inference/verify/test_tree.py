"""Trees of ranks: node order, tree files, and invalid files."""

import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.inference.verify.tree import StaticTree, Topology, chain, read_tree
from draftsmith.kernels.tree_attention import ancestor_mask

PATHS = [[1], [0], [0, 0], [1, 0], [0, 2], [0, 0, 1], [0, 0, 0]]
IN_ORDER = ((0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 2), (1,), (1, 0))


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"paths": PATHS, "expected_accepted": 2.5}),
        json.dumps(PATHS),
        "[(0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 0, 1)]\n",
        json.dumps([[], *PATHS]),
    ],
    ids=["tree.json", "medusa_choices", "tuples", "root given"],
)
def test_read_tree(tmp_path, text):
    (tmp_path / "tree.json").write_text(text)
    assert read_tree(tmp_path / "tree.json").paths == IN_ORDER


def test_the_product_of_numbers_of_children(tmp_path):
    """Σ_k Π_{i ≤ k} s_i nodes and the root; every node of a depth has as many children."""
    (tmp_path / "tree.json").write_text('{"product": [3, 1, 2]}')
    tree = read_tree(tmp_path / "tree.json")
    assert tree.num_nodes == 1 + 3 + 3 * 1 + 3 * 1 * 2
    children = Counter(path[:-1] for path in tree.paths)
    assert children[()] == 3 and {children[path] for path in tree.paths if len(path) == 1} == {1}
    assert {children[path] for path in tree.paths if len(path) == 2} == {2} and tree.max_depth == 3


DEEP = 100_000
NO_JSON = ["", "[[0], [0, 0]", "{[0]: 1}", "import os", "\x00"]
NO_JSON += ["[" * DEEP, "[" * DEEP + "]" * DEEP, "(" * DEEP, "-" * DEEP + "1"]
NO_PATHS = ["7", '"01"', "{}", "[0, 1]", "[{}, [0]]", "[{0: 1}]", "{(0,)}", '{"paths": null}', '{"paths": {"0": 1}}']
NO_PATHS += ['[["0"]]', '["01"]', "[b'0']", "[[0.5]]", "[[1e9]]", "[[Infinity]]", "[[NaN]]", "[[true]]", "[[null]]"]
NO_PATHS += ["[" + "(0,)," * 300_000 + "]"]
INVALID = {
    "neither JSON": NO_JSON,
    "a list of rank paths": NO_PATHS,
    "path [-1] holds a negative rank": ["[[0], [-1]]"],
    "path [1, 0] has no parent; add [1]": ["[[0], [1, 0]]"],
    "path [0, 0, 2, 1] has no parent; add [0, 0, 2]": ["[[0], [0, 0, 2, 1]]"],
    "a path is given twice": ["[[0], [1], [0]]"],
    "a tree of 100001 nodes; at most 4096": [str([[n] for n in range(100_000)])],
    "a tree of 4097 nodes; at most 4096": [str([[n] for n in range(4096)]), '{"product": [4096]}'],
    "'product' is a list of numbers of children": ['{"product": []}', '{"product": [2, 0]}', '{"product": "22"}'],
    "a tree of 1111111111111 nodes": ['{"product": [10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10]}'],
}


@pytest.mark.parametrize(
    ("text", "message"),
    [(text, message) for message, texts in INVALID.items() for text in texts],
    ids=lambda text: text[:20],
)
def test_invalid_trees(tmp_path, text, message):
    path = tmp_path / "tree.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_tree(path)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_tree_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such tree"):
        read_tree(tmp_path / "tree.json")
    (tmp_path / "tree.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8 text"):
        read_tree(tmp_path / "tree.json")
    with pytest.raises(ValueError, match="this is a folder; a tree is needed"):
        read_tree(tmp_path)
    (tmp_path / "tree.json").write_bytes(b"\xef\xbb\xbf[[0], [0, 0]]")
    assert read_tree(tmp_path / "tree.json").num_nodes == 3, "a byte order mark is ignored"
    (tmp_path / "tree.json").write_text(str([[n] for n in range(4095)]))
    assert read_tree(tmp_path / "tree.json").num_nodes == 4096


@st.composite
def rank_paths(draw):
    known = [()]
    for _ in range(draw(st.integers(0, 40))):
        above = draw(st.sampled_from(known))
        known.append((*above, draw(st.integers(0, 3))))
    return draw(st.permutations(sorted(set(known) - {()})))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rank_paths())
def test_order_of_nodes(paths):
    """Parents before children; the top-1 chain is nodes 0, 1, 2, …; the order of the given paths does not matter."""
    tree = Topology(tuple(paths))
    all_paths = [(), *tree.paths]
    assert set(tree.paths) == set(paths) and tree.num_nodes == len(paths) + 1
    assert tree.parents[0] == -1
    for node, (path, above) in enumerate(zip(all_paths, tree.parents, strict=True)):
        if node:
            assert above < node and all_paths[above] == path[:-1]
    for node, path in enumerate(all_paths):
        assert any(path) or len(path) == node
    assert tree.max_depth == max(map(len, all_paths))
    assert tree.max_rank == max((rank for path in paths for rank in path), default=-1)


def test_chain_is_one_path():
    tree = chain(3)
    assert tree.paths == ((0,), (0, 0), (0, 0, 0)) and tree.parents == [-1, 0, 1, 2]
    assert chain(0).num_nodes == 1


def test_static_tree():
    topology = Topology(IN_ORDER)
    tokens = torch.arange(16).reshape(2, 8)
    tree = StaticTree(topology.parents, torch.device("cpu")).fill(tokens)
    assert tree.tokens is tokens
    assert tree.parent.tolist() == [topology.parents] * 2 and tree.parent.dtype == torch.int32
    assert tree.depth.tolist() == [[0, *map(len, topology.paths)]] * 2
    assert bool(tree.valid.all()) and tree.valid.shape == (2, 8)
    paths = [(), *topology.paths]
    wanted = [[path[: len(above)] == above for above in paths] for path in paths]
    assert tree.mask.tolist() == ancestor_mask(tree.ancestors, 8).tolist() == [wanted] * 2
