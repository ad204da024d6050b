"""Features that heads take from one prompt or several, in views, commands and lookups."""

import contextlib
import csv
import io
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from helpers.commands import run_json, run_rejected
from helpers.identities import IDENTITY
from helpers.stored import INPUTS, VECTORS, append
from scipy.stats import spearmanr

import llmcond
import llmcond.config
from llmcond.arrays import as_matrix
from llmcond.cli import run
from llmcond.data.datasets import sample_folder
from llmcond.errors import DiskFullError, UserError
from llmcond.evaluation import results
from llmcond.evaluation.paired import bootstrap_metrics
from llmcond.features.store import FeatureStore
from llmcond.features.view import FeatureView, recipe_view
from llmcond.heads import load_recipe
from llmcond.prompts import InputTemplate, Prompt
from llmcond.runs import head_name, open_run

pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp", "few_resamples")


@pytest.fixture(scope="module")
def few_resamples() -> Iterator[None]:
    """Use few resamples for intervals, as these tests do not check the intervals."""

    def bootstrap_few(*arguments, **options):
        *data, resamples = arguments
        return bootstrap_metrics(*data, min(resamples, 20), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "bootstrap_metrics", bootstrap_few)
        yield


# -- every view --------------------------------------------------------------------------------


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
DIM = 4

NO_SEPARATE = (
    r"the head takes separate features, e\(s\) and e\(c\), from one prompt, and {} has {}\. Extract"
)
HAS_JOINT_ONLY = "joint features only"
TAKES_SEPARATE_ONLY = r"takes separate features only, but --prompt {} also names joint features"
CONDITION_IGNORED = "without subtraction the condition would be ignored"
HAS_SEPARATE = "the prompt separate has separate features"
HAS_NO_INPUT = "the head, which takes joint features, has no input"
NEEDS_CONDITION = r"takes e\(c\), but the prompt {} encodes no condition without its sentence"

#: (features, prompts) -> the layouts of four views: with subtraction and without it, each without
#: and with conditions. A layout lists the features of a sentence, which are concatenated, and after
#: a | those of the condition. An error after a ! means that the view is invalid.
VIEWS = {
    ("joint", "J"): ("J-j", "J-j | j", "J", "J | j"),
    ("joint", "S"): ("S-s", f"!{HAS_NO_INPUT}", f"!{CONDITION_IGNORED}", f"!{HAS_NO_INPUT}"),
    ("joint", "JS"): ("J-j S-s", "J-j S-s | s", "J S", "J S | s"),
    ("joint", "SJ"): ("S-s J-j", "S-s J-j | s", "S J", "S J | s"),
    ("joint", "JK"): ("J-j K-k", "J-j K-k | j", "J K", "J K | j"),
    ("separate", "J"): (f"!{NO_SEPARATE.format('joint', HAS_JOINT_ONLY)}",) * 4,
    ("separate", "S"): (f"!{CONDITION_IGNORED}", "S | s", f"!{CONDITION_IGNORED}", "S | s"),
    ("separate", "JS"): (f"!{TAKES_SEPARATE_ONLY.format('joint.separate')}",) * 4,
    ("separate", "SJ"): (f"!{TAKES_SEPARATE_ONLY.format('separate.joint')}",) * 4,
    ("separate", "JK"): (f"!{NO_SEPARATE.format('joint.other', HAS_JOINT_ONLY)}",) * 4,
    ("both", "J"): (f"!{NO_SEPARATE.format('joint', HAS_JOINT_ONLY)}",) * 4,
    ("both", "S"): (f"!{HAS_SEPARATE}", f"!{HAS_NO_INPUT}", f"!{HAS_SEPARATE}", f"!{HAS_NO_INPUT}"),
    ("both", "JS"): ("J-j S", "J-j S | s", "J S", "J S | s"),
    ("both", "SJ"): ("S J-j", "S J-j | s", "S J", "S J | s"),
    ("both", "JK"): (f"!{NO_SEPARATE.format('joint.other', HAS_JOINT_ONLY)}",) * 4,
    # These cover unconditional features of sentences, three prompts, and two separate prompts.
    ("joint", "M"): (
        "M-m",
        f"!{NEEDS_CONDITION.format('middle')}",
        "M",
        f"!{NEEDS_CONDITION.format('middle')}",
    ),
    ("joint", "MJ"): ("M-m J-j", "M-m J-j | j", "M J", "M J | j"),
    ("joint", "KJM"): ("K-k J-j M-m", "K-k J-j M-m | k", "K J M", "K J M | k"),
    ("both", "MS"): ("M-m S", "M-m S | s", "M S", "M S | s"),
    ("both", "JSK"): ("J-j S K-k", "J-j S K-k | s", "J S K", "J S K | s"),
    ("joint", "ST"): ("S-s T-t", f"!{HAS_NO_INPUT}", f"!{CONDITION_IGNORED}", f"!{HAS_NO_INPUT}"),
    ("joint", "SJT"): ("S-s J-j T-t", "S-s J-j T-t | s", "S J T", "S J T | s"),
    ("separate", "ST"): (f"!{NO_SEPARATE.format('separate.texts', '2 prompts with them')}",) * 4,
    ("both", "SJT"): (f"!{NO_SEPARATE.format('separate.joint.texts', '2 prompts with them')}",) * 4,
}
CASES = [
    (features, letters, subtract, conditioned, layout)
    for (features, letters), row in VIEWS.items()
    for (subtract, conditioned), layout in zip(
        itertools.product((True, False), (False, True)), row, strict=True
    )
]
VALID_CASES = [case for case in CASES if not case[-1].startswith("!")]
INVALID_CASES = [case for case in CASES if case[-1].startswith("!")]


def make_view(features: str, letters: str, subtract: bool, conditioned: bool) -> FeatureView:
    return FeatureView(
        tuple(PROMPTS[letter] for letter in letters), subtract, features, conditioned
    )


def concatenate_features(layout: str, vectors: Callable[[str], np.ndarray]) -> np.ndarray:
    """Return the features that a layout such as ``J-j S`` lists, some of them subtracted."""
    terms = [re.fullmatch(r"(\w)(?:-(\w))?", term).groups() for term in layout.split()]
    return np.hstack([vectors(a) - vectors(b) if b else vectors(a) for a, b in terms])


class FeatureReader:
    """A reader of random float16 features that records the letters of those that are read."""

    def __init__(self):
        values = np.random.default_rng(0).normal(size=(2 * len(PROMPTS), len(ROWS), DIM))
        letters = [*PROMPTS, *(letter.lower() for letter in PROMPTS)]
        self.stored = dict(zip(letters, values.astype(np.float16), strict=True))
        self.letters_read = set()

    def __call__(self, prompt, part):
        letter = next(letter for letter, known_prompt in PROMPTS.items() if known_prompt is prompt)
        self.letters_read.add(letter := letter if part == "conditional" else letter.lower())
        return self.stored[letter]

    def concatenate(self, layout):
        return concatenate_features(layout, lambda letter: self.stored[letter].astype(np.float32))


@pytest.mark.parametrize(("features", "letters", "subtract", "conditioned", "layout"), VALID_CASES)
def test_view_returns_features_of_its_prompts(features, letters, subtract, conditioned, layout):
    view, reader = make_view(features, letters, subtract, conditioned), FeatureReader()
    sentence, _, condition = layout.partition(" | ")
    actual = view.sentence_features(reader)
    expected = reader.concatenate(sentence)
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(as_matrix(actual).read(), expected)
    assert (view.condition_features(reader) is not None) == conditioned == bool(condition)
    if condition:
        np.testing.assert_array_equal(view.condition_features(reader), reader.stored[condition])
    assert view.name == "+".join(PROMPTS[letter].name for letter in letters)


@pytest.mark.parametrize(("features", "letters", "subtract", "conditioned", "layout"), VALID_CASES)
def test_view_lists_the_inputs_it_reads(features, letters, subtract, conditioned, layout):
    view, reader = make_view(features, letters, subtract, conditioned), FeatureReader()
    view.sentence_features(reader)
    view.condition_features(reader)
    parts = {
        letter: PROMPTS[letter.upper()].conditional
        if letter.isupper()
        else PROMPTS[letter.upper()].unconditional
        for letter in reader.letters_read
    }
    expected = [part.render(*row) for row in ROWS for part in parts.values()]
    inputs = view.inputs(ROWS)
    assert len(inputs) == len(expected)
    # Each input occurs once, as no two prompts are equal.
    assert sorted(inputs, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize(("features", "letters", "subtract", "conditioned", "error"), INVALID_CASES)
def test_invalid_view_is_rejected(features, letters, subtract, conditioned, error):
    with pytest.raises(UserError, match=error[1:]) as caught:
        make_view(features, letters, subtract, conditioned)
    assert "\n" not in str(caught.value)


def catch_message(case: tuple) -> str:
    with pytest.raises(UserError) as caught:
        make_view(*case[:-1])
    return str(caught.value).replace("llmcond extract --prompt", "extracting")


@pytest.mark.parametrize("case", [case for case in INVALID_CASES if case[3]])
def test_advice_in_errors_is_accepted(case):
    features, letters, subtract, conditioned, error = case
    names = {prompt.name: letter for letter, prompt in PROMPTS.items()} | {"PROMPT": "K"}
    message = catch_message(case).replace(f"--prompt {join_names(letters)} also names", "")
    suggestions = re.findall(r"--prompt ([\w+]+)", message)
    assert bool(suggestions) == ("encodes no condition" not in error)
    for suggestion in suggestions:
        suggested_letters = [names[name] for name in suggestion.split("+")]
        assert len(set(suggested_letters)) == len(suggested_letters)
        make_view(features, "".join(suggested_letters), subtract, conditioned)


def join_names(letters: str) -> str:
    return "+".join(PROMPTS[letter].name for letter in letters)


@pytest.mark.parametrize(
    ("head", "features", "letters", "layout"),
    [
        ("mlp", None, "JS", "J-j S-s"),
        ("pca", None, "S", "S-s"),
        ("hypernet", None, "S", "S | s"),
        ("hypernet", "both", "JS", "J-j S | j"),
        ("hypernet-joint", None, "JK", "J-j K-k | j"),
        ("hypernet-joint", "separate", "S", "S | s"),
        ("hadamard", "joint", "J", "J-j | j"),
        ("concat", None, "S", "S | s"),
        ("hypernet-ablation", "both", "SJ", "S J-j | s"),
    ],
)
def test_recipe_selects_features_of_its_head(head, features, letters, layout):
    recipe, reader = load_recipe(head), FeatureReader()
    if features:
        recipe = recipe.with_settings({"features": features}, "test")
    view = recipe_view(recipe, [PROMPTS[letter] for letter in letters], True)
    sentence, _, condition = layout.partition(" | ")
    np.testing.assert_array_equal(
        as_matrix(view.sentence_features(reader)).read(), reader.concatenate(sentence)
    )
    assert (view.condition_features(reader) is not None) == bool(condition)


def test_heads_of_different_features_have_different_names():
    names = {}
    for features, letters, subtract, conditioned, layout in VALID_CASES:
        name = head_name(
            f"{features}-{conditioned}", make_view(features, letters, subtract, conditioned)
        )
        assert names.setdefault(name, layout) == layout


# -- through the command line ------------------------------------------------------------------

J, S = "concat-sent-cond", "separate"
BOTH = f"{J}+{S}"

#: name -> recipe, prompts, settings, and layout of the features (J and S are the two prompts).
HEADS = {
    "separate-features": ("hypernet", S, "dim=4 rank=2", "S | s"),
    "both-features": ("hypernet", BOTH, "dim=4 rank=2 features=both", "J-j S | j"),
    "two-prompts": ("hypernet-joint", BOTH, "dim=4 rank=2 activation=none", "J-j S-s | j"),
    "one-prompt": ("hypernet-joint", J, "dim=4 rank=0 activation=none", "J-j | j"),
    "concatenated": ("concat", BOTH, "dim=4 features=both", "J-j S | j"),
    "product": ("hadamard", BOTH, "features=both", "J-j S | j"),
    "ablation": ("hypernet-ablation", BOTH, "rank=2 features=both", "J-j S | j"),
    "two-towers": ("towers", BOTH, "dim=4 hidden=8 rank=2 activation=none", "J-j S | j"),
    "layers": ("mlp", BOTH, "dim=4 hidden=8 last=none", "J-j S-s"),
    "difference": ("linear", S, "dim=4", "S-s"),
}
COUNTS = {"train": 240, "dev": 40, "test": 60}


def build_fit_arguments(name: str) -> list[str]:
    recipe, prompts, settings, _ = HEADS[name]
    parts = settings.split()
    dim = [option for part in parts if part[:4] == "dim=" for option in ("--dim", part[4:])]
    rest = [part for part in parts if part[:4] != "dim="]
    options = ["batch_size=64", "epochs=2", *rest]
    return ["fit-head", "--head", recipe, "--prompt", prompts, *dim, "--set", *options]


def run_quietly(*arguments: object) -> dict:
    """Run a command that must succeed, and return its JSON output, without ``capsys``."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run([*map(str, arguments), "--json"]) == 0
    return json.loads(out.getvalue())


@pytest.fixture(scope="module")
def sample_run(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Callable[..., Path],
    one_thread: None,
    few_resamples: None,
) -> SimpleNamespace:
    """A run on rows of the sample, with two prompts and all heads. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("views")
    (folder / "data").mkdir()
    for split, count in COUNTS.items():
        lines = (sample_folder() / f"{split}.csv").read_text(encoding="utf-8").splitlines(True)
        (folder / "data" / f"{split}.csv").write_text("".join(lines[: count + 1]), "utf-8")
    run_dir = folder / "run"
    extract = ["extract", "--model", tiny_checkpoint(), "--data", folder / "data", "--run", run_dir]
    extract += [*ENCODER, "--device", "cpu", "--store-dtype", "float32"]
    extracted = run_quietly(*extract, "--prompt", J, "--prompt", S)
    fitted = {
        name: run_quietly(*build_fit_arguments(name), "--run", run_dir, "--name", name)
        for name in HEADS
    }
    rows = run_quietly("evaluate", "--run", run_dir, "--predictions", folder / "predicted.csv")[
        "results"
    ]
    with (folder / "predicted.csv").open(encoding="utf-8") as stream:
        predicted = list(csv.DictReader(stream))
    sample = SimpleNamespace(
        folder=run_dir, extracted=extracted, fitted=fitted, predicted=predicted
    )
    sample.results = {row["name"]: row for row in rows}
    return sample


ENCODER = ["--dtype", "float32", "--pooling", "mean", "--normalize"]


@pytest.fixture
def run_copy(sample_run: SimpleNamespace, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(sample_run.folder, tmp_path / "copy"))


def read_model(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["encoder"]["model"])


class ReferenceFeatures:
    """Features that are computed by the encoder itself, and heads applied to them."""

    def __init__(self, folder: Path) -> None:
        self.run = open_run(folder)
        self._encoder = llmcond.load_embedder(folder, "none", prompt=J).encoder

    def features(self, layout: str, rows: Sequence[tuple[str, str]]) -> np.ndarray:
        prompts = {"J": self.run.prompt(J), "S": self.run.prompt(S)}

        def vectors(letter: str) -> np.ndarray:
            prompt = prompts[letter.upper()]
            part = prompt.conditional if letter.isupper() else prompt.unconditional
            return self._encoder.encode([part.render(*row) for row in rows])

        return concatenate_features(layout, vectors)

    def embeddings(self, name: str, rows: Sequence[tuple[str, str]]) -> np.ndarray:
        sentence, _, condition = HEADS[name][-1].partition(" | ")
        head = self.run.load_head(name).head
        conditions = self.features(condition, rows) if condition else None
        return head.transform(self.features(sentence, rows), conditions)


def compute_cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    first, second = first.astype(np.float64), second.astype(np.float64)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return np.divide((first * second).sum(axis=1), norms, out=np.zeros(len(norms)), where=norms > 0)


@pytest.fixture(scope="module")
def reference(sample_run: SimpleNamespace) -> ReferenceFeatures:
    return ReferenceFeatures(sample_run.folder)


def test_heads_are_fitted_on_the_features_they_take(sample_run):
    assert set(sample_run.extracted["prompts"]) == {J, S}
    for name, (recipe, prompts, settings, layout) in HEADS.items():
        fitted, dim = sample_run.fitted[name], 32 * len(layout.partition(" | ")[0].split())
        assert (fitted["head"], fitted["prompt"]) == (recipe, prompts)
        assert fitted["dim_in"] == dim
        assert fitted["dim"] == (4 if "dim=4" in settings else dim)
        assert (fitted["n_train"], fitted["n_dev"]) == (COUNTS["train"], COUNTS["dev"])
        record = json.loads((sample_run.folder / "heads" / name / "head.json").read_text())
        assert "+".join(prompt["name"] for prompt in record["prompts"]) == prompts
        assert record["dim_condition"] == (32 if "|" in layout else 0)


def test_head_is_named_after_its_recipe_and_prompts(capsys, run_copy):
    fit = ("fit-head", "--run", run_copy, "--dim", "4")
    mlp = (*fit, "--head", "mlp", "--prompt", BOTH, "--set", "epochs=1")
    assert run_json(capsys, *mlp)["name"] == f"mlp@{BOTH}"
    unsubtracted = run_json(capsys, *mlp, "--no-subtract")
    assert unsubtracted["name"] == f"mlp@{BOTH}+c"
    assert unsubtracted["dim_in"] == 64
    # Separate features have no suffix for subtraction, and --prompt may be left out.
    for options in ([], ["--no-subtract"]):
        hypernet = (*fit, "--head", "hypernet", "--set", "rank=2", "epochs=1", *options)
        summary = run_json(capsys, *hypernet)
        assert (summary["name"], summary["prompt"]) == ("hypernet@separate", S)


ZERO_SHOT = {f"none@{J}+c": "J", f"none@{J}": "J-j", f"none@{S}": "S-s"}


def test_every_head_is_evaluated_on_the_features_it_takes(sample_run, reference):
    rows = reference.run.rows("test")
    assert list(sample_run.results) == [*ZERO_SHOT, *HEADS]
    for name, row in sample_run.results.items():
        first, second = (
            reference.features(ZERO_SHOT[name], texts)
            if name in ZERO_SHOT
            else reference.embeddings(name, texts)
            for texts in (
                list(zip(sentences, rows.condition, strict=True))
                for sentences in (rows.sentence1, rows.sentence2)
            )
        )
        predicted = np.array([float(line[name]) for line in sample_run.predicted])
        np.testing.assert_allclose(predicted, compute_cosines(first, second), rtol=0, atol=1e-5)
        assert row["spearman"] == pytest.approx(
            spearmanr(predicted, rows.rating).statistic, abs=1e-3
        )
        recipe, prompts, *_ = HEADS.get(name, ("none", row["prompt"]))
        assert (row["head"], row["prompt"], row["split"]) == (recipe, prompts, "test")
        fitted = sample_run.fitted.get(name, {"dim": None, "seed": None})
        assert (row["n"], row["dim"], row["seed"]) == (60, fitted["dim"], fitted["seed"])


def test_separate_features_without_head_are_always_subtracted(sample_run):
    rows = [row for row in sample_run.results.values() if row["head"] == "none"]
    assert [(row["prompt"], row["subtract"]) for row in rows] == [(J, False), (J, True), (S, True)]


def test_dev_score_while_fitting_matches_reference(sample_run, reference):
    rows = reference.run.rows("dev")
    for name in HEADS:
        first, second = (
            reference.embeddings(name, list(zip(sentences, rows.condition, strict=True)))
            for sentences in (rows.sentence1, rows.sentence2)
        )
        score = spearmanr(compute_cosines(first, second), rows.rating).statistic
        assert sample_run.fitted[name]["dev_spearman"] == pytest.approx(score, abs=1e-3)


TEXTS = [
    ("two men play in the park", "the place"),
    ("three women sit at the beach", "the number of people"),
    ("two men play in the park", "the mood"),
    ("dogs walk in the rain", "the place"),
    ("a dog", "the place"),
    ("children read in the kitchen", "the mood"),
    ("children read in the kitchen", "the place"),
]
SENTENCES, CONDITIONS = (list(column) for column in zip(*TEXTS, strict=True))


@pytest.mark.matrix
@pytest.mark.parametrize("name", HEADS)
def test_embedding_is_the_head_applied_to_features(
    capsys, monkeypatch, sample_run, run_copy, reference, write_rows, name
):
    data = write_rows(TEXTS, header="sentence,condition")
    embed = ("embed", data, "--run", run_copy, "--head", name, "--no-normalize")
    summary = run_json(capsys, *embed, "--out", "v.npy")
    dim = sample_run.fitted[name]["dim"]
    assert (summary["rows"], summary["dim"], summary["head"]) == (len(TEXTS), dim, name)
    assert summary["prompt"] == HEADS[name][1]
    expected = reference.embeddings(name, TEXTS)
    assert len({row.tobytes() for row in expected.round(4)}) == len(TEXTS)
    np.testing.assert_allclose(np.load("v.npy"), expected, rtol=0, atol=1e-5)

    embedder = llmcond.load_embedder(run_copy, head=name)
    assert embedder.dim == dim
    encoded = embedder.encode(SENTENCES, CONDITIONS, normalize=False)
    np.testing.assert_allclose(encoded, np.load("v.npy"), rtol=0, atol=1e-5)
    # One condition for all texts. The second call may use the cached features of the condition.
    indices = [i for i, condition in enumerate(CONDITIONS) if condition == "the place"]
    for _ in range(2):
        vectors = embedder.encode(SENTENCES, "the place", normalize=False)
        np.testing.assert_allclose(vectors[indices], expected[indices], rtol=0, atol=1e-5)
    assert embedder.encode(SENTENCES[:1], CONDITIONS[:1]).shape == (1, dim)

    monkeypatch.setattr(import_module("llmcond.runs.embedder"), "_BLOCK", 3)
    run_json(capsys, *embed, "--out", "w.parquet")
    stored = np.stack(pq.read_table("w.parquet")["embedding"].to_numpy())
    np.testing.assert_allclose(stored, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_encoding_no_texts_returns_no_rows(sample_run, name):
    embedder = llmcond.load_embedder(sample_run.folder, head=name)
    assert embedder.encode([], "the place").shape == (0, sample_run.fitted[name]["dim"])
    assert embedder.encode([], []).shape == (0, sample_run.fitted[name]["dim"])


@pytest.mark.matrix
@pytest.mark.parametrize("name", HEADS)
def test_similarity_is_the_cosine_of_embeddings(capsys, sample_run, reference, name):
    conditions = ("the place", "the mood", "the number of people")
    texts = ("two men play in the park", "three dogs sit at the beach")
    options = [option for condition in conditions for option in ("--condition", condition)]
    result = run_json(
        capsys, "similarity", *texts, *options, "--run", sample_run.folder, "--head", name
    )
    assert (result["head"], result["prompt"]) == (name, HEADS[name][1])
    first, second = (
        reference.embeddings(name, [(text, condition) for condition in conditions])
        for text in texts
    )
    values = [row["similarity"] for row in result["similarities"]]
    np.testing.assert_allclose(values, compute_cosines(first, second), rtol=0, atol=1e-5)


def test_separate_features_without_head_are_embedded_as_difference(
    capsys, run_copy, reference, write_rows
):
    data = write_rows(TEXTS, header="sentence,condition")
    options = ("--run", run_copy, "--head", "none", "--prompt", S, "--no-normalize")
    assert run_json(capsys, "embed", data, "--out", "v.npy", *options)["dim"] == 32
    np.testing.assert_allclose(
        np.load("v.npy"), reference.features("S-s", TEXTS), rtol=0, atol=1e-5
    )


def test_every_head_scores_other_rows(capsys, run_copy, reference, write_rows):
    people, locations = ("two men", "three women", "children"), ("park", "rain", "kitchen")
    rows = [
        (f"{who} play in the {location}", "two dogs sit on the street", condition, 1 + i % 5)
        for i, (who, location, condition) in enumerate(
            itertools.product(people, locations, ("the place", "the mood"))
        )
    ]
    evaluate = ("evaluate", "--run", run_copy, "--data", write_rows(rows, "other.csv"))
    results = run_json(capsys, *evaluate, "--predictions", "p.csv")["results"]
    assert [row["name"] for row in results] == [*ZERO_SHOT, *HEADS]
    assert {row["n"] for row in results} == {len(rows)}
    with Path("p.csv").open(encoding="utf-8") as stream:
        written = list(csv.DictReader(stream))
    for name in HEADS:
        first, second = (
            reference.embeddings(name, [(row[side], row[2]) for row in rows]) for side in (0, 1)
        )
        predicted = [float(row[name]) for row in written]
        np.testing.assert_allclose(predicted, compute_cosines(first, second), rtol=0, atol=1e-5)


def test_other_rows_are_encoded_for_prompts_of_named_heads(capsys, run_copy, write_rows):
    data = write_rows([("two men", "a dog", "the mood", 1), ("a hat", "a dog", "the place", 4)])
    arguments = ["evaluate", "--run", str(run_copy), "--data", str(data), "--json", "--head"]
    for name, encoded_prompt, skipped_prompt in (
        ("separate-features", S, J),
        ("concatenated", J, "none"),
    ):
        assert run([*arguments, name]) == 0
        captured = capsys.readouterr()
        prompts = {row["prompt"] for row in json.loads(captured.out)["results"]}
        assert prompts == {S, *HEADS[name][1].split("+"), HEADS[name][1]}
        assert f"{encoded_prompt}: " in captured.err
        assert f"{skipped_prompt}: " not in captured.err
    # The second head uses the features that were encoded for the first one.
    assert f"{S}: nothing to encode" in captured.err


def test_evaluating_in_blocks_and_from_disk_changes_no_score(capsys, monkeypatch, sample_run):
    monkeypatch.setattr(import_module("llmcond.runs.examples"), "_BLOCK", 7)
    monkeypatch.setattr("llmcond.features.store._MAX_TABLE_BYTES", 1_000)
    names = ("separate-features", "two-prompts", "two-towers", "layers")
    run_json(
        capsys, "evaluate", "--run", sample_run.folder, "--head", *names, "--predictions", "p.csv"
    )
    with Path("p.csv").open(encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    for name in (*names, *ZERO_SHOT):
        actual, expected = (
            [float(line[name]) for line in rows] for rows in (lines, sample_run.predicted)
        )
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["separate-features", "layers"])
def test_head_can_be_fitted_from_disk(capsys, monkeypatch, sample_run, run_copy, name):
    monkeypatch.setattr("llmcond.features.store._MAX_TABLE_BYTES", 0)
    before = sorted(path for path in (run_copy / "features").rglob("*") if path.is_file())
    fitted = run_json(capsys, *build_fit_arguments(name), "--run", run_copy, "--name", "streamed")
    assert fitted["dim_in"] == sample_run.fitted[name]["dim_in"]
    assert sorted(path for path in (run_copy / "features").rglob("*") if path.is_file()) == before
    first = json.loads((run_copy / "heads" / name / "head.json").read_text())["fit"]["curve"][0]
    second = json.loads((run_copy / "heads/streamed/head.json").read_text())["fit"]["curve"][0]
    # The order of rows differs.
    assert second["loss"] == pytest.approx(first["loss"], rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--head", "hypernet", "--prompt", J], "--prompt separate"),
        (["--head", "hadamard", "--prompt", J], "llmcond extract --prompt separate"),
        (
            ["--head", "hypernet", "--prompt", BOTH],
            "Give --prompt separate, or --set features=both",
        ),
        (["--head", "hypernet", "--set", "features=both"], f"--prompt separate+{J}"),
        (["--head", "hypernet-joint", "--prompt", S], "--prompt PROMPT+separate"),
        (["--head", "linear", "--prompt", S, "--no-subtract"], "Subtract, or choose a prompt"),
        (["--head", "pca", "--prompt", S, "--no-subtract"], "condition would be ignored"),
        (["--head", "mlp", "--prompt", f"{S}+{S}"], "names a prompt twice"),
        (["--head", "mlp", "--prompt", f"{S}+{J}+{S}.toml"], "names a prompt twice"),
        (["--head", "mlp", "--prompt", f"{J}+sepparate"], "Did you mean 'separate'"),
        (["--head", "mlp", "--prompt", f"{J}+cond"], "llmcond extract --model"),
        (["--head", "hypernet", "--set", "rnk=2"], "Did you mean 'rank'"),
        (["--head", "concat", "--set", "hidden=2"], "has no setting 'hidden'"),
        (["--head", "hypernet", "--set", "features=all"], "one of 'separate', 'joint' or 'both'"),
        (["--head", "hypernet", "--set", "transform=yes"], "transform is 'yes', not bool"),
        (["--head", "hypernet", "--dim", "4", "--set", "rank=5"], "has a rank of at most 4"),
        (["--head", "hypernet", "--set", "rank=33"], "has a rank of at most 32"),
        (["--head", "hypernet-ablation", "--set", "rank=0"], "'rank' is 0: it must be at least 1"),
        (["--head", "hadamard", "--dim", "4"], "Leave out --dim"),
        (
            ["--head", "hadamard", "--prompt", BOTH, "--set", "features=both", "transform=false"],
            "64 dimensions and the conditions' 32",
        ),
        (["--head", "mlp", "--prompt", BOTH, "--dim", "65"], "the features have 64"),
    ],
)
def test_invalid_arguments_of_fit_head_are_rejected(capsys, sample_run, arguments, expected):
    before = sorted(sample_run.folder.rglob("*"))
    assert expected in run_rejected(capsys, "fit-head", *arguments, "--run", sample_run.folder)
    assert sorted(sample_run.folder.rglob("*")) == before


def test_error_advises_to_extract_the_separate_prompt(capsys, tiny_run):
    line = run_rejected(capsys, "fit-head", "--head", "hypernet", "--run", tiny_run)
    assert "has joint features only" in line
    assert "llmcond extract --prompt separate" in line
    assert line.endswith("--prompt separate")


def test_towers_take_separate_features_in_any_prompt_order(capsys, run_copy, reference):
    fit = ("fit-head", "--head", "towers", "--run", run_copy, "--dim", "4", "--name", "turned")
    assert f"--prompt {S}+{J}" in run_rejected(capsys, *fit, "--prompt", J)
    settings = ("--set", "hidden=8", "rank=2", "activation=none", "epochs=1")
    assert run_json(capsys, *fit, "--prompt", f"{S}+{J}", *settings)["prompt"] == BOTH
    weights = open_run(run_copy).load_head("turned").head.tensors
    # The first half of an embedding depends on joint features alone.
    first = reference.features("J-j", TEXTS) @ weights["weight1"].T @ weights["weight2"].T
    expected = first / np.linalg.norm(first, axis=1, keepdims=True)
    embedder = llmcond.load_embedder(run_copy, head="turned")
    vectors = embedder.encode(SENTENCES, CONDITIONS, normalize=False)
    np.testing.assert_allclose(vectors[:, :2], expected, rtol=0, atol=1e-5)


def test_prompt_order_does_not_change_a_head(capsys, sample_run, run_copy):
    fit = [*build_fit_arguments("both-features"), "--run", run_copy]
    fit[fit.index(BOTH)] = f"{S}+{J}"
    assert run_json(capsys, *fit)["name"] == f"hypernet@{BOTH}"
    heads = [
        open_run(run_copy).load_head(name).head for name in ("both-features", f"hypernet@{BOTH}")
    ]
    for name, weights in heads[0].tensors.items():
        np.testing.assert_array_equal(heads[1].tensors[name], weights)


def test_order_of_prompts_is_irrelevant_to_head_lookup(capsys, sample_run):
    similarity = ("similarity", "a", "b", "--condition", "the place", "--run", sample_run.folder)
    assert run([*map(str, similarity), "--head", "layers", "--prompt", f"{S}+{J}"]) == 0


def write_small_recipe(head: str) -> str:
    text = (llmcond.bundled.bundled_folder("heads") / f"{head}.toml").read_text()
    text = text.replace("rank = 64", "rank = 2").replace("epochs = 60", "epochs = 2")
    Path("mine.toml").write_text(text)
    return "mine.toml"


@pytest.mark.parametrize(("head", "prompt"), [("hypernet-joint", J), ("hypernet", S)])
def test_heads_with_conditions_are_compared(capsys, run_copy, head, prompt):
    recipe_path = write_small_recipe(head)
    options = ("--run", run_copy, *ENCODER, "--prompts", prompt, "--heads", recipe_path, "--plain")
    options = (*options, "--seeds", 1, "--workers", 1)
    rows = run_json(capsys, "compare-prompts", "--model", read_model(run_copy), *options)["results"]
    results = {row["name"]: row for row in rows if row["head"] == "mine"}
    fit = ("fit-head", "--run", run_copy, "--head", recipe_path, "--prompt", prompt)
    for flags in ([], ["--no-subtract"])[: len(results)]:
        name = run_json(capsys, *fit, *flags)["name"]
        single = run_json(capsys, "evaluate", "--run", run_copy, "--head", name)["results"][-1]
        for score in ("spearman", "pearson", "n", "dim", "prompt", "subtract"):
            assert results[name][score] == pytest.approx(single[score])
    assert set(results) == ({f"mine@{J}", f"mine@{J}+c"} if prompt == J else {f"mine@{S}"})


def test_unsuitable_heads_are_rejected_before_encoding(capsys, run_copy, write_rows, small_rows):
    encoder = ("--model", read_model(run_copy), "--data", write_rows(small_rows), "--run", "fresh")
    heads = ("--prompts", J, "--heads", write_small_recipe("hypernet"))
    line = run_rejected(capsys, "compare-prompts", *encoder, *ENCODER, *heads)
    assert "--prompt separate" in line
    assert not Path("fresh").exists()


def test_prompts_that_differ_from_the_heads_are_rejected(capsys, sample_run):
    similarity = ("similarity", "a", "b", "--condition", "the place", "--run", sample_run.folder)
    line = run_rejected(capsys, *similarity, "--head", "layers", "--prompt", S)
    assert f"was fitted on the prompt {BOTH}, not {S}" in line
    result = run_json(capsys, *similarity, "--head", "layers", "--prompt", BOTH)
    assert result["head"] == "layers"


def test_several_prompts_without_head_get_valid_advice(capsys, sample_run):
    similarity = ("similarity", "a", "b", "--condition", "the place", "--run", sample_run.folder)
    line = run_rejected(capsys, *similarity, "--head", "none", "--prompt", BOTH)
    assert line == (
        f"--prompt {BOTH} names several prompts, and only a head can concatenate their features. "
        "Name one of them, or a fitted --head."
    )


@pytest.mark.parametrize("prompts", [f"{S}+", f"+{S}", f"{J}++{S}"])
def test_plus_without_prompt_is_rejected(capsys, sample_run, prompts):
    fit = ("fit-head", "--head", "mlp", "--run", sample_run.folder, "--prompt", prompts)
    expected = f"--prompt is '{prompts}'; expected names joined by +, such as a+b."
    assert run_rejected(capsys, *fit) == expected


def test_prompt_named_c_does_not_collide_with_suffix_c(capsys, run_copy):
    bundled = (llmcond.bundled.bundled_folder("prompts") / f"{J}.toml").read_text()
    Path("c.toml").write_text(bundled.replace("{sentence} {condition}", "{sentence}: {condition}"))
    extract = ("extract", "--model", read_model(run_copy), "--run", run_copy, *ENCODER)
    run_json(capsys, *extract, "--prompt", "c.toml")
    fit = ("fit-head", "--run", run_copy, "--head", "pca", "--dim", "4", "--prompt")
    assert "Name the prompt c first" in run_rejected(capsys, *fit, f"{J}+c")
    assert run_json(capsys, *fit, f"c+{J}")["name"] == f"pca@c+{J}"
    assert run_json(capsys, *fit, J, "--no-subtract")["name"] == f"pca@{J}+c"


# -- heads on disk -----------------------------------------------------------------------------


def test_head_without_prompts_is_damaged(capsys, run_copy):
    path = run_copy / "heads" / "layers" / "head.json"
    record = json.loads(path.read_text())
    del record["prompts"]
    path.write_text(json.dumps(record))
    assert run(["evaluate", "--run", str(run_copy), "--head", "layers"]) == 1
    assert "the key 'prompts' is missing" in capsys.readouterr().err


def test_head_with_missing_second_prompt_is_skipped(capsys, run_copy):
    path = run_copy / "run.json"
    manifest = json.loads(path.read_text())
    separate = manifest["prompts"].pop(S)
    path.write_text(json.dumps(manifest))
    assert run(["evaluate", "--run", str(run_copy), "--json"]) == 0
    captured = capsys.readouterr()
    assert f"left out: the head layers of {run_copy} was fitted on the prompt {S}" in captured.err
    rows = json.loads(captured.out)["results"]
    assert [row["name"] for row in rows] == [f"none@{J}+c", f"none@{J}", "one-prompt"]
    line = run_rejected(capsys, "evaluate", "--run", run_copy, "--head", "layers")
    assert "is missing" in line
    assert separate["prompt"]["digest"] in line


# -- lookups of vectors ------------------------------------------------------------------------


@pytest.fixture(params=["float16", "float32"])
def store(request, tmp_path):
    feature_store = FeatureStore(tmp_path / "store", IDENTITY, request.param)
    append(feature_store, [7, 3, 11, 0])
    append(feature_store, [19, 5])
    return feature_store


LOOKUP_INDICES = [19, 3, 0, 7, 3, 11, 19, 19, 5]


def check_lookup(store, indices=LOOKUP_INDICES):
    gathered = store.lookup([INPUTS[i] for i in indices])
    table, index = gathered.table.array, gathered.index
    assert table.dtype == np.dtype(store.dtype)
    assert table.shape == (len(set(indices)), VECTORS.shape[1])
    assert len({row.tobytes() for row in table}) == len(table)
    assert index.shape == (len(indices),)
    assert np.issubdtype(index.dtype, np.integer)
    np.testing.assert_array_equal(table[index], VECTORS[indices].astype(store.dtype))
    return table


def list_files(store):
    return sorted(path for path in store.folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("block_size", [1, 2, 65_536])
def test_lookup_returns_distinct_stored_vectors(store, monkeypatch, block_size):
    monkeypatch.setattr("llmcond.features.store._READ_ROWS", block_size)
    assert not isinstance(check_lookup(store), np.memmap)
    check_lookup(store, [5])
    check_lookup(store, [5] * 7)


@pytest.mark.parametrize("block_size", [1, 2, 65_536])
def test_large_tables_are_memory_maps_of_unnamed_files(store, monkeypatch, block_size):
    monkeypatch.setattr("llmcond.features.store._READ_ROWS", block_size)
    size = 6 * VECTORS.shape[1] * np.dtype(store.dtype).itemsize
    monkeypatch.setattr("llmcond.features.store._MAX_TABLE_BYTES", size - 1)
    before, process = list_files(store), psutil.Process()
    opened = process.num_fds()
    table = check_lookup(store)
    assert isinstance(table, np.memmap)
    assert list_files(store) == before
    del table
    assert process.num_fds() <= opened
    assert list_files(store) == before
    monkeypatch.setattr("llmcond.features.store._MAX_TABLE_BYTES", size)
    assert not isinstance(check_lookup(store), np.memmap)


def test_failed_lookup_leaves_no_file(store, monkeypatch):
    monkeypatch.setattr("llmcond.features.store._MAX_TABLE_BYTES", 0)
    monkeypatch.setattr("llmcond.features.store._READ_ROWS", 2)
    before, read_vectors = list_files(store), store._read_vectors

    def fail_after_first_call(positions):
        store._read_vectors = fail
        return read_vectors(positions)

    def fail(positions):
        raise OSError("gone")

    store._read_vectors = fail_after_first_call
    with pytest.raises(OSError, match="gone"):
        store.lookup([INPUTS[i] for i in LOOKUP_INDICES])
    assert list_files(store) == before


def test_memory_map_raises_on_full_disk(store, monkeypatch):
    before = list_files(store)
    usage = SimpleNamespace(free=0)
    monkeypatch.setattr("llmcond.features.location.shutil.disk_usage", lambda folder: usage)
    check_lookup(store)
    monkeypatch.setattr("llmcond.features.store._MAX_TABLE_BYTES", 0)
    with pytest.raises(DiskFullError, match="the disk is full"):
        store.lookup([INPUTS[3]])
    assert list_files(store) == before


def test_lookup_of_missing_inputs_advises_to_extract_again(store):
    with pytest.raises(UserError, match=r"2 of 4 features.*llmcond extract"):
        store.lookup([INPUTS[3], INPUTS[1], INPUTS[19], INPUTS[2]])


def test_empty_lookup_returns_empty_arrays(store):
    gathered = store.lookup([])
    assert (gathered.table.shape, gathered.index.shape) == ((0, 0), (0,))
    assert gathered[:].dtype == np.dtype(store.dtype)
