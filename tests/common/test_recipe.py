import importlib
import itertools
from pathlib import Path

import pytest

from draftsmith.common.recipe import read_recipe, write_recipe
from draftsmith.common.sections import Batch, Optim, Recipe, Stage

ROOT = Path(__file__).parents[2]
SHIPPED = {
    f"{name}.yaml": (script, recipe)
    for script, recipe, names in (
        (
            "train/distill.py",
            "DistillRecipe",
            "llama3-70b-distill llama3.1-8b-distill llama3.3-70b-distill qwen2.5-coder-0.5b-distill "
            "qwen2.5-coder-1.5b-distill qwen3-30b-a3b-distill qwen3-8b-non-thinking-distill qwen3-8b-thinking-distill "
            "smollm2-distill tiny-distill vicuna33b-distill zephyr7b-distill",
        ),
        ("train/lm.py", "LmRecipe", "tiny-draft tiny-lm"),
        (
            "train/medusa.py",
            "MedusaRecipe",
            "llama3-70b-zero3 llama3.1-8b-medusa llama3.3-70b-medusa qwen3-30b-a3b-medusa qwen3-8b-non-thinking-medusa "
            "qwen3-8b-thinking-medusa llama3-8b qwen2.5-coder-0.5b-medusa qwen2.5-coder-1.5b-medusa qwen3-8b "
            "smollm2-medusa smollm2-medusa2 tiny-medusa tiny-medusa2 vicuna7b "
            "vicuna33b-self-distill zephyr7b-self-distill",
        ),
        ("train/ssm.py", "SsmRecipe", "tiny-ssm smollm2-ssm llama7b-68m-ssm"),
        (
            "train/eagle.py",
            "EagleRecipe",
            "tiny-eagle1 tiny-eagle3 smollm2-eagle3 llama3-8b-eagle3 qwen2.5-coder-0.5b-eagle3 "
            "qwen2.5-coder-0.5b-peagle qwen2.5-coder-1.5b-eagle3 qwen3-8b-eagle3 llama3.1-8b-eagle3 "
            "qwen3-30b-a3b-eagle3 qwen3-8b-non-thinking-eagle3 qwen3-8b-thinking-eagle3 llama3.3-70b-eagle3",
        ),
        ("train/dflash.py", "DflashRecipe", "tiny-dflash qwen2.5-coder-0.5b-dflash qwen3-8b-dflash"),
        (
            "train/dynaspec.py",
            "DynaspecRecipe",
            "tiny-dynaspec smollm2-dynaspec llama3-8b-dynaspec qwen2-7b-dynaspec qwen2.5-coder-0.5b-dynaspec",
        ),
    )
    for name in names.split()
}
GOOD = """\
run: {name: x}
data: {train: [{source: stdlib}, {source: "package:rich", weight: 2.0}], validation: [{source: stdlib}]}
optim: {lr: 2e-3, betas: [0.9, 0.99]}
batch: {sequences: 8, accumulate: 2}
steps: 10
"""


class Toy(Recipe):
    optim: Optim
    batch: Batch
    steps: int
    stages: list[Stage] = []


@pytest.fixture
def read(tmp_path):
    """read(text, *overrides), with `old → new` pairs applied to the good recipe."""

    def read(*overrides: str, text: str = GOOD, replace: tuple[str, str] = ("", "")) -> Toy:
        assert replace[0] in text
        path = tmp_path / "toy.yaml"
        path.write_text(text.replace(*replace) if replace[0] else text)
        return read_recipe(path, Toy, overrides)

    return read


def test_numbers_and_lists(read):
    recipe = read()
    assert recipe.optim.lr == 2e-3 and isinstance(recipe.optim.lr, float)
    assert recipe.optim.betas == (0.9, 0.99)
    assert recipe.run.folder == Path("runs/x")
    assert [s.weight for s in recipe.data.train] == [1.0, 2.0]


@pytest.mark.parametrize("written, value", [("2e-3", 2e-3), ("2.0e-3", 2e-3), ("1E2", 100.0), (".5", 0.5), ("3", 3.0)])
def test_what_looks_like_a_number_is_one(read, written, value):
    assert read(f"optim.lr={written}").optim.lr == value


def test_overrides(read):
    recipe = read(
        "optim.lr=1e-4", "data.train.1.weight=3.5", "precision.compile=true", "data.train.0.answers.prompts=9"
    )
    assert recipe.optim.lr == 1e-4
    assert [s.weight for s in recipe.data.train] == [1.0, 3.5]
    assert recipe.precision.compile is True
    assert recipe.data.train[0].answers is not None and recipe.data.train[0].answers.prompts == 9
    opened = read("data.train.0.answers=null", "data.train.0.answers.prompts=8", "data.train.0.answers.new_tokens=9")
    assert opened.data.train[0].answers is not None and opened.data.train[0].answers.prompts == 8
    assert len(read("data.train=[{source: stdlib}]").data.train) == 1


def test_an_override_changes_one_of_what_an_anchor_names(read):
    """YAML hands the same mapping to both places."""
    ask = "{prompts: 4, prompt_tokens: 8, new_tokens: 8}"
    sources = f"[{{source: stdlib, answers: &ask {ask}}}, {{source: stdlib, answers: *ask}}]"
    data = f"data: {{train: {sources}, validation: [{{source: stdlib}}]}}"
    recipe = read("data.train.0.answers.prompts=9", text=GOOD.replace(GOOD.splitlines()[1], data))
    assert [source.answers.prompts for source in recipe.data.train] == [9, 4]


WRONG = {
    # a misspelt key, its nearest sibling
    "optim.lrr=1": "unknown key 'optim.lrr'; nearest valid key: optim.lr",
    "data.train.0.wieght=1.0": "unknown key 'data.train.0.wieght'; nearest valid key: data.train.0.weight",
    # a good key in the wrong section
    "run.warmup_steps=3": "unknown key 'run.warmup_steps'; nearest valid key: optim.warmup_steps",
    # a word of one key here, rather than a similar one elsewhere
    "optim.decay=3": "unknown key 'optim.decay'; nearest valid key: optim.weight_decay",
    "batch.threats=3": "unknown key 'batch.threats'; nearest valid key: precision.threads",
    "batch.heads=3": "unknown key 'batch.heads'; valid keys here: sequences, micro, accumulate",
    "batch.zzz=3": "unknown key 'batch.zzz'; valid keys here: sequences, micro, accumulate",
    # types: nothing is converted
    "steps='10'": "'steps': input should be a valid integer, got '10'",
    "steps=1.5": "'steps': input should be a valid integer, got 1.5",
    "precision.compile=1": "'precision.compile': input should be a valid boolean, got 1",
    "optim.lr=-1.0": "'optim.lr': input should be greater than or equal to 0.000000000001, got -1.0",
    "optim.schedule=sine": "'optim.schedule': input should be 'constant', 'linear' or 'cosine', got 'sine'",
    "data.train=[]": "'data.train': list should have at least 1 item",
    "data=3": "'data': this is a section; write its fields below it, got 3",
    "data=": "'data': this is a section; write its fields below it, got None",
    "data=[1]": "'data': this is a section; write its fields below it, got a list",
    "data.train=3": "'data.train': input should be a valid list, got 3",
    # combinations
    "batch.accumulate=3": "'batch': sequences=8 is not a multiple of accumulate=3",
    "batch.micro=2": "'batch': it has micro=2 and accumulate=2; set one of them to null",
    "batch.micro=some": "'batch.micro': write a number of sequences from 1 to 65536, or auto, got 'some'",
    "batch.micro=0": "'batch.micro': write a number of sequences from 1 to 65536, or auto, got 0",
    "data.train.0.source=wikipedia": "source 'wikipedia' is neither 'stdlib', 'package:NAME', a file",
    # overrides that reach nowhere
    "data.train.7.weight=1.0": "'data.train.7.weight': the list has 2 entries, counted from 0",
    "steps.more=1": "'steps.more': 'steps' is a value, not a section",
    "steps": "'steps' is no override; write section.field=value",
    "=3": "'=3' is no override",
    "a..b=1": "'a..b=1' is no override",
    "data.train.0=3": "'data.train.0': this is a section",
    "data.train.².source=x": "the list has 2 entries, counted from 0",
    f"data.train.{'9' * 60}=x": "the list has 2 entries, counted from 0",
    # what is no YAML, or YAML that recipes do without
    "run.name={": "not valid YAML",
    "run.name=*a": "not valid YAML: found undefined alias 'a'",
    "run.name=&a [*a]": "not valid YAML: nested too deeply",
    "run=<<: {name: x}": "merge keys (<<) are not supported; write the keys out",
    "run={? [a] : 1}": "a key is a word; a list, mapping, alias or tag cannot be one",
    "run={{a: 1}: 1}": "a key is a word",
    "run.name=!!python/name:os.system x": "tags (!!python/name:os.system) are not supported; leave it out",
    "run=!!set {a, b}": "tags (!!set) are not supported",
    "run.name=! x": "tags (!) are not supported",
    "steps=!!int '3'": "tags (!!int) are not supported",
    "run.name=--- a\n--- b": "expected a single document in the stream but found another document",
    "run.name=\t@": "cannot start any token",
    'run.name="\\0"': "text cannot hold a null character or half of a surrogate pair",
    'run={"\\udfff": 1}': "text cannot hold a null character or half of a surrogate pair",
    'run.name="\\UFFFFFFFF"': "an escape in quotes stands for no character",
    "run.name=a\udcffb": "special characters are not allowed",
    "run.name=\x1b[0m": "special characters are not allowed",
    # words and numbers are those of YAML 1.2, and decimal
    "run.name=1e2": "'run.name': input should be a valid string, got 100.0",
    "precision.compile=yes": "input should be a valid boolean, got 'yes'",
    "steps=017": "'steps': input should be a valid integer, got '017'",
    "steps=0x1F": "'steps': input should be a valid integer, got '0x1F'",
    "steps=1:30": "'steps': input should be a valid integer, got '1:30'",
    "steps=2024-01-01": "'steps': input should be a valid integer, got '2024-01-01'",
    "steps=": "'steps': input should be a valid integer, got None",
    # not finite, and out of every range
    "optim.lr=.nan": "'optim.lr': input should be a finite number, got nan",
    "optim.lr=1e400": "'optim.lr': input should be a finite number, got inf",
    f"optim.lr={'9' * 5000}": "'optim.lr': input should be a finite number, got inf",
    "optim.lr=1e-300": "'optim.lr': input should be greater than or equal to",
    "optim.lr=1e3": "'optim.lr': input should be less than or equal to 100, got 1000.0",
    "optim.betas=[0.9, 1.0]": "'optim.betas.1': input should be less than 1, got 1.0",
    "optim.betas=[-0.1, 0.9]": "'optim.betas.0': input should be greater than or equal to 0, got -0.1",
    "optim.betas=[0.9]": "'optim.betas.1' is missing",
    "optim.clip=1e-300": "'optim.clip': input should be greater than or equal to",
    "optim.warmup_steps=-1": "'optim.warmup_steps': input should be greater than or equal to 0, got -1",
    "optim.warmup_steps=1000000000000": "'optim.warmup_steps': input should be less than or equal to",
    "data.train.0.weight=1e-300": "'data.train.0.weight': input should be greater than or equal to",
    "data.train.0.limit=0": "'data.train.0.limit': input should be greater than 0",
    "data.train.0.limit=1000000000000000000": "'data.train.0.limit': input should be less than or equal to 1000000000",
    "data.train.0.answers.prompts=1000000000": "'data.train.0.answers.prompts': input should be less than or equal to",
    "data.train.0.answers={prompts: 1, new_tokens: 1000000000}": "'data.train.0.answers.new_tokens': input should be l",
    "data.max_length=1000000000": "'data.max_length': input should be less than or equal to 1048576",
    "data.max_unsupervised=1.5": "'data.max_unsupervised': input should be less than or equal to 1, got 1.5",
    "batch.sequences=1000000000": "'batch.sequences': input should be less than or equal to 65536, got 1000000000",
    "batch.accumulate=1000000000": "'batch': sequences=8 is not a multiple of accumulate=1000000000",
    "stages=[{steps: 100000000, batch: {sequences: 2}, optim: {lr: 1}}]": (
        "'stages.0': steps=100000000 × batch.sequences=2 are more than the 100,000,000 sequences that a stage may have"
    ),
    "stages=[{steps: 1000000000000000000, batch: {sequences: 1}, optim: {lr: 1}}]": (
        "'stages.0.steps': input should be less than or equal to 1000000000, got 1000000000000000000"
    ),
    "stages=[{batch: {sequences: 2}, optim: {lr: 1}}]": "'stages.0': it has neither steps nor epochs; add one of them",
    "stages=[{steps: 3, epochs: 2, batch: {sequences: 2}, optim: {lr: 1}}]": (
        "'stages.0': it has steps=3 and epochs=2; set one of them to null"
    ),
    "stages=[{epochs: 0, batch: {sequences: 2}, optim: {lr: 1}}]": (
        "'stages.0.epochs': input should be greater than or equal to 0.000001, got 0"
    ),
    "precision.threads=0": "'precision.threads': input should be greater than 0",
    "precision.threads=100000": "'precision.threads': input should be less than or equal to 1024, got 100000",
    "checkpoint.keep=-1": "'checkpoint.keep': input should be greater than 0, got -1",
    "checkpoint.every=1000000000000": "'checkpoint.every': input should be less than or equal to 1000000000",
    "evaluate.prompts=0": "'evaluate.prompts': input should be greater than 0",
    "run.seed=-1": "'run.seed': input should be greater than or equal to 0, got -1",
    "run.seed=9223372036854775808": "'run.seed': input should be less than 9223372036854775808",
    # names
    'run.name="a\\nb"': "'run.name': a name has at most 200 bytes, no control characters and no spaces around it",
    'run.name="a "': "'run.name': a name has at most 200 bytes, no control characters and no spaces around it",
    f"run.name={'ä' * 101}": "'run.name': a name has at most 200 bytes",
    "run.name=''": "'run.name': string should have at least 1 character, got ''",
    "run.output_dir=''": "'run.output_dir': string should have at least 1 character, got ''",
    "data.template=''": "'data.template': string should have at least 1 character, got ''",
    "data.train.0.split=''": "'data.train.0.split': string should have at least 1 character",
    "data.train.0.source=../..": "source '../..' is neither 'stdlib', 'package:NAME', a file",
    "data.train.0.source=a/..": "source 'a/..' is neither",
    "data.train.0.source=package:../x": "source 'package:../x': after 'package:' comes the name it is imported by",
    "export.push_to_hub=../..": "'export.push_to_hub': a Hub id is USER/NAME; both are letters",
}
WRONG |= {
    f"run.name={name}": "'run.name': the run's folder has to be inside of output_dir"
    for name in ("..", ".", "../../x", "a/../../x", "/tmp/x", "a/")
}
WRONG |= {
    f"export.push_to_hub={name}": "'export.push_to_hub': a Hub id is USER/NAME"
    for name in ("me/a..b", "me/a--b", "me/x.git", "me/-x", "x", "me/x/y", f"me/{'x' * 97}")
}


def shown(override):
    """An override as errors print it: on one line, and not all of a long one."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in override)
    return text if len(text) <= 100 else text[:90]


@pytest.mark.parametrize("override, message", WRONG.items())
def test_wrong_values_are_one_clear_line(read, override, message):
    with pytest.raises(ValueError) as caught:
        read(override)
    text = str(caught.value)
    assert message in text
    assert "\n" not in text
    assert shown(override) in text and (text.startswith("'") or "toy.yaml" in text)
    assert len(text) < 1000 and text.isprintable()


@pytest.mark.parametrize(
    "override, field, value",
    [
        ("run.seed=9223372036854775807", "seed", 2**63 - 1),
        ("run.name=no", "name", "no"),
        *((f"run.name={text}", "name", text) for text in ("1e-3x", "v1.2", "2-3", "1.2.3")),
        ("run.name=2024-01-01", "name", "2024-01-01"),
        ("run.name=017", "name", "017"),
        ("run.name='1e2'", "name", "1e2"),
        ("run.name='!!x'", "name", "!!x"),
        ("run.name='<<'", "name", "<<"),
        ("run.name=&a b", "name", "b"),
        ("run.name=sweep/lr-1", "name", "sweep/lr-1"),
        (r'run.name="\U0001F600 é"', "name", "😀 é"),
        (f"run.name={'x' * 200}", "name", "x" * 200),
        ("run.output_dir=../elsewhere", "output_dir", "../elsewhere"),
    ],
)
def test_what_is_meant_is_taken_and_reads_back(read, tmp_path, override, field, value):
    recipe = read(override, "data.train.0.answers.prompts=9", "optim.lr=1e-5")
    assert getattr(recipe.run, field) == value
    write_recipe(recipe, tmp_path / "resolved.yaml", "command\nrun.name=\x1b")
    assert (tmp_path / "resolved.yaml").read_text().startswith("# command\\nrun.name=\\x1b\n")
    assert read_recipe(tmp_path / "resolved.yaml", Toy) == recipe


def test_other_names(read):
    """Hub ids; a template may hold what a name may not."""
    for name in ("me/x", "Me_1/x.y-z_", "a/" + "x" * 96):
        assert read(f"export.push_to_hub={name}").export.push_to_hub == name
        assert read(f"data.train.0.source={name}").data.train[0].source == name
    assert read(r'data.template="{{ a }}\n\t"').data.template == "{{ a }}\n\t"


def test_long_overrides_are_cut(read):
    long = "x" * 100_000
    for override in (
        f"run.{long}=1",
        f"{long}=1",
        f"run.name={long}",
        f"steps={long}",
        f"run.name=!{long} x",
        f"run={{? {long} : 1}}",
        f"data.train.0.source={long}",
        "a." * 10_000 + "b=1",
        long,
    ):
        with pytest.raises(ValueError) as caught:
            read(override)
        assert len(str(caught.value)) < 1000 and "…" in str(caught.value)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n" for before, name in itertools.pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    "overrides, replace, message",
    [  # only the override at fault is named
        (["run.seed=3", "optim.lr=-1.0", "steps=3"], ("", ""), r"toy\.yaml with optim\.lr=-1\.0: 'optim\.lr'"),
        (["steps=3"], ("lr: 2e-3", "lr: 2e-3, clip: -1.0"), r"toy\.yaml:3: 'optim\.clip': "),
        (["run.weight=3"], ("", ""), r"unknown key 'run\.weight'; nearest valid key: data\.train\.0\.weight"),
        ([], ("lr: 2e-3, ", ""), r"toy\.yaml:3: 'optim\.lr' is missing; add it$"),
        ([], ("lr: 2e-3", "lrr: 2e-3"), r"toy\.yaml:3: unknown key 'optim\.lrr'; nearest valid key: optim\.lr \(and 1"),
        ([], ("lr: 2e-3", "lr: -1.0, clip: -1.0"), r"\(and 1 more\)$"),
    ],
)
def test_what_an_error_says(read, overrides, replace, message):
    with pytest.raises(ValueError, match=message):
        read(*overrides, replace=replace)


@pytest.mark.parametrize("epochs, rows, steps", [(2, 100, 25), (1, 101, 13), (0.5, 8, 1), (0.001, 8, 1)])
def test_epochs_become_steps(epochs, rows, steps):
    """So many that each pass is whole."""
    content = {"batch": {"sequences": 8}, "optim": {"lr": 1.0}}
    stage = Stage.model_validate({**content, "epochs": epochs}).with_rows(rows)
    assert (stage.steps, stage.epochs, stage.samples) == (steps, None, 8 * steps)
    assert Stage.model_validate(stage.model_dump()) == stage, "it can be read again"


def test_epochs_of_too_many_rows():
    stage = Stage.model_validate({"batch": {"sequences": 8}, "optim": {"lr": 1.0}, "epochs": 1000})
    wanted = "epochs=1000 of 100,001 rows .* are more than the 100,000,000 .*; lower epochs"
    with pytest.raises(ValueError, match=wanted):
        stage.with_rows(100_001)


@pytest.mark.parametrize(
    "text, message",
    [
        (GOOD + "steps: 11\n", "toy.yaml:6: not valid YAML: key 'steps' is given twice"),
        (GOOD.replace("{lr: 2e-3,", "{lr: 2e-3, lr: 1e-3,"), "key 'lr' is given twice"),
        ("run: {name: [\n", "not valid YAML"),
        ("- a\n", "a recipe is a mapping of sections (run, data, optim, …), got list"),
        ("", "a recipe is a mapping of sections (run, data, optim, …), got nothing"),
        ("# only a comment\n", "got nothing"),
        ("some text\n", "a recipe is a mapping of sections (run, data, optim, …), got str"),
        ("3\n", "got int"),
        (
            GOOD + "---\n" + GOOD,
            "toy.yaml:6: not valid YAML: expected a single document in the stream but found another",
        ),
        (GOOD + "...\n", "ok"),
        ("---\n" + GOOD, "ok"),
        ("\ufeff" + GOOD, "ok"),
        (GOOD.replace("\n", "\r\n"), "ok"),
        (GOOD + "precision:\n\tcompile: true\n", "toy.yaml:7: not valid YAML: found character '\\t'"),
        (GOOD + "track: \0\n", "toy.yaml:6: not valid YAML: unacceptable character #x0000"),
        (GOOD + "? [a]\n: 1\n", "toy.yaml:6: not valid YAML: a key is a word"),
        (GOOD + "*a : 1\n", "toy.yaml:6: not valid YAML: a key is a word"),
        (GOOD + "<<: {track: {}}\n", "toy.yaml:6: not valid YAML: merge keys (<<) are not supported"),
        (GOOD + "track: !!python/object/apply:os.system [ls]\n", "toy.yaml:6: not valid YAML: tags (!!python/object"),
        ("!!map\n" + GOOD, "toy.yaml:1: not valid YAML: tags (!!map)"),
        ("%TAG ! tag:x,2000:\n---\n!y {}\n", "not valid YAML: tags (tag:x,2000:y) are not supported"),
        ("[" * 100_000, "toy.yaml: not valid YAML: nested too deeply"),
        ("{a: " * 100_000, "toy.yaml: not valid YAML: nested too deeply"),
        ("- " * 100_000, "toy.yaml: not valid YAML: nested too deeply"),
        ("a: &a [*a]\n", "toy.yaml: not valid YAML: nested too deeply"),
        ("a: &a {b: *a}\n", "toy.yaml: not valid YAML: nested too deeply"),
        (BOMB, "toy.yaml: not valid YAML: more than 10,000 values; no recipe is so long"),
        ("- x\n" * 20_000, "toy.yaml: not valid YAML: more than 10,000 values"),
        ("? " + "k" * 5000 + "\n: 1\n" + GOOD, "unknown key 'kkkkkkkkkk"),
        ("k" * 5000 + ": 1\n" + GOOD, "not valid YAML: "),
        (GOOD + "#" + " " * 1_000_000, "1,000,"),
    ],
    ids=lambda value: value[:30].encode("unicode_escape").decode(),
)
def test_damaged_files(read, text, message):
    if message == "ok":
        assert read(text=text) == read()
        return
    with pytest.raises(ValueError) as caught:
        read(text=text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable() and "toy.yaml" in str(caught.value)


def test_an_alias_chain_that_is_too_deep(read):
    """Each line is shallow; what the last alias stands for is not."""
    text = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} {'[' * 50}*a{n - 1}{']' * 50}\n" for n in range(1, 30))
    with pytest.raises(ValueError, match=r"not valid YAML: (nested too deeply|more than 10,000 values)"):
        read(text=text)


def test_what_is_no_text_file(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"x\.yaml: not UTF-8 text \(byte 0\); a recipe is needed$"):
        read_recipe(path, Toy)
    with pytest.raises(ValueError, match="this is a folder; a recipe is needed$"):
        read_recipe(tmp_path, Toy)
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "broken.yaml").symlink_to("nowhere.yaml")
    for name in (tmp_path / "loop.yaml", tmp_path / "broken.yaml", "/dev/zero"):
        with pytest.raises(ValueError, match="not a file .*; a recipe is needed$"):
            read_recipe(name, Toy)
    for name in ("x" * 5000, "a\0b", f"{path}/more.yaml"):
        with pytest.raises(FileNotFoundError, match="there is no such recipe"):
            read_recipe(name, Toy)


def test_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "tiny-medusa.yaml").write_text(GOOD)
    with pytest.raises(FileNotFoundError, match=r"tiny-meduza\.yaml: .* did you mean .*tiny-medusa\.yaml\?"):
        read_recipe(tmp_path / "tiny-meduza.yaml", Toy)
    with pytest.raises(FileNotFoundError, match="there is no such recipe$"):
        read_recipe(tmp_path / "nowhere" / "qqq.yaml", Toy)


def test_every_shipped_recipe_is_known():
    shipped = {path.name for path in (ROOT / "recipes").glob("*.yaml")}
    assert shipped == set(SHIPPED)


def class_of(script, recipe):
    return getattr(importlib.import_module(f"draftsmith.{script.removesuffix('.py').replace('/', '.')}"), recipe)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_parse(name):
    script, recipe = SHIPPED[name]
    path = ROOT / "recipes" / name
    launcher = "python" if script == "train/distill.py" else "accelerate launch"
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# {launcher} ") and first.endswith(f" {script} recipes/{name}")
    assert read_recipe(path, class_of(script, recipe)).run.name


def test_the_script_of_another_recipe(run_main):
    """The recipe's first line names its own script."""
    from draftsmith.data import preview
    from draftsmith.train import distill, lm

    for main, script in ((lm.main, "train/lm.py"), (distill.main, "/anywhere/train/distill.py")):
        code, _, err = run_main(main, ROOT / "recipes/tiny-medusa.yaml", script=script)
        assert code == 2 and err.endswith(" (this recipe is for train/medusa.py)\n") and err.count("\n") == 1
    code, _, err = run_main(lm.main, ROOT / "recipes/tiny-lm.yaml", "run.nam=x", script="train/lm.py")
    assert code == 2 and "this recipe is for" not in err
    code, _, err = run_main(preview.main, ROOT / "recipes/tiny-medusa.yaml", "run.nam=x", script="data/preview.py")
    assert code == 2 and "unknown key 'run.nam'" in err and "this recipe is for" not in err, "it reads all recipes"
