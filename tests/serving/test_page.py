"""The page at the root URL: it loads nothing from elsewhere and works in a real browser."""

import base64
import hashlib
import re

from helpers.pages import check_views
from helpers.serving import serve

from llmcond import Condition
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


def test_page_shows_conditions_only_without_key(tiny_run, tmp_path):
    condition = Condition("the place", values=["Rome", "Paris, Texas"])
    index = Index.build(tmp_path / "i", ["two men"], conditions=[condition], run=tiny_run)
    for keys in ((), (b"k3y",)):
        with serve(ServedModel(index.embedder, condition, index), keys) as (client, _):
            text = client.get("/").body.decode()
        assert ("Rome, &#34;Paris, Texas&#34;" in text) == (not keys)
        assert ('<option value="the place' in text) == (not keys)


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
        compare.get_by_label("Conditions, one").fill(f"{CONDITION}\n{HOSTILE}")
        compare.get_by_role("button").click()
        rows = compare.locator("tbody tr")
        rows.nth(1).wait_for()
        expected = index.embedder.similarity(
            "A man rides a horse along the beach.", HOSTILE, CONDITION
        )
        assert rows.nth(0).locator("td").nth(0).inner_text() == f"{expected:.3f}"
        compare.get_by_text("Request as a curl command").click()
        assert "$KEY" in compare.locator("pre").inner_text()
        assert "k3y" not in compare.locator("pre").inner_text()
        embed.get_by_label("Texts").fill("two men\nchildren\ntwo men")
        embed.get_by_label("Example values").fill('beach, "snow, ice"')
        embed.get_by_role("button").click()
        embed.locator("tbody tr").nth(2).wait_for()
        assert embed.locator("tbody tr").nth(0).locator("td").nth(2).inner_text() == "1.000"
        assert '"values":["beach","snow, ice"]' in embed.locator("pre").text_content()
        search.get_by_label("Query").fill("two men play")
        search.get_by_label("Condition", exact=True).fill(CONDITION)
        search.get_by_label("Condition", exact=True).press("Enter")
        search.locator("li").nth(2).wait_for()
        assert search.locator("li").nth(0).locator(".text").inner_text() == "two men play"
        assert search.locator("img").count() == 0
        search.get_by_label("Condition", exact=True).fill("the mood")
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
