"""The comparison of shortlists by the real command, against counts of its own: node by node, with the list that the
engine makes for a level of that node alone, the target's own forward pass, and dense masks."""

import json
import shutil
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from eagles import untrained
from safetensors.torch import load_file, save_file

from draftsmith.benchmarks import shortlist_heads
from draftsmith.benchmarks.shortlist_heads import ROUNDS, STATISTICS, WHOLE
from draftsmith.inference.drafters.shortlists import Shortlists
from draftsmith.inference.measure.rollouts import eagle_drafts as drafts_of
from draftsmith.inference.measure.rollouts import kept, record
from draftsmith.inference.measure.timing import bootstrap_interval
from draftsmith.inference.measure.tree_statistics import MAX_RANK, draft_labels
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.artifact import read_drafter, write_drafter
from draftsmith.models.shortlist import ShortlistConfig, ShortlistHead, budget
from draftsmith.models.target import Target

pytestmark = pytest.mark.measurement

NEW, DEPTHS, NODES = 14, 3, 12
KINDS = ("code", "writing")
COMMON = ["--threads", 1, "--device", "cpu", "--max-new-tokens", NEW, "--depths", DEPTHS, "--nodes", NODES]


def shortlists(outputs: int, width: int) -> dict[str, ShortlistHead]:
    """All kinds. Their capacities change by depth; the text's tokens and some clusters do not all fit."""
    router = {"num_clusters": 12, "router_width": 8, "embedding_size": width, "feature_size": width}
    configs = {
        "fr_spec": ShortlistConfig("fr_spec", outputs, budget(90, "position_aware")),
        "vocab_trim": ShortlistConfig("vocab_trim", outputs, (60,)),
        "dynaspec": ShortlistConfig("dynaspec", outputs, (110, 110, 70), clusters=(6, 6, 3), **router),
    }
    generator = torch.Generator().manual_seed(5)
    heads: dict[str, ShortlistHead] = {}
    for name, config in configs.items():
        torch.manual_seed(1)
        heads[name] = ShortlistHead(config).requires_grad_(False)
        heads[name].order.copy_(torch.randperm(outputs, generator=generator))
    cuts = torch.randperm(outputs - 1, generator=generator)[:11].sort().values + 1
    heads["dynaspec"].starts.copy_(torch.cat((torch.tensor([0]), cuts, torch.tensor([outputs]))))
    return heads


def write(folder, head: ShortlistHead, target: Target, base) -> None:
    shutil.copytree(base, folder / "drafter", dirs_exist_ok=True)
    weights = {name: w.int() if name in ("order", "starts") else w for name, w in head.state_dict().items()}
    write_drafter(folder, "dynaspec", head.config.to_dict(), weights, target, {}, parts=["drafter"])


@pytest.fixture(scope="module")
def eagle(target, texts):
    """An EAGLE drafter on rows of the target's LM head, four fifths of them; fitted to half of the texts for a moment,
    so that it is sometimes right."""
    eagle = untrained(target, "shared", draft_vocab=True, spread=0.1).requires_grad_(True)
    optimizer = torch.optim.Adam(eagle.parameters(), 5e-3)
    known = {token: place for place, token in enumerate(eagle.draft_vocab.tolist())}
    for _ in range(8):
        for prompt, answer in texts[::2]:
            row = torch.tensor([[*prompt, *answer]])
            labels = torch.tensor([known.get(token, -1) for token in row[0].tolist()])
            with torch.no_grad():
                features = target.features(row, eagle.config.captured_layers)
            head, loss = eagle.draft_head(target.lm_head), torch.zeros(())
            for depth, out in enumerate(eagle.unroll(features, target.embeddings, row, DEPTHS)):
                logits, after = head(out)[0, : -depth - 2], labels[depth + 2 :]
                loss = loss + torch.nn.functional.cross_entropy(logits, after, ignore_index=-1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return eagle.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def base(target, eagle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters") / "eagle"
    write_drafter(folder, "eagle", eagle.config.to_dict(), eagle.state_dict(), target, {})
    return folder


@pytest.fixture(scope="module")
def drafts(target, eagle):
    return drafts_of(eagle, target)


@pytest.fixture(scope="module")
def heads(drafts, target):
    return shortlists(len(drafts.weight), target.hidden_size)


@pytest.fixture(scope="module")
def folders(heads, target, base, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for name, head in heads.items():
        write(root / name, head, target, base)
    return root


@pytest.fixture(scope="module")
def prompts(write_prompts):
    return write_prompts([f"licence {number} of the work " * (1 + number % 3) for number in range(12)], *KINDS)


@pytest.fixture(scope="module")
def found(run_main, folders, heads, prompts):
    paths = [folders / name for name in heads]
    report = folders / "report"
    code, printed, err = run_main(shortlist_heads.main, *paths, "--prompts", prompts, *COMMON, "--report", report)
    assert code == 0, err
    assert (report / "shortlists.png").stat().st_size > 10_000
    return json.loads((report / "shortlists.json").read_text()) | {"printed": printed}


@pytest.fixture(scope="module")
def texts(written, prompts):
    return written(prompts, NEW)


@pytest.fixture(scope="module")
@torch.no_grad()
def nodes(target, drafts, heads, texts):
    """By text, position and depth: the label's rank and :data:`STATISTICS` of each method."""
    ids, outputs = drafts.ids.tolist(), len(drafts.weight)
    names = {None: WHOLE} | {name: name for name in heads}
    lists = {name: Shortlists(head, drafts.head, drafts.ids) for name, head in heads.items()}
    found = []
    for prompt, answer in texts:
        text = torch.tensor([[*prompt, *answer]])
        marks = torch.arange(text.shape[1])[None] >= len(prompt)
        following = target.model(text).logits[0].softmax(-1)  # [T, V]
        rollouts = list(drafts.run(text, marks))
        steps = []
        for step in range(len(answer) - 1):  # the root is the answer's token number ``step``
            root = len(prompt) + step
            by_depth = []
            for depth in range(min(DEPTHS, len(answer) - 1 - step)):
                node, label = root + depth, int(text[0, root + depth + 1])
                read = rollouts[depth].out[step][None, None]
                whole = drafts.head(read)[0, 0]
                best = [ids[place] for place in whole.topk(10).indices.tolist()]
                row = {}
                for name in names:
                    if name is None:
                        logits, tokens = whole, ids
                    else:
                        each = lists[name]
                        each.allocate(static=False)
                        embeddings = target.embeddings(text[:, node : node + 1])
                        each.choose(embeddings, rollouts[depth].hidden[step][None, None], depth)
                        logits, tokens = (part.flatten() for part in each.logits(read))
                        logits, tokens = logits[tokens >= 0], tokens[tokens >= 0].tolist()
                    assert len(set(tokens)) == len(tokens)
                    q, inside = torch.zeros(target.vocab_size), torch.zeros(target.vocab_size, dtype=torch.bool)
                    q[tokens], inside[tokens] = logits.softmax(-1), True
                    order = [tokens[place] for place in logits.argsort(descending=True).tolist()]
                    rank = order.index(label) if label in order[:MAX_RANK] else MAX_RANK
                    both = torch.where(inside, torch.minimum(following[node], q), 0).sum()
                    values = (both, inside[best[0]], inside[best].float().mean(), inside.sum(), inside[label])
                    row[names[name]] = rank, [float(value) for value in values]
                by_depth.append(row)
            steps.append(by_depth)
        found.append(steps)
    labels = [label for _, answer in texts for label in answer]
    assert outputs < target.vocab_size and not set(labels) <= set(ids)  # some labels cannot be drafted
    return found


def numbers_of(kind: str) -> list[int]:
    return [number for number in range(12) if kind in ("all", KINDS[number % 2])]


def part_of(found: dict, kind: str) -> dict:
    return found["all"] if kind == "all" else found["kinds"][kind]


def method_of(found: dict, folders, kind: str, name: str) -> dict:
    return part_of(found, kind)["methods"][name if name == WHOLE else str(folders / name)]


METHODS = [WHOLE, "fr_spec", "vocab_trim", "dynaspec"]


@pytest.mark.parametrize("kind", ["all", *KINDS])
@pytest.mark.parametrize("name", METHODS)
def test_what_a_list_keeps(found, folders, nodes, kind, name):
    """Acceptance, recall, tokens and labels, by depth and on average."""
    row = method_of(found, folders, kind, name)
    means = dict.fromkeys(STATISTICS, 0.0)
    for depth in range(DEPTHS):
        values = [step[depth][name][1] for number in numbers_of(kind) for step in nodes[number] if len(step) > depth]
        for place, field in enumerate(STATISTICS):
            mean = sum(each[place] for each in values) / len(values)
            means[field] += mean / DEPTHS
            assert row["by_depth"][field][depth] == pytest.approx(mean, abs=1e-4), (field, depth)
        if depth == 0:
            assert row["acceptance_at_depth_0"]["value"] == row["by_depth"]["acceptance"][0]
            assert part_of(found, kind)["positions"] == len(values)
    for field, mean in means.items():
        assert row[field]["value"] == pytest.approx(mean, abs=2e-4)
    if name != WHOLE:
        low, high = row["acceptance"]["interval"]
        assert low < row["acceptance"]["value"] < high
        assert 0.05 < row["top10"]["value"] < 0.95 and 0 < row["labels"]["value"] < 0.9


def steps_of(tree: set[tuple[int, ...]], text: list, name: str) -> int:
    """Steps with a fixed tree, until all tokens but the first are committed."""
    done = count = 0
    while done < len(text):
        path = ()
        for row in text[done]:
            if (*path, row[name][0]) not in tree:
                break
            path = (*path, row[name][0])
        done += len(path) + 1
        count += 1
    return count


@pytest.mark.parametrize("kind", ["all", *KINDS])
@pytest.mark.parametrize("name", METHODS)
def test_accepted_length(found, folders, nodes, kind, name):
    """τ is that of trees walked by hand; its ratio is paired by prompts."""
    tree = {tuple(path) for path in found["tree"]}
    some = [nodes[number] for number in numbers_of(kind)]
    tokens = torch.tensor([len(text) for text in some], dtype=torch.float64)
    whole, steps = (
        torch.tensor([steps_of(tree, text, method) for text in some], dtype=torch.float64) for method in (WHOLE, name)
    )
    row = method_of(found, folders, kind, name)
    assert row["tau"]["value"] == pytest.approx(float(tokens.sum() / steps.sum()), abs=1e-4)
    assert row["tau_over_whole"]["value"] == pytest.approx(float(whole.sum() / steps.sum()), abs=1e-4)
    for field, columns in (("tau", (tokens, steps)), ("tau_over_whole", (whole, steps))):
        interval = bootstrap_interval(torch.stack(columns), lambda total: total[0] / total[1])
        assert row[field]["interval"] == pytest.approx(interval, abs=1e-4)
    if name == WHOLE and kind == "all":
        assert row["tau"]["value"] > 1.1  # the drafter is sometimes right
    if name == "dynaspec" and kind == "all":
        assert row["tau_over_whole"]["value"] != 1


def test_tree(found, nodes):
    """The most frequent rank paths of the whole LM head on all texts."""
    counts: Counter[tuple[int, ...]] = Counter()
    for text in nodes:
        for step in text:
            path = tuple(row[WHOLE][0] for row in step)
            if len(path) == DEPTHS:
                counts.update(path[:end] for end in range(1, DEPTHS + 1) if max(path[:end]) < MAX_RANK)
    chosen = [tuple(path) for path in found["tree"]]
    assert len(chosen) == NODES - 1
    fewest = min(counts[path] for path in chosen)
    assert all(path in chosen for path, count in counts.items() if count > fewest)


def test_as_rollouts_keep_it(target, drafts, heads, texts):
    """Ranks, recall and sizes are those by which train/dynaspec.py selects."""
    rows = [[*prompt, *answer] for prompt, answer in texts]
    tokens, supervised = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32), []
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        supervised.append([len(texts[number][0]) <= place < len(row) for place in range(tokens.shape[1])])
    marks = torch.tensor(supervised)
    recorded = record(drafts, tokens, marks, len(drafts.weight))
    cut = {"best", "hidden", "label", "log_q", "tokens"}
    recorded = replace(recorded, **{name: getattr(recorded, name)[:, :DEPTHS] for name in cut})
    measured = shortlist_heads.measure_lists(target, drafts, {WHOLE: None, **heads}, tokens, marks, DEPTHS)
    for name, head in {WHOLE: None, **heads}.items():
        expected = kept(recorded, drafts.embed, head)
        assert torch.equal(measured.ranks[name], expected.ranks)
        shares = (measured.sums[name].sum(1) / measured.nodes.sum(0)).tolist()
        assert [round(x, 4) for x in shares[1]] == expected.top1
        assert shares[2] == pytest.approx(expected.top10, abs=1e-4)
        assert shares[3] == pytest.approx(expected.tokens, abs=1e-4)
    labels = draft_labels(tokens, marks, DEPTHS)
    assert torch.equal(measured.nodes, (labels >= 0).sum(1).double())


def test_small_chunks_change_nothing(monkeypatch, target, drafts, heads, texts):
    rows = [(prompt, answer) for prompt, answer in texts if len(prompt) == len(texts[0][0]) and len(answer) == NEW]
    tokens = torch.tensor([[*prompt, *answer] for prompt, answer in rows])
    marks = torch.arange(tokens.shape[1]).expand_as(tokens) >= len(rows[0][0])
    whole = shortlist_heads.measure_lists(target, drafts, heads, tokens, marks, DEPTHS)
    monkeypatch.setattr(shortlist_heads, "ENTRIES", 7 * target.vocab_size)
    monkeypatch.setattr(shortlist_heads, "TEXTS", 1)
    parts = shortlist_heads.measure_lists(target, drafts, heads, tokens, marks, DEPTHS)
    for name in heads:
        assert torch.equal(whole.ranks[name], parts.ranks[name])
        torch.testing.assert_close(whole.sums[name], parts.sums[name], atol=1e-4, rtol=1e-4)


def test_scaled_logits(make_target):
    """The draft's distribution is that of the target's logits where the LM head is shared, cap or scale included."""
    target = make_target("granite")
    drafts = drafts_of(untrained(target, "shared"), target)
    tokens = torch.randint(target.vocab_size, (1, 24), generator=torch.Generator().manual_seed(2))
    marks = torch.arange(24)[None] >= 8
    measured = shortlist_heads.measure_lists(target, drafts, {WHOLE: None}, tokens, marks, 1)
    with torch.no_grad():
        read = next(iter(drafts.run(tokens, marks))).out[:-1]  # the last has no label
        p, q = target.model(tokens).logits[0, 8:-1].softmax(-1), target.logits(read).softmax(-1)
    assert float(measured.sums[WHOLE][0]) == pytest.approx(float(torch.minimum(p, q).sum()), rel=1e-4)
    assert (q - drafts.head(read).softmax(-1)).abs().max() > 0.05


def test_equal_logits():
    """The label's rank among equal logits goes by the place in the vocabulary, in any order of the list; a label that
    is not in the list, or not in the vocabulary, is missed."""
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0]]).expand(4, -1)
    p, label = torch.full((4, 5), 0.2), torch.tensor([3, 2, 1, 5])
    lists = torch.tensor([[3, 2, 4, -1]]).expand(4, -1)
    (_, whole), (found, rank) = shortlist_heads.keep([None, lists], logits, p, label)
    assert whole.tolist() == [4, 3, 0, MAX_RANK]
    assert rank.tolist() == [2, 1, MAX_RANK, MAX_RANK]
    assert found[-2].tolist() == [3] * 4 and found[-1].tolist() == [1, 1, 0, 0]


def test_head_time(monkeypatch, target, drafts, heads):
    """All methods run all depths with as many nodes as the tree goes on from; the whole LM head is the drafter's own;
    a slow method is slow in the figures."""
    tokens = torch.arange(1, 41)[None] % 40
    marks = torch.arange(40)[None] >= 12
    widths = [1, 4, 2]
    drawn = shortlist_heads.draw_nodes(target, drafts, tokens, marks, widths, torch.Generator().manual_seed(0))
    assert drawn is not None and [len(each[0][0]) for each in drawn] == widths
    calls: list[tuple[torch.nn.Module, int]] = []
    apply = shortlist_heads.apply_linear
    monkeypatch.setattr(
        shortlist_heads, "apply_linear", lambda head, x: [calls.append((head, x.shape[1])), apply(head, x)][1]
    )
    chosen, choose = [], Shortlists.choose

    def slow_choice(self, embeddings, hidden, depth):
        chosen.append((self.config.shortlist, depth, hidden.shape[1]))
        assert self.shortlist not in heads.values()  # decoding changes the router's dtype
        if self.config.shortlist == "vocab_trim":
            time.sleep(0.02)
        choose(self, embeddings, hidden, depth)

    monkeypatch.setattr(Shortlists, "choose", slow_choice)
    seconds = shortlist_heads.time_heads(target, drafts, {WHOLE: None, **heads}, [drawn, drawn])
    assert seconds.shape == (4, 2) and bool((seconds > 0).all())
    slow = list(heads).index("vocab_trim") + 1
    assert bool((seconds[slow] >= 0.06).all()) and bool((seconds[slow] > seconds[0] + 0.04).all())
    assert calls == [(drafts.head, width) for width in widths] * (2 * (ROUNDS + 1))
    assert Counter(chosen) == {
        (name, depth, width): 2 * (ROUNDS + 1) for name in heads for depth, width in enumerate(widths)
    }
    short = torch.arange(40)[None] >= 38
    assert shortlist_heads.draw_nodes(target, drafts, tokens, short, widths, torch.Generator()) is None


def test_report(found, folders, heads):
    assert found["folders"] == [str(folders / name) for name in heads]
    assert found["outputs"] == heads["fr_spec"].config.outputs and found["timed_prompts"] == 12
    assert {kind: part["prompts"] for kind, part in found["kinds"].items()} == dict.fromkeys(KINDS, 6)
    for part in (found["all"], *found["kinds"].values()):
        for name, row in part["methods"].items():
            assert row["head_seconds"] > 0
            low, high = row["head_over_whole"]["interval"]
            assert low <= row["head_over_whole"]["value"] <= high
            assert (row["head_over_whole"]["value"] == 1) == (name == WHOLE)
    assert found["command"].startswith("python benchmarks/shortlist_heads.py ") and found["versions"]["torch"]
    printed = found["printed"]
    assert all(f"\n{kind}: 6 prompts" in printed for kind in KINDS) and "\nall texts: 12 prompts" in printed
    assert printed.count("\nvocab_trim ") == 3 and printed.count(f"\n{WHOLE}") == 3


def test_refused(run_main, folders, heads, target, base, prompts, tmp_path):
    """Other base drafters and impossible options, in one line each."""
    write(tmp_path / "other", heads["fr_spec"], target, base)
    file = tmp_path / "other" / "drafter" / "model.safetensors"
    weights = load_file(file)
    weights["fc.weight"][0, 0] += 1e-3
    save_file(weights, file)
    write(tmp_path / "config", heads["fr_spec"], target, base)
    config = tmp_path / "config" / "drafter" / "config.json"
    config.write_text(config.read_text().replace('"norm_output": false', '"norm_output": true'))
    narrow = shortlists(heads["fr_spec"].config.outputs, 16)["dynaspec"]
    write(tmp_path / "narrow", narrow, target, base)
    file_in_the_way = tmp_path / "file"
    file_in_the_way.write_text("")
    first = folders / "fr_spec"
    assert read_drafter(str(first))[1]["drafter_type"] == "dynaspec"
    same = f"that of {first}/drafter; give folders whose 'drafter' is the same drafter"
    for arguments, message in (
        ([tmp_path / "other"], f"{tmp_path}/other/drafter: weight 'fc.weight' is not {same}"),
        ([tmp_path / "config"], f"{tmp_path}/config/drafter: field 'norm_output' is not {same}"),
        ([tmp_path / "narrow"], f"{tmp_path}/narrow: the shortlists' router reads embeddings of 16"),
        ([base], f"{base}: drafter_type 'eagle'; give folders that train/dynaspec.py wrote"),
        ([first], f"{first} {first}: {first} is given twice; leave one out"),
        ([tmp_path / "none"], "there is no such folder"),
        (["--depths", 7], "--depths 7: must be at most 6; deeper nodes have the last one's list"),
        (["--nodes", 1], "--nodes 1: must be at least 2, the root and a draft"),
        (["--max-new-tokens", 5], "--max-new-tokens 5: must be above --depths 5"),
        (["--report", file_in_the_way], f"--report {file_in_the_way}: cannot write here"),
    ):
        code, out, err = run_main(shortlist_heads.main, first, *arguments, "--prompts", prompts, "--threads", 1)
        *before, line = err.splitlines()
        assert (code, out) == (2, "") and line.startswith("error: ") and message in line, (arguments, err)
        assert all(each.startswith("precision: ") for each in before)


def test_a_tree_has_a_draft():
    """What the simulation takes where the drafter is never right."""
    tokens, steps = shortlist_heads.steps_of(Topology(((0,),)), torch.tensor([[[-1], [MAX_RANK], [0], [2], [-1]]]))
    assert (tokens.tolist(), steps.tolist()) == ([3], [2])
