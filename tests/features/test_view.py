"""What heads see: features of one prompt or of several, from the store to every command."""

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
from helpers.commands import ok, refused
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
    """Few resamples for intervals, which these tests are not about."""

    def few_draws(*arguments):
        *data, resamples = arguments
        return bootstrap_metrics(*data, min(resamples, 20))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "bootstrap_metrics", few_draws)
        yield


# -- every view --------------------------------------------------------------------------------


def prompt(name: str, conditional: str, unconditional: str) -> Prompt:
    return Prompt("", "", InputTemplate(conditional), InputTemplate(unconditional), name=name)


#: By a letter: a capital is what the prompt gives for a sentence, a small one is what is subtracted
#: or is e(c). M subtracts the sentence's own.
PROMPTS = {
    "J": prompt("joint", "{sentence} {condition}", "of {condition}"),
    "K": prompt("other", "{condition}: {sentence}", "under {condition}"),
    "M": prompt("middle", "{sentence}, {condition}", "only {sentence}"),
    "S": prompt("separate", "{sentence}", "{condition}"),
    "T": prompt("texts", "text: {sentence}", "text: {condition}"),
}
ROWS = [("a man", "the place"), ("two dogs", "the mood"), ("a man", "the mood")]
DIM = 4

APART = (
    r"the head takes separate features, e\(s\) and e\(c\), from one prompt, and {} has {}\. Extract"
)
JOINT = "joint features only"
ALONE = r"takes separate features only, but --prompt {} also names joint features"
IGNORED = "without subtraction the condition would be ignored"
SEPARATE = "the prompt separate has separate features"
NOTHING = "the head, which takes joint features, has no input"
SENTENCE = r"takes e\(c\), but the prompt {} encodes no condition without its sentence"

#: (features, prompts) -> what is given, subtracted or not, each without and with conditions: a
#: sentence's features side by side | the condition's; or, with a !, why there is nothing.
VIEWS = {
    ("joint", "J"): ("J-j", "J-j | j", "J", "J | j"),
    ("joint", "S"): ("S-s", f"!{NOTHING}", f"!{IGNORED}", f"!{NOTHING}"),
    ("joint", "JS"): ("J-j S-s", "J-j S-s | s", "J S", "J S | s"),
    ("joint", "SJ"): ("S-s J-j", "S-s J-j | s", "S J", "S J | s"),
    ("joint", "JK"): ("J-j K-k", "J-j K-k | j", "J K", "J K | j"),
    ("separate", "J"): (f"!{APART.format('joint', JOINT)}",) * 4,
    ("separate", "S"): (f"!{IGNORED}", "S | s", f"!{IGNORED}", "S | s"),
    ("separate", "JS"): (f"!{ALONE.format('joint.separate')}",) * 4,
    ("separate", "SJ"): (f"!{ALONE.format('separate.joint')}",) * 4,
    ("separate", "JK"): (f"!{APART.format('joint.other', JOINT)}",) * 4,
    ("both", "J"): (f"!{APART.format('joint', JOINT)}",) * 4,
    ("both", "S"): (f"!{SEPARATE}", f"!{NOTHING}", f"!{SEPARATE}", f"!{NOTHING}"),
    ("both", "JS"): ("J-j S", "J-j S | s", "J S", "J S | s"),
    ("both", "SJ"): ("S J-j", "S J-j | s", "S J", "S J | s"),
    ("both", "JK"): (f"!{APART.format('joint.other', JOINT)}",) * 4,
    # Unconditional features that are the sentence's own, three prompts, and two separate ones.
    ("joint", "M"): ("M-m", f"!{SENTENCE.format('middle')}", "M", f"!{SENTENCE.format('middle')}"),
    ("joint", "MJ"): ("M-m J-j", "M-m J-j | j", "M J", "M J | j"),
    ("joint", "KJM"): ("K-k J-j M-m", "K-k J-j M-m | k", "K J M", "K J M | k"),
    ("both", "MS"): ("M-m S", "M-m S | s", "M S", "M S | s"),
    ("both", "JSK"): ("J-j S K-k", "J-j S K-k | s", "J S K", "J S K | s"),
    ("joint", "ST"): ("S-s T-t", f"!{NOTHING}", f"!{IGNORED}", f"!{NOTHING}"),
    ("joint", "SJT"): ("S-s J-j T-t", "S-s J-j T-t | s", "S J T", "S J T | s"),
    ("separate", "ST"): (f"!{APART.format('separate.texts', '2 prompts with them')}",) * 4,
    ("both", "SJT"): (f"!{APART.format('separate.joint.texts', '2 prompts with them')}",) * 4,
}
CASES = [
    (features, letters, subtract, conditioned, given)
    for (features, letters), row in VIEWS.items()
    for (subtract, conditioned), given in zip(
        itertools.product((True, False), (False, True)), row, strict=True
    )
]
GIVEN = [case for case in CASES if not case[-1].startswith("!")]
REFUSED = [case for case in CASES if case[-1].startswith("!")]


def made(features: str, letters: str, subtract: bool, conditioned: bool) -> FeatureView:
    return FeatureView(
        tuple(PROMPTS[letter] for letter in letters), subtract, features, conditioned
    )


def side_by_side(given: str, vectors: Callable[[str], np.ndarray]) -> np.ndarray:
    """Return what e.g. ``J-j S`` stands for: features side by side, some of them subtracted."""
    sides = [re.fullmatch(r"(\w)(?:-(\w))?", side).groups() for side in given.split()]
    return np.hstack([vectors(a) - vectors(b) if b else vectors(a) for a, b in sides])


class Read:
    """Features as a store has them, in 16 bit, and what was read of them."""

    def __init__(self):
        drawn = np.random.default_rng(0).normal(size=(2 * len(PROMPTS), len(ROWS), DIM))
        letters = [*PROMPTS, *(letter.lower() for letter in PROMPTS)]
        self.stored = dict(zip(letters, drawn.astype(np.float16), strict=True))
        self.read = set()

    def __call__(self, prompt, part):
        letter = next(letter for letter, known in PROMPTS.items() if known is prompt)
        self.read.add(letter := letter if part == "conditional" else letter.lower())
        return self.stored[letter]

    def by_hand(self, text):
        return side_by_side(text, lambda letter: self.stored[letter].astype(np.float32))


@pytest.mark.parametrize(("features", "letters", "subtract", "conditioned", "given"), GIVEN)
def test_a_view_gives_the_features_of_its_prompts(features, letters, subtract, conditioned, given):
    view, read = made(features, letters, subtract, conditioned), Read()
    sentence, _, condition = given.partition(" | ")
    found = view.sentence_features(read)
    expected = read.by_hand(sentence)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(as_matrix(found).read(), expected)
    assert (view.condition_features(read) is not None) == conditioned == bool(condition)
    if condition:
        np.testing.assert_array_equal(view.condition_features(read), read.stored[condition])
    assert view.name == "+".join(PROMPTS[letter].name for letter in letters)


@pytest.mark.parametrize(("features", "letters", "subtract", "conditioned", "given"), GIVEN)
def test_inputs_are_those_that_are_read(features, letters, subtract, conditioned, given):
    view, read = made(features, letters, subtract, conditioned), Read()
    view.sentence_features(read)
    view.condition_features(read)
    parts = {
        letter: PROMPTS[letter.upper()].conditional
        if letter.isupper()
        else PROMPTS[letter.upper()].unconditional
        for letter in read.read
    }
    expected = [part.render(*row) for row in ROWS for part in parts.values()]
    found = view.inputs(ROWS)
    assert len(found) == len(expected)
    # Each part once: those that are there twice would be of two equal prompts.
    assert sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize(("features", "letters", "subtract", "conditioned", "given"), REFUSED)
def test_a_view_that_cannot_be_is_refused(features, letters, subtract, conditioned, given):
    with pytest.raises(UserError, match=given[1:]) as caught:
        made(features, letters, subtract, conditioned)
    assert "\n" not in str(caught.value)


def advice(case: tuple) -> str:
    with pytest.raises(UserError) as caught:
        made(*case[:-1])
    return str(caught.value).replace("llmcond extract --prompt", "extracting")


@pytest.mark.parametrize("case", [case for case in REFUSED if case[3]])
def test_what_a_refusal_advises_is_accepted(case):
    features, letters, subtract, conditioned, given = case
    names = {known.name: letter for letter, known in PROMPTS.items()} | {"PROMPT": "K"}
    told = advice(case).replace(f"--prompt {view_name(letters)} also names", "")
    advised = re.findall(r"--prompt ([\w+]+)", told)
    assert bool(advised) == ("encodes no condition" not in given)
    for prompts in advised:
        chosen = [names[name] for name in prompts.split("+")]
        assert len(set(chosen)) == len(chosen)
        made(features, "".join(chosen), subtract, conditioned)


def view_name(letters: str) -> str:
    return "+".join(PROMPTS[letter].name for letter in letters)


@pytest.mark.parametrize(
    ("head", "features", "letters", "given"),
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
def test_a_recipe_decides_what_its_head_sees(head, features, letters, given):
    recipe, read = load_recipe(head), Read()
    if features:
        recipe = recipe.with_settings({"features": features}, "test")
    view = recipe_view(recipe, [PROMPTS[letter] for letter in letters], True)
    sentence, _, condition = given.partition(" | ")
    np.testing.assert_array_equal(
        as_matrix(view.sentence_features(read)).read(), read.by_hand(sentence)
    )
    assert (view.condition_features(read) is not None) == bool(condition)


def test_heads_of_different_features_have_different_names():
    names = {}
    for features, letters, subtract, conditioned, given in GIVEN:
        name = head_name(
            f"{features}-{conditioned}", made(features, letters, subtract, conditioned)
        )
        assert names.setdefault(name, given) == given


# -- through the command line ------------------------------------------------------------------

J, S = "concat-sent-cond", "separate"
BOTH = f"{J}+{S}"

#: name -> recipe, prompts, settings, and what it sees (J and S are the two prompts).
HEADS = {
    "apart": ("hypernet", S, "dim=4 rank=2", "S | s"),
    "of-both": ("hypernet", BOTH, "dim=4 rank=2 features=both", "J-j S | j"),
    "of-two": ("hypernet-joint", BOTH, "dim=4 rank=2 activation=none", "J-j S-s | j"),
    "of-one": ("hypernet-joint", J, "dim=4 rank=0 activation=none", "J-j | j"),
    "side": ("concat", BOTH, "dim=4 features=both", "J-j S | j"),
    "product": ("hadamard", BOTH, "features=both", "J-j S | j"),
    "ablation": ("hypernet-ablation", BOTH, "rank=2 features=both", "J-j S | j"),
    "two-towers": ("towers", BOTH, "dim=4 hidden=8 rank=2 activation=none", "J-j S | j"),
    "layers": ("mlp", BOTH, "dim=4 hidden=8 last=none", "J-j S-s"),
    "difference": ("linear", S, "dim=4", "S-s"),
}
COUNTS = {"train": 240, "dev": 40, "test": 60}


def fit_arguments(name: str) -> list[str]:
    recipe, prompts, settings, _ = HEADS[name]
    chosen = settings.split()
    dim = [option for part in chosen if part[:4] == "dim=" for option in ("--dim", part[4:])]
    rest = [part for part in chosen if part[:4] != "dim="]
    options = ["batch_size=64", "epochs=2", *rest]
    return ["fit-head", "--head", recipe, "--prompt", prompts, *dim, "--set", *options]


def quietly(*arguments: object) -> dict:
    """Run a command that must succeed with --json, where nobody captures what is printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run([*map(str, arguments), "--json"]) == 0
    return json.loads(out.getvalue())


@pytest.fixture(scope="module")
def sampled(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Callable[..., Path],
    one_thread: None,
    few_resamples: None,
) -> SimpleNamespace:
    """Rows of the sample under two prompts, with one head of each kind. Copy it to change it."""
    folder = tmp_path_factory.mktemp("views")
    (folder / "data").mkdir()
    for split, count in COUNTS.items():
        lines = (sample_folder() / f"{split}.csv").read_text(encoding="utf-8").splitlines(True)
        (folder / "data" / f"{split}.csv").write_text("".join(lines[: count + 1]), "utf-8")
    own = folder / "run"
    extract = ["extract", "--model", tiny_checkpoint(), "--data", folder / "data", "--run", own]
    extract += [*ENCODER, "--device", "cpu", "--store-dtype", "float32"]
    extracted = quietly(*extract, "--prompt", J, "--prompt", S)
    fitted = {name: quietly(*fit_arguments(name), "--run", own, "--name", name) for name in HEADS}
    rows = quietly("evaluate", "--run", own, "--predictions", folder / "predicted.csv")["results"]
    with (folder / "predicted.csv").open(encoding="utf-8") as stream:
        predicted = list(csv.DictReader(stream))
    found = SimpleNamespace(folder=own, extracted=extracted, fitted=fitted, predicted=predicted)
    found.results = {row["name"]: row for row in rows}
    return found


ENCODER = ["--dtype", "float32", "--pooling", "mean", "--normalize"]


@pytest.fixture
def own(sampled: SimpleNamespace, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(sampled.folder, tmp_path / "own"))


def model_of(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["encoder"]["model"])


class ByHand:
    """Features of texts, from the encoder itself, and heads applied to them."""

    def __init__(self, folder: Path) -> None:
        self.run = open_run(folder)
        self._encoder = llmcond.load_embedder(folder, "none", prompt=J).encoder

    def features(self, given: str, rows: Sequence[tuple[str, str]]) -> np.ndarray:
        prompts = {"J": self.run.prompt(J), "S": self.run.prompt(S)}

        def vectors(letter: str) -> np.ndarray:
            of = prompts[letter.upper()]
            part = of.conditional if letter.isupper() else of.unconditional
            return self._encoder.encode([part.render(*row) for row in rows])

        return side_by_side(given, vectors)

    def embeddings(self, name: str, rows: Sequence[tuple[str, str]]) -> np.ndarray:
        sentence, _, condition = HEADS[name][-1].partition(" | ")
        head = self.run.load_head(name).head
        conditions = self.features(condition, rows) if condition else None
        return head.transform(self.features(sentence, rows), conditions)


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    first, second = first.astype(np.float64), second.astype(np.float64)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return np.divide((first * second).sum(axis=1), norms, out=np.zeros(len(norms)), where=norms > 0)


@pytest.fixture(scope="module")
def by_hand(sampled: SimpleNamespace) -> ByHand:
    return ByHand(sampled.folder)


def test_heads_are_fitted_on_the_features_they_take(sampled):
    assert set(sampled.extracted["prompts"]) == {J, S}
    for name, (recipe, prompts, settings, given) in HEADS.items():
        fitted, dim = sampled.fitted[name], 32 * len(given.partition(" | ")[0].split())
        assert (fitted["head"], fitted["prompt"]) == (recipe, prompts)
        assert fitted["dim_in"] == dim
        assert fitted["dim"] == (4 if "dim=4" in settings else dim)
        assert (fitted["n_train"], fitted["n_dev"]) == (COUNTS["train"], COUNTS["dev"])
        record = json.loads((sampled.folder / "heads" / name / "head.json").read_text())
        assert "+".join(prompt["name"] for prompt in record["prompts"]) == prompts
        assert record["dim_condition"] == (32 if "|" in given else 0)


def test_a_head_is_named_after_its_recipe_and_prompts(capsys, own):
    fit = ("fit-head", "--run", own, "--dim", "4")
    mlp = (*fit, "--head", "mlp", "--prompt", BOTH, "--set", "epochs=1")
    assert ok(capsys, *mlp)["name"] == f"mlp@{BOTH}"
    plain = ok(capsys, *mlp, "--no-subtract")
    assert plain["name"] == f"mlp@{BOTH}+c"
    assert plain["dim_in"] == 64
    # Nothing is subtracted from separate features, and the prompt that gives them goes unsaid.
    for options in ([], ["--no-subtract"]):
        hypernet = (*fit, "--head", "hypernet", "--set", "rank=2", "epochs=1", *options)
        found = ok(capsys, *hypernet)
        assert (found["name"], found["prompt"]) == ("hypernet@separate", S)


ZERO_SHOT = {f"none@{J}+c": "J", f"none@{J}": "J-j", f"none@{S}": "S-s"}


def test_every_head_is_evaluated_on_the_features_it_takes(sampled, by_hand):
    rows = by_hand.run.rows("test")
    assert list(sampled.results) == [*ZERO_SHOT, *HEADS]
    for name, row in sampled.results.items():
        first, second = (
            by_hand.features(ZERO_SHOT[name], texts)
            if name in ZERO_SHOT
            else by_hand.embeddings(name, texts)
            for texts in (
                list(zip(sentences, rows.condition, strict=True))
                for sentences in (rows.sentence1, rows.sentence2)
            )
        )
        predicted = np.array([float(line[name]) for line in sampled.predicted])
        np.testing.assert_allclose(predicted, cosines(first, second), rtol=0, atol=1e-5)
        assert row["spearman"] == pytest.approx(
            spearmanr(predicted, rows.rating).statistic, abs=1e-3
        )
        recipe, prompts, *_ = HEADS.get(name, ("none", row["prompt"]))
        assert (row["head"], row["prompt"], row["split"]) == (recipe, prompts, "test")
        fitted = sampled.fitted.get(name, {"dim": None, "seed": None})
        assert (row["n"], row["dim"], row["seed"]) == (60, fitted["dim"], fitted["seed"])


def test_separate_features_are_compared_as_they_are_with_subtraction_only(sampled):
    rows = [row for row in sampled.results.values() if row["head"] == "none"]
    assert [(row["prompt"], row["subtract"]) for row in rows] == [(J, False), (J, True), (S, True)]


def test_dev_is_scored_while_fitting_as_by_hand(sampled, by_hand):
    rows = by_hand.run.rows("dev")
    for name in HEADS:
        first, second = (
            by_hand.embeddings(name, list(zip(sentences, rows.condition, strict=True)))
            for sentences in (rows.sentence1, rows.sentence2)
        )
        score = spearmanr(cosines(first, second), rows.rating).statistic
        assert sampled.fitted[name]["dev_spearman"] == pytest.approx(score, abs=1e-3)


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
def test_an_embedding_is_the_head_applied_to_features(
    capsys, monkeypatch, sampled, own, by_hand, write_rows, name
):
    data = write_rows(TEXTS, header="sentence,condition")
    embed = ("embed", data, "--run", own, "--head", name, "--no-normalize")
    summary = ok(capsys, *embed, "--out", "v.npy")
    dim = sampled.fitted[name]["dim"]
    assert (summary["rows"], summary["dim"], summary["head"]) == (len(TEXTS), dim, name)
    assert summary["prompt"] == HEADS[name][1]
    expected = by_hand.embeddings(name, TEXTS)
    assert len({row.tobytes() for row in expected.round(4)}) == len(TEXTS)
    np.testing.assert_allclose(np.load("v.npy"), expected, rtol=0, atol=1e-5)

    embedder = llmcond.load_embedder(own, head=name)
    assert embedder.dim == dim
    encoded = embedder.encode(SENTENCES, CONDITIONS, normalize=False)
    np.testing.assert_allclose(encoded, np.load("v.npy"), rtol=0, atol=1e-5)
    # One condition for all; the second time what was made of it may have been kept.
    places = [i for i, condition in enumerate(CONDITIONS) if condition == "the place"]
    for _ in range(2):
        one = embedder.encode(SENTENCES, "the place", normalize=False)
        np.testing.assert_allclose(one[places], expected[places], rtol=0, atol=1e-5)
    assert embedder.encode(SENTENCES[:1], CONDITIONS[:1]).shape == (1, dim)

    monkeypatch.setattr(import_module("llmcond.workflows.embed"), "_BLOCK", 3)
    ok(capsys, *embed, "--out", "w.parquet")
    stored = np.stack(pq.read_table("w.parquet")["embedding"].to_numpy())
    np.testing.assert_allclose(stored, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_no_texts_have_no_embeddings(sampled, name):
    embedder = llmcond.load_embedder(sampled.folder, head=name)
    assert embedder.encode([], "the place").shape == (0, sampled.fitted[name]["dim"])
    assert embedder.encode([], []).shape == (0, sampled.fitted[name]["dim"])


@pytest.mark.matrix
@pytest.mark.parametrize("name", HEADS)
def test_similarity_is_the_cosine_of_embeddings(capsys, sampled, by_hand, name):
    conditions = ("the place", "the mood", "the number of people")
    texts = ("two men play in the park", "three dogs sit at the beach")
    options = [option for condition in conditions for option in ("--condition", condition)]
    found = ok(capsys, "similarity", *texts, *options, "--run", sampled.folder, "--head", name)
    assert (found["head"], found["prompt"]) == (name, HEADS[name][1])
    first, second = (
        by_hand.embeddings(name, [(text, condition) for condition in conditions]) for text in texts
    )
    values = [row["similarity"] for row in found["similarities"]]
    np.testing.assert_allclose(values, cosines(first, second), rtol=0, atol=1e-5)


def test_separate_features_without_a_head_are_embedded_as_their_difference(
    capsys, own, by_hand, write_rows
):
    data = write_rows(TEXTS, header="sentence,condition")
    options = ("--run", own, "--head", "none", "--prompt", S, "--no-normalize")
    assert ok(capsys, "embed", data, "--out", "v.npy", *options)["dim"] == 32
    np.testing.assert_allclose(np.load("v.npy"), by_hand.features("S-s", TEXTS), rtol=0, atol=1e-5)


def test_other_rows_are_scored_by_every_head(capsys, own, by_hand, write_rows):
    people, places = ("two men", "three women", "children"), ("park", "rain", "kitchen")
    rows = [
        (f"{who} play in the {where}", "two dogs sit on the street", condition, 1 + i % 5)
        for i, (who, where, condition) in enumerate(
            itertools.product(people, places, ("the place", "the mood"))
        )
    ]
    evaluate = ("evaluate", "--run", own, "--data", write_rows(rows, "other.csv"))
    results = ok(capsys, *evaluate, "--predictions", "p.csv")["results"]
    assert [row["name"] for row in results] == [*ZERO_SHOT, *HEADS]
    assert {row["n"] for row in results} == {len(rows)}
    with Path("p.csv").open(encoding="utf-8") as stream:
        written = list(csv.DictReader(stream))
    for name in HEADS:
        first, second = (
            by_hand.embeddings(name, [(row[side], row[2]) for row in rows]) for side in (0, 1)
        )
        predicted = [float(row[name]) for row in written]
        np.testing.assert_allclose(predicted, cosines(first, second), rtol=0, atol=1e-5)


def test_other_rows_are_encoded_for_the_prompts_of_the_heads_that_are_named(
    capsys, own, write_rows
):
    data = write_rows([("two men", "a dog", "the mood", 1), ("a hat", "a dog", "the place", 4)])
    arguments = ["evaluate", "--run", str(own), "--data", str(data), "--json", "--head"]
    for name, told, untold in (("apart", S, J), ("side", J, "none")):
        assert run([*arguments, name]) == 0
        captured = capsys.readouterr()
        prompts = {row["prompt"] for row in json.loads(captured.out)["results"]}
        assert prompts == {S, *HEADS[name][1].split("+"), HEADS[name][1]}
        assert f"{told}: " in captured.err
        assert f"{untold}: " not in captured.err
    # What was encoded for the first head is there for the second one.
    assert f"{S}: nothing to encode" in captured.err


def test_evaluating_in_blocks_and_from_disk_changes_nothing(capsys, monkeypatch, sampled):
    monkeypatch.setattr(import_module("llmcond.runs.predictors"), "_BLOCK", 7)
    monkeypatch.setattr("llmcond.features.store._MAX_TABLE_BYTES", 1_000)
    names = ("apart", "of-two", "two-towers", "layers")
    ok(capsys, "evaluate", "--run", sampled.folder, "--head", *names, "--predictions", "p.csv")
    with Path("p.csv").open(encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    for name in (*names, *ZERO_SHOT):
        found, before = ([float(line[name]) for line in x] for x in (lines, sampled.predicted))
        np.testing.assert_allclose(found, before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["apart", "layers"])
def test_a_head_can_be_fitted_from_disk(capsys, monkeypatch, sampled, own, name):
    monkeypatch.setattr("llmcond.features.store._MAX_TABLE_BYTES", 0)
    before = sorted(path for path in (own / "features").rglob("*") if path.is_file())
    fitted = ok(capsys, *fit_arguments(name), "--run", own, "--name", "streamed")
    assert fitted["dim_in"] == sampled.fitted[name]["dim_in"]
    assert sorted(path for path in (own / "features").rglob("*") if path.is_file()) == before
    first = json.loads((own / "heads" / name / "head.json").read_text())["fit"]["curve"][0]
    second = json.loads((own / "heads/streamed/head.json").read_text())["fit"]["curve"][0]
    # In another order of rows.
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
def test_heads_that_cannot_be_fitted(capsys, sampled, arguments, expected):
    before = sorted(sampled.folder.rglob("*"))
    assert expected in refused(capsys, "fit-head", *arguments, "--run", sampled.folder)
    assert sorted(sampled.folder.rglob("*")) == before


def test_a_run_without_the_separate_prompt_is_told_to_extract_it(capsys, tiny_run):
    line = refused(capsys, "fit-head", "--head", "hypernet", "--run", tiny_run)
    assert "has joint features only" in line
    assert "llmcond extract --prompt separate" in line
    assert line.endswith("--prompt separate")


def test_towers_see_separate_features_wherever_their_prompt_is_named(capsys, own, by_hand):
    fit = ("fit-head", "--head", "towers", "--run", own, "--dim", "4", "--name", "turned")
    assert f"--prompt {S}+{J}" in refused(capsys, *fit, "--prompt", J)
    settings = ("--set", "hidden=8", "rank=2", "activation=none", "epochs=1")
    assert ok(capsys, *fit, "--prompt", f"{S}+{J}", *settings)["prompt"] == BOTH
    weights = open_run(own).load_head("turned").head.tensors
    # The first half of an embedding is of joint features alone.
    first = by_hand.features("J-j", TEXTS) @ weights["weight1"].T @ weights["weight2"].T
    expected = first / np.linalg.norm(first, axis=1, keepdims=True)
    embedder = llmcond.load_embedder(own, head="turned")
    found = embedder.encode(SENTENCES, CONDITIONS, normalize=False)
    np.testing.assert_allclose(found[:, :2], expected, rtol=0, atol=1e-5)


def test_prompts_in_another_order_are_the_same(capsys, sampled, own):
    fit = [*fit_arguments("of-both"), "--run", own]
    fit[fit.index(BOTH)] = f"{S}+{J}"
    assert ok(capsys, *fit)["name"] == f"hypernet@{BOTH}"
    heads = [open_run(own).load_head(name).head for name in ("of-both", f"hypernet@{BOTH}")]
    for name, weights in heads[0].tensors.items():
        np.testing.assert_array_equal(heads[1].tensors[name], weights)


def test_a_head_is_found_by_its_prompts_in_another_order(capsys, sampled):
    similarity = ("similarity", "a", "b", "--condition", "the place", "--run", sampled.folder)
    assert run([*map(str, similarity), "--head", "layers", "--prompt", f"{S}+{J}"]) == 0


def small_recipe(head: str) -> str:
    recipe = (llmcond.bundled.bundled_folder("heads") / f"{head}.toml").read_text()
    recipe = recipe.replace("rank = 64", "rank = 2").replace("epochs = 60", "epochs = 2")
    Path("mine.toml").write_text(recipe)
    return "mine.toml"


@pytest.mark.parametrize(("head", "prompt"), [("hypernet-joint", J), ("hypernet", S)])
def test_heads_with_conditions_are_compared(capsys, own, head, prompt):
    mine = small_recipe(head)
    options = ("--run", own, *ENCODER, "--prompts", prompt, "--heads", mine, "--plain")
    options = (*options, "--seeds", 1, "--workers", 1)
    rows = ok(capsys, "compare-prompts", "--model", model_of(own), *options)["results"]
    found = {row["name"]: row for row in rows if row["head"] == "mine"}
    fit = ("fit-head", "--run", own, "--head", mine, "--prompt", prompt)
    for extra in ([], ["--no-subtract"])[: len(found)]:
        name = ok(capsys, *fit, *extra)["name"]
        single = ok(capsys, "evaluate", "--run", own, "--head", name)["results"][-1]
        for score in ("spearman", "pearson", "n", "dim", "prompt", "subtract"):
            assert found[name][score] == pytest.approx(single[score])
    assert set(found) == ({f"mine@{J}", f"mine@{J}+c"} if prompt == J else {f"mine@{S}"})


def test_heads_that_no_prompt_suits_are_not_compared_before_anything_is_encoded(
    capsys, own, write_rows, small_rows
):
    encoder = ("--model", model_of(own), "--data", write_rows(small_rows), "--run", "fresh")
    heads = ("--prompts", J, "--heads", small_recipe("hypernet"))
    line = refused(capsys, "compare-prompts", *encoder, *ENCODER, *heads)
    assert "--prompt separate" in line
    assert not Path("fresh").exists()


def test_the_prompts_of_a_head_are_not_those_of_another(capsys, sampled):
    similarity = ("similarity", "a", "b", "--condition", "the place", "--run", sampled.folder)
    line = refused(capsys, *similarity, "--head", "layers", "--prompt", S)
    assert f"was fitted on the prompt {BOTH}, not {S}" in line
    found = ok(capsys, *similarity, "--head", "layers", "--prompt", BOTH)
    assert found["head"] == "layers"


def test_several_prompts_without_a_head_are_refused_with_advice_that_helps(capsys, sampled):
    similarity = ("similarity", "a", "b", "--condition", "the place", "--run", sampled.folder)
    line = refused(capsys, *similarity, "--head", "none", "--prompt", BOTH)
    assert f"--prompt {BOTH} --run" not in line


@pytest.mark.parametrize("prompts", [f"{S}+", f"+{S}", f"{J}++{S}"])
def test_a_plus_without_a_prompt_is_refused_as_such(capsys, sampled, prompts):
    fit = ("fit-head", "--head", "mlp", "--run", sampled.folder, "--prompt", prompts)
    assert "the prompt ''" not in refused(capsys, *fit)


def test_a_prompt_called_c_makes_no_names_collide(capsys, own):
    bundled = (llmcond.bundled.bundled_folder("prompts") / f"{J}.toml").read_text()
    Path("c.toml").write_text(bundled.replace("{sentence} {condition}", "{sentence}: {condition}"))
    extract = ("extract", "--model", model_of(own), "--run", own, *ENCODER)
    ok(capsys, *extract, "--prompt", "c.toml")
    fit = ("fit-head", "--run", own, "--head", "pca", "--dim", "4", "--prompt")
    assert "Name the prompt c first" in refused(capsys, *fit, f"{J}+c")
    assert ok(capsys, *fit, f"c+{J}")["name"] == f"pca@c+{J}"
    assert ok(capsys, *fit, J, "--no-subtract")["name"] == f"pca@{J}+c"


# -- heads on disk -----------------------------------------------------------------------------


def test_heads_saved_when_they_had_one_prompt_are_loaded(capsys, own):
    ok(capsys, "fit-head", "--run", own, "--head", "mlp", "--prompt", J, "--set", "epochs=1")
    names = ("difference", f"mlp@{J}")
    before = ok(capsys, "evaluate", "--run", own, "--head", *names)["results"]
    for name in names:
        path = own / "heads" / name / "head.json"
        record = json.loads(path.read_text())
        (record["prompt"],) = record.pop("prompts")
        for key in ("features", "dim_condition"):
            del record[key]
        known = ("dim", "hidden", "dropout", "learning_rate", "batch_size", "epochs", "patience")
        settings = record["settings"]
        record["settings"] = {key: settings[key] for key in known if key in settings}
        path.write_text(json.dumps(record))
    assert ok(capsys, "evaluate", "--run", own, "--head", *names)["results"] == before
    similarity = ("similarity", "two men", "a dog", "--condition", "the place", "--run", own)
    assert ok(capsys, *similarity, "--head", "difference")["prompt"] == S


def test_a_head_without_any_prompt_is_damaged(capsys, own):
    path = own / "heads" / "layers" / "head.json"
    record = json.loads(path.read_text())
    del record["prompts"]
    path.write_text(json.dumps(record))
    assert run(["evaluate", "--run", str(own), "--head", "layers"]) == 1
    assert "the key 'prompts' is missing" in capsys.readouterr().err


def test_a_head_whose_second_prompt_is_gone_is_left_out(capsys, own):
    path = own / "run.json"
    manifest = json.loads(path.read_text())
    separate = manifest["prompts"].pop(S)
    path.write_text(json.dumps(manifest))
    assert run(["evaluate", "--run", str(own), "--json"]) == 0
    captured = capsys.readouterr()
    assert f"left out: the head layers of {own} was fitted on the prompt {S}" in captured.err
    rows = json.loads(captured.out)["results"]
    assert [row["name"] for row in rows] == [f"none@{J}+c", f"none@{J}", "of-one"]
    line = refused(capsys, "evaluate", "--run", own, "--head", "layers")
    assert "is missing" in line
    assert separate["prompt"]["digest"] in line


# -- looking vectors up ------------------------------------------------------------------------


@pytest.fixture(params=["float16", "float32"])
def store(request, tmp_path):
    found = FeatureStore(tmp_path / "store", IDENTITY, request.param)
    append(found, [7, 3, 11, 0])
    append(found, [19, 5])
    return found


ASKED = [19, 3, 0, 7, 3, 11, 19, 19, 5]


def check_lookup(store, asked=ASKED):
    gathered = store.lookup([INPUTS[i] for i in asked])
    table, index = gathered.table.array, gathered.index
    assert table.dtype == np.dtype(store.dtype)
    assert table.shape == (len(set(asked)), VECTORS.shape[1])
    assert len({row.tobytes() for row in table}) == len(table)
    assert index.shape == (len(asked),)
    assert np.issubdtype(index.dtype, np.integer)
    np.testing.assert_array_equal(table[index], VECTORS[asked].astype(store.dtype))
    return table


def files(store):
    return sorted(path for path in store.folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("at_once", [1, 2, 65_536])
def test_looked_up_vectors_are_the_distinct_ones_as_they_are_stored(store, monkeypatch, at_once):
    monkeypatch.setattr("llmcond.features.store._READ_ROWS", at_once)
    assert not isinstance(check_lookup(store), np.memmap)
    check_lookup(store, [5])
    check_lookup(store, [5] * 7)


@pytest.mark.parametrize("at_once", [1, 2, 65_536])
def test_large_tables_are_memory_maps_of_files_without_a_name(store, monkeypatch, at_once):
    monkeypatch.setattr("llmcond.features.store._READ_ROWS", at_once)
    size = 6 * VECTORS.shape[1] * np.dtype(store.dtype).itemsize
    monkeypatch.setattr("llmcond.features.store._MAX_TABLE_BYTES", size - 1)
    before, process = files(store), psutil.Process()
    opened = process.num_fds()
    table = check_lookup(store)
    assert isinstance(table, np.memmap)
    assert files(store) == before
    del table
    assert process.num_fds() <= opened
    assert files(store) == before
    monkeypatch.setattr("llmcond.features.store._MAX_TABLE_BYTES", size)
    assert not isinstance(check_lookup(store), np.memmap)


def test_a_lookup_that_fails_leaves_no_file(store, monkeypatch):
    monkeypatch.setattr("llmcond.features.store._MAX_TABLE_BYTES", 0)
    monkeypatch.setattr("llmcond.features.store._READ_ROWS", 2)
    before, read = files(store), store._read_vectors

    def once(places):
        store._read_vectors = fails
        return read(places)

    def fails(places):
        raise OSError("gone")

    store._read_vectors = once
    with pytest.raises(OSError, match="gone"):
        store.lookup([INPUTS[i] for i in ASKED])
    assert files(store) == before


def test_a_memory_map_without_room_is_refused(store, monkeypatch):
    before = files(store)
    nothing = SimpleNamespace(free=0)
    monkeypatch.setattr("llmcond.features.location.shutil.disk_usage", lambda folder: nothing)
    check_lookup(store)
    monkeypatch.setattr("llmcond.features.store._MAX_TABLE_BYTES", 0)
    with pytest.raises(DiskFullError, match="the disk is full"):
        store.lookup([INPUTS[3]])
    assert files(store) == before


def test_looking_up_what_is_not_there_says_to_extract_again(store):
    with pytest.raises(UserError, match=r"2 of 4 features.*llmcond extract"):
        store.lookup([INPUTS[3], INPUTS[1], INPUTS[19], INPUTS[2]])


def test_looking_nothing_up_gives_nothing(store):
    gathered = store.lookup([])
    assert (gathered.table.shape, gathered.index.shape) == ((0, 0), (0,))
    assert gathered[:].dtype == np.dtype(store.dtype)
