"""The page of results: its content, its safety with hostile texts, and its display in browsers."""

import re
from dataclasses import replace
from math import nan

import numpy as np
import pytest
from helpers.pages import CHARTS_READY, HOSTILE, ParsedPage, check_views, open_page

from llmcond.base.errors import UserError
from llmcond.base.metrics import METRICS, Estimate
from llmcond.data.rows import Rows
from llmcond.evaluation.analyses import rank_error
from llmcond.evaluation.paired import PairedDifference
from llmcond.evaluation.results import ComparedSystem, Result, compare_with_baseline, estimate_text
from llmcond.report.content import Page
from llmcond.report.page import write_page
from llmcond.report.tables import with_minus_signs

TEMPLATES = ("pair-cond", "concat-sent-cond")
CONDITIONS = ("The number of people.", "the activity", "mood")


def build_page(n=300):
    """Return a page of zero-shot and fitted heads, with and without subtraction."""
    random = np.random.default_rng(0)
    rating = random.choice([0, 0.25, 0.5, 0.75, 1], size=n)
    sentences = [f"Two old men play chess at home, number {i // 2}." for i in range(n)]
    conditions = random.choice(CONDITIONS, size=n).tolist()
    rows = Rows(sentences, sentences[::-1], conditions, rating, np.arange(n) + 1, "dev.csv")
    curve = [{"epoch": i, "loss": 1 / i, "dev_spearman": 0.1 * i} for i in range(1, 6)]
    names = [(h, t, s) for t in TEMPLATES for h in ("none", "mlp") for s in (True, False)]
    systems, isotropy = [], []
    for head, template, subtract in [*names, ("mlp", "control-shuffled", True)]:
        about = {"head": head, "subtract": subtract}
        about["name"] = f"{head}@{template}" + ("" if subtract else "+c")
        control = {"control": "shuffled c" if template == "control-shuffled" else ""}
        fits = ({"curve": curve},) if head == "mlp" else ()
        result = Result(**about, prompts=(template,), split="dev", about=control, fits=fits)
        error = {"pair-cond": 0.3, "concat-sent-cond": 1}.get(template, 99) + (head == "none")
        predictions = (rating + error * random.normal(size=n)).astype(np.float32)
        systems.append(ComparedSystem((head, subtract), result, predictions[None]))
        if head == "none":
            figures = dict.fromkeys(("mean_cosine", "std_cosine", "partition_ratio"), 0.3)
            isotropy.append({**about, "prompt": template, **figures})
    return Page(
        title="Prompt templates on re-annotated C-STS with minilm",
        summary=["The MLP is the best head.", "With mlp: worse by 3.0.", "The control is random."],
        results=list(compare_with_baseline(systems, TEMPLATES[1], rows)),
        rows=rows,
        scale=(1.0, 5.0),
        similarity={system.result.name: system.similarity[0] for system in systems},
        isotropy=isotropy,
        provenance={
            "model": {"name": "minilm", "revision": "c9745ed1d9f207416be6d2e6f8de32d1f16199bf"},
            "settings": {"seeds": [0, 1, 2], "learning_rate": 1e-3, "steps": [{"a": 1}, {"b": []}]},
        },
    )


def make_hostile(page):
    """Return the page with texts in all fields that are special in HTML, JavaScript or Jinja."""
    evil, n = HOSTILE[0], len(page.rows)
    cycled = [HOSTILE[i % len(HOSTILE)] for i in range(n)]
    old, new = next(iter(page.baselines)), f"mlp@{evil}"
    renamed = [
        replace(row, name=new, prompts=(evil,), about={"control": evil})
        if row.name == old
        else replace(row, against=new if row.against == old else row.against)
        for row in page.results
    ]
    conditions = [f"{text} {i % 3}" for i, text in enumerate(cycled)]
    rows = replace(page.rows, sentence1=cycled, sentence2=cycled[::-1], condition=conditions)
    return replace(
        page,
        title=f"Title {evil}",
        summary=[*HOSTILE[:3], *page.summary],
        results=renamed,
        rows=rows,
        similarity={new if name == old else name: v for name, v in page.similarity.items()},
        isotropy=[{**row, "prompt": row["prompt"] + evil} for row in page.isotropy],
        provenance={evil: {"text": HOSTILE[1], "list": [HOSTILE[0], 1]}, "long": HOSTILE[6]},
    )


def make_undefined(page):
    """Return the page with every figure undefined."""
    nothing = PairedDifference(*[nan] * 7, "no evidence")
    empty = {"epoch": 1, "loss": None, "dev_spearman": None}
    results = [
        replace(
            row,
            metrics=dict.fromkeys(row.metrics, Estimate(nan)),
            fits=({"curve": [empty]},),
            difference=row.difference and dict.fromkeys(row.difference, nothing),
        )
        for row in page.results
    ]
    return replace(
        page,
        results=results,
        rows=replace(page.rows, rating=np.full(len(page.rows), np.nan)),
        similarity={name: np.full(len(v), np.nan) for name, v in page.similarity.items()},
        isotropy=(),
    )


def write_and_parse(page, folder):
    path = folder / "page.html"
    write_page(page, path)
    return ParsedPage(path.read_text("utf-8"))


@pytest.fixture(scope="module")
def page():
    return build_page()


@pytest.fixture(scope="module")
def parsed(page, tmp_path_factory):
    return write_and_parse(page, tmp_path_factory.mktemp("page"))


def get_sections(parsed):
    return [attributes["id"] for attributes in parsed.all("section")]


def test_every_section_exists_and_is_linked(page, parsed):
    sections = get_sections(parsed)
    assert sections == ["summary", "results", "systems", "isotropy", "curves", "made"]
    assert [a["href"] for a in parsed.all("a")] == [f"#{section}" for section in sections]
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert not parsed.open
    # The verdict and the chart precede the other sentences.
    chart = "Spearman by prompt and head, with 95 % confidence intervals"
    order = [page.summary[0], chart, *page.summary[1:], "head prompt minus c"]
    positions = [parsed.visible_text.index(text) for text in order]
    assert positions == sorted(positions)
    assert "seeds 0, 1, 2 learning rate 0.001 steps a 1 b –" in parsed.visible_text


def test_page_fetches_nothing_and_allows_only_its_scripts(parsed):
    policy = parsed.all("meta")[1]
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert "default-src 'none'" in policy["content"]
    assert "unsafe-eval" not in policy["content"]
    assert len(re.findall("'sha256-[^']+'", policy["content"])) == 3
    for _, attributes in parsed.elements:
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith(("#", "data:,"))
    assert "@import" not in "".join(parsed.text)


def test_main_table_has_figures_intervals_and_verdicts(page, parsed):
    text = parsed.visible_text
    best, spearman = page.results[0], METRICS["spearman"]
    main, difference = best.main, best.difference["spearman"]
    figures = f"{estimate_text(spearman, main)} better {estimate_text(spearman, difference)}"
    assert "head prompt minus c Spearman difference p accuracy difference Pearson" in text
    assert f"mlp pair-cond yes {with_minus_signs(figures)} " in text
    assert "control: shuffled c" in text
    assert "compared with the baseline prompt, concat-sent-cond , under the same head" in text
    assert text.count(" baseline concat-sent-cond ") == 4
    assert f"dev: {best.counts.text}" in text
    rows = next(rows for rows in parsed.data["charts"]["heads"]["datasets"].values() if rows[1:])
    labels = {row["system"]: row["label"] for row in rows}
    assert labels["mlp@control-shuffled"] == "control-shuffled\nminus c, control"
    assert labels["none@concat-sent-cond+c"] == "concat-sent-cond\nno subtraction, baseline"


def test_embedded_numbers_match_rows(page, parsed):
    data = parsed.data
    names = [system["name"] for system in data["systems"]]
    assert names == [result.name for result in page.results]
    assert data["chosen"] == ["mlp@pair-cond", "mlp@concat-sent-cond"]
    system = data["systems"][3]
    np.testing.assert_allclose(system["similarity"], page.similarity[system["name"]], atol=5e-5)
    error = rank_error(page.similarity[system["name"]], page.rows.rating)
    np.testing.assert_allclose(system["error"], 1000 * error, atol=0.51)
    assert [data["texts"][i] for i in data["rows"]["sentence2"]] == page.rows.sentence2
    assert len(set(data["texts"])) == len(data["texts"])
    assert set(data["rows"]["rating"]) == {1, 2, 3, 4, 5}
    mood = [i for i, text in enumerate(page.rows.condition) if text == "mood"]
    position = [data["texts"][i] for i in data["conditions"]["text"]].index("mood")
    assert data["conditions"]["n"][position] == len(mood)
    expected = 1000 * np.abs(error)[mood].mean()
    assert data["conditions"]["error"][3][position] == pytest.approx(expected, abs=0.51)
    assert [level[0] for level in system["levels"]] == [1, 2, 3, 4, 5]


def test_hostile_texts_are_escaped(page, tmp_path):
    source = write_and_parse(make_hostile(page), tmp_path)
    assert len(source.scripts) == 4
    assert len(source.all("style")) == 1
    assert not source.all("img")
    assert set(HOSTILE) <= set(source.data["texts"])
    raw = (tmp_path / "page.html").read_text("utf-8").replace(source.scripts[1], "")
    assert "<script>alert" not in raw
    assert "<img" not in raw
    assert not re.search("[<>&\u2028\u2029]", source.scripts[0])
    assert source.visible_text.count("{{ 7 * 7 }}") == 1


def test_page_without_defined_figures_is_written(page, tmp_path):
    source = write_and_parse(make_undefined(page), tmp_path)
    assert "undefined" in source.visible_text
    assert "nan" not in source.visible_text.lower()
    assert source.data["conditions"] is None
    assert get_sections(source) == ["summary", "results", "systems", "made"]


def test_page_of_single_result_has_no_comparison(page, tmp_path):
    best = replace(page.results[0], difference=None, against=None, fits=())
    best = replace(best, variant=("score", "maxsim"))
    one = replace(
        page,
        summary=["a-1 is worse: -5.0 [-7.0, -3.0], p < 0.001, in 95 % intervals."],
        results=[best],
        similarity={best.name: page.similarity[best.name]},
        isotropy=(),
    )
    source = write_and_parse(one, tmp_path)
    assert get_sections(source) == ["summary", "results", "systems", "made"]
    assert source.data["chosen"] == ["mlp@pair-cond", None]
    assert "against the baseline" not in source.visible_text
    assert "mlp pair-cond yes maxsim " in source.visible_text
    typeset = "a-1 is worse: −5.0 [−7.0, −3.0], p\xa0&lt;\xa00.001, in 95\xa0% intervals."
    assert typeset in (tmp_path / "page.html").read_text("utf-8")
    bare = Page("t", [], [best], page.rows.take(np.array([], dtype=int)))
    assert get_sections(write_and_parse(bare, tmp_path)) == ["results"]
    with pytest.raises(UserError, match="1 names of results occur more than once"):
        replace(page, results=[best, best])


# -- in a browser --------------------------------------------------------------------------------


def test_reader_can_select_systems_conditions_and_theme(browser, page, tmp_path):
    write_page(page, tmp_path / "page.html")
    background = "getComputedStyle(document.body).backgroundColor"
    with open_page(browser, tmp_path / "page.html", 718, "dark") as tab:
        dark = tab.evaluate(background)
        tab.get_by_role("button", name="Light theme").click()
        assert tab.evaluate(background) != dark
        cards = tab.locator("#disagreements").inner_text()
        tab.locator("#system-B").select_option(label="none@pair-cond+c")
        tab.wait_for_function(CHARTS_READY)
        assert tab.locator("#scatter-name-B").inner_text() == "B: none@pair-cond+c"
        assert tab.locator("#disagreements").inner_text() != cards
        tab.get_by_label("Search conditions").fill("MOOD")
        rows = tab.locator("#conditions tbody tr").all_inner_texts()
        assert [row.split("\t")[0] for row in rows] == ["mood"]
        tab.get_by_label("Closer to the rating").select_option("B")
        verdicts = tab.locator(".card > .detail").all_inner_texts()
        assert set(verdicts) == {"B is closer to the rating"}
        table = tab.locator("#results table").first
        table.locator("thead button", has_text="prompt").click()
        first = table.locator("tbody tr").first.locator("td").first.inner_text()
        assert first == "concat-sent-cond"


def test_browser_shows_hostile_and_undefined_pages(browser, page, tmp_path):
    for path, content in (
        (tmp_path / "undefined.html", make_undefined(page)),
        (tmp_path / "hostile.html", make_hostile(page)),
    ):
        write_page(content, path)
        with open_page(browser, path) as tab:
            check_views(tab)
    with open_page(browser, path, 360) as tab:
        assert tab.title() == f"Title {HOSTILE[0]}"
        for text in (HOSTILE[0], HOSTILE[1], HOSTILE[5]):
            tab.get_by_label("Search texts").fill(text)
            assert tab.locator(".card .text", has_text=text).count() > 0
