"""The comparison of ensembles by the real command, against counts of its own: an SSM that writes token by token, and
trees built and walked node by node."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.benchmarks import ensembles
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.models.artifact import write_drafter
from draftsmith.models.target import load_target

pytestmark = pytest.mark.measurement

NEW, MATCH, DEPTH = 16, 3, 4
EXPANSION = [4, 2, 2, 1]  # far more nodes than the merge keeps
NOISE = {"pair": {"ssm-0": 0.03, "ssm-1": 0.04}, "one": {"ssm-0": 0.02}}
KINDS = ("code", "writing")
COMMON = ["--threads", 1, "--device", "cpu", "--max-new-tokens", NEW, "--depth", DEPTH, "--match", MATCH]


@pytest.fixture(scope="module")
def folders(tiny_lm, target, tmp_path_factory):
    """Drafters of type ssm, whose SSMs are copies of the target with perturbed weights: ``pair`` with two of them and a
    draft vocabulary, and ``one``."""
    root = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    for name, parts in NOISE.items():
        for part, noise in parts.items():
            shutil.copytree(tiny_lm, root / name / part)
            file = root / name / part / "model.safetensors"
            perturbed = {key: w + noise * w.std() * torch.randn_like(w) for key, w in load_file(file).items()}
            save_file(perturbed, file, {"format": "pt"})
        weights = {"draft_vocab": torch.arange(target.vocab_size)[torch.arange(target.vocab_size) % 7 > 0]}
        weights = weights if name == "pair" else {}
        shape = {"num_ssms": len(parts), "vocab_size": target.vocab_size, "mark_tokens": 8}
        shape |= {"draft_vocab_size": len(weights["draft_vocab"]) if weights else None}
        shape |= {"coverage": [0.5] * len(parts), "overlap": [[1.0] * len(parts)] * len(parts)}
        write_drafter(root / name, "ssm", shape, weights, target, {}, parts=list(parts))
    return root


@pytest.fixture(scope="module")
def prompts(write_prompts):
    return write_prompts([f"licence {number} of the work" for number in range(10)], *KINDS)


@pytest.fixture(scope="module")
def found(run_main, folders, prompts):
    more = ["--nodes", 4, 8, "--expansion", *EXPANSION, "--sampling", 1.0, "--widths", 1, 3, "--pattern", "w", 1]
    out = folders / "out.json"
    paths = [folders / name for name in NOISE]
    code, printed, err = run_main(ensembles.main, *paths, "--prompts", prompts, *COMMON, *more, "--out", out)
    assert code == 0, err
    return json.loads(out.read_text()) | {"printed": printed}


class Ssm:
    """An SSM that knows only the text so far: no cache, none of our engine."""

    def __init__(self, folder, part):
        self.model = load_target(str(folder / part)).model
        stored = folder / "model.safetensors"
        self.ids = load_file(stored)["draft_vocab"] if stored.exists() else torch.arange(self.model.config.vocab_size)
        self.known = {}

    @torch.no_grad()
    def best(self, texts, count):
        """Its likeliest tokens after each of some texts of one length, with their probabilities."""
        new = [text for text in texts if tuple(text) not in self.known]
        if new:
            logits = self.model(torch.tensor(new), use_cache=False).logits[:, -1, self.ids]
            p, order = logits.softmax(-1).topk(10)
            for text, tokens, each in zip(new, self.ids[order].tolist(), p.tolist(), strict=True):
                self.known[tuple(text)] = list(zip(tokens, each, strict=True))
        return [self.known[tuple(text)][:count] for text in texts]

    def chain(self, text, count):
        for _ in range(count):
            text = [*text, self.best([text], 1)[0][0][0]]
        return text[len(text) - count :] if count else []


@pytest.fixture(scope="module")
def ssms(folders):
    return {name: [Ssm(folders / name, part) for part in parts] for name, parts in NOISE.items()}


@pytest.fixture(scope="module")
def texts(written, prompts):
    found = written(prompts, NEW)
    assert any(len(set(answer)) > 3 for _, answer in found)
    return found


@pytest.mark.parametrize("nodes", [4, 8])
def test_accepted_length(found, folders, texts, nodes):
    """τ by folder, and what it is less the first one's on the same prompts. (Merged trees: test_merged.py.)"""
    pair, one = (found["folders"][str(folders / name)]["tau"][str(nodes)] for name in NOISE)
    for row, ssms in ((pair, 2), (one, 1)):
        low, high = row["tau_interval"]
        assert low < row["tau"] < high and 1.2 < row["tau"] < 1 + len(EXPANSION)
        assert row["mean_nodes"] == nodes and (row["texts"], row["different"]) == (len(texts), 0)
        assert row["kinds"].keys() == {*KINDS} and len(row["accepted_from"]) == ssms and min(row["accepted_from"]) > 0
    low, high = one["difference_interval"]
    assert one["difference"] == pytest.approx(one["tau"] - pair["tau"], abs=2e-4) and low <= one["difference"] <= high
    assert "difference" not in pair and high - low < 2


@pytest.mark.parametrize("name", NOISE)
def test_coverage_and_chains(found, folders, ssms, texts, name):
    """Coverage, overlap and acceptance by depth are those of SSMs that write token by token."""
    folder = found["folders"][str(folders / name)]
    matched = [
        {n for n, (prompt, answer) in enumerate(texts) if ssm.chain(prompt, MATCH)[: len(answer)] == answer[:MATCH]}
        for ssm in ssms[name]
    ]
    expected = [len(set().union(*matched[: s + 1])) / len(texts) for s in range(len(matched))]
    assert folder["coverage"] == pytest.approx(expected, abs=1e-4)
    assert 0 < expected[0] < 1 and len(folder["coverage_interval"]) == len(expected)
    for i, one in enumerate(matched):
        for j, other in enumerate(matched):
            of = len(one & other) / len(one | other) if one | other else 1
            assert folder["overlap"][i][j] == pytest.approx(of, abs=1e-4)
    for ssm, row in zip(ssms[name], folder["ssms"].values(), strict=True):
        for k in range(1, DEPTH + 1):
            right = [
                ssm.chain([*prompt, *answer[:root]], k) == answer[root : root + k]
                for prompt, answer in texts
                for root in range(1, len(answer) - k + 1)
            ]
            of_depth = row["acceptance_by_depth"][k - 1]
            assert of_depth["share"] == pytest.approx(sum(right) / len(right), abs=1e-4)
            assert of_depth["interval"][0] <= of_depth["share"] <= of_depth["interval"][1]
        for k, top in enumerate(row["top_k"], 1):
            among = [
                answer[root] in [token for token, _ in ssm.best([[*prompt, *answer[:root]]], k)[0]]
                for prompt, answer in texts
                for root in range(len(answer))
            ]
            assert top["share"] == pytest.approx(sum(among) / len(among), abs=1e-4)
        assert k == 5 and row["top_k"][0]["share"] < row["top_k"][4]["share"]


def test_sampling(found):
    rows = found["sampling"]["widths"]
    assert list(rows) == ["1", "3"] and found["sampling"]["ssm"].endswith("pair/ssm-0")
    for row in rows.values():
        for draws in ensembles.DRAWS:
            assert row[draws]["accepted"]["share"] == pytest.approx(row[draws]["tau"] - 1, abs=1e-3)
            tokens, steps = map(sum, zip(*row[draws]["accepted_by_prompt"], strict=True))
            assert row[draws]["tau"] == pytest.approx(tokens / steps, abs=1e-4)
        for draws in ("without_replacement", "iid"):
            low, high = row[draws]["tau_over_naive_interval"]
            ratio = row[draws]["tau"] / row["naive"]["tau"]
            assert row[draws]["tau_over_naive"] == pytest.approx(ratio, abs=1e-3) and low <= ratio <= high
    assert len({row["without_replacement"]["tau"] for row in rows.values()}) == 2, "the width has an effect"
    assert rows["1"]["greedy"]["tau"] < rows["3"]["greedy"]["tau"]


def test_break_even(found):
    """The forecast of a chain, from the acceptance by depth and the costs in the file."""
    for row in (row for folder in found["folders"].values() for row in folder["ssms"].values()):
        assert row["cost"] > 0 and row["parameters"] > row["parameters_without_embeddings"] > 0
        for gamma, each in enumerate(row["chains"], 1):
            tokens = 1 + sum(depth["share"] for depth in row["acceptance_by_depth"][:gamma])
            assert each["tokens"] == pytest.approx(tokens, abs=1e-3)
            assert each["speedup"] == pytest.approx(tokens / (gamma * row["cost"] + each["step"]), abs=1e-3)
            at_break_even = tokens / (gamma * each["break_even"] + each["step"])
            assert at_break_even == pytest.approx(1, abs=1e-3) or (each["break_even"] == 0 and at_break_even < 1)


def test_another_text_is_an_error(run_main, folders, prompts, monkeypatch):
    """A decoder that changes a token ends the command with 1."""

    class Wrong(SpeculativeDecoder):
        def generate(self, *arguments, **options):
            results = super().generate(*arguments, **options)
            results[0].tokens[3] = (results[0].tokens[3] + 1) % 200
            return results

    monkeypatch.setattr(ensembles, "SpeculativeDecoder", Wrong)
    code, out, err = run_main(
        ensembles.main, folders / "one", "--prompts", prompts, *COMMON, "--nodes", 2, "--expansion", 1
    )
    assert code == 1 and "8/10" in out and "Traceback" not in err, out


def test_wrong_options(run_main, folders, prompts, drafter):
    for more, message in (
        (["--nodes", 9, "--expansion", 2, 2], "drafts a tree of 7 nodes by --expansion 2 2"),
        (["--nodes", 8, 8], "--nodes 8 8: 8 is given twice"),
        (["--pattern", 1, 1], "--pattern 1 1: write numbers from 1 on and one w"),
        (["--sampling", 0], "--sampling 0: must be above 0"),
        (["--max-new-tokens", 1], "--max-new-tokens 1: must be at least 2"),
        ([folders / "one"], "is given twice"),
        ([drafter], "drafter_type 'medusa'; give folders that train/ssm.py wrote"),
    ):
        code, _, err = run_main(ensembles.main, folders / "one", *more, "--prompts", prompts, "--threads", 1)
        assert code == 2 and message in err and err.strip().count("\n") <= 2, err
