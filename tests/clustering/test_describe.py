"""Names and typical texts of clusters, in many scripts and with markup."""

import numpy as np
import pytest

from llmcond.clustering.describe import describe_clusters


def describe(*groups):
    """Describe clusters of these texts; the first text of a group is the nearest to the centre."""
    texts = [text for group in groups for text in group]
    labels = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    distances = [i for group in groups for i in range(len(group))]
    vectors = np.array([[d * (-1) ** d] for d in distances], dtype=np.float32)
    return describe_clusters(texts, vectors, labels)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        pytest.param(
            ("किताब बहुत अच्छी है", "यह किताब मुझे पसंद आई", "किताब की कहानी लंबी है"),
            ("बिजली का बिल ज़्यादा आया", "बिजली चली गई", "बिजली विभाग ने बिल भेजा"),
            ("किताब", "बिजली"),
            id="Hindi",
        ),
        pytest.param(
            ("புத்தகம் நன்றாக இருந்தது", "இந்தப் புத்தகம் எனக்குப் பிடித்தது"),
            ("மின்சாரம் இல்லை", "மின்சாரம் கட்டணம் அதிகம்"),
            ("புத்தகம்", "மின்சாரம்"),
            id="Tamil",
        ),
        pytest.param(
            ("పుస్తకం చాలా బాగుంది", "ఈ పుస్తకం నాకు నచ్చింది"),
            ("విద్యుత్ బిల్లు ఎక్కువ", "విద్యుత్ పోయింది"),
            ("పుస్తకం", "విద్యుత్"),
            id="Telugu",
        ),
        pytest.param(
            ("שָׁלוֹם סֵפֶר טוב", "סֵפֶר ארוך"), ("חַשְׁמַל יקר", "אין חַשְׁמַל"), ("סֵפֶר", "חַשְׁמַל"), id="Hebrew"
        ),
        pytest.param(
            ("می‌خواهم کتاب", "می‌خواهم برق"),
            ("خانه بزرگ", "خانه کوچک"),
            ("می‌خواهم", "خانه"),
            id="Persian",
        ),
        pytest.param(
            ("Cafe\u0301 ouvert", "CAFÉ fermé"),
            ("L’eau froide", "l'eau sale"),
            ("café", "eau"),
            id="French",
        ),
        pytest.param(
            ("快递太慢了，包裹没到", "我的快递丢了，请查包裹"),
            ("手机电池坏了", "电池充不进电，手机很热"),
            ("快递", "电池"),
            id="Chinese",
        ),
        pytest.param(
            ("荷物の配達が遅れています", "配達がまだ来ません。荷物はどこですか"),
            ("スマートフォンのバッテリーが壊れた", "バッテリーが充電できません"),
            ("配達", "バッテリー"),
            id="Japanese",
        ),
        pytest.param(
            ("การจัดส่งสินค้าล่าช้ามาก", "พัสดุยังไม่มา การจัดส่งช้า"),
            ("แบตเตอรี่โทรศัพท์เสีย", "โทรศัพท์ชาร์จไม่เข้า แบตเตอรี่หมด"),
            ("การจัดส่ง", "โทรศัพท์"),
            id="Thai",
        ),
        pytest.param(
            ("배송이 너무 늦어요", "배송이 안 왔어요"),
            ("배터리 고장", "배터리 충전"),
            ("배송이", "배터리"),
            id="Korean",
        ),
    ],
)
def test_names_have_whole_words_in_any_script(first, second, words):
    for cluster, word in zip(describe(first, second), words, strict=True):
        assert word in cluster.name.split(", ")


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        pytest.param(
            ("Late<br>parcel&nbsp;&amp;", "parcel <b class='x'>late</b> &lt;br&gt;"),
            ("<p>dead battery</p>", "battery <style>p {color: red}</style> dead"),
            ("late, parcel", "battery, dead"),
            id="markup",
        ),
        pytest.param(
            ("parcel 4711 of 2024-05-01", "parcel 4711"),
            ("battery 17:30", "battery 17:30"),
            ("parcel", "battery"),
            id="numbers beside words",
        ),
        pytest.param(
            ("1998 1999", "1998"),
            ("2020", "2020 2021"),
            ("1998, 1999", "2020, 2021"),
            id="only numbers",
        ),
        pytest.param(
            ("Dear Sir, parcel. Kind regards", "Hello, parcel, many thanks"),
            ("Hi, battery", "Sehr geehrte Damen und Herren, battery"),
            ("parcel", "battery"),
            id="greetings",
        ),
        pytest.param(
            ("see https://x.org/parcel-page a parcel", "parcel ann@shop.com"),
            ("www.shop.com battery", "battery"),
            ("parcel", "battery"),
            id="addresses",
        ),
        pytest.param(
            ("it doesn't charge", "we'll charge", "the dog's charge"),
            ("they've smoke", "it’s smoke"),
            ("charge, dog", "smoke"),
            id="contractions",
        ),
        pytest.param(("x" * 300_000, "?!"), ("!?", "😀"), ("", ""), id="no words"),
    ],
)
def test_names_have_neither_markup_nor_formulas(first, second, names):
    assert tuple(cluster.name for cluster in describe(first, second)) == names


@pytest.mark.parametrize(
    ("texts", "n_typical"),
    [
        (("Late again", "late  again", "LATE AGAIN!", "Lost"), 2),
        (("कि", "की", " कि "), 2),
        (("😀 😀", "😀  😀", "💔"), 2),
        (("same",) * 50 + ("other",), 2),
        (("a b", "b c", "c d", "d e"), 3),
    ],
)
def test_typical_texts_differ_in_words(texts, n_typical):
    (cluster,) = describe(texts)
    assert len(cluster.typical) == n_typical
    assert set(cluster.typical) <= set(texts)
