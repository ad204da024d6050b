"""The page of results: its content, its safety with hostile texts, and its display in browsers."""

import re
from dataclasses import replace
from math import nan

import numpy as np
import pytest
from helpers.pages import (
    CHARTS_READY,
    HOSTILE,
    ParsedPage,
    check_views,
    find_accessibility_faults,
    find_overflow,
    open_page,
)

from llmcond.data.rows import QueryRows, Rows
from llmcond.errors import UserError
from llmcond.evaluation.analyses import rank_error
from llmcond.evaluation.paired import PairedDifference
from llmcond.evaluation.results import Result, RowCounts, Subset
from llmcond.metrics import METRICS, Estimate
from llmcond.report.content import Page, with_minus_signs
from llmcond.report.page import check_page, write_page
from llmcond.report.tables import p_value_text, range_text

WHO = ("A young woman", "Two old men", "Three children in red coats", "A large group of students")
DOES = ("rides a bicycle", "is reading a newspaper", "play chess", "throws a ball to a brown dog")
WHERE = ("on a crowded beach at sunset", "in a narrow street", "beside a frozen lake", "at home")
EXTRA = ("while a small dog looks on and somebody behind them is taking a picture", "", "at night")
COMMON = ("The number of people.", "the activity", "The place", "The age of the people.", "mood")
RARE = ("the colour of the {}", "what the {} is made of", "how far away the {} is", "the {} itself")
THINGS = "coat hat dog ball street lake newspaper bicycle window table horse umbrella".split()
TEMPLATES = ("pair-cond", "concat-sent-cond", "concat-cond-sent", "question-then-sentence")


def build_result(name, spearman, head="mlp", prompt="pair-cond", **fields):
    """Return a result, whose metrics are undefined if its Spearman is None."""

    def estimate(value, down, up):
        return Estimate(nan) if spearman is None else Estimate(value, value - down, value + up)

    base = spearman or 0.0
    fitted = head != "none"
    defaults = {
        "name": name,
        "head": head,
        "prompts": (prompt,),
        "subtract": not name.endswith("+c"),
        "split": "dev",
        "counts": RowCounts(n=1_830, n_pairs=985),
        "metrics": {
            "spearman": estimate(base, 0.035, 0.033),
            "pearson": estimate(base - 0.012, 0.03, 0.03),
            "accuracy": estimate(0.52 + base / 2, 0.026, 0.024),
        },
        "dim": 384 if fitted else None,
        "seeds": (0, 1, 2) if fitted else (),
        "seed_sd": {"spearman": 0.0071 if fitted else None},
    }
    return Result(**{**defaults, **fields})


def build_difference(value):
    verdict = "better" if value > 0.04 else "worse" if value < -0.04 else "no evidence"
    p = float(np.exp(-abs(value) * 90))
    return PairedDifference(
        value, value - 0.04, value + 0.038, 0.0, p, min(1.0, 8 * p), 0.056, verdict
    )


def compare_with(row, reference):
    names = ("spearman", "accuracy")
    return replace(
        row,
        difference={
            n: build_difference(row.metrics[n].value - reference.metrics[n].value) for n in names
        },
        against=reference.name,
    )


def build_texts(n, random):
    """Return sentence pairs like those of C-STS, each under two conditions."""

    def sentence():
        who, does, where, extra = (random.choice(part) for part in (WHO, DOES, WHERE, EXTRA))
        return f"{who} {does} {where} {extra}".strip() + "."

    def condition():
        if random.random() < 0.55:
            return str(random.choice(COMMON))
        return str(random.choice(RARE)).format(random.choice(THINGS))

    pairs = [(sentence(), sentence()) for _ in range((n + 1) // 2)]
    first, second = zip(*[pairs[i // 2] for i in range(n)], strict=True)
    return list(first), list(second), [condition() for _ in range(n)]


def build_page(n=1_830, templates=TEMPLATES, seed=0):
    """Return a page of zero-shot and fitted heads, with and without subtraction."""
    random = np.random.default_rng(seed)
    rating = random.choice([0, 0.25, 0.5, 0.75, 1], size=n, p=[0.3, 0.2, 0.14, 0.18, 0.18])
    results, similarity, isotropy = [], {}, []
    for t, template in enumerate(templates):
        for head, base in (("none", 0.14), ("linear", 0.42), ("mlp", 0.585)):
            for suffix, loss in (("", 0.0), ("+c", 0.05 + 0.02 * t)):
                name = f"{head}@{template}{suffix}"
                score = base - 0.03 * t - loss
                noise = random.normal(size=n)
                latent = score * (rating - rating.mean()) / rating.std() + noise * (1 - score)
                similarity[name] = np.tanh(latent * (0.15 if head == "none" else 0.8)) + 0.01 * t
                fits = () if head == "none" else [build_fit(score, head, random) for _ in range(3)]
                results.append(build_result(name, score, head, template, fits=tuple(fits)))
                if head == "none":
                    mean = 0.3 - 0.02 * t if not suffix else 0.78 + 0.03 * t
                    figures = {"mean_cosine": mean, "std_cosine": 0.11}
                    about = {"name": name, "head": head, "prompt": template, "subtract": not suffix}
                    isotropy.append({**about, **figures, "partition_ratio": 0.9 - mean / 2})
    results.append(
        build_result(
            "mlp@control-shuffled", 0.02, prompt="control-shuffled", about={"control": "shuffled c"}
        )
    )
    similarity["mlp@control-shuffled"] = random.normal(size=n) / 5
    results.sort(key=lambda r: -r.main.value)
    baseline = f"mlp@{templates[1]}"
    references = {(r.head, r.subtract): r for r in results if r.prompt == templates[1]}
    results = [
        row if row is reference else compare_with(row, reference)
        for row in results
        for reference in [references[row.head, row.subtract]]
    ]
    first, second, condition = build_texts(n, random)
    return Page(
        title="Prompt templates on re-annotated C-STS with minilm",
        summary=[
            "An MLP on pair-cond minus c orders the rows best: Spearman 58.5 (55.0 to 61.8).",
            "With mlp: no evidence of a difference from concat-sent-cond for pair-cond minus c "
            "(these rows can detect 5.6 or more); worse: question-then-sentence by 6.0.",
            "Subtraction of the unconditional vector helps every template, most where the "
            "sentence is pooled. The shuffled control is at chance, as it has to be.",
        ],
        results=results,
        rows=Rows(first, second, condition, rating, np.arange(n) + 1, "dev.csv"),
        scale=(1.0, 5.0),
        similarity=similarity,
        isotropy=isotropy,
        provenance={
            "model": {"name": "minilm", "revision": "c9745ed1d9f207416be6d2e6f8de32d1f16199bf"},
            "prompts": {
                template: {
                    "conditional": {"text": "{sentence}\nGiven the condition: {condition}"},
                    "unconditional": None,
                }
                for template in templates
            },
            "data": {"file": "dev.csv", "digest": "5f2c" * 16, "rows": n, "rated": True},
            "settings": {"seeds": [0, 1, 2], "learning_rate": 1e-3, "steps": [{"a": 1}, {"b": []}]},
            "versions": {"llmcond": "0.1.0", "torch": "2.13.0"},
            "seconds": 81.25,
        },
        baseline=baseline,
    )


def build_fit(score, head, random):
    epochs = 10 if head == "linear" else 25
    rising = score * (1 - np.exp(-np.arange(1, epochs + 1) / 4)) + random.normal(0, 0.006, epochs)
    losses = 0.12 * np.exp(-np.arange(epochs) / 6) + random.uniform(0.02, 0.025)
    curve = [
        {"epoch": i + 1, "loss": float(losses[i]), "dev_spearman": float(rising[i])}
        for i in range(epochs)
    ]
    return {"curve": curve}


def make_hostile(page):
    """Return the page with texts in all fields that are special in HTML, JavaScript or Jinja."""
    evil = HOSTILE[0]
    n = len(page.rows)
    cycled = [HOSTILE[i % len(HOSTILE)] for i in range(n)]
    old, new = page.baseline, f"mlp@{evil}"
    renamed = [
        replace(row, name=new, prompts=(evil,), about={"control": evil})
        if row.name == old
        else replace(row, against=new if row.against == old else row.against)
        for row in page.results
    ]
    return replace(
        page,
        title=f"Title {evil}",
        summary=[*HOSTILE[:3], *page.summary],
        results=renamed,
        rows=replace(
            page.rows,
            sentence1=cycled,
            sentence2=cycled[1:] + cycled[:1],
            condition=[f"{text} {i % 3}" for i, text in enumerate(cycled)],
        ),
        similarity={new if name == old else name: v for name, v in page.similarity.items()},
        isotropy=[{**row, "prompt": row["prompt"] + evil} for row in page.isotropy],
        provenance={evil: {"text": HOSTILE[1], "list": [HOSTILE[0], 1]}, "long": HOSTILE[6]},
        baseline=new,
    )


def make_undefined(page):
    """Return the page with every figure undefined."""
    nothing = PairedDifference(*[nan] * 7, "no evidence")
    empty = {"epoch": 1, "loss": None, "dev_spearman": None}
    results = [
        replace(
            row,
            metrics=dict.fromkeys(row.metrics, Estimate(nan)),
            seed_sd={},
            dim=None,
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
        isotropy=[
            {**row, **dict.fromkeys(("mean_cosine", "std_cosine", "partition_ratio"))}
            for row in page.isotropy
        ],
        provenance={"nothing": None},
    )


def make_partial(page):
    """Return the page with some unrated rows, and some rows that one system does not predict."""
    rating = np.where(np.arange(len(page.rows)) % 7 == 0, np.nan, page.rows.rating)
    (name, *_) = page.similarity
    some = np.where(np.arange(len(rating)) % 5 == 0, np.nan, page.similarity[name])
    return replace(
        page, rows=replace(page.rows, rating=rating), similarity={**page.similarity, name: some}
    )


def make_plain(page):
    """Return the page of a single head, which has no comparison and no curves."""
    (best, *_) = page.results
    return replace(
        page,
        results=[replace(best, difference=None, against=None, fits=())],
        similarity={best.name: page.similarity[best.name]},
        isotropy=(),
        baseline=None,
    )


def build_ranked_page(page):
    """Return a page of the ranks of two heads, with hostile texts."""
    random, n = np.random.default_rng(0), 60
    texts = [HOSTILE[i % len(HOSTILE)] for i in range(n)]
    columns = {"condition": [f"{text} {i % 9}" for i, text in enumerate(texts)], "sentence": texts}
    rows = QueryRows(
        {**columns, "answer": texts}, ("condition",), ("sentence", "answer"), "condition"
    )
    metrics = {name: Estimate(0.4, 0.3, 0.5) for name in ("mrr", "hits@1")}
    fields = {"metrics": metrics, "seed_sd": {}, "split": "test"}
    results = [build_result(name, 0.0, head=name, **fields) for name in ("linear", "mlp")]
    parts = [
        {
            "forward": Subset(30, metrics),
            "<b>": Subset(0, dict.fromkeys(metrics, Estimate(nan))),
        }
    ] * 2
    return Page(
        "Ranks",
        [],
        results,
        rows,
        similarity={result.name: random.integers(1, 2_000, n) / 1.0 for result in results},
        subsets={
            "part": parts,
            "relation": [{f"r{i}": part["forward"] for i in range(20)} for part in parts],
        },
        dev_metric="mrr",
    )


def write_and_parse(page, folder):
    path = folder / "page.html"
    write_page(page, path)
    return ParsedPage(path.read_text("utf-8"))


@pytest.fixture(scope="module")
def page():
    return build_page(n=300)


@pytest.fixture(scope="module")
def parsed(page, tmp_path_factory):
    return write_and_parse(page, tmp_path_factory.mktemp("page"))


def test_every_section_exists_and_is_linked(parsed):
    sections = [attributes["id"] for attributes in parsed.all("section")]
    assert sections == ["summary", "results", "systems", "isotropy", "curves", "made"]
    assert [a["href"] for a in parsed.all("a")] == [f"#{section}" for section in sections]
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {attributes["aria-labelledby"] for attributes in parsed.all("section")} <= set(ids)
    assert not parsed.open


def test_verdict_and_chart_precede_prose(page, parsed):
    verdict, *prose = page.summary
    chart = parsed.visible_text.index(
        "Spearman by template and head, with 95 % confidence intervals"
    )
    assert parsed.visible_text.index(verdict) < chart < parsed.visible_text.index(prose[0])
    assert parsed.visible_text.index(prose[-1]) < parsed.visible_text.index("head template minus c")


def test_chart_labels_controls_and_baselines(parsed):
    rows = next(rows for rows in parsed.data["charts"]["heads"]["datasets"].values() if rows[1:])
    assert {row["series"] for row in rows} == {"none", "linear", "mlp"}
    labels = {row["system"]: row["label"] for row in rows}
    assert labels["mlp@control-shuffled"] == "control-shuffled\nminus c, control"
    assert labels["none@concat-sent-cond+c"] == "concat-sent-cond\nno subtraction, baseline"
    assert labels["mlp@pair-cond"] == "pair-cond\nminus c"


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


def test_main_table_has_figures_intervals_and_verdicts(parsed):
    headings = "head template minus c Spearman Spearman against the baseline accuracy"
    assert headings in parsed.visible_text
    assert (
        "mlp pair-cond yes 58.5 55.0 to 61.8 no evidence +3.0 −1.0 to +6.8 81.2"
        in parsed.visible_text
    )
    assert "control: shuffled c" in parsed.visible_text
    comparison = "compared with the baseline template, concat-sent-cond , under the same head"
    assert comparison in parsed.visible_text
    assert parsed.visible_text.count(" baseline concat-sent-cond ") == 6
    assert "dev: 1,830 rated rows of 985 sentence pairs" in parsed.visible_text


def test_all_systems_may_be_compared_with_one_baseline(page, tmp_path):
    reference = next(row for row in page.results if row.name == page.baseline)
    results = [row if row is reference else compare_with(row, reference) for row in page.results]
    source = write_and_parse(replace(page, results=results), tmp_path)
    assert (
        "Each system is compared with the baseline, mlp@concat-sent-cond ." in source.visible_text
    )
    assert source.visible_text.count(" baseline concat-sent-cond ") == 1
    assert "The dashed line is the baseline." in source.visible_text


def test_page_shows_complete_provenance(parsed):
    assert "revision c9745ed1d9f207416be6d2e6f8de32d1f16199bf" in parsed.visible_text
    assert "{sentence} Given the condition: {condition}" in parsed.visible_text
    assert "seeds 0, 1, 2 learning rate 0.001 steps a 1 b –" in parsed.visible_text


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


def test_unpaired_surrogates_are_written(page, tmp_path):
    source = write_and_parse(
        replace(page, title="a \ud800", rows=replace(page.rows, condition=["\udfff"] * 300)),
        tmp_path,
    )
    assert source.data["texts"][-1] == "\udfff"


def test_page_of_full_split_is_small(tmp_path):
    page = build_page()
    assert (len(page.results), len(page.rows)) == (25, 1_830)
    repeated = [f"{t} {t} {i}" for i, t in enumerate(page.rows.sentence1)]
    longer = replace(page, rows=replace(page.rows, sentence1=repeated))
    write_page(longer, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 5_000_000


def test_page_without_defined_figures_is_written(page, tmp_path):
    source = write_and_parse(make_undefined(page), tmp_path)
    assert "undefined" in source.visible_text
    assert "nan" not in source.visible_text.lower()
    assert "Below each figure" not in source.visible_text
    assert source.data["conditions"] is None
    sections = [attributes["id"] for attributes in source.all("section")]
    assert sections == ["summary", "results", "systems", "made"]


def test_rows_may_lack_rating_or_prediction(page, tmp_path):
    page = make_partial(page)
    (name, *_) = page.similarity
    data = write_and_parse(page, tmp_path).data
    (system,) = [system for system in data["systems"] if system["name"] == name]
    for i, (rating, similarity) in enumerate(
        zip(page.rows.rating, page.similarity[name], strict=True)
    ):
        assert (data["rows"]["rating"][i] is None) == np.isnan(rating)
        assert (
            (system["similarity"][i] is None)
            == (system["place"][i] is None)
            == np.isnan(similarity)
        )
        assert (system["error"][i] is None) == np.isnan(rating + similarity)
    assert sum(data["conditions"]["n"]) == np.isfinite(page.rows.rating).sum()
    assert max(system["place"][i] for i in range(1, 300, 5)) <= 1000


def test_page_of_single_result_has_no_comparison(page, tmp_path):
    source = write_and_parse(make_plain(page), tmp_path)
    sections = [attributes["id"] for attributes in source.all("section")]
    assert sections == ["summary", "results", "systems", "made"]
    assert source.data["chosen"] == ["mlp@pair-cond", None]
    assert "against the baseline" not in source.visible_text
    assert "verdict" not in source.visible_text


def test_page_of_results_alone_is_written(page, tmp_path):
    alone = replace(page.results[0], fits=())
    bare = Page("t", [], [alone], page.rows.take(np.array([], dtype=int)))
    sections = [attributes["id"] for attributes in write_and_parse(bare, tmp_path).all("section")]
    assert sections == ["results"]


def test_fits_of_same_head_and_template_do_not_overlap(page, tmp_path):
    repeated = [replace(page.results[0], name=f"mine-{i}") for i in range(2)]
    source = write_and_parse(replace(page, results=[*page.results, *repeated]), tmp_path)
    datasets = source.data["charts"]["heads"]["datasets"].values()
    rows = next(rows for rows in datasets if "system" in rows[0])
    positions = [(row["label"], row["place"]) for row in rows]
    assert len(set(positions)) == len(positions)
    # A single value is in the middle of its row.
    assert ("control-shuffled\nminus c, control", 0.5) in positions


def test_variant_of_system_is_not_repeated_in_its_name(page, tmp_path):
    result = build_result("none@pair-cond maxsim", 0.3, head="none")
    one = replace(make_plain(page), results=[result], similarity={}, variants=("score", ["maxsim"]))
    assert "none pair-cond yes maxsim 30.0" in write_and_parse(one, tmp_path).visible_text


def test_numbers_of_summary_have_minus_signs_and_keep_their_units(page, tmp_path):
    summary = ["a-1 is worse than b: -5.0 [-7.0, -3.0], p < 0.001, in 95 % intervals."]
    write_page(replace(make_plain(page), summary=summary), tmp_path / "page.html")
    shown = "a-1 is worse than b: −5.0 [−7.0, −3.0], p\xa0&lt;\xa00.001, in 95\xa0% intervals."
    assert shown in (tmp_path / "page.html").read_text("utf-8")


def test_duplicate_names_of_results_are_rejected(page):
    with pytest.raises(
        UserError, match="1 names of results occur more than once, such as 'mlp@pair-cond'"
    ):
        replace(page, results=[page.results[0], page.results[0]])


def test_invalid_paths_and_missing_packages_are_rejected(page, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"has the suffix \.pdf; name an \.html or \.htm file"):
        check_page(tmp_path / "page.pdf")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UserError, match="is a folder; name a file"):
        check_page(tmp_path / "folder.html")
    check_page(tmp_path / "new" / "page.html")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr("llmcond.report.page.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'llmcond\[report\]'"):
        check_page(tmp_path / "page.html")


def test_figures_are_formatted_for_readers():
    metric = METRICS["spearman"]
    assert range_text(metric, 0.1, nan) == ""
    assert with_minus_signs(range_text(metric, -0.1, 0.2, signed=True)) == "−10.0 to +20.0"
    assert [p_value_text(p) for p in (0.0004, 0.0312, nan)] == ["< 0.001", "0.031", "–"]


# -- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(page, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    pages = {
        "full": page,
        "small": build_page(60, TEMPLATES[:2]),
        "hostile": make_hostile(page),
        "undefined": make_undefined(page),
        "partial": make_partial(page),
        "plain": make_plain(page),
        "ranked": build_ranked_page(page),
    }
    for name, variant in pages.items():
        write_page(variant, folder / f"{name}.html")
    return folder


@pytest.mark.parametrize(("name", "charts"), [("small", 8), ("ranked", 2)])
def test_page_is_accessible_in_all_views(browser, files, name, charts):
    with open_page(browser, files / f"{name}.html") as tab:
        assert tab.locator("[data-chart] svg").count() == charts
        for box in tab.locator("details").all():
            box.locator("summary").first.click()
        for box in tab.locator("[data-numbers]").all():
            box.locator("tbody tr").nth(1).wait_for()
        check_views(tab)


@pytest.mark.parametrize("name", ["undefined", "partial", "plain"])
def test_browser_shows_sparse_pages(browser, files, name):
    with open_page(browser, files / f"{name}.html", 360, "dark") as tab:
        assert find_overflow(tab) == [0, []]


def test_browser_shows_hostile_texts_as_text(browser, files):
    with open_page(browser, files / "hostile.html", 360) as tab:
        assert tab.title() == f"Title {HOSTILE[0]}"
        assert find_overflow(tab) == [0, []]
        for text in (HOSTILE[0], HOSTILE[1], HOSTILE[5]):
            tab.get_by_label("Search texts").fill(text)
            assert tab.locator(".card .text", has_text=text).count() > 0
        tab.get_by_label("Search texts").fill("wordwithout")
        card = tab.locator(".card").first
        before = card.bounding_box()["height"]
        card.get_by_role("button", name="Show all").first.click()
        assert card.bounding_box()["height"] > before + 300
        assert find_overflow(tab) == [0, []]
        assert find_accessibility_faults(tab) == []


@pytest.mark.parametrize("width", [375, 2_000])
def test_only_overflowing_tables_show_scroll_hint(browser, files, width):
    with open_page(browser, files / "full.html", width) as tab:
        tab.locator("[data-numbers=scatter] summary").click()
        tab.locator("[data-numbers=scatter] tbody tr").nth(4).wait_for()
        boxes = tab.locator(".scroll").evaluate_all(
            """(boxes) => boxes.filter((box) => box.checkVisibility()).map((box) => [
                box.scrollWidth > box.clientWidth,
                getComputedStyle(box, "::before").content.startsWith('"Scroll sideways'),
            ])"""
        )
        assert len(boxes) == 3
        assert [wide for wide, _ in boxes] == [has_hint for _, has_hint in boxes]
        assert boxes[0] == [width < 1_000] * 2


def test_provenance_is_folded_on_screen_and_printed(browser, files):
    with open_page(browser, files / "full.html") as tab:
        provenance = tab.get_by_text("Given the condition: {condition}").first
        assert not provenance.is_visible()
        tab.emulate_media(media="print")
        assert provenance.is_visible()
        tab.emulate_media(media="screen")
        tab.locator("#made summary").click()
        assert provenance.is_visible()


def test_tables_are_sorted_by_keyboard(browser, files):
    with open_page(browser, files / "full.html") as tab:
        table = tab.locator("#results table").first
        column = table.locator("thead th", has_text="seeds").last
        column.get_by_role("button").focus()
        seen = []
        for _ in range(2):
            tab.keyboard.press("Enter")
            last = table.locator("tbody tr").last.locator("td").nth(8).inner_text()
            seen.append((column.get_attribute("aria-sort"), last))
        # Rows without seeds come last in either order.
        assert seen == [("descending", "–"), ("ascending", "–")]
        table.locator("thead button", has_text="template").click()
        assert (
            table.locator("tbody tr").first.locator("td").first.inner_text() == "concat-cond-sent"
        )
        assert table.locator("[aria-sort=ascending]").count() == 1


def test_browser_shows_ranks(browser, files):
    with open_page(browser, files / "ranked.html", 390, "dark") as tab:
        assert tab.locator("#parts thead th").all_inner_texts()[:3] == [
            "system",
            "forward\n30 queries",
            "<b>\n0 queries",
        ]
        assert tab.locator("#parts tbody").last.locator("tr").count() == 20
        text = tab.locator("#disagreements li").first.inner_text()
        rank_a, rank_b = (float(rank) for rank in re.findall(r"rank ([\d.]+)", text))
        better = "A" if rank_a < rank_b else "B"
        assert f"{better} ranks the answer higher" in text
        tab.get_by_label("Ranks the answer higher").select_option("B")
        assert "A ranks the answer higher" not in tab.locator("#disagreements").inner_text()
        tab.locator("[data-numbers=hits] summary").click()
        assert "100.0" in tab.locator("[data-numbers=hits] tbody").inner_text()


def test_reader_can_select_systems_and_conditions(browser, files):
    with open_page(browser, files / "full.html") as tab:
        cards = tab.locator("#disagreements").inner_text()
        tab.locator("#system-B").select_option(label="none@pair-cond+c")
        tab.wait_for_function(CHARTS_READY)
        assert tab.locator("#scatter-name-B").inner_text() == "B: none@pair-cond+c"
        assert tab.locator("#disagreements").inner_text() != cards
        tab.get_by_label("Search conditions").fill("MOOD")
        rows = tab.locator("#conditions tbody tr")
        assert [row.split("\t")[0] for row in rows.all_inner_texts()] == ["mood"]
        tab.get_by_label("Closer to the rating").select_option("B")
        verdicts = tab.locator(".card > .detail").all_inner_texts()
        assert set(verdicts) == {"B is closer to the rating"}
        # The button may disappear, so the focus moves to the first further row.
        tab.get_by_role("button", name="Show more", exact=True).press("Enter")
        focused = "[...document.querySelectorAll('.card')].indexOf(document.activeElement)"
        assert tab.evaluate(focused) == 6
        tab.locator("#system-curves").select_option(label="linear@pair-cond")
        tab.locator("[data-numbers=curves] summary").click()
        row = tab.locator("[data-numbers=curves] tbody tr").first
        assert row.inner_text().startswith("linear@pair-cond\t0\t1\t")


def test_theme_can_be_switched_and_print_is_light(browser, files):
    background = "getComputedStyle(document.body).backgroundColor"
    with open_page(browser, files / "full.html", 718, "dark") as tab:
        dark = tab.evaluate(background)
        tab.get_by_role("button", name="Light theme").click()
        light = tab.evaluate(background)
        tab.get_by_role("button", name="Dark theme").click()
        assert tab.evaluate(background) == dark != light
        tab.emulate_media(media="print")
        assert tab.evaluate(background) == light
        assert find_overflow(tab) == [0, []]
