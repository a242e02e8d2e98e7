"""The comparisons of shortlists, node by node and by task: what a list keeps is what train/dynaspec.py counts of the
same drafts, one by one; the report's figures are of these sums; head time, equal logits, and what is refused; parts
that are measured once."""

import copy
import json
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagles import untrained
from safetensors.torch import load_file, save_file

from draftsmith.benchmarks import shortlist_heads, shortlist_tasks
from draftsmith.benchmarks.shortlist_heads import ROUNDS, STATISTICS, WHOLE
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.shortlists import Shortlists
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.measure.rollouts import eagle_drafts as drafts_of
from draftsmith.inference.measure.rollouts import kept, record
from draftsmith.inference.measure.timing import bootstrap_interval
from draftsmith.inference.measure.tree_statistics import MAX_RANK, draft_labels
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.models.artifact import write_drafter
from draftsmith.models.shortlist import ShortlistConfig, ShortlistHead, budget, low_rank_factors
from draftsmith.models.target import Target

pytestmark = pytest.mark.measurement

NEW, DEPTHS, NODES = 14, 3, 12
KINDS = ("code", "writing")
COMMON = ["--threads", 1, "--device", "cpu", "--max-new-tokens", NEW, "--depths", DEPTHS, "--nodes", NODES]


def shortlists(outputs: int, width: int) -> dict[str, ShortlistHead]:
    """All kinds. Their capacities change by depth; the text's tokens and some clusters do not all fit."""
    router = {"num_clusters": 12, "router_width": 8, "embedding_size": width, "feature_size": width}
    configs = {
        "fr_spec": ShortlistConfig("fr_spec", outputs, budget(100, "position_aware")),
        "vocab_trim": ShortlistConfig("vocab_trim", outputs, (60,)),
        "dynaspec": ShortlistConfig("dynaspec", outputs, (110, 110, 70), clusters=(6, 6, 3), **router),
        "low_rank": ShortlistConfig("low_rank", outputs, (60, 60, 12), rank=6, feature_size=width),
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
    heads = shortlists(len(drafts.weight), target.hidden_size)
    low = heads["low_rank"]
    low.down, up = low_rank_factors(drafts.weight, 6, torch.eye(drafts.weight.shape[1]))
    low.up = up[low.order]
    return heads


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
def answered(texts):
    """Tokens ``[S, T]`` and which of them the target wrote."""
    rows = [[*prompt, *answer] for prompt, answer in texts]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32)
    marks = torch.zeros_like(tokens, dtype=torch.bool)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        marks[number, len(texts[number][0]) : len(row)] = True
    return tokens, marks


@pytest.fixture(scope="module")
def measured(target, drafts, heads, answered):
    return shortlist_heads.measure_lists(target, drafts, {WHOLE: None, **heads}, *answered, DEPTHS)


def steps_of(tree, ranks):
    """Steps with a fixed tree over an answer's ranks ``[T, K]``, until all tokens but the first are committed."""
    begins = [row for row in ranks.tolist() if row[0] >= 0]
    done = count = 0
    while done < len(begins):
        path = ()
        while len(path) < DEPTHS and (*path, begins[done][len(path)]) in tree:
            path = (*path, begins[done][len(path)])
        done += len(path) + 1
        count += 1
    return len(begins), count


@pytest.mark.parametrize("kind", ["all", *KINDS])
def test_figures(found, folders, heads, measured, kind):
    """Means by depth and over the depths; τ is that of trees walked by hand, its ratio paired by prompts."""
    numbers = [number for number in range(12) if kind in ("all", KINDS[number % 2])]
    part, tree = found["all"] if kind == "all" else found["kinds"][kind], {tuple(path) for path in found["tree"]}
    nodes = measured.nodes[numbers].sum(0)  # [K]
    whole = torch.tensor([steps_of(tree, measured.ranks[WHOLE][number]) for number in numbers]).double()
    assert part["prompts"] == len(numbers) and part["positions"] == int(nodes[0])
    for name in (WHOLE, *heads):
        row = part["methods"][name if name == WHOLE else str(folders / name)]
        shares = measured.sums[name][:, numbers].sum(1) / nodes  # [5, K]
        for field, by_depth in zip(STATISTICS, shares, strict=True):
            assert row["by_depth"][field] == pytest.approx(by_depth.tolist(), abs=1e-4)
            assert row[field]["value"] == pytest.approx(float(by_depth.mean()), abs=2e-4)
        assert row["acceptance_at_depth_0"]["value"] == row["by_depth"]["acceptance"][0] and row["head_seconds"] > 0
        tokens, steps = torch.tensor([steps_of(tree, measured.ranks[name][n]) for n in numbers]).double().unbind(1)
        for field, columns in (("tau", (tokens, steps)), ("tau_over_whole", (whole[:, 1], steps))):
            value, interval = float(columns[0].sum() / columns[1].sum()), row[field]["interval"]
            assert row[field]["value"] == pytest.approx(value, abs=1e-4)
            expected = bootstrap_interval(torch.stack(columns), lambda total: total[0] / total[1])
            assert interval == pytest.approx(expected, abs=1e-4)
        if name != WHOLE:
            low, high = row["acceptance"]["interval"]
            assert low < row["acceptance"]["value"] < high and 0.05 < row["top10"]["value"] < 0.95
            assert 0 < row["labels"]["value"] < 0.9
    if kind == "all":
        assert part["methods"][WHOLE]["tau"]["value"] > 1.1, "the drafter is sometimes right"


def test_as_rollouts_keep_it(drafts, heads, answered, measured):
    """Ranks, recall and sizes are those by which train/dynaspec.py selects."""
    tokens, marks = answered
    cut = {"best", "hidden", "label", "log_q", "tokens"}
    for name, head in {WHOLE: None, **heads}.items():
        low = head is not None and head.low_rank
        recorded = record(drafts, tokens, marks, len(drafts.weight), low_rank=low)
        recorded = replace(recorded, **{name: getattr(recorded, name)[:, :DEPTHS] for name in cut})
        expected = kept(recorded, drafts.embed, head)
        assert torch.equal(measured.ranks[name], expected.ranks)
        shares = (measured.sums[name].sum(1) / measured.nodes.sum(0)).tolist()
        assert [round(x, 4) for x in shares[1]] == expected.top1
        assert shares[2] == pytest.approx(expected.top10, abs=1e-4)
        assert shares[3] == pytest.approx(expected.tokens, abs=1e-4)
    assert torch.equal(measured.nodes, (draft_labels(tokens, marks, DEPTHS) >= 0).sum(1).double())


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
    """All methods run all depths with as many nodes as the tree goes on from; a slow one is slow in the figures."""
    tokens, marks = torch.arange(1, 41)[None] % 40, torch.arange(40)[None] >= 12
    widths = [1, 4, 2]
    drawn = shortlist_heads.draw_nodes(target, drafts, tokens, marks, widths, torch.Generator().manual_seed(0))
    chosen, choose = [], Shortlists.choose

    def slow_choice(self, embeddings, hidden, depth):
        chosen.append((self.config.shortlist, depth, hidden.shape[1]))
        assert self.shortlist not in heads.values()  # decoding changes the router's dtype
        time.sleep(0.02 if self.config.shortlist == "vocab_trim" else 0)
        choose(self, embeddings, hidden, depth)

    monkeypatch.setattr(Shortlists, "choose", slow_choice)
    seconds = shortlist_heads.time_heads(target, drafts, {WHOLE: None, **heads}, [drawn, drawn])
    slow = list(heads).index("vocab_trim") + 1
    assert seconds.shape == (5, 2) and bool((seconds[slow] >= 0.06).all()) and bool((seconds > 0).all())
    each = {(name, depth, width) for name in heads for depth, width in enumerate(widths)}
    assert Counter(chosen) == dict.fromkeys(each, 2 * (ROUNDS + 1))
    short = torch.arange(40)[None] >= 38
    assert shortlist_heads.draw_nodes(target, drafts, tokens, short, widths, torch.Generator()) is None


def test_refused(run_main, folders, heads, target, base, prompts, tmp_path):
    """Other base drafters and impossible options, in one line each."""
    for name, head in (
        ("other", heads["fr_spec"]),
        ("narrow", shortlists(heads["fr_spec"].config.outputs, 16)["dynaspec"]),
    ):
        write(tmp_path / name, head, target, base)
    file = tmp_path / "other" / "drafter" / "model.safetensors"
    weights = load_file(file)
    weights["fc.weight"][0, 0] += 1e-3
    save_file(weights, file)
    first = folders / "fr_spec"
    for arguments, message in (
        ([tmp_path / "other"], f"{tmp_path}/other/drafter: weight 'fc.weight' is not that of {first}/drafter; give"),
        ([tmp_path / "narrow"], f"{tmp_path}/narrow: the shortlists' router reads embeddings of 16"),
        ([base], f"{base}: drafter_type 'eagle'; give folders that train/dynaspec.py wrote"),
        ([first], f"{first} {first}: {first} is given twice; leave one out"),
        (["--depths", 7], "--depths 7: must be at most 6; deeper nodes have the last one's list"),
        (["--nodes", 1], "--nodes 1: must be at least 2, the root and a draft"),
        (["--max-new-tokens", 5], "--max-new-tokens 5: must be above --depths 5"),
    ):
        code, out, err = run_main(shortlist_heads.main, first, *arguments, "--prompts", prompts, "--threads", 1)
        line = err.splitlines()[-1]
        assert (code, out) == (2, "") and line.startswith("error: ") and message in line, (arguments, err)


# ---- by task


def of_tasks(run_main, folders, names, prompts, out, *more):
    words = [*(folders / name for name in names), "--prompts", prompts, "--max-new-tokens", NEW, "--nodes", 8]
    return run_main(shortlist_tasks.main, *words, "--threads", 1, "--device", "cpu", "--report", out, *more)


def test_tasks(run_main, folders, heads, target, eagle, write_prompts, tmp_path, monkeypatch):
    """τ is that of decoding with each list, DynaSpec's at both schedules; nothing is measured again but what was asked
    otherwise; the table stands between its markers."""
    prompts = write_prompts([f"licence {number} of the work" for number in range(4)], *KINDS)
    page, ran, decode = tmp_path / "page.md", [], shortlist_tasks.decode
    marker = f"shortlist-table {Path(target.name).name} -->"
    page.write_text(f"before\n<!-- {marker}\nold\n<!-- /{marker}\nafter\n")
    monkeypatch.setattr(shortlist_tasks, "decode", lambda *given: ran.append(given) or decode(*given))
    code, out, err = of_tasks(run_main, folders, heads, prompts, tmp_path, "--write", page)
    assert code == 0, err
    methods = [WHOLE, "FR-Spec", "VocabTrim", "DynaSpec, fixed", "DynaSpec, position-aware", "low rank"]
    assert len(ran) == 2 * len(methods)
    report = json.loads((tmp_path / "table.json").read_text())
    config, outputs = heads["dynaspec"].config, len(heads["fr_spec"].order)
    both = [json.loads(line) for line in prompts.read_text().splitlines()]
    for name, kind in zip(methods, (None, "fr_spec", "vocab_trim", "dynaspec", "dynaspec", "low_rank"), strict=True):
        head = heads[kind] if kind else None
        own = copy.deepcopy(head)
        if "DynaSpec" in name:
            own.config = config.with_budget(6, name.removeprefix("DynaSpec, ").replace("-", "_"))
            assert report["capacity"][name] == [*own.config.capacity]
        decoder = SpeculativeDecoder(target, EagleDrafter(eagle, target, DynamicShape(8, 6, 8), shortlist=own))
        for kind in KINDS[:1]:
            ids = [target.tokenizer(row["prompt"])["input_ids"] for row in both if row["kind"] == kind]
            accepted = [result.accepted for result in decoder.generate(ids, NEW, batch_size=1)]
            row = report["tasks"][kind]["methods"][name]
            assert row["steps"] == [[sum(each), len(each)] for each in accepted]
            assert row["tau"]["value"] == pytest.approx(sum(map(sum, accepted)) / sum(map(len, accepted)), abs=1e-4)
        row = report["all"]["methods"][name]
        assert len(row["steps"]) == 4 and report["head"][name]["seconds"] > 0 and name in out
        assert (row["tau_over_whole"] is None) == (name == WHOLE)
        if name in (sizes := {WHOLE: outputs, "VocabTrim": 60}):
            assert row["tokens"] == sizes[name]
        else:
            assert 8 <= row["tokens"] < outputs
    written = page.read_text()
    assert written.startswith(f"before\n<!-- {marker}\n| shortlist | tokens |") and "old" not in written
    assert written.endswith(f"<!-- /{marker}\nafter\n") and all(f"| {name} |" in written for name in methods)
    ran.clear()
    (tmp_path / "parts" / "code-vocabtrim.json").unlink()
    assert of_tasks(run_main, folders, heads, prompts, tmp_path)[0] == 0 and len(ran) == 1
    assert json.loads((tmp_path / "table.json").read_text())["tasks"] == report["tasks"]
    ran.clear()
    few = ("vocab_trim",)
    assert of_tasks(run_main, folders, few, prompts, tmp_path, "--max-new-tokens", NEW - 2)[0] == 0 and len(ran) == 4


def test_missing_lists_are_named_with_their_command(run_main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run_main(shortlist_tasks.main, "--report", "out", "--threads", 1)
    said = "runs/smollm2-dynaspec: is not there yet; make it by: python train/dynaspec.py recipes/smollm2-dynaspec.yaml"
    assert code == 2 and said in err.splitlines()[-1]
    (tmp_path / "runs/smollm2-dynaspec").mkdir(parents=True)
    (tmp_path / "runs/smollm2-dynaspec/config.json").write_text("{}")
    code, _, err = run_main(shortlist_tasks.main, "--report", "out", "--threads", 1)
    assert code == 2 and "runs/smollm2-frspec: is not there yet" in err and "drafter.size=2048" in err
    code, _, err = run_main(shortlist_tasks.main, "--model", "qwen2.5-coder-0.5b", "--report", "out", "--threads", 1)
    assert code == 2 and "python train/eagle.py recipes/qwen2.5-coder-0.5b-eagle3.yaml" in err
