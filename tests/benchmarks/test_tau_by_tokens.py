"""τ by training tokens from ranks: the steps are those that decode.py takes, whatever is simulated."""

import json

import pytest
import torch
from blocks import untrained_block
from torch.nn import functional as F

from draftsmith.benchmarks import tau_by_tokens
from draftsmith.benchmarks.tau_by_tokens import conditional, given, tokens_text
from draftsmith.inference import decode
from draftsmith.inference.commands.prompts import encode_prompts, read_sets
from draftsmith.inference.engine.answers import answer
from draftsmith.inference.verify.tree import chain
from draftsmith.models.artifact import write_drafter, write_json
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads

CODE = ["import os", "def f(x):", "class A:", "for i in", "return x"]
NEW = 24


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Two files: texts, and conversations of two turns."""
    folder = tmp_path_factory.mktemp("sets")
    rows = {"code": [{"turns": [text]} for text in CODE], "talk": [{"turns": ["def g(y):", "x = 1"]}] * 2}
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [folder / f"{name}.jsonl" for name in rows]


@pytest.fixture(scope="module")
def drafters(target, sets, tmp_path_factory):
    """An EAGLE-3 drafter and heads that know some of what the target answers; folders with trees."""
    folder = tmp_path_factory.mktemp("drafters")
    torch.manual_seed(0)
    data = answer(target, encode_prompts(read_sets(sets)[:-1], target), NEW, 6)
    rows = data["tokens"].long()
    labels = torch.where(data["supervised"], rows, -100)
    eagle = Eagle.for_target(target, 3, "shared")
    heads = MedusaHeads.for_target(target, 4, 1, "own")
    with torch.no_grad():
        hidden, features = target.hidden(rows), target.features(rows, eagle.config.captured_layers)
    for module in (eagle, heads):
        module.requires_grad_(True)
        optimizer = torch.optim.Adam(module.parameters(), 5e-3)
        for _ in range(40):
            loss = torch.zeros(())
            if module is eagle:
                head = eagle.draft_head(target.lm_head)
                outs = [head(out) for out in eagle.unroll(features, target.embeddings, rows, 3)]
            else:
                outs = heads.logits(hidden.flatten(0, 1), target.lm_head).unflatten(1, rows.shape)
            for depth, logits in enumerate(outs):
                loss = loss + F.cross_entropy(logits[:, : -depth - 2].flatten(0, 1), labels[:, depth + 2 :].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        module.requires_grad_(False)
    for kind, module in {"eagle": eagle, "medusa": heads}.items():
        facts = {"data_labels": [330_000]} if kind == "eagle" else {}
        write_drafter(folder / kind, kind, module.config.to_dict(), module.state_dict(), target, facts)
        write_json(folder / kind / "tree.json", {"paths": [[0], [0, 0], [0, 0, 0], [0, 1], [1], [1, 0]]})
    return folder / "eagle", folder / "medusa"


@pytest.fixture(scope="module")
def found(run_main, drafters, sets, tmp_path_factory):
    """The command's figures of both; its files and what it says."""
    folder = tmp_path_factory.mktemp("out")
    eagle, medusa = drafters
    words = [eagle, f"{medusa}=2k", "--prompts", sets[0], "--prompts", sets[1], "--max-new-tokens", NEW]
    words += ["--answers", folder / "answers.json", "--out", folder / "tau.json", "--threads", 1]
    code, out, err = run_main(tau_by_tokens.main, *words)
    assert code == 0, err
    assert (folder / "answers.json").exists()
    return json.loads((folder / "tau.json").read_text()), folder, out, words


def test_the_command(found):
    figures, folder, out, _ = found
    assert figures["sets"] == ["code", "talk"] and figures["prompts"] == 9, "each turn is one"
    eagle, medusa = figures["drafters"]
    assert (eagle["family"], eagle["tokens"], eagle["tokens_are"]) == ("eagle-3", 330_000, "answer_tokens")
    assert (medusa["family"], medusa["tokens"], medusa["tokens_are"]) == ("medusa", 2000, "given")
    assert [*eagle["tau"]] == ["chain 3", "chain 5", "chain 7", "tree"]
    assert [*medusa["tau"]] == ["chain 3", "chain 4", "tree"], "no more drafts than there are heads"
    for row in figures["drafters"]:
        for by_set in row["tau"].values():
            assert by_set["all"]["by_prompt"] == by_set["code"]["by_prompt"] + by_set["talk"]["by_prompt"]
            tokens, steps = map(sum, zip(*by_set["all"]["by_prompt"], strict=True))
            assert by_set["all"]["tau"] == pytest.approx(tokens / steps, abs=1e-4) and tokens / steps > 1.3
            low, high = by_set["all"]["interval"]
            assert low <= by_set["all"]["tau"] <= high
    page = (folder / "tau.md").read_text()
    assert "| eagle-3 | 330 k | tree, 7 nodes | " in page and "| medusa | 2 k | at all positions | " in page
    assert (folder / "tau.png").stat().st_size > 20_000 and "training tokens" in out


def test_fixed_and_dynamic_trees(run_main, found, drafters, target, tmp_path):
    """By halves of the prompts; each dynamic tree beside the fixed one of as many nodes."""
    words = found[3]
    prompts = words[words.index("--prompts") : words.index("--out")]
    words = [f"{drafters[1]}=2k", *prompts, "--nodes", 4, 8, "--out", tmp_path / "tau.json", "--threads", 1]
    code, out, err = run_main(tau_by_tokens.main, *words)
    assert code == 0, err
    (row,) = json.loads((tmp_path / "tau.json").read_text())["drafters"]
    kinds = ("fixed tree", "dynamic tree", "dynamic tree by confidence")
    taus = {form: row["tau"][form]["all"]["tau"] for form in (f"{kind}, {n} nodes" for n in (4, 8) for kind in kinds)}
    assert all(tau > 1.3 for tau in taus.values()) and "; less fixed " in out
    for form, less in row["less_fixed"].items():
        expected = taus[form] - taus[f"fixed tree, {form.partition(', ')[2]}"]
        assert less["difference"] == pytest.approx(expected, abs=2e-4)
        assert less["interval"][0] <= less["difference"] <= less["interval"][1]
    assert len(row["less_fixed"]) == 4 and row["tau"]["tree"] == found[0]["drafters"][1]["tau"]["tree"]
    block = untrained_block(target)
    write_drafter(tmp_path / "block", "dflash", block.config.to_dict(), block.stored(), target, {})
    words = [drafters[0], f"{tmp_path / 'block'}=2k", *prompts, "--nodes", 4, *words[-4:]]
    code, _, err = run_main(tau_by_tokens.main, *words)
    assert code == 0, err
    rows = json.loads((tmp_path / "tau.json").read_text())["drafters"]
    forms = {row["family"]: [form for form in row["tau"] if "nodes" in form] for row in rows}
    assert forms == {"eagle-3": ["fixed tree, 4 nodes"], "dflash": [f"{kind}, 4 nodes" for kind in kinds]}, (
        "an EAGLE draft's next level depends on the tokens before it"
    )


@pytest.mark.parametrize("form", ["chain 3", "chain 7", "tree"])
@pytest.mark.parametrize("number", [0, 1], ids=["eagle", "medusa"])
def test_it_is_what_decoding_accepts(run_main, found, drafters, sets, tmp_path, number, form):
    """The steps and tokens of every prompt are those of decode.py with this chain or tree."""
    form = "chain 4" if (number, form) == (1, "chain 7") else form
    tree = drafters[number] / "tree.json"
    if form != "tree":
        tree = tmp_path / "chain.json"
        write_json(tree, {"paths": [list(path) for path in chain(int(form.split()[1])).paths]})
    words = [drafters[number], "--tree", tree, "--all-nodes", "--prompts", sets[0], "--prompts", sets[1]]
    more = ["--threads", 1, "--max-new-tokens", NEW, "--baseline", "none", "--report", tmp_path / "out"]
    code, _, err = run_main(decode.main, *words, *more)
    assert code == 0, err
    report = json.loads((tmp_path / "out/report.json").read_text())
    row = found[0]["drafters"][number]
    decoded = zip(report["per_prompt"]["committed_tokens"], report["per_prompt"]["steps"], strict=True)
    assert row["tau"][form]["all"]["by_prompt"] == [list(pair) for pair in decoded]
    assert {kind: of["mean_accepted_length"] for kind, of in report["kinds"].items()} == {
        name: row["tau"][form][name]["tau"] for name in ("code", "talk")
    }
    positions = row["acceptance_by_position"]
    if form == positions["form"]:  # where the text had room for the draft
        offered = [report["steps"], *report["spec_decode"]["num_accepted_tokens_per_pos"]]
        for k, each in enumerate(positions["in_steps"]["all"]):
            accepted = report["spec_decode"]["num_accepted_tokens_per_pos"][k]
            assert each["count"] <= offered[k]
            assert each["value"] is None or 0 <= each["value"] * each["count"] - accepted + 1e-2 <= offered[k]


def test_answers_are_kept(run_main, found, monkeypatch):
    figures, _, _, words = found
    monkeypatch.setattr(tau_by_tokens, "SpeculativeDecoder", None)  # nothing is decoded
    code, _, err = run_main(tau_by_tokens.main, *words)
    assert code == 0, err
    again = json.loads((found[1] / "tau.json").read_text())
    assert again["drafters"] == figures["drafters"]
    code, _, err = run_main(tau_by_tokens.main, *words, "--first", 1)
    assert code == 2 and "answers.json: of another run ('asked' differs); name another file" in err


def test_acceptance_by_position():
    """Depth k counts where all before it were right and the text goes on."""
    accepted = torch.tensor([[2, 0, 1, 0], [0, 0, 3, 0]])
    labelled = torch.tensor([[[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]], [[1, 1, 1]] * 4]).bool()
    counts = conditional(accepted, labelled, [[0, 1, 2], [2]])
    assert counts.tolist() == [[[2, 1], [3, 1]], [[1, 1], [1, 1]], [[0, 1], [1, 1]]]


def test_tokens_that_are_given():
    pairs = [("a/b=0.33M", ("a/b", 330_000)), ("a=4k", ("a", 4000)), ("a=12", ("a", 12)), ("a=b", ("a=b", None))]
    assert [given(text) for text, _ in pairs] == [expected for _, expected in pairs]
    assert [*map(tokens_text, (1_272_054, 330_000, 12))] == ["1.27 M", "330 k", "12"]


def test_what_is_refused(run_main, drafters, sets, tmp_path):
    eagle, medusa = drafters
    deep = tmp_path / "deep.json"
    write_json(deep, {"paths": [[0] * depth for depth in range(1, 6)]})
    for words, message in (
        ([medusa, "--prompts", sets[0]], "does not say how many tokens it was trained with; write"),
        ([f"{medusa}=0k", "--prompts", sets[0]], "training tokens must be above 0"),
        ([f"{medusa}=1k", "--prompts", sets[0], "--tree", deep], "a tree of 5 levels; "),
        ([eagle, eagle, "--prompts", sets[0]], "is given twice"),
        ([eagle, "--prompts", sets[0], "--max-new-tokens", 2], "at least 3"),
        ([eagle, "--prompts", sets[0], "--first", 1, "--nodes", 4], "give at least two prompts"),
        ([eagle, "--prompts", sets[0], "--first", 0], "--first 0: must be at least 1"),
    ):
        code, _, err = run_main(tau_by_tokens.main, *words, "--threads", 1)
        assert code == 2 and message in err, err
