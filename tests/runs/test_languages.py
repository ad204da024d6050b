"""Notes about texts: those in other languages than English, and those that train has as well."""

from pathlib import Path

import pytest
from helpers.commands import read_csv, run_json
from scipy.stats import spearmanr

from llmcond.base.output import log
from llmcond.cli import run
from llmcond.data.datasets import read_dataset
from llmcond.encoders.checkpoint import Checkpoint
from llmcond.encoders.settings import find_model
from llmcond.runs.rated import log_rows
from llmcond.runs.similarity import report_foreign_texts, seems_foreign

FOREIGN = (
    "Wo ist mein Paket?", "Où est mon colis ?", "¿Dónde está mi paquete?", "Dov'è il mio pacco?",
    "Onde está o meu pacote?", "Waar is mijn pakket?", "Gdzie jest moja paczka?",
    "Batarya bozuk ve çok ısınıyor.", "Gói hàng của tôi ở đâu?", "Var är mitt paket?",
    "मेरा पैकेट कहाँ है?", "我的包裹在哪里?", "荷物はどこですか", "Где моя посылка?", "أين طردي؟",
    "พัสดุของฉันอยู่ที่ไหน", "내 소포는 어디에 있나요?", "Πού είναι το πακέτο μου;",
)  # fmt: skip
ENGLISH = (
    "Where is my parcel?", "asdf qwer", "12345", "", "😀😀😀 great!", "José García", "Real Madrid",
    "François Müller from Zürich", "Oscar de la Renta", "flights from LA to San Juan", "GmbH",
    "I ate pão de queijo in São Paulo", "Kraków and Łódź are cities in Poland", "π ≈ 3.14159",
    "SELECT * FROM orders WHERE id = 4;", "def der(das): return ist_nicht", "Schadenfreude",
    "The word 'спасибо' means thanks", "see https://x.de/und/das/ist", "Ludwig van Beethoven",
    "<p class='der das'>fine</p>", "Order ACME-4711-X was late", "Das Boot", "(╯°□°）╯︵ ┻━┻",
)  # fmt: skip


def test_foreign_texts_are_recognised():
    assert [text for text in FOREIGN if not seems_foreign(text)] == []
    assert [text for text in ENGLISH if seems_foreign(text)] == []


@pytest.fixture
def messages(caplog, monkeypatch, tmp_path):
    """Return a function that reports texts for an encoder with a card, and returns the messages."""
    caplog.set_level("INFO", logger="llmcond")
    monkeypatch.setattr(log, "propagate", True)

    def report(texts, known="", card=None):
        caplog.clear()
        (tmp_path / "README.md").write_text(card or "")
        model = find_model(known)
        encoder = Checkpoint(name="my-encoder", folder=tmp_path, known=model, base=None)
        report_foreign_texts(texts, encoder)
        # An encoder that is trained from it has no card of its own.
        (tmp_path / "trained").mkdir(exist_ok=True)
        trained = Checkpoint(name="x", folder=tmp_path / "trained", known=None, base=encoder)
        report_foreign_texts(texts, trained)
        return caplog.messages

    return report


def test_only_english_encoders_are_reported(messages):
    for known, card, is_reported in (
        ("minilm", None, True),
        ("BAAI/bge-m3", "---\nlanguage: en\n---\n", False),
        ("", "---\nlicense: mit\nlanguage: en\ntags: [x]\n---\n# Card", True),
        ("", "---\nlanguage:\n- en\nlicense: mit\n---\n", True),
        ("", "---\nlanguage:\n- en\n- de\n---\n", False),
        ("", "---\nlanguage: multilingual\n---\n", False),
        ("", "# Card\nlanguage: en\n", False),
        ("", None, False),
    ):
        lines = messages([*FOREIGN, *ENGLISH], known, card)
        start = "18 of 42 texts seem not to be in English, which "
        assert [line.startswith(start) for line in lines] == [True] * 2 * is_reported
    assert messages([*ENGLISH, FOREIGN[0]], "minilm") == []  # fewer than a tenth
    (message, _) = messages(FOREIGN[:1] * 3_000, "minilm")
    assert message.startswith("1,000 of 1,000 sampled texts seem not")


# -- rows that share a sentence with train -----------------------------------------------------


@pytest.fixture
def splits(in_tmp, small_rows, write_rows):
    """Write splits in which 8 of 40 rows of dev have the first sentence of train; return train."""
    train, dev = small_rows[:40], list(small_rows[40:])
    dev[::5] = [(train[0][0].upper(), *row[1:]) for row in dev[::5]]
    write_rows(train, "data/train.csv")
    write_rows(dev, "data/dev.csv")
    return train


def test_unseen_sentences_are_scored_separately(
    splits, capsys, caplog, model, small_rows, write_rows
):
    train = splits
    words = ("--data", "data", "--prompt", "concat-sent-cond", "--pooling", "mean", "--run", "r")
    assert run(["extract", "--model", model, *words]) == 0
    messages = capsys.readouterr().err
    assert "sentence pairs of dev are also in train" not in messages
    assert "dev: 8 of 40 rated rows share a sentence with train" in messages
    evaluate = ("evaluate", "--run", "r", "--head", "none")
    result, _ = run_json(capsys, *evaluate, "--predictions", "p.csv")["results"]
    unseen = [row for row in read_csv("p.csv") if row["sentence1"] != train[0][0].upper()]
    assert (result["n_unseen_sentences"], len(unseen)) == (32, 32)
    predictions, ratings = (
        [float(row[key]) for row in unseen] for key in (result["name"], "rating")
    )
    scores = result["unseen_sentences"]
    expected = spearmanr(predictions, ratings).statistic
    assert scores["spearman"] == pytest.approx(expected, abs=1e-3)
    assert scores["n_pairs"] < result["n_pairs"]
    low, high = scores["spearman_ci"]
    assert low < scores["spearman"] < high
    # All sentences of train are known, and so are those of another file with the same pairs.
    assert "unseen_sentences" not in run_json(capsys, *evaluate, "--split", "train")["results"][0]
    rows = [(a, b, "the weather", 3 + i % 2) for i, (a, b, *_) in enumerate(train)]
    known = run_json(capsys, *evaluate, "--data", write_rows(rows, "data/known.csv"))["results"][0]
    assert (known["n_unseen_sentences"], known["unseen_sentences"]["spearman"]) == (0, None)
    # A pair that is in both splits causes a warning.
    Path("data/known.csv").unlink()
    write_rows(small_rows[38:], "data/dev.csv")
    caplog.clear()
    log_rows(read_dataset("data"))
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "1 sentence pair of dev is also in train" in warning
    assert "remove their rows from one of the splits" in warning
