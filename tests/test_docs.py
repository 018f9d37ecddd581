"""The API's page: complete, and whole without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest
from serving import TINY, FakeGateway, fake_gateway

from gateway.api import docs


class Page(HTMLParser):
    """What a page holds: its ids, its links, whatever would be loaded, and its preformatted texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[tuple[str, str | None]] = []
        self.blocks: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A tag opens."""
        if tag not in ("meta", "link", "img", "br"):
            self._open.append(tag)
        if tag == "pre":
            self.blocks.append("")
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if name == "href" and tag == "a" and value:
                self.links.append(value)
            elif name in ("src", "href", "srcset", "data", "action", "style"):
                self.loads.append((tag, value))
        if tag in ("script", "iframe", "object", "link", "img"):
            self.loads.append((tag, None))

    def handle_endtag(self, tag: str) -> None:
        """A tag closes."""
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Text."""
        if "pre" in self._open:
            self.blocks[-1] += data


@pytest.fixture(scope="module")
def gateway() -> Iterator[FakeGateway]:
    with fake_gateway(TINY) as gateway:
        yield gateway


def test_it_loads_nothing_and_may_not(gateway: FakeGateway) -> None:
    answer = gateway.http.get("/docs")
    page = Page(answer.text)
    assert page.loads == []
    assert "@import" not in answer.text
    assert "url(" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_every_operation_parameter_and_schema_is_on_it(gateway: FakeGateway) -> None:
    text, document = gateway.http.get("/docs").text, gateway.http.get("/openapi.json").json()
    page = Page(text)
    for path, operations in document["paths"].items():
        assert f"<h2>{path}</h2>" in text
        for operation in operations.values():
            assert operation["operationId"] in page.ids
            for parameter in operation["parameters"]:
                assert f"<code>{parameter['name']}</code>" in text
    schemas = document["components"]["schemas"]
    assert {f"schema-{name}" for name in schemas} <= page.ids
    # Each block is JSON once its shortened references are read as what they are.
    shown = [json.loads(block) for block in page.blocks]
    assert schemas["Usage"] in shown


def test_every_link_leads_somewhere(gateway: FakeGateway) -> None:
    page = Page(gateway.http.get("/docs").text)
    inside = {link.removeprefix("#") for link in page.links if link.startswith("#")}
    assert inside
    assert inside <= page.ids
    outside = {link for link in page.links if not link.startswith("#")}
    assert outside == {"/openapi.json"}


def test_the_gateways_own_address_leads_there(gateway: FakeGateway) -> None:
    assert gateway.http.get("/").text == gateway.http.get("/docs").text


def test_what_a_document_says_is_text() -> None:
    hostile = "</pre><script>alert(1)</script>"
    document = {
        "info": {"title": hostile, "version": "1", "description": hostile},
        "paths": {
            f"/{hostile}": {
                "get": {
                    "operationId": hostile,
                    "summary": hostile,
                    "parameters": [
                        {"name": hostile, "in": "query", "required": True, "schema": {"title": hostile}}
                    ],
                    "responses": {"200": {"description": hostile, "content": {}}},
                }
            }
        },
        "components": {"schemas": {"A": {"description": hostile}}},
    }
    assert Page(docs.page(document)).loads == []
