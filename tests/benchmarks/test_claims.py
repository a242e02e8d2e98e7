"""The papers' claims: their commands at toy size by the real command, what is judged and how, and what is kept."""

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith.benchmarks import claim_figures, claims
from draftsmith.benchmarks.claim_figures import Figure, expected, nodes_of, paired, sparse
from draftsmith.benchmarks.published import CLAIMS, SMOLLM2
from draftsmith.inference.verify.tree import Topology, product

pytestmark = pytest.mark.measurement

ROOT = Path(__file__).parents[2]
LONG = ("dynaspec-shortlist", "medusa-stages")  # two minutes on a busy core: they train in several processes
SHARED = ("specinfer-width", "specinfer-sampling")  # of one measurement
TOO_FEW = "not comparable: too few texts for an interval"
RUN = [
    pytest.param((claim.name,), marks=pytest.mark.slow if claim.name in LONG else (), id=claim.name)
    for claim in CLAIMS
    if claim.read is not None and claim.name not in SHARED
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of all claims, so that those which share a drafter train it once."""
    return tmp_path_factory.mktemp("claims")


@pytest.fixture
def in_this_process(run_main, monkeypatch):
    """Commands run without a process and imports of their own."""

    def run(words, cwd, check):
        assert (words[0], cwd, check) == (sys.executable, ROOT, False)
        main = importlib.import_module(f"draftsmith.{words[1].removesuffix('.py').replace('/', '.')}").main
        code, _, err = run_main(main, *words[2:], script=words[1])
        print(err, file=sys.stderr)
        return subprocess.CompletedProcess(words, code)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(claims, "subprocess", SimpleNamespace(run=run))


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("names", [*RUN, pytest.param(SHARED, id="specinfer")])
def test_the_small_version(run_main, folder, names):
    """Runs every command of the full version but for its sizes, what claims share once, and reads figures from what
    they write."""
    code, out, err = run_main(claims.main, *names, "--small", "--out", folder, script="benchmarks/claims.py")
    assert code == 0, err
    assert names != SHARED or err.count("python benchmarks/ensembles.py") == 1, err
    for name in names:
        result = json.loads((folder / f"{name}-small.json").read_text())
        assert result["small"] and result["verdict"] == "none: a small run" and result["seconds"] >= 0
        assert "threads" not in result["device"], "each command has its own"
        judged = [each for each in result["figures"] if each["above"] is not None]
        assert judged and all(each["value"] is not None for each in judged)
        assert all(each["what"] in out for each in result["figures"])
        full = claims.commands_of(claims.BY_NAME[name], False, folder)[0]
        scripts = [shlex.split(command)[1] for _, command in full]
        assert scripts == [shlex.split(command)[1] for command in result["commands"]][-len(scripts) :]
    code, out, _ = run_main(claims.main, "--table", "--out", folder, script="benchmarks/claims.py")
    assert code == 0 and "none: a small run" not in out


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ([Figure("a", 2.0, (1.5, 2.5), 1.0)], "confirmed"),
        ([Figure("a", 2.0, (1.0, 2.5), 1.0)], "undecided"),
        ([Figure("a", 0.5, (0.2, 0.9), 1.0)], "refuted"),
        ([Figure("a", 2.0, (1.5, 2.5), 1.0), Figure("b", 0.0, (-1.0, 1.0), 0.0)], "undecided"),
        ([Figure("a", 2.0, (1.5, 2.5), 1.0), Figure("b", -1.0, (-2.0, -0.5), 0.0)], "refuted for b"),
        ([Figure("a", 2.0, (1.5, 2.5), 1.0), Figure("b", -1.0, (-2.0, -0.5))], "confirmed"),
        ([Figure("a", 2.0, None, 1.0)], TOO_FEW),
    ],
)
def test_verdicts(figures, verdict):
    assert claims.judge(figures) == verdict


def test_paired_figures():
    """The interval is of the difference on the same texts: far narrower than those of texts which differ."""
    one = [(3 * n + 3, n + 1) for n in range(20)]
    other = [(2 * n + 2, n + 1) for n in range(20)]
    figure = paired("τ", one, other, above=0)
    assert figure.value == 1 and figure.interval == [1, 1] and paired("τ", one, other, 1, ratio=True).value == 1.5
    torch.manual_seed(0)
    noise = torch.randint(1, 9, (20,)).tolist()
    figure = paired("τ", [(n + 2, 1) for n in noise], [(n, 1) for n in noise], above=0)
    assert figure.interval == [2, 2]


def test_trees_by_the_product_of_accuracies():
    accuracy = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.05]]
    paths = sparse(accuracy, 6)
    assert paths == [[0], [0, 0], [1], [0, 1], [2]]
    assert Topology(tuple(map(tuple, paths))).num_nodes == 6
    assert sparse(accuracy, 100) == sparse(accuracy, 13) and len(sparse(accuracy, 13)) == 12, "all that there are"
    assert nodes_of([3, 2]) == product([3, 2]).num_nodes == 10
    assert expected([2, 2], accuracy) == pytest.approx(1 + 0.7 + 0.7 * 0.7)


def test_every_claim_has_its_source_and_its_end():
    """A claim is run, awaits a GPU, or says why it cannot be compared; the scope of what is run names the target."""
    names = [claim.name for claim in CLAIMS]
    assert len(set(names)) == len(names) >= 15
    for claim in CLAIMS:
        assert "arXiv" in claim.paper and claim.published
        assert (claim.read is not None) + claim.awaits + bool(claim.why_not) == 1, claim.name
        if claim.read is not None:
            assert claim.minutes and (SMOLLM2 in claim.tested or "bundled target" in claim.tested), claim.name


def test_kept_results_are_of_claims_and_judged_as_they_stand():
    found = [(name, result) for name, results in claims.kept().items() for result in results]
    assert len({(name, result["seed"]) for name, result in found}) == len(found) >= 10
    for name, result in found:
        assert name in claims.BY_NAME and not result["small"]
        figures = [Figure(**each) for each in result["figures"]]
        assert result["verdict"] == claims.judge(figures), name
        assert {"date", "device", "versions", "command", "commands", "tested"} <= {*result}
        assert all("/tmp" not in command and "/root" not in command for command in result["commands"])


def test_the_list_and_the_table(run_main, tmp_path, monkeypatch):
    """A result of the folder stands in place of the kept one; pages are Markdown with a row for each claim. What is not
    small is kept."""
    result = {"name": "eagle-dynamic-tree", "small": False, "seed": 0, "verdict": "undecided", "device": "a machine"}
    result |= {"figures": [vars(Figure("τ | x", 1.0, (0.5, 1.5), 1.0))], "date": "2026-01-01"}
    for seed, value in enumerate((1.0, 1.2)):
        again = {"seed": seed, "figures": [vars(Figure("τ | x", value, (value - 0.5, value + 0.5), 1.0))]}
        (tmp_path / f"{seed}.json").write_text(json.dumps(result | again))
    (tmp_path / "another.json").write_text('{"name": "a file of another command"}')
    code, out, _ = run_main(claims.main, "--list", "--out", tmp_path, script="benchmarks/claims.py")
    assert code == 0 and all(claim.name in out for claim in CLAIMS)
    code, out, _ = run_main(claims.main, "--table", "--out", tmp_path, script="benchmarks/claims.py")
    rows = out.splitlines()
    assert code == 0 and len(rows) == 2 + len(CLAIMS) and all(row.replace("\\|", "").count("|") == 7 for row in rows)
    row = next(row for row in rows if "eagle-dynamic-tree" in row)
    assert "τ \\| x: 1.000 (0.500 to 1.500), 1.200 (0.700 to 1.700) [judged: > 1]" in row
    assert "a machine, 2026-01-01" in row
    assert row.endswith("| undecided, by seeds 0 and 1; intervals overlap |")
    (tmp_path / "0.json").write_text(json.dumps(result | {"tested": "with older prompts"}))
    code, out, _ = run_main(claims.main, "--table", "--out", tmp_path, script="benchmarks/claims.py")
    assert code == 0 and "of an earlier form**, which has not run again: with older prompts |" in out
    assert any("magicdec-speed" in row and row.endswith("| awaits a GPU |") for row in rows)
    for name in ("KEPT", "PAGE"):
        monkeypatch.setattr(claims, name, str(tmp_path / name))
    (tmp_path / "small.json").write_text(json.dumps(result | {"name": "medusa-stages", "small": True}))
    code, _, err = run_main(claims.main, "--keep", "--out", tmp_path, script="benchmarks/claims.py")
    assert code == 0 and "1 results" in err and [*json.loads((tmp_path / "KEPT").read_text())] == [result["name"]]
    assert "| a machine, 2026-01-01 |" in (tmp_path / "PAGE").read_text()


def test_the_page_is_that_of_the_kept_results():
    page = (ROOT / claims.PAGE).read_text()
    assert page == claims.page(), "write it by: python benchmarks/claims.py --keep"
    assert claims.PAGE in (ROOT / "RESULTS.md").read_text() and claims.PAGE in (ROOT / "zensical.toml").read_text()


def test_another_seed_is_another_run():
    """Its texts, or what is trained, are others, and nothing of the first run is taken for its own."""
    for name in [claim.name for claim in CLAIMS if claim.read is not None]:
        first, again = (claims.commands_of(claims.BY_NAME[name], False, Path("x"), seed)[0] for seed in (0, 1))
        words = [shlex.split(command) for _, command in again]
        assert any("--seed" in each and each[each.index("--seed") + 1] == "1" for each in words), name
        trains = [each for each in words if any(word.startswith("train/") for word in each)]
        assert all("run.seed=1" in each for each in trains), name
        assert not {made for made, _ in first if made} & {made for made, _ in again if made}


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        ((1.5, 2.5), "confirmed, by seeds 0 and 1; intervals overlap"),
        ((3.5, 4.5), "confirmed, by seeds 0 and 1; intervals apart"),
        ((0.5, 2.5), "undecided: confirmed, undecided, by seeds 0 and 1; intervals overlap"),
        (None, f"undecided: confirmed, {TOO_FEW}, by seeds 0 and 1; intervals apart"),
    ],
)
def test_a_verdict_of_two_seeds(second, verdict):
    results = [
        {"seed": seed, "figures": [vars(figure)], "verdict": claims.judge([figure])}
        for seed, figure in enumerate((Figure("a", 2.0, (1.9, 3.0), 1.0), Figure("a", 2.0, second, 1.0)))
    ]
    claim = claims.BY_NAME["eagle-dynamic-tree"]
    assert claims.verdict_of(claim, results) == verdict
    same = verdict.startswith("confirmed")
    assert claims.in_short(claim, results) == ("confirmed for 1 of 1, 2 seeds" if same else "undecided, 2 seeds")


def test_a_command_that_fails_is_named(run_main, tmp_path):
    (tmp_path / "medusa-stages-small").mkdir()
    (tmp_path / "medusa-stages-small" / "prompts.jsonl").write_text("no row\n")
    code, _, err = run_main(claims.main, "medusa-stages", "--small", "--out", tmp_path, script="benchmarks/claims.py")
    assert code == 2 and "medusa-stages: a command failed (exit code 2): python benchmarks/medusa_stages.py" in err
    assert not (tmp_path / "medusa-stages-small.json").exists()


def test_figures_of_reports_without_intervals():
    """Of texts too few for a bootstrap."""
    row = {"speedup": 2.0, "interval": None}
    assert claim_figures.apart("x", row, row | {"interval": [1.0, 3.0]}, "speedup", 0).interval is None
    ends = {"speedup": 2.0, "interval": [1.5, 2.5]}
    assert claim_figures.apart("x", ends, ends, "speedup", 0).interval == [-1.0, 1.0]
