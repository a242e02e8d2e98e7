"""planner.py --drafters: the formula by hand, what is chosen, what is measured of each kind of drafter, the command."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from draws import fixed_seed
from eagles import untrained
from faults import error_of
from tiny_models import perturbed

from draftsmith.common.files import write_json
from draftsmith.inference import planner
from draftsmith.inference.drafters.compressed import CompressedDrafter, Selector
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.parallel_eagle import drafter_of
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.protocol import PlainDrafter
from draftsmith.inference.measure import drafter_plans
from draftsmith.inference.measure.drafter_plans import Accepted, Candidate, StepTimes, drafted_step_seconds, predicted
from draftsmith.inference.measure.prefilled import Prefilled
from draftsmith.models.artifact import write_drafter
from draftsmith.models.eagle import Eagle

K = 36


class Times(StepTimes):
    """Seconds by hand: a plain step 10, each further node 1, each drafted token ``draft``."""

    def __init__(self, rows=1, draft=2.0):
        self.rows, self.draft, self.plain = rows, draft, 10.0

    def measure(self, chosen):
        self.drafted = [lambda drafts: (10.0 + drafts + drafts * self.draft, 10.0 + drafts)] * len(chosen)
        return self


@pytest.mark.parametrize(
    ("name", "new_tokens", "share"), [("snapkv", 64, 0), ("snapkv", 300, 1 / 256), ("topk", 64, None)]
)
def test_predictions_are_the_formula(name, new_tokens, share):
    """share: of a selection, for each token; None: one in each step."""
    each = Candidate(
        f"draft_model:x,{name}:64", lambda drafts: pytest.fail("not needed"), [1, 2, 3], Selector(name, 64)
    )
    own = Accepted([0.9, 0.8, 0.5], 0.5)
    options = predicted(each, own, *Times().measure([each]).drafted, 4, 10.0, new_tokens)
    assert [option["drafter"] for option in options] == [
        f"draft_model:x,{name}:64@{','.join('1' * n)}" for n in (1, 2, 3)
    ]
    found, tokens = options[1], 1 + 0.9 + 0.9 * 0.8
    select = 4 * 0.5 * (1 if share is None else share * tokens)
    assert found["tokens"] == pytest.approx(tokens, abs=1e-4) and found["alpha"] == [0.9, 0.8]
    assert (found["verify"], found["draft"]) == pytest.approx((1.2, 0.4))
    assert found["select"] == pytest.approx(select / 10, abs=1e-4)
    assert found["speedup"] == pytest.approx(10 * tokens / (16 + select), abs=1e-4)
    least = found["least_alpha"]
    assert 1 + least + least**2 == pytest.approx((16 + select) / 10, abs=1e-3)
    (_, fast, _) = predicted(each, own, lambda drafts: (1.0, 2.0), 4, 10.0, 64)  # other work disturbed plain steps
    assert fast["speedup"] <= fast["tokens"] and (fast["verify"], fast["draft"]) == (1, 0)


def test_the_shortest_of_several_rounds_counts(monkeypatch):
    """Other work in one round changes nothing, and a verification takes no longer than the step that holds it."""
    calls = []

    def timed(seconds, *what):
        calls.append(what)
        return seconds * (9.0 if what[0] == 1 + calls.count(what) % 3 else 1.0)  # each is slow in one of the rounds

    monkeypatch.setattr(drafter_plans, "chain_step", lambda target, lean, rows, cached, nodes: nodes)
    monkeypatch.setattr(drafter_plans, "shortest", lambda nodes, _: timed({1: 1.0, 2: 1.5, 3: 50.0}[nodes], nodes))
    monkeypatch.setattr(
        drafter_plans, "drafted_step_seconds", lambda _, drafter, *rest: timed(2.0, drafter.num_nodes, "d")
    )
    chosen = [Candidate(name, lambda n: SimpleNamespace(num_nodes=n + 1), [1, 2]) for name in "xy"]
    times = StepTimes(None, 4, 64, None).measure(chosen)
    assert times.plain == 1.0 and len(calls) == 3 * (3 + 4) and calls[:7] == calls[7:14]
    for seconds in times.drafted:
        assert seconds(1) == (2.0, 1.5) and seconds(2) == (2.0, 2.0)


def test_the_longest_drafts_are_timed(monkeypatch):
    """Of six, as a P-EAGLE drafter has: beyond what is timed, all would take as long."""
    monkeypatch.setattr(drafter_plans, "chain_step", lambda target, lean, rows, cached, nodes: nodes)
    monkeypatch.setattr(drafter_plans, "shortest", lambda nodes, _: float(nodes))
    monkeypatch.setattr(drafter_plans, "drafted_step_seconds", lambda _, drafter, *rest: 2.0 * drafter.num_nodes)
    chosen = [Candidate("p", lambda n: SimpleNamespace(num_nodes=n + 1), range(1, 7))]
    (seconds,) = StepTimes(None, 1, 64, None).measure(chosen).drafted
    assert [seconds(n) for n in (1, 3, 5, 6)] == [(4.0, 2.0), (8.0, 4.0), (12.0, 6.0), (14.0, 7.0)]


def test_a_plan_is_of_the_decoder_that_decodes(kinds):
    target, _ = kinds
    said = [Prefilled(target, [[5] * 20], 2, lean=lean).plain.execution for lean in (None, False)]
    assert "lean decoder" in said[0] and "transformers decoder (as requested)" in said[1]


def test_the_fastest_drafter_is_chosen_and_the_next_one_named(monkeypatch, make_target):
    """In each setting, of another drafter than the best; plain decoding where none pays."""
    names = {"good": 0.9, "fair": 0.6, "poor": 0.1}
    chosen = [Candidate(name, lambda drafts: PlainDrafter(torch.device("cpu")), (1, 2, 3)) for name in names]
    given = lambda target, own, *rest: [Accepted([names[each.name]] * 3, 0.0) for each in own]  # noqa: E731
    monkeypatch.setattr(drafter_plans, "accepted", given)
    monkeypatch.setattr(drafter_plans, "StepTimes", lambda target, rows, *rest: Times(rows, 2.0 if rows == 1 else 30.0))
    facts = drafter_plans.plan_drafters(make_target("llama"), chosen, [64], [1, 9], {64: []}, 64, None)
    first, second = facts["cells"]
    assert (first["drafter"], first["second"]["drafter"]) == ("good@1,1,1", "fair@1")
    assert first["speedup"] == pytest.approx(10 * (1 + 0.9 + 0.81 + 0.729) / 19, abs=1e-4)
    assert (second["drafter"], second["second"]["drafter"]) == ("none", "good@1") and second["second"]["speedup"] < 1
    assert len(first["options"]) == 9


@pytest.fixture(scope="module")
def kinds(make_target):
    """A target, and a drafter of every kind for a chain of so many tokens."""
    target = make_target("llama")
    model, eagle = perturbed(target, 0.04), EagleDrafter(untrained(target), target, (1,))
    of_model = DraftModelDrafter(model, target, (1,))
    return target, {
        "itself": lambda drafts: CompressedDrafter(target, Selector("streamingllm", 16), (1,) * drafts),
        "a draft model": lambda drafts: of_model.with_tree((1,) * drafts),
        "a compressed one": lambda drafts: DraftModelDrafter(
            model, target, (1,) * drafts, selector=Selector("snapkv", K)
        ),
        "EAGLE": lambda drafts: eagle.with_tree((1,) * drafts),
        "EAGLE over a window": lambda drafts: eagle.with_tree((1,) * drafts, selector=Selector("streamingllm", 16)),
    }


@torch.inference_mode()
def test_continuations_of_every_kind_are_the_engines(kinds):
    """Each twice, from one prefill: the same steps as those of the engine, which reads the texts anew."""
    target, makers = kinds
    texts = [[(3 * n * n + row) % 61 for n in range(44)] for row in range(2)]
    eagle = makers["EAGLE"](1)
    batch = Prefilled(target, texts, 12, eagle.captures)
    for name, make in makers.items():
        results = SpeculativeDecoder(target, make(3)).generate(texts, 24, stop_ids=frozenset(), batch_size=2)
        for _ in range(2):
            committed = batch.run(batch.step(make(3))).committed
            for result, own in zip(results, committed, strict=True):
                same = min(len(result.accepted), len(own)) - 1
                assert own[:same] == result.accepted[:same] and same > 2, name
    assert len(batch.read) == 1, "the draft model ran the texts once"


@torch.inference_mode()
def test_timed_steps_draft_after_as_many_tokens(kinds):
    """Whatever the texts are, caches hold what they hold after texts of S tokens."""
    target, makers = kinds
    held = {"itself": 16, "a draft model": 50, "a compressed one": K, "EAGLE": 49, "EAGLE over a window": 16}
    for name, make in makers.items():
        drafter, seen = make(2), []
        propose = drafter.propose

        def spy(state, drafter=drafter, propose=propose, seen=seen):
            tree = propose(state)
            if isinstance(drafter, EagleDrafter):
                before = state.length - 1
                seen.append(before if drafter.window is None else drafter.window.after(before))
            else:
                seen.append(drafter.cache.lengths.clone())
            assert tree.tokens.shape == (2, 3)
            return tree

        drafter.propose = spy
        assert drafted_step_seconds(target, drafter, 2, 50, None) > 0
        assert {int(each.max()) for each in seen} == {held[name]} and len(seen) > 4, name


@pytest.fixture(scope="module")
def eagle_folder(target, tmp_path_factory):
    with fixed_seed("any weights do"):
        torch.manual_seed(0)
    eagle = Eagle.for_target(target, 3, "own", target.vocab_size // 2)
    eagle.draft_from(torch.arange(1, target.vocab_size, 2), target)
    folder = tmp_path_factory.mktemp("drafters") / "eagle"
    write_drafter(folder, "eagle", eagle.config.to_dict(), eagle.state_dict(), target, {})
    write_json(folder / "tree.json", {"dynamic": {"top_k": 2, "depth": 2, "nodes": 5}})
    return folder


@pytest.fixture(scope="module")
def long_prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "long.jsonl"
    rows = [{"prompt": ("for name in names: print(name, len(name)); " * 3)[number:][:90]} for number in (3, 5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def planned(run_main, tiny_lm, eagle_folder, long_prompts, tmp_path_factory):
    """The plan of a command, and what it printed."""
    out = tmp_path_factory.mktemp("plans") / "plan.json"
    sizes = f"--contexts 48 --batch-sizes 1 2 --entries {K} --texts 1 --new-tokens 6 --threads 1 --device cpu"
    names = f"draft_model:{tiny_lm} {eagle_folder}"
    options = f"--target {tiny_lm} --drafters {names} {sizes} --prompts {long_prompts} --out {out}"
    code, said, err = run_main(planner.main, *options.split(), script="inference/planner.py")
    assert code == 0, err
    return out, said


def test_the_command_chooses_among_drafters(planned, tiny_lm, eagle_folder):
    """Each over its whole cache and compressed ones, and the target itself; lines end in decode.py's DRAFTER."""
    out, said = planned
    facts = json.loads(out.read_text())
    assert [(cell["batch"], cell["context"]) for cell in facts["cells"]] == [(1, 48), (2, 48)]
    model, chain = f"draft_model:{tiny_lm}", "@1,1,1,1,1,1,1,1"
    names = [f"{name}{chain}" for name in (f"streamingllm:{K}", f"snapkv:{K}")]
    names += [f"{model}{chain}", f"{model},streamingllm:{K}{chain}", f"{model},snapkv:{K}{chain}"]
    for folder in (f"{eagle_folder}", f"{eagle_folder},streamingllm:{K}"):
        names += [f"{folder}{chain}", folder]
    alphas = {row["drafter"]: row["alpha"] for row in facts["measured"]}
    assert list(alphas) == names and alphas[f"{model}{chain}"] == [1.0] * 8, "the target drafts for itself"
    lines = said.splitlines()
    for cell in facts["cells"]:
        assert any(line.rstrip().endswith(cell["drafter"]) for line in lines)
        assert cell["speedup"] >= cell["second"]["speedup"] and cell["drafter"] != cell["second"]["drafter"]
        assert {option["drafter"] for option in cell["options"]} >= {*names}


def test_what_is_planned_can_be_decoded_with(planned, report_of, eagle_folder, tiny_lm, long_prompts, tmp_path):
    facts = json.loads(planned[0].read_text())
    given = f"--target {tiny_lm} --prompts {long_prompts} --max-new-tokens 8 --device cpu --check-lossless"
    for name in (f"draft_model:{tiny_lm},snapkv:{K}@1,1", f"{eagle_folder},streamingllm:{K}@1,1"):
        for cell in facts["cells"]:
            cell["drafter"] = name
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps(facts))
        report, _ = report_of(f"--plan {plan} {given} --all-nodes")
        assert report["drafter"] == name and report["lossless"]["passed"]


def test_drafters_that_cannot_be_planned_are_refused(run_main, run_decode, tiny_lm, drafter):
    plan = partial(
        run_main,
        planner.main,
        "--target",
        tiny_lm,
        "--device",
        "cpu",
        "--contexts",
        48,
        "--batch-sizes",
        1,
        "--drafters",
    )
    for name in ("ngram", f"draft_model:{tiny_lm}@2,1"):
        assert "plans are of chains of" in error_of(plan(name, script="inference/planner.py"))
    said = "only an EAGLE drafter takes what follows the folder"
    assert said in error_of(run_decode(f"{drafter},streamingllm:64 --prompt a"))


def test_a_drafter_of_one_pass_is_planned_over_all_pairs(kinds, monkeypatch):
    """With chains of as many tokens as it drafts, and its own tree."""
    target, _ = kinds
    own = drafter_of(untrained(target, "parallel"), target, (2, 1))
    options: list[object] = []
    monkeypatch.setattr(drafter_plans, "open_named", lambda *given: options.append(given[-1]) or (target, own))
    chosen = drafter_plans.candidates(target, ["runs/p"], ["streamingllm"], [K], {"dtype": "float32"})
    assert options == [{"dtype": "float32"}], "a draft model runs in the dtype that decoding gives it"
    assert [(each.name, list(each.drafts)) for each in chosen[1:]] == [("runs/p", [1, 2, 3]), ("runs/p", [2])]
    assert [each.make(2).num_nodes for each in chosen] == [3, 3, 5]
