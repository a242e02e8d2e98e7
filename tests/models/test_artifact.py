"""A drafter folder: written and read again, damaged, or made for another target."""

import contextlib
import errno
import json
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from faults import limited
from made import edit, stand_in

from draftsmith.models.adapter import target_of
from draftsmith.models.artifact import check_target, part_folders, read_drafter, renew_fingerprint, write_drafter
from draftsmith.models.card import named
from draftsmith.models.files.identity import fingerprint, older_fingerprint
from draftsmith.models.files.weights import save_tensors
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target


@pytest.fixture
def drafter(tmp_path):
    """A written folder and the heads in it."""
    torch.manual_seed(0)
    target = SimpleNamespace(**vars(stand_in()), lm_head=torch.nn.Linear(8, 11, bias=False), device="cpu")
    heads = MedusaHeads.for_target(target, 3, 2, "own")
    for weight in heads.parameters():
        torch.nn.init.normal_(weight)
    folder = tmp_path / "runs/x"
    write_drafter(folder, "medusa", heads.config.to_dict(), heads.state_dict(), stand_in(), {"command": "train"})
    return folder, heads


def refusal(folder, error=(ValueError, FileNotFoundError)):
    """The one line that says why the folder is no drafter."""
    with pytest.raises(error) as caught:
        _, config, weights = read_drafter(str(folder))
        if config["drafter_type"] == "medusa":
            MedusaHeads.from_artifact(config, weights, str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_round_trip(drafter):
    folder, heads = drafter
    files = {file.name for file in folder.iterdir()}
    assert files >= {"config.json", "model.safetensors", "provenance.json"}
    assert not any(name.endswith(".tmp") for name in files)
    path, config, weights = read_drafter(str(folder))
    assert path == folder and config["drafter_type"] == "medusa"
    assert config["target"] == {"name_or_path": "some/target", "fingerprint": "ab" * 32}
    again = MedusaHeads.from_artifact(config, weights, str(folder))
    assert again.config == heads.config and not again.training
    for name, weight in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    check_target(folder, config, stand_in())
    check_target(folder, config, stand_in(name="/copied/elsewhere"))
    assert json.loads((folder / "provenance.json").read_text()) == {"command": "train"}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"hidden_size": 16}, "hidden_size 8 ≠ 16"),
        ({"vocab_size": 12}, "vocab_size 11 ≠ 12"),
        (
            {"fingerprint": "cd" * 32},
            "same shape, other weights, config or tokenizer (fingerprint abababababab… ≠ cdcdcdcdcdcd…)",
        ),
    ],
)
def test_drafter_for_another_target(drafter, other, said):
    folder, _ = drafter
    _, config, _ = read_drafter(str(folder))
    with pytest.raises(ValueError) as error:
        check_target(folder, config, stand_in(name="another", **other))
    message = str(error.value)
    assert message.startswith(f"{folder}: this drafter was trained for target 'some/target', not for 'another'")
    assert said in message and message.endswith("or pass --target some/target")


def test_what_the_config_does_not_state_is_not_compared(drafter):
    """A drafter by tokens alone has no hidden size; that it is for this target, the fingerprint says."""
    folder, _ = drafter
    edit(folder, lambda config: [config.pop(field) for field in ("hidden_size", "vocab_size")])
    _, config, _ = read_drafter(str(folder))
    check_target(folder, config, stand_in(hidden_size=16, vocab_size=12))
    with pytest.raises(ValueError, match="other weights"):
        check_target(folder, config, stand_in(fingerprint="cd" * 32))


# ---- parts


@pytest.fixture
def ensemble(tmp_path, tiny_lm):
    """A drafter of two causal LMs and an adapter, with a chosen few of the files that a run leaves beside them."""
    folder = tmp_path / "runs/ensemble"
    for name in ("ssm-0", "ssm-1"):
        shutil.copytree(tiny_lm, folder / name)
    (folder / "lora").mkdir()
    (folder / "lora/adapter_config.json").write_text("{}")
    save_tensors({"a": torch.ones(2)}, folder / "lora/adapter_model.safetensors")
    for name in ("checkpoints/step-1", "held_out", "answers/train-0", "mine"):
        (folder / name).mkdir(parents=True)
        save_tensors({"a": torch.ones(2)}, folder / name / "model.safetensors")
    (folder / "mine/config.json").write_text("{}")  # a user's own model
    return folder


NAMES = ["ssm-0", "ssm-1", "lora"]


def test_a_drafter_of_parts_alone(ensemble):
    expansion = {"expansion": [1, 3]}
    assert part_folders(ensemble) == []
    save_tensors({"old": torch.ones(2)}, ensemble / "model.safetensors")
    write_drafter(ensemble, "ssm", expansion, {}, stand_in(), {}, parts=NAMES)
    folder, config, weights = read_drafter(str(ensemble))
    assert (config["parts"], config["expansion"], weights) == (NAMES, [1, 3], {}) and folder == ensemble
    assert part_folders(ensemble) == sorted(NAMES)
    load_target(str(ensemble / "ssm-0"))
    write_drafter(ensemble, "ssm", expansion, {"q": torch.ones(3)}, stand_in(), {}, parts=["ssm-0"])
    assert list(read_drafter(str(ensemble))[2]) == ["q"] and part_folders(ensemble) == ["ssm-0"]
    write_drafter(ensemble, "ssm", expansion, {"q": torch.ones(3)}, stand_in(), {})
    assert "parts" not in read_drafter(str(ensemble))[1] and part_folders(ensemble) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: shutil.rmtree(f / "ssm-1"), "{}: part 'ssm-1' is missing; fetch or train the drafter again"),
        (lambda f: (f / "ssm-1/config.json").unlink(), "{}/ssm-1/config.json: there is no such config of a part"),
        (lambda f: (f / "ssm-1/config.json").write_text("{"), "{}/ssm-1/config.json: not valid JSON"),
        (lambda f: (f / "ssm-1/model.safetensors").unlink(), "{}/ssm-1: no weights here; fetch or train the drafter"),
        (lambda f: (f / "ssm-1/model.safetensors").write_bytes(b"half"), "{}/ssm-1/model.safetensors: not a safetens"),
        (lambda f: (f / "lora/adapter_config.json").write_text("[]"), "{}/lora/adapter_config.json: a JSON object is"),
        (lambda f: (f / "lora/adapter_model.safetensors").unlink(), "{}/lora: no weights here"),
        (lambda f: edit(f, lambda c: c.update(parts="ssm-0")), "{}/config.json: field 'parts' is 'ssm-0'; it has to"),
        (lambda f: edit(f, lambda c: c.update(parts=[3])), "{}/config.json: field 'parts' is [3]; it has to be a list"),
        (lambda f: edit(f, lambda c: c.update(parts=["../x"])), "{}/config.json: field 'parts' is ['../x']; it has to"),
        (lambda f: edit(f, lambda c: c.update(parts=[".."])), "field 'parts' is ['..']"),
        (lambda f: edit(f, lambda c: c.update(parts=["/tmp"])), "field 'parts' is ['/tmp']"),
        (lambda f: edit(f, lambda c: c.update(parts=["*"])), "field 'parts' is ['*']"),
        (lambda f: edit(f, lambda c: c.update(parts=[""])), "field 'parts' is ['']"),
    ],
)
def test_damaged_parts(ensemble, change, said):
    write_drafter(ensemble, "ssm", {}, {}, stand_in(), {}, parts=NAMES)
    change(ensemble)
    assert said.format(ensemble) in refusal(ensemble)
    assert set(part_folders(ensemble)) <= set(NAMES)


def test_a_part_with_parts_of_its_own(ensemble):
    """A drafter may be a part, also one of parts alone; what it lists is checked, too."""
    write_drafter(ensemble, "ssm", {}, {}, stand_in(), {}, parts=["ssm-0", "ssm-1"])
    outer = ensemble.parent / "outer"
    shutil.copytree(ensemble, outer / "drafter", ignore=shutil.ignore_patterns("checkpoints", "answers"))
    write_drafter(outer, "dynaspec", {}, {"order": torch.arange(3)}, stand_in(), {}, parts=["drafter"])
    _, config, weights = read_drafter(str(outer))
    assert (config["parts"], list(weights), part_folders(outer)) == (["drafter"], ["order"], ["drafter"])
    assert read_drafter(str(outer / "drafter"))[1]["parts"] == ["ssm-0", "ssm-1"]
    inner = outer / "drafter"
    save_tensors({"a": torch.ones(2)}, inner / "model.safetensors")  # beside parts, it may have weights of its own
    read_drafter(str(outer))
    for change, said in (
        (lambda: (inner / "model.safetensors").write_bytes(b"half"), f"{inner}/model.safetensors: not a safetensors"),
        (lambda: (inner / "model.safetensors").unlink(), None),
        (lambda: (inner / "ssm-1/model.safetensors").unlink(), f"{inner}/ssm-1: no weights here"),
        (lambda: shutil.rmtree(inner / "ssm-1"), f"{inner}: part 'ssm-1' is missing; fetch or train the drafter"),
        (lambda: edit(inner, lambda c: c.update(parts=["../x"])), f"{inner}/config.json: field 'parts' is ['../x']"),
        (lambda: edit(inner, lambda c: c.update(parts=[])), f"{inner}: no weights here"),
        (lambda: edit(inner, lambda c: c.update(target=3)), f"{inner}/config.json: field 'target' is 3; it has to be"),
    ):
        change()
        if said is None:
            read_drafter(str(outer))
        else:
            assert said in refusal(outer)


def test_a_part_is_written_before_what_lists_it(ensemble):
    with pytest.raises(FileNotFoundError, match="part 'ssm-2' is missing"):
        write_drafter(ensemble, "ssm", {}, {}, stand_in(), {}, parts=["ssm-2"])
    assert not (ensemble / "config.json").exists()


def test_the_adapter_and_the_merged_target_are_part_folders(drafter, tiny_lm):
    """Also of artifacts from before there were parts; a model that is not the merged target is none."""
    folder, _ = drafter
    shutil.copytree(tiny_lm, folder / "merged")
    shutil.copytree(tiny_lm, folder / "other")
    edit(folder / "other", lambda config: config.update(vocab_size=301))
    (folder / "adapter").mkdir()
    assert part_folders(folder) == []
    described = {"adapter": "adapter", "merged_fingerprint": fingerprint(tiny_lm)}
    edit(folder, lambda config: config["target"].update(described))
    assert part_folders(folder) == ["adapter", "merged"]
    read_drafter(str(folder))
    shutil.rmtree(folder / "merged")
    assert part_folders(folder) == ["adapter"], "it is not needed to decode"


def test_weights_have_the_permissions_of_other_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_tensors({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


@pytest.mark.parametrize("kept", [0, 7, 60, -1])
def test_truncated_weights(drafter, kept):
    folder, _ = drafter
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:kept])
    assert re.search(r"model\.safetensors: .*truncated", refusal(folder, ValueError))


def test_missing_files(drafter, tmp_path):
    folder, _ = drafter
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors here" in refusal(folder, FileNotFoundError)
    (folder / "config.json").unlink()
    assert "no config.json here: no drafter" in refusal(folder, FileNotFoundError)
    (folder / "checkpoints").mkdir()
    assert "training has not finished; go on with --resume" in refusal(folder, FileNotFoundError)
    assert "there is no such folder" in refusal(tmp_path / "nowhere", FileNotFoundError)


def test_older_fingerprints(tiny_lm, tmp_path, capsys):
    """A drafter and its part that name their target by one are taken, and renewed by a command that writes there."""
    target = load_target(str(tiny_lm))
    new, old = target.fingerprint, older_fingerprint(tiny_lm)
    target.fingerprint = old
    for place, parts in ((tmp_path / "part", ()), (tmp_path, ("part",))):
        write_drafter(place, "medusa", {}, {"w": torch.zeros(1)}, target, {}, None, parts)
    target = load_target(str(tiny_lm))
    _, config, _ = read_drafter(str(tmp_path))
    assert target_of(tmp_path, config, target) is target and new != old
    for lines in (2, 0):
        renew_fingerprint(tmp_path, target)
        assert capsys.readouterr().err.count("it is renewed\n") == lines
    assert [read_drafter(str(folder))[1]["target"]["fingerprint"] for folder in (tmp_path, tmp_path / "part")] == [
        new
    ] * 2
    target.older_fingerprint = "ab" * 32
    with pytest.raises(ValueError, match="other weights, config or tokenizer"):
        check_target(tmp_path, config, target)


def test_another_config_is_not_called_other_weights(tiny_lm, tmp_path):
    target = load_target(str(tiny_lm))
    write_drafter(tmp_path / "drafter", "medusa", {}, {"w": torch.zeros(1)}, target, {})
    other = shutil.copytree(tiny_lm, tmp_path / "other")
    edit(other, lambda config: config.update(rope_parameters={"rope_type": "default", "rope_theta": 2e5}))
    _, config, _ = read_drafter(str(tmp_path / "drafter"))
    with pytest.raises(ValueError, match=r"same shape, the same weights with another config\.json; train one for it"):
        check_target(tmp_path / "drafter", config, load_target(str(other)))


def test_a_drafter_without_a_fingerprint_is_refused(drafter):
    """Unless its target has none either: one that was never stored."""
    folder, _ = drafter

    def check(target, message):
        _, config, _ = read_drafter(str(folder))
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            check_target(folder, config, target)

    for missing in (None, ""):
        edit(folder, lambda config, value=missing: config["target"].update(fingerprint=value))
        check(stand_in(), "has no target.fingerprint, which says for which weights")
        check(stand_in(fingerprint=""), "")
    edit(folder, lambda config: config["target"].pop("fingerprint"))
    check(stand_in(), r"has no target\.fingerprint")
    edit(folder, lambda config: config["target"].update(fingerprint="ab" * 32))
    check(stand_in(fingerprint=""), "other weights")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('{"drafter_type": ', "config.json: not valid JSON"),
        ("[]", "a JSON object is needed, got list"),
        ("3", "a JSON object is needed, got int"),
        ("{}", "not a drafter"),
        (lambda c: c.pop("target"), "field 'target' is None; it has to be an object"),
        (lambda c: c.update(target="some/target"), "field 'target' is 'some/target'; it has to be an object"),
        (lambda c: c.update(target=["some/target"]), "field 'target' is ['some/target']"),
        (lambda c: c["target"].pop("name_or_path"), "field 'target.name_or_path' is None"),
        (lambda c: c["target"].update(name_or_path=3), "field 'target.name_or_path' is 3"),
        (lambda c: c["target"].update(fingerprint=7), "field 'target.fingerprint' is 7; it has to be text"),
        (lambda c: c["target"].update(adapter=True), "field 'target.adapter' is True"),
        (lambda c: c["target"].update(adapter="../other"), "field 'target.adapter' is '../other'; it has "),
        (lambda c: c.update(drafter_type=None), "field 'drafter_type' is None"),
        (lambda c: c.update(num_draft_heads=10**9), "config.json promises {'weight': (2, 1000000000, 8, 8)"),
        (lambda c: c.update(num_layers=10**9), "config.json promises {'weight': (1000000000, 3, 8, 8)"),
        (lambda c: c.update(num_draft_heads=10**30), "heads of this size fit into no memory"),
        (lambda c: c.update(num_draft_heads=2.5), "field 'num_draft_heads' is 2.5"),
        (lambda c: c.update(projection=["own"]), "field 'projection' is ['own']"),
        (lambda c: c.update(projection="half"), "field 'projection' is 'half'"),
        (lambda c: c.update(vocab_size=12), "its tensors are "),
    ],
)
def test_odd_configs(drafter, change, said):
    folder, _ = drafter
    if isinstance(change, str):
        (folder / "config.json").write_text(change)
    else:
        edit(folder, change)
    message = refusal(folder, ValueError)
    assert said in message and message.startswith(str(folder))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite(drafter, value):
    folder, heads = drafter
    weights = heads.state_dict()
    weights["bias"][0, 0, 0, 0] = value
    save_tensors(weights, folder / "model.safetensors")
    assert "model.safetensors: 'bias' holds NaN or infinity" in refusal(folder, ValueError)


def test_a_write_that_fails_names_the_file_and_leaves_what_was(drafter):
    """A limit on the size of files stands for a full disk."""
    folder, heads = drafter
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with limited(1000), pytest.raises(OSError) as error:
        write_drafter(folder, "medusa", heads.config.to_dict(), heads.state_dict(), stand_in(), {"new": 1})
    assert error.value.errno == errno.EFBIG and error.value.filename == str(folder / "model.safetensors")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.whole_runs
def test_the_cards_first_command_runs_where_the_card_is(tiny_lm, tmp_path, monkeypatch):
    target = load_target(str(tiny_lm))
    heads = MedusaHeads.for_target(target, 2, 1, "shared")
    folder = tmp_path / "runs/named"
    write_drafter(folder, "medusa", heads.config.to_dict(), heads.state_dict(), target, {"steps": 3})
    (folder / "tree.json").write_text('{"paths": [[0], [0, 0]]}')
    card = (folder / "README.md").read_text()
    commands = re.search(r"```bash\n(.*?)```", card, re.DOTALL)[1].splitlines()
    assert len(commands) == 2 and "\n# named: a drafter of type medusa for TARGET\n" in card and "| steps | 3 |" in card
    assert "base_model:" not in card, "the Hub takes names of its own only"
    known = "TARGET is the folder or Hub id of that target, a model of the family llama"
    assert str(tiny_lm) not in card and known in card
    words = shlex.split(commands[0])
    assert words[:4] == ["python", "-m", "draftsmith.inference.decode", "."]
    done = subprocess.run([sys.executable, *words[1:], "--max-new-tokens", "5"], cwd=folder, capture_output=True)
    assert done.returncode == 0 and done.stdout, done.stderr.decode()


def test_the_card_of_a_target_that_is_known(drafter, tmp_path):
    """By its Hub id, or by the fingerprint of what `make models` fetches."""
    folder, heads = drafter
    card = (folder / "README.md").read_text()
    assert "base_model: some/target\n" in card and "# x: a drafter of type medusa for some/target\n" in card
    assert "license:" not in card and "No licence was stated" in card and "Nothing has been measured yet." in card
    smollm2 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    facts = {"target_fingerprint": smollm2, "simulated_tau": 2.5, "device": "A CPU", "dtype": "float32", "command": "x"}
    target = stand_in(name="models/smollm2")
    write_drafter(folder, "medusa", heads.config.to_dict(), heads.state_dict(), target, facts)
    card = (folder / "README.md").read_text()
    assert "models/smollm2" not in card and "| command" not in card
    assert "by `--target TARGET`" in card and "the weights on the Hub are others" in card
    assert "license: apache-2.0\nbase_model: HuggingFaceTB/SmolLM2-135M-Instruct\n" in card
    assert "Licence: apache-2.0, which is the target's." in card and "| 2.5 | float32, A CPU |" in card
    write_drafter(folder, "medusa", heads.config.to_dict(), heads.state_dict(), target, facts | {"licence": "mit"})
    assert "license: mit\n" in (folder / "README.md").read_text()


def test_facts_are_shown_as_people_write_them(drafter):
    """No None, no brackets, no folder of this machine."""
    folder, heads = drafter
    facts = {"data": ["/home/me/a.jsonl (train[:90%])", "some/set (train)"], "data_labels": [1272054, None]}
    facts |= {"learning_rate": [0.003, 1e-05], "packing": False, "init_from": None, "sha": ["ab", "ab"]}
    write_drafter(folder, "medusa", heads.config.to_dict(), heads.state_dict(), stand_in(), facts)
    card = (folder / "README.md").read_text()
    table = dict(re.findall(r"^\| (\w+) \| (.*) \|$", card.partition("## Training")[2], re.MULTILINE))
    assert {name: table[name] for name in facts if name in table} == {
        "data": "a.jsonl (train[:90%]); some/set (train)",
        "data_labels": "1,272,054; unknown",
        "learning_rate": "0.003; 1e-05",
        "packing": "no",
        "sha": "ab; ab",
    }


def test_a_licence_is_what_the_targets_card_states(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache",
        lambda name, file, revision: str(tmp_path / f"cached{revision or ''}" / file),
    )
    for place, text, licence in (
        (tmp_path / "mine", "---\nlanguage: en\nlicense: llama3\n---\n# Mine\nlicense: other\n", "llama3"),
        (tmp_path / "cached", "---\nlicense: apache-2.0\n---\n", "apache-2.0"),
        (tmp_path / "cachedv2", "---\nlicense: mit\n---\n", "mit"),
        (tmp_path / "none", "# Mine\n---\nlicense: mit\n---\n", None),
        (tmp_path / "list", "---\nlicense: [mit, x]\n---\n", None),
        (tmp_path / "damaged", "---\n{\n---\n", None),
    ):
        place.mkdir()
        (place / "README.md").write_text(text)
        name, revision = ("org/model" if "cached" in place.name else str(place)), place.name.removeprefix("cached")
        assert named(name, "", "llama", revision=revision if revision == "v2" else None).licence == licence


def test_a_drafter_brings_the_template_it_was_trained_with(tiny_lm, tmp_path):
    """What the heads were trained on is asked for as they were trained, whatever the target's tokenizer has."""
    target, folder = load_target(str(tiny_lm)), tmp_path / "run"
    heads, own = MedusaHeads.for_target(target, 2, 1, "shared"), target.tokenizer.chat_template
    x = "{{ 'x' }}"
    cases = ((x, True, x, x), (x, False, x, own), (None, True, None, None), (None, False, own, own))
    for template, lacking, used, kept in cases:
        write_drafter(folder, "medusa", heads.config.to_dict(), heads.state_dict(), target, {}, template)
        _, config, _ = read_drafter(str(folder))
        for keep_template in (False, True):  # whose: the drafter's, or that of a target loaded for another one
            target.tokenizer.chat_template = None if lacking else own
            asked = target_of(folder, config, target, keep_template=keep_template).tokenizer.chat_template
            assert asked == (kept if keep_template else used)
