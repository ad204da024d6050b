"""The page at the root URL: it loads nothing from elsewhere and works in a real browser."""

import base64
import hashlib
import re

from helpers.pages import check_views
from helpers.serving import serve

from llmcond import Condition, load_embedder
from llmcond.search import Index
from llmcond.serving.model import ServedModel

HOSTILE = "<img src=x onerror=alert(1)> & \u2028 </script><script>alert(2)</script>"
CONDITION = "the place"


def test_page_makes_no_external_requests_and_runs_only_its_script(client):
    response = client.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    text = response.body.decode()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = response.headers["content-security-policy"]
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.findall(r"(?:src|href)=[\"'](?!#|data:)", text)


def test_page_names_training_data_and_no_head_of_bundled_model():
    with serve(ServedModel(load_embedder())) as (client, _):
        page = client.get("/").body.decode()
        (model,) = client.get("/v1/models").json["data"]
    assert model["fitted_on"] == "csts and texts of 38 datasets"
    about = "384 dimensions, prompt concat-cond-sent, trained on csts and texts of 38 datasets."
    assert f'<p class="muted">{about}</p>' in page


def test_page_works_for_index_without_conditions(tiny_run, tmp_path):
    index = Index.build(tmp_path / "i", ["two men play"], run=tiny_run, device="cpu")
    with serve(ServedModel(index.embedder, None, index)) as (client, _):
        page = client.get("/").body.decode()
    assert '<input name="condition" required list="conditions" value="">' in page


def test_browser_compares_embeds_and_searches_with_key(browser, tiny_run, tmp_path):
    texts = ["two men play", HOSTILE, "children read"]
    index = Index.build(tmp_path / "i", texts, conditions=[CONDITION], run=tiny_run, device="cpu")
    problems = []
    tab = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
    tab.set_default_timeout(15_000)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    model = ServedModel(index.embedder, None, index)
    with serve(model, (b"k3y",)) as (client, _):
        tab.goto(client.url)
        compare, embed, search = (
            tab.locator(f"#{name}") for name in ("similarity", "embeddings", "search")
        )
        compare.get_by_role("button").click()
        message = compare.get_by_role("alert").inner_text()
        assert message == "The API key is missing or wrong. Enter it at the top of the page."
        tab.get_by_label("API key").fill("k3y")
        compare.get_by_label("Second text").fill(HOSTILE)
        compare.get_by_label("Conditions").fill(f"{CONDITION}\n{HOSTILE}")
        compare.get_by_role("button").click()
        rows = compare.locator("tbody tr")
        rows.nth(1).wait_for()
        expected = index.embedder.similarity(
            "A man rides a horse along the beach.", HOSTILE, CONDITION
        )
        assert rows.nth(0).locator("td").nth(0).inner_text() == f"{expected:.3f}"
        assert not compare.get_by_role("alert").is_visible()
        compare.get_by_text("Request as a curl command").click()
        assert "$KEY" in compare.locator("pre").inner_text()
        assert "k3y" not in compare.locator("pre").inner_text()
        embed.get_by_label("Texts").fill("two men\nchildren\ntwo men")
        embed.get_by_role("button").click()
        embed.locator("tbody tr").nth(2).wait_for()
        assert embed.locator("tbody tr").nth(0).locator("td").nth(2).inner_text() == "1.000"
        search.get_by_label("Query").fill("two men play")
        search.get_by_label("Condition").fill(CONDITION)
        search.get_by_label("Query").press("Tab")
        search.get_by_label("Condition").press("Enter")
        search.locator("li").nth(2).wait_for()
        assert search.locator("li").nth(0).locator(".text").inner_text() == "two men play"
        assert search.locator("img").count() == 0
        search.get_by_label("Condition").fill("the mood")
        search.get_by_role("button").click()
        search.get_by_role("alert").wait_for()
        message = search.get_by_role("alert").inner_text()
        assert "Prepared conditions: 'the place'. Whoever runs the server can prepare" in message
        check_views(tab)
    compare.get_by_role("button").click()
    compare.get_by_role("alert").wait_for()
    assert compare.get_by_role("alert").inner_text() == "The server does not respond."
    assert problems == []
    tab.close()


def test_browser_sends_example_values(browser, tiny_run):
    from playwright.sync_api import expect

    embedder = load_embedder(tiny_run, device="cpu")
    tab = browser.new_page()
    with serve(ServedModel(embedder)) as (client, _):
        tab.goto(client.url)
        compare, embed = (tab.locator(f"#{name}") for name in ("similarity", "embeddings"))
        compare.get_by_label("Conditions").fill(f"{CONDITION}\n\n{CONDITION}")
        compare.get_by_label("Example values").fill("\n\nbeach, snow")
        compare.get_by_role("button").click()
        pair = [compare.get_by_label(f"{name} text").input_value() for name in ("First", "Second")]
        for row, condition in enumerate([CONDITION, Condition(CONDITION, ["beach", "snow"])]):
            cell = compare.locator("tbody tr").nth(row).locator("td").nth(0)
            expect(cell).to_have_text(f"{embedder.similarity(*pair, condition):.3f}")
        embed.get_by_label("Example values").fill("beach, snow")
        embed.get_by_role("button").click()
        expect(embed.locator("pre")).to_contain_text('"values":["beach","snow"]')
        for width in (1_280, 390):
            tab.set_viewport_size({"width": width, "height": 900})
            edges = tab.evaluate(
                "[...document.querySelectorAll('nav, form[data-path], .scroll')]"
                ".map((element) => element.getBoundingClientRect().right)"
            )
            assert len(edges) == 5
            assert len(set(edges)) == 1  # all of the width is used
    tab.close()


def test_browser_reports_search_without_hits_and_keeps_focus(browser, tiny_run, tmp_path):
    index = Index.build(
        tmp_path / "i", ["two men"], conditions=[CONDITION], run=tiny_run, device="cpu"
    )
    tab = browser.new_page()
    with serve(ServedModel(index.embedder, None, index)) as (client, _):
        tab.goto(client.url)
        search = tab.locator("#search")
        search.get_by_label("Query").fill("two men")
        search.get_by_label("Filter").fill("text = 'nothing'")
        button = search.get_by_role("button")
        button.press("Enter")
        search.get_by_text("No text matches.").wait_for()
        assert button.evaluate("(e) => e === document.activeElement")
    tab.close()
