"""Protects the docs site: no link of the built pages leads nowhere, every chapter can be found and
searched, and nothing is asked of another server.
"""

import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

from lab import site
from test_book import navigation

pytest.importorskip(
    "zensical",
    reason="zensical is not installed here; `make test-all` installs it into a venv of its own",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    site.main(folder)
    return folder


class Links(HTMLParser):
    """What a page links to, and the places in it that can be linked to."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.places = [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("href", "src") and value]
        self.places |= {value for name, value in attrs if name in ("id", "name")}


def dead(folder) -> list[str]:
    """Links that lead to no file of the site, or to a place that its page does not have."""
    pages = {
        path: Links(path.read_text()) for path in folder.rglob("*.html") if path.name != "404.html"
    }
    found = []
    for path, page in pages.items():
        for link in page.links:
            file, _, place = unquote(link).partition("#")
            goal = (path.parent / file).resolve() if file else path
            goal = goal / "index.html" if goal.is_dir() else goal
            there = goal.is_file() and (goal not in pages or place in pages[goal].places)
            found += [] if there or re.match(r"[a-z]+:|//", link) else [f"{path.name}: {link}"]
    return found


def test_the_links_hold_and_a_broken_one_is_found(built):
    assert dead(built) == []
    page = built / "docs" / "broken.html"
    page.write_text('<a href="nowhere.html">a</a><a href="letters.html#nowhere">b</a>')
    assert dead(built) == ["broken.html: nowhere.html", "broken.html: letters.html#nowhere"]
    page.unlink()


def test_the_start_page_links_to_each_page_of_the_navigation(built):
    start = (built / "index.html").read_text()
    for page in navigation()[1:]:
        assert re.search(rf'href="(\./)?{re.escape(site.built(page))}"', start), page


def test_all_of_it_is_searched_and_no_other_server_is_asked(built):
    searched = (built / "search.json").read_text()
    words = ("governance", "group_advantages", "Your turn")  # a chapter, code, the notebook
    assert all(word in searched for word in words)
    other = r'<(?:script|img|iframe|source)[^>]* src="(?:https?:)?//|<link[^>]* rel="stylesheet"[^>]*https?://'
    assert not [path for path in built.rglob("*.html") if re.search(other, path.read_text())]
