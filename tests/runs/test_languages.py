"""Detection of texts in other languages than English, and the line that reports them."""

from pathlib import Path

import pytest

from llmcond.encoders.checkpoints.checkpoint import Checkpoint
from llmcond.encoders.known import find_model
from llmcond.log import log
from llmcond.runs.languages import report_foreign_texts, seems_foreign

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


@pytest.mark.parametrize("text", FOREIGN)
def test_foreign_text_is_recognised(text):
    assert seems_foreign(text)


@pytest.mark.parametrize("text", ENGLISH)
def test_english_text_is_not_foreign(text):
    assert not seems_foreign(text)


@pytest.fixture
def caplog(caplog, monkeypatch):
    caplog.set_level("INFO", logger="llmcond")
    monkeypatch.setattr(log, "propagate", True)
    return caplog


def checkpoint_of(folder, card=None, known=None, base=None):
    if card is not None:
        (folder / "README.md").write_text(card)
    return Checkpoint(
        name="my-encoder", folder=Path(folder), known=find_model(known or ""), base=base
    )


@pytest.mark.parametrize(
    ("known", "card", "is_reported"),
    [
        ("minilm", None, True),
        ("BAAI/bge-m3", "---\nlanguage: en\n---\n", False),
        (None, "---\nlicense: mit\nlanguage: en\ntags: [x]\n---\n# Card", True),
        (None, "---\nlanguage:\n- en\nlicense: mit\n---\n", True),
        (None, "---\nlanguage: [en]\n---\n", True),
        (None, "---\nlanguage:\n- en\n- de\n---\n", False),
        (None, "---\nlanguage: multilingual\n---\n", False),
        (None, "# Card\nlanguage: en\n", False),
        (None, None, False),
    ],
)
def test_only_english_encoders_are_reported(tmp_path, caplog, known, card, is_reported):
    checkpoint = checkpoint_of(tmp_path, card, known)
    report_foreign_texts([*FOREIGN, *ENGLISH], checkpoint)
    trained = checkpoint_of(tmp_path, base=checkpoint)
    report_foreign_texts([*FOREIGN, *ENGLISH], trained)
    assert len(caplog.messages) == 2 * is_reported
    for message in caplog.messages:
        assert message.startswith("18 of 42 texts seem not to be in English, which ")


@pytest.mark.parametrize(
    ("texts", "start"),
    [
        (FOREIGN[:1], "1 of 1 text seems not"),
        (FOREIGN[:1] * 3_000, "1,000 of 1,000 sampled texts seem not"),
        ([*ENGLISH, FOREIGN[0]], None),  # fewer than a tenth
        (["a"] * 30, None),
        ([], None),
    ],
)
def test_foreign_texts_are_counted(tmp_path, caplog, texts, start):
    report_foreign_texts(texts, checkpoint_of(tmp_path, known="minilm"))
    assert [message.startswith(start or "?") for message in caplog.messages] == [True] * bool(start)
