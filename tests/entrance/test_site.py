"""Protects the docs site: it builds without a warning, no link of the built pages leads nowhere,
and every chapter is in it and can be searched."""

import json
import re

import pytest

from lab.pages import site

pytest.importorskip("zensical", reason="zensical is not installed here; `make test-all` installs it into a venv of its own")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    site.build(folder)
    return folder


def test_every_chapter_has_its_page_and_a_line_of_the_navigation(built):
    start = (built / "index.html").read_text()
    for places in site.chapters().values():
        assert places
        for title, file in places:
            assert (built / site.built_name(file)).exists(), file
            assert re.search(rf'href="(\./)?{re.escape(site.built_name(file))}"', start), title


def test_the_links_hold_and_a_broken_one_is_found(built):
    assert site.problems(built) == []
    page = built / "docs" / "fork.html"
    whole = page.read_text()
    try:
        page.write_text(whole.replace("</article>", '<a href="nowhere.html">a</a><a href="letters.html#nowhere">b</a></article>'))
        assert [line.split(": ")[1] for line in site.problems(built)] == ["nowhere.html leads nowhere", "letters.html#nowhere"]
    finally:
        page.write_text(whole)


def test_the_live_page_leads_to_lines_of_code(built):
    links = re.findall(r'href="([^"]+)#__codelineno-0-(\d+)"', (built / "docs" / "live" / "index.html").read_text())
    assert len(links) > 20
    for file, line in links:
        assert f'id="__codelineno-0-{line}"' in (built / "docs" / "live" / file).resolve().read_text()


def test_all_of_it_is_searched(built):
    found = json.dumps(json.loads((built / "search.json").read_text()))
    for word in ("governance", "group_advantages", "Your turn"):  # a chapter, a file of code, the notebook
        assert word in found, word


def test_a_page_asks_no_other_server_for_anything(built):
    for path in built.rglob("*.html"):
        asked = re.findall(
            r'<(?:script|img|iframe|source)[^>]* src="(?:https?:)?//[^"]*"|<link[^>]* rel="stylesheet"[^>]*https?://[^>]*>',
            path.read_text(),
        )
        assert not asked, path


def test_lists_that_begin_right_below_a_paragraph_are_lists():
    text = "some words:\n* one\n* two\n\n```\nsome words:\n* no list\n```\n"
    assert site.rewritten("docs/x.md", text, set(), []) == "some words:\n\n* one\n* two\n\n```\nsome words:\n* no list\n```\n"
