"""Budgets, configs, routers and membership of shortlists, each against a plain reimplementation; what is refused."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from draftsmith.models.shortlist import DEPTHS, Router, ShortlistConfig, ShortlistHead, budget, low_rank_factors

WHERE = "runs/short"
FIXED = ShortlistConfig("fr_spec", 12, (5, 5, 2))
SIZES = {"num_clusters": 5, "router_width": 7, "embedding_size": 6, "feature_size": 4}
ROUTED = ShortlistConfig("dynaspec", 12, (9, 9, 4), clusters=(3, 3, 1), **SIZES)
STARTS = [0, 2, 3, 7, 9, 12]
LOW = ShortlistConfig("low_rank", 12, (5, 5, 2), rank=3, feature_size=4)
KINDS = {"fr_spec": FIXED, "vocab_trim": replace(FIXED, shortlist="vocab_trim"), "dynaspec": ROUTED, "low_rank": LOW}


def head_of(config: ShortlistConfig) -> ShortlistHead:
    """A random order, router and factors; biases of depths, too."""
    torch.manual_seed(0)
    head = ShortlistHead(config)
    head.order.copy_(torch.randperm(config.outputs))
    if head.router is not None:
        head.starts.copy_(torch.tensor(STARTS))
        torch.nn.init.normal_(head.router.depth.weight)
    if head.low_rank:
        head.down.normal_()
        head.up.normal_()
    return head.eval().requires_grad_(False)


# ---- budgets


@pytest.mark.parametrize(
    ("most", "schedule", "expected"),
    [
        (24, "position_aware", [24, 24, 4, 3, 2, 2, 1, 1]),
        (1000, "position_aware", [1000, 1000, 166, 125, 100, 83, 71, 62]),
        (5, "position_aware", [5, 5, 1, 1, 1, 1, 1, 1]),
        (1, "position_aware", [1] * 8),
        (24, "fixed", [24] * 8),
        (1, "fixed", [1] * 8),
    ],
)
def test_budget(most, schedule, expected):
    """By hand: k_max twice, then ⌊k_max / 6⌋, ⌊k_max / 8⌋, …, and never 0."""
    assert [*budget(most, schedule, 8)] == expected
    assert [*budget(most, schedule)] == expected[:DEPTHS] and len(budget(most, schedule, 3)) == 3


def test_deeper_nodes_have_the_last_budget():
    assert [ROUTED.tokens(depth) for depth in range(6)] == [9, 9, 4, 4, 4, 4]
    assert [ROUTED.wanted(depth) for depth in range(6)] == [3, 3, 1, 1, 1, 1]
    assert ROUTED.fewest == 4 and FIXED.fewest == 2


# ---- configs


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_is_what_its_file_says(kind):
    """Through JSON, where tuples are lists."""
    config = KINDS[kind]
    stored = json.loads(json.dumps(config.to_dict()))
    assert ShortlistConfig(**stored) == config and hash(ShortlistConfig(**stored)) == hash(config)
    assert ("router_width" in stored) == (kind == "dynaspec")


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("fr_spec", {"shortlist": "fr-spec"}, "field 'shortlist' is 'fr-spec'; known: fr_spec, vocab_trim, dynaspec"),
        ("fr_spec", {"outputs": 0}, "field 'outputs' is 0; it has to be a whole number above 0"),
        ("fr_spec", {"outputs": 12.0}, "field 'outputs' is 12.0; it has to be a whole number above 0"),
        ("fr_spec", {"outputs": True}, "field 'outputs' is True; it has to be a whole number above 0"),
        ("fr_spec", {"capacity": ()}, r"field 'capacity' is \[\]; it has .* of whole numbers from 1 to 12"),
        ("fr_spec", {"capacity": (5, 0)}, r"field 'capacity' is \[5, 0\]; it has .* of whole numbers from 1 to 12"),
        ("fr_spec", {"capacity": (13,)}, r"field 'capacity' is \[13\]; it has .* of whole numbers from 1 to 12"),
        ("fr_spec", {"capacity": "8"}, r"field 'capacity' is '8'; it has .* of whole numbers from 1 to 12"),
        ("dynaspec", {"clusters": ()}, r"field 'clusters' is \[\]; it has .* of whole numbers from 1 to 5"),
        ("dynaspec", {"clusters": (6,)}, r"field 'clusters' is \[6\]; it has .* of whole numbers from 1 to 5"),
        ("dynaspec", {"num_clusters": 0}, "field 'num_clusters' is 0; it has to be a whole number above 0"),
        ("dynaspec", {"router_width": "7"}, "field 'router_width' is '7'; it has to be a whole number above 0"),
        ("dynaspec", {"embedding_size": 0}, "field 'embedding_size' is 0; it has to be a whole number above 0"),
        ("dynaspec", {"feature_size": -4}, "field 'feature_size' is -4; it has to be a whole number above 0"),
        ("low_rank", {"rank": 0}, "field 'rank' is 0; it has to be a whole number above 0"),
        ("low_rank", {"rank": 5}, "field 'rank' is 5; an LM head of 12 × 4 has 4"),
    ],
)
def test_configs_that_are_refused(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        replace(KINDS[kind], **fields)


# ---- the router


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def test_the_routers_scores_are_the_formula():
    """W₂ · SiLU(W₁ · cat(norm(e), norm(h̃)) + b_t) + b₂; inputs of another scale make no difference."""
    router = head_of(ROUTED).router.double()
    embeddings, hidden = torch.randn(3, 2, 6).double(), 40 * torch.randn(3, 2, 4).double()
    weights = {name: weight.double() for name, weight in router.named_parameters()}
    seen = []
    for depth in range(DEPTHS + 2):
        x = torch.cat((rms(embeddings), rms(hidden)), -1) @ weights["inputs.weight"].t()
        x = x + weights["depth.weight"][min(depth, DEPTHS - 1)]
        expected = (x * x.sigmoid()) @ weights["clusters.weight"].t() + weights["clusters.bias"]
        scores = router(embeddings, hidden, depth)
        assert scores.shape == (3, 2, 5)
        torch.testing.assert_close(scores, expected, atol=1e-9, rtol=0)
        torch.testing.assert_close(router(embeddings * 9, hidden / 9, depth), expected, atol=1e-6, rtol=0)
        seen.append(scores)
    assert all(not torch.allclose(one, other, atol=1e-2) for one, other in itertools.pairwise(seen[:DEPTHS]))
    torch.testing.assert_close(seen[-1], seen[DEPTHS - 1])


def test_a_depth_as_a_tensor():
    """Rows of several depths at once, as training has them."""
    router = head_of(ROUTED).router
    embeddings, hidden = torch.randn(DEPTHS, 6), torch.randn(DEPTHS, 4)
    together = router(embeddings, hidden, torch.arange(DEPTHS))
    for depth in range(DEPTHS):
        torch.testing.assert_close(together[depth], router(embeddings[depth], hidden[depth], depth))


def test_an_untrained_router_starts_without_depths():
    router = Router(6, 4, 7, 5)
    embeddings, hidden = torch.randn(6), torch.randn(4)
    assert torch.equal(router(embeddings, hidden, 0), router(embeddings, hidden, 3))


# ---- artifacts


def stored(kind: str = "dynaspec"):
    """Config, as a file has it, and weights."""
    head = head_of(KINDS[kind])
    config = {"draftsmith_version": "0", "drafter_type": "dynaspec", **json.loads(json.dumps(head.config.to_dict()))}
    return config, {name: weight.clone() for name, weight in head.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_from_artifact(kind):
    config, weights = stored(kind)
    head = ShortlistHead.from_artifact(config, weights | {"order": weights["order"].int()}, WHERE)
    assert head.config == KINDS[kind] and head.order.dtype == torch.int64 and not head.training
    for name, weight in head.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    assert not any(parameter.requires_grad for parameter in head.parameters())


def tensor(**values):
    return lambda config, weights: weights.update({name: torch.tensor(rows) for name, rows in values.items()})


def field(**fields):
    return lambda config, weights: config.update(fields)


def without(name):
    return lambda config, weights: (config if name in config else weights).pop(name)


CONFIG, WEIGHTS = f"^{WHERE}/config.json: ", f"^{WHERE}/model.safetensors: "


@pytest.mark.parametrize("reads", [8, 40, 5], ids=["identity", "some", "fewer than numbers"])
def test_low_rank_factors(reads):
    """No product of the rank has less error in what is read (the theorem of Eckart and Young on the scores), best
    directions first; of full rank the head itself."""
    drawn = torch.Generator().manual_seed(1)
    head = torch.randn(30, 8, generator=drawn).double()
    x = torch.eye(8).double() if reads == 8 else torch.randn(reads, 8, generator=drawn).double() * torch.arange(1, 9)
    s = torch.linalg.svdvals(x @ head.t()).tolist() + [0.0] * 8
    for rank in (1, 3, 8):
        down, up = low_rank_factors(head, rank, x.t() @ x / len(x))
        assert down.shape == (rank, 8) and up.shape == (30, rank) and up.dtype == torch.float32
        scores = (x @ down.t().double()) @ up.t().double()
        error = float((x @ head.t() - scores).square().sum())
        assert error == pytest.approx(sum(each**2 for each in s[rank:]), rel=1e-4, abs=1e-4)
        norms = up.norm(dim=0).tolist()
        assert norms == sorted(norms, reverse=True) and norms[0] == pytest.approx(s[0] / len(x) ** 0.5, rel=1e-4)
    torch.testing.assert_close((up @ down).double(), head, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("shortlist"), f"{CONFIG}field 'shortlist' is missing$"),
        (without("capacity"), f"{CONFIG}field 'capacity' is missing$"),
        (without("num_clusters"), f"{CONFIG}field 'num_clusters' is 0"),
        (field(capacity=5), f"{CONFIG}field 'capacity' is 5; it has to be a list"),
        (field(capacity=None), f"{CONFIG}field 'capacity' is None; it has to be"),
        (field(clusters=3), f"{CONFIG}field 'clusters' is 3; it has to be a list"),
        (field(shortlist=["fr_spec"]), rf"{CONFIG}field 'shortlist' is \['fr_spec'\]"),
        (field(outputs=13), rf"{WEIGHTS}'order' is \(12,\) instead of \(13,\)"),
        (field(num_clusters=6), rf"{WEIGHTS}'router.clusters.bias' is \(5,\) instead of \(6,\)"),
        (without("starts"), rf"{WEIGHTS}'starts' is missing instead of \(6,\)"),
        (without("router.inputs.weight"), rf"{WEIGHTS}'router.inputs.weight' is missing instead of \(7, 10\)"),
        (tensor(extra=[1.0, 1.0]), rf"{WEIGHTS}'extra' is \(2,\) instead of absent, as config.json promises; fetch or"),
        (tensor(order=[*range(11), 0]), f"{WEIGHTS}'order' does not hold each row of the LM head once; fetch or train"),
        (tensor(order=[*range(1, 13)]), f"{WEIGHTS}'order' does not hold each row"),
        (tensor(order=[*range(11), -1]), f"{WEIGHTS}'order' does not hold each row"),
        (tensor(starts=[0, 2, 3, 7, 9, 11]), f"{WEIGHTS}'starts' does not ascend from 0 to 12; fetch or train"),
        (tensor(starts=[1, 2, 3, 7, 9, 12]), f"{WEIGHTS}'starts' does not ascend from 0 to 12"),
        (tensor(starts=[0, 2, 2, 7, 9, 12]), f"{WEIGHTS}'starts' does not ascend from 0 to 12"),
        (tensor(starts=[0, 3, 2, 7, 9, 12]), f"{WEIGHTS}'starts' does not ascend from 0 to 12"),
    ],
)
def test_artifacts_that_are_refused(damage, message):
    """One line: which file, what is wrong, what to do."""
    config, weights = stored()
    damage(config, weights)
    with pytest.raises(ValueError, match=message) as error:
        ShortlistHead.from_artifact(config, weights, WHERE)
    assert "\n" not in str(error.value)


def test_factors_of_another_shape():
    config, weights = stored("low_rank")
    weights["up"] = torch.zeros(12, 2)
    with pytest.raises(
        ValueError, match=rf"{WEIGHTS}'up' is \(12, 2\) instead of \(12, 3\), as config.json promises; fetch or"
    ):
        ShortlistHead.from_artifact(config, weights, WHERE)


# ---- which tokens are in a list


def expected_list(head: ShortlistHead, scores: list[float], depth: int) -> set[int]:
    """Places in the drafter's vocabulary, in plain Python."""
    config, rows = head.config, head.order.tolist()
    capacity = config.capacity[min(depth, len(config.capacity) - 1)]
    if config.shortlist == "low_rank":
        return {rows[row] for row in sorted(range(len(scores)), key=lambda row: -scores[row])[:capacity]}
    if config.shortlist != "dynaspec":
        return set(rows[:capacity])
    wanted = config.clusters[min(depth, len(config.clusters) - 1)]
    taken: list[int] = []
    for cluster in sorted(range(len(scores)), key=lambda cluster: -scores[cluster])[:wanted]:
        taken += rows[STARTS[cluster] : STARTS[cluster + 1]]
    return set(taken[:capacity])


@pytest.mark.parametrize("kind", KINDS)
def test_contains(kind):
    """For every token and node; clusters that do not fit, and one larger than the capacity, among them."""
    config = KINDS[kind] if kind != "dynaspec" else replace(ROUTED, capacity=(8, 8, 3))
    head, nodes = head_of(config), 40
    embeddings, hidden = torch.randn(nodes, 6), torch.randn(nodes, 4)
    tokens = torch.arange(12).expand(nodes, -1)
    sizes = set()
    for depth in range(5):
        chosen = head.choose(embeddings, hidden, depth)
        assert (chosen is None) == (kind in ("fr_spec", "vocab_trim"))
        got = head.contains(tokens, chosen, depth)
        assert got.shape == (nodes, 12) and got.dtype == torch.bool
        for node in range(nodes):
            scores = [] if head.router is None else head.router(embeddings[node], hidden[node], depth).tolist()
            if head.low_rank:
                scores = (head.up @ head.down @ hidden[node]).tolist()
            expected = expected_list(head, scores, depth)
            assert set(got[node].nonzero()[:, 0].tolist()) == expected, (depth, node)
            sizes.add(len(expected))
            if chosen is not None:
                rows = chosen.rows[node]
                assert set(head.order[rows[rows >= 0]].tolist()) == expected
                assert int(chosen.count[node]) == len(expected) <= config.tokens(depth)
    assert len(sizes) > 1, sizes
    assert torch.equal(head.contains(tokens.flip(1), chosen, depth), got.flip(1)), "tokens in any order"
