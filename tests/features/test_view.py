"""Features that heads take from one prompt or several, in views and commands."""

import itertools
import json
import re
import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.commands import run_json, run_rejected
from helpers.vectors import cosines
from scipy.stats import spearmanr

import llmcond
from llmcond.base.arrays import as_matrix
from llmcond.base.errors import UserError
from llmcond.cli import run
from llmcond.data.datasets import sample_folder
from llmcond.features.view import FeatureView
from llmcond.prompts import InputTemplate, Prompt
from llmcond.runs import head_name, open_run

pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp")


# -- every view ------------------------------------------------------------------------------------


def make_prompt(name: str, conditional: str, unconditional: str) -> Prompt:
    return Prompt("", "", InputTemplate(conditional), InputTemplate(unconditional), name=name)


#: Prompts by letter. A capital letter stands for the conditional features of a prompt, and a small
#: one for its unconditional features, which are subtracted or are e(c). M subtracts those of the
#: sentence.
PROMPTS = {
    "J": make_prompt("joint", "{sentence} {condition}", "of {condition}"),
    "K": make_prompt("other", "{condition}: {sentence}", "under {condition}"),
    "M": make_prompt("middle", "{sentence}, {condition}", "only {sentence}"),
    "S": make_prompt("separate", "{sentence}", "{condition}"),
    "T": make_prompt("texts", "text: {sentence}", "text: {condition}"),
}
ROWS = [("a man", "the place"), ("two dogs", "the mood"), ("a man", "the mood")]

NO_SEPARATE = (
    r"the head takes separate features, e\(s\) and e\(c\), from one prompt, and {} has {}\. Extract"
)
JOINT_ONLY = "!" + NO_SEPARATE.format("joint", "joint features only")
TWO_SEPARATE = "!" + NO_SEPARATE.format("separate.texts", "2 prompts with them")
IGNORED = "!without subtraction the condition would be ignored"
HAS_SEPARATE = "!the prompt separate has separate features"
NO_INPUT = "!the head, which takes joint features, has no input"
NOTHING_TO_SUBTRACT = "!so there is nothing to subtract"
NEVER_ALONE = "!the prompt joint encodes every sentence with its condition"
NO_CONDITION = r"!takes e\(c\), but the prompt middle encodes no condition without its sentence"

#: (features, prompts) -> the layouts of four views: with subtraction and without it, each without
#: and with conditions. A layout lists the features of a sentence, which are concatenated, and after
#: a | those of the condition. An error after a ! means that the view is invalid.
VIEWS = {
    ("joint", "J"): ("J-j", "J-j | j", "J", "J | j"),
    ("joint", "S"): ("S-s", NO_INPUT, IGNORED, NO_INPUT),
    ("joint", "JS"): ("J-j S-s", "J-j S-s | s", "J S", "J S | s"),
    ("joint", "JK"): ("J-j K-k", "J-j K-k | j", "J K", "J K | j"),
    ("joint", "M"): ("M-m", NO_CONDITION, "M", NO_CONDITION),
    ("joint", "MJ"): ("M-m J-j", "M-m J-j | j", "M J", "M J | j"),
    ("joint", "SJT"): ("S-s J-j T-t", "S-s J-j T-t | s", "S J T", "S J T | s"),
    ("separate", "J"): (JOINT_ONLY,) * 4,
    ("separate", "S"): (IGNORED, "S | s", IGNORED, "S | s"),
    ("separate", "ST"): (TWO_SEPARATE,) * 4,
    ("both", "J"): (JOINT_ONLY,) * 4,
    ("both", "S"): (HAS_SEPARATE, NO_INPUT, HAS_SEPARATE, NO_INPUT),
    ("both", "JS"): ("J-j S", "J-j S | s", "J S", "J S | s"),
    ("both", "SJ"): ("S J-j", "S J-j | s", "S J", "S J | s"),
    ("alone", "S"): (NOTHING_TO_SUBTRACT, NOTHING_TO_SUBTRACT, "S", "S | s"),
    ("alone", "J"): (NOTHING_TO_SUBTRACT, NOTHING_TO_SUBTRACT, NEVER_ALONE, NEVER_ALONE),
}
CASES = [
    (features, letters, subtract, conditioned, layout)
    for (features, letters), row in VIEWS.items()
    for (subtract, conditioned), layout in zip(
        itertools.product((True, False), (False, True)), row, strict=True
    )
]
VALID_CASES = [case for case in CASES if not case[-1].startswith("!")]


def make_view(features: str, letters: str, subtract: bool, conditioned: bool) -> FeatureView:
    return FeatureView(
        tuple(PROMPTS[letter] for letter in letters), subtract, features, conditioned
    )


def concatenate_features(layout: str, vectors: Callable[[str], np.ndarray]) -> np.ndarray:
    """Return the features that a layout such as ``J-j S`` lists, some of them subtracted."""
    terms = [re.fullmatch(r"(\w)(?:-(\w))?", term).groups() for term in layout.split()]
    return np.hstack([vectors(a) - vectors(b) if b else vectors(a) for a, b in terms])


class FeatureReader:
    """A reader of random float16 features that records the templates of those that are read."""

    def __init__(self):
        values = np.random.default_rng(0).normal(size=(2 * len(PROMPTS), len(ROWS), 4))
        letters = [*PROMPTS, *(letter.lower() for letter in PROMPTS)]
        self.stored = dict(zip(letters, values.astype(np.float16), strict=True))
        self.templates = set()

    def __call__(self, prompt, part):
        self.templates.add(getattr(prompt, part))
        letter = next(letter for letter, known_prompt in PROMPTS.items() if known_prompt is prompt)
        return self.stored[letter if part == "conditional" else letter.lower()]

    def check(self, view, layout):
        """Check that a view reads the features of a layout."""
        sentence, _, condition = layout.partition(" | ")
        expected = concatenate_features(
            sentence, lambda letter: self.stored[letter].astype(np.float32)
        )
        actual = view.sentence_features(self)
        assert actual.shape == expected.shape
        np.testing.assert_array_equal(as_matrix(actual).read(), expected)
        vectors = view.condition_features(self)
        assert (vectors is None) == (condition == "")
        if condition:
            np.testing.assert_array_equal(vectors, self.stored[condition])


def test_view_returns_features_of_its_prompts_and_lists_their_inputs():
    names = {}
    for features, letters, subtract, conditioned, layout in VALID_CASES:
        view, reader = make_view(features, letters, subtract, conditioned), FeatureReader()
        reader.check(view, layout)
        # Each input occurs once, as no two prompts are equal.
        expected = [template.render(*row) for row in ROWS for template in reader.templates]
        inputs = view.inputs(ROWS)
        assert len(inputs) == len(expected)
        assert sorted(inputs, key=str) == sorted(expected, key=str)
        # Heads of different features have different names.
        name = head_name(f"{features}-{conditioned}", view)
        assert names.setdefault(name, layout) == layout


def test_invalid_view_is_rejected_with_valid_advice():
    letters_by_name = {prompt.name: letter for letter, prompt in PROMPTS.items()} | {"PROMPT": "K"}
    for features, letters, subtract, conditioned, error in set(CASES) - set(VALID_CASES):
        with pytest.raises(UserError, match=error[1:]) as caught:
            make_view(features, letters, subtract, conditioned)
        message = re.sub("extract --prompt|--prompt [^ ]+ also names", "", str(caught.value))
        assert "\n" not in message
        suggestions = re.findall(r"--prompt ([\w+]+)", message)
        if conditioned and features != "alone":
            assert bool(suggestions) == (error != NO_CONDITION)
            for suggestion in suggestions:
                suggested = "".join(letters_by_name[name] for name in suggestion.split("+"))
                make_view(features, suggested, subtract, conditioned)


# -- through the command line ----------------------------------------------------------------------

J, S = "concat-sent-cond", "separate"
BOTH = f"{J}+{S}"

#: name -> recipe, prompts, settings, and layout of the features (J and S are the two prompts).
HEADS = {
    "separate-features": ("hypernet", S, "dim=4 rank=2", "S | s"),
    "both-features": ("hypernet", BOTH, "dim=4 rank=2 features=both", "J-j S | s"),
    "two-prompts": ("hypernet-joint", BOTH, "dim=4 rank=2 activation=none", "J-j S-s | s"),
    "two-towers": ("towers", BOTH, "dim=4 hidden=8 rank=2 activation=none", "J-j S | s"),
    "layers": ("mlp", BOTH, "dim=4 hidden=8 last=none", "J-j S-s"),
    "difference": ("linear", S, "dim=4", "S-s"),
}
ZERO_SHOT = {f"none@{J}+c": "J", f"none@{J}": "J-j", f"none@{S}": "S-s"}
ENCODER = {"dtype": "float32", "device": "cpu", "pooling": "mean", "normalize": True}


def fit(run_dir: Path, name: str, prompts: str, saved_name: str) -> Any:
    recipe, _, settings, _ = HEADS[name]
    changes = dict(change.split("=") for change in f"batch_size=64 epochs=2 {settings}".split())
    return llmcond.fit_head(run=run_dir, head=recipe, prompt=prompts, set=changes, name=saved_name)


@pytest.fixture(scope="module")
def sample_run(tmp_path_factory: pytest.TempPathFactory, model: str, one_thread: None) -> Path:
    """A run on rows of the sample, with two prompts and all heads. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("views")
    (folder / "data").mkdir()
    for split, count in {"train": 240, "dev": 40, "test": 60}.items():
        lines = (sample_folder() / f"{split}.csv").read_text(encoding="utf-8").splitlines(True)
        (folder / "data" / f"{split}.csv").write_text("".join(lines[: count + 1]), "utf-8")
    options = {"data": folder / "data", "run": folder / "run", "prompt": [J, S], **ENCODER}
    llmcond.extract(model=model, store_dtype="float32", **options)
    for name, (_, prompts, *_) in HEADS.items():
        fit(folder / "run", name, prompts, name)
    return folder / "run"


@pytest.fixture
def run_copy(sample_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sample_run, tmp_path / "copy"))


class ReferenceFeatures:
    """Features that are computed by the encoder itself, and heads applied to them."""

    def __init__(self, folder: Path) -> None:
        self.run = open_run(folder)
        self._encoder = llmcond.load_embedder(folder, "none", prompt=J).encoder

    def features(self, layout: str, rows: Sequence[tuple[str, str]]) -> np.ndarray:
        def vectors(letter: str) -> np.ndarray:
            prompt = self.run.prompt({"J": J, "S": S}[letter.upper()])
            part = prompt.conditional if letter.isupper() else prompt.unconditional
            return self._encoder.encode([part.render(*row) for row in rows])

        return concatenate_features(layout, vectors)

    def embeddings(self, name: str, rows: Sequence[tuple[str, str]]) -> np.ndarray:
        if name in ZERO_SHOT:
            return self.features(ZERO_SHOT[name], rows)
        sentence, _, condition = HEADS[name][-1].partition(" | ")
        head = self.run.load_head(name).head
        conditions = self.features(condition, rows) if condition else None
        return head.transform(self.features(sentence, rows), conditions)

    def similarities(self, name: str, first, second, conditions) -> np.ndarray:
        first, second = (
            self.embeddings(name, list(zip(texts, conditions, strict=True))).astype(np.float64)
            for texts in (first, second)
        )
        return cosines(first, second)


@pytest.fixture(scope="module")
def reference(sample_run: Path) -> ReferenceFeatures:
    return ReferenceFeatures(sample_run)


def test_every_head_is_evaluated_on_the_features_it_takes(capsys, sample_run, reference):
    rows, evaluate = reference.run.rows("test"), ("evaluate", "--run", sample_run)
    evaluated = run_json(capsys, *evaluate, "--predictions", "p.csv")["results"]
    results = {row["name"]: row for row in evaluated}
    predictions = pd.read_csv("p.csv")
    assert list(results) == [*ZERO_SHOT, *HEADS]
    for name, row in results.items():
        expected = reference.similarities(name, rows.sentence1, rows.sentence2, rows.condition)
        predicted = predictions[name].to_numpy()
        np.testing.assert_allclose(predicted, expected, rtol=0, atol=1e-5)
        score = spearmanr(predicted, rows.rating).statistic
        assert row["spearman"] == pytest.approx(score, abs=1e-3)
        recipe, prompts, *_ = HEADS.get(name, ("none", row["prompt"]))
        assert (row["head"], row["prompt"], row["split"]) == (recipe, prompts, "test")
        dim, seed = (4, 0) if name in HEADS else (None, None)
        assert (row["n"], row["dim"], row["seed"]) == (60, dim, seed)
    # Separate features without a head are always subtracted.
    assert [results[name]["subtract"] for name in ZERO_SHOT] == [False, True, True]


TEXTS = [
    ("two men play in the park", "the place"),
    ("three women sit at the beach", "the number of people"),
    ("two men play in the park", "the mood"),
    ("a dog", "the place"),
    ("children read in the kitchen", "the mood"),
    ("children read in the kitchen", "the place"),
]
SENTENCES, CONDITIONS = (list(column) for column in zip(*TEXTS, strict=True))


@pytest.mark.parametrize("name", ["both-features", "two-prompts", f"none@{S}"])
def test_embedding_is_the_head_applied_to_features(monkeypatch, sample_run, reference, name):
    head, _, prompt = name.partition("@")
    expected = reference.embeddings(name, TEXTS)
    monkeypatch.setattr(import_module("llmcond.runs.embedder"), "_BLOCK", 3)
    embedder = llmcond.load_embedder(sample_run, head=head, prompt=prompt or None)
    encoded = embedder.encode(SENTENCES, CONDITIONS, normalize=False)
    np.testing.assert_allclose(encoded, expected, rtol=0, atol=1e-5)
    # One condition for all texts. The second call may use the cached features of the condition.
    indices = [i for i, condition in enumerate(CONDITIONS) if condition == "the place"]
    for _ in range(2):
        vectors = embedder.encode(SENTENCES, "the place", normalize=False)
        np.testing.assert_allclose(vectors[indices], expected[indices], rtol=0, atol=1e-5)
    assert embedder.encode([], "the place").shape == (0, expected.shape[1])
    texts = ["two men play"] * 3, ["dogs sit at the beach"] * 3
    expected = reference.similarities(name, *texts, CONDITIONS[:3])
    values = embedder.similarity(*texts, CONDITIONS[:3])
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)


def test_invalid_arguments_of_fit_head_are_rejected(capsys, sample_run):
    for arguments, expected in (
        (["--head", "hypernet", "--prompt", J], "--prompt separate"),
        (["--head", "hypernet", "--set", "features=both"], f"--prompt separate+{J}"),
        (["--head", "linear", "--prompt", S, "--no-subtract"], "Subtract, or choose a prompt"),
        (["--head", "mlp", "--prompt", f"{S}+{J}+{S}.toml"], "names a prompt twice"),
        (["--head", "mlp", "--prompt", f"{J}++{S}"], f"is '{J}++{S}'; expected names joined by +"),
        (["--head", "hadamard", "--dim", "4"], "Leave out --dim"),
    ):
        before = sorted(sample_run.rglob("*"))
        assert expected in run_rejected(capsys, "fit-head", *arguments, "--run", sample_run)
        assert sorted(sample_run.rglob("*")) == before


def test_order_of_prompts_does_not_change_a_head(run_copy):
    for name in ("both-features", "two-towers"):
        assert fit(run_copy, name, f"{S}+{J}", "turned").to_json()["prompt"] == BOTH
        heads = [open_run(run_copy).load_head(head).head for head in (name, "turned")]
        for key, weights in heads[0].tensors.items():
            np.testing.assert_array_equal(heads[1].tensors[key], weights)
    assert llmcond.load_embedder(run_copy, "layers", prompt=f"{S}+{J}").dim == 4
    for head, prompt, message in (
        ("layers", S, f"was fitted on the prompt {BOTH}, not {S}"),
        ("none", BOTH, "names several prompts, and only a head can concatenate"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            llmcond.load_embedder(run_copy, head, prompt=prompt)


def test_head_is_named_after_its_recipe_and_prompts(capsys, run_copy, model):
    bundled = (llmcond.base.package.bundled_folder("prompts") / f"{J}.toml").read_text()
    Path("c.toml").write_text(bundled.replace("{sentence} {condition}", "{sentence}: {condition}"))
    llmcond.extract(model=model, run=run_copy, prompt=["c.toml"], **ENCODER)
    pca = ("fit-head", "--run", run_copy, "--dim", "4", "--head", "pca", "--prompt")
    # A prompt named c does not collide with the suffix +c for unsubtracted features.
    assert "Name the prompt c first" in run_rejected(capsys, *pca, f"{J}+c")
    assert run_json(capsys, *pca, f"c+{J}")["name"] == f"pca@c+{J}"
    assert run_json(capsys, *pca, J, "--no-subtract")["name"] == f"pca@{J}+c"
    unsubtracted = run_json(capsys, *pca, BOTH, "--no-subtract")
    assert (unsubtracted["name"], unsubtracted["dim_in"]) == (f"pca@{BOTH}+c", 64)


def test_head_without_its_prompts_is_skipped_or_reported(capsys, run_copy):
    path = run_copy / "run.json"
    manifest = json.loads(path.read_text())
    separate = manifest["prompts"].pop(S)
    path.write_text(json.dumps(manifest))
    shutil.rmtree(run_copy / "heads" / "difference")
    assert run(["evaluate", "--run", str(run_copy), "--json"]) == 0
    captured = capsys.readouterr()
    assert f"left out: the head layers of {run_copy} was fitted on the prompt {S}" in captured.err
    rows = json.loads(captured.out)["results"]
    assert [row["name"] for row in rows] == [f"none@{J}+c", f"none@{J}"]
    line = run_rejected(capsys, "evaluate", "--run", run_copy, "--head", "layers")
    assert "is missing" in line
    assert separate["prompt"]["digest"] in line
