"""GET /docs: the OpenAPI document as one page of plain HTML that asks nothing of the network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from litestar import Request, Response, get

from gateway.api.route import Route

HttpRequest = Request[Any, Any, Any]
HTML = "text/html"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
"""Content-Security-Policy: a browser that keeps it cannot load anything beside the page."""

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font: 600 1.05rem ui-monospace, monospace; margin: 2.2rem 0 .4rem; border-bottom: 1px solid #8886; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
details { margin: .2rem 0 .2rem 1rem; }
summary { cursor: pointer; }
summary code { font-weight: 600; }
pre { font: 13px/1.4 ui-monospace, monospace; background: #8881; padding: .6rem; overflow-x: auto; }
.method { font: 600 .8rem ui-monospace, monospace; border: 1px solid; border-radius: 3px; padding: 0 .4em; }
table { border-collapse: collapse; margin: .3rem 0 .3rem 1rem; }
td, th { text-align: left; padding: .1rem .8rem .1rem 0; vertical-align: top; }
"""
_REF = re.compile(r"&quot;#/components/schemas/([A-Za-z0-9_]+)&quot;")


def page(document: Mapping[str, Any]) -> str:
    """An OpenAPI document as HTML: operations by path, then the schemas they refer to."""
    info = document["info"]
    title = f"{info['title']} {info['version']}"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(title)}: API</title>",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f"<p>{escape(info['description'])} The same for machines: "
            '<a href="/openapi.json">/openapi.json</a>.</p>',
            *(_path(path, operations) for path, operations in document["paths"].items()),
            "<h2>Schemas</h2>",
            *(_schema(name, schema) for name, schema in document["components"]["schemas"].items()),
            "</body></html>",
        ]
    )


def _path(path: str, operations: Mapping[str, Any]) -> str:
    shown = [f"<h2>{escape(path)}</h2>"]
    for method, operation in operations.items():
        verb = f'<span class="method">{escape(method.upper())}</span>'
        name, summary = escape(operation["operationId"]), escape(operation["summary"])
        shown.append(f'<h3 id="{name}">{verb} {summary}</h3>')
        if "description" in operation:
            shown.append(f"<p>{escape(operation['description'])}</p>")
        if operation["parameters"]:
            shown.append(_parameters(operation["parameters"]))
        if "requestBody" in operation:
            shown += _contents("Body", operation["requestBody"]["content"])
        for status, answer in operation["responses"].items():
            shown += _contents(f"{status} {answer['description']}", answer["content"])
    return "\n".join(shown)


def _parameters(parameters: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for one in parameters:
        name, where = escape(one["name"]), escape(one["in"]) + (", required" if one["required"] else "")
        schema = _json(one["schema"], indent=None)
        rows.append(f"<tr><td><code>{name}</code></td><td>{where}</td><td><code>{schema}</code></td></tr>")
    return "\n".join(["<table><tr><th>parameter</th><th>in</th><th>schema</th></tr>", *rows, "</table>"])


def _contents(what: str, content: Mapping[str, Any]) -> list[str]:
    return [
        f"<details><summary>{escape(what)} <code>{escape(mime)}</code></summary>"
        f"<pre>{_json(kind['schema'])}</pre></details>"
        for mime, kind in content.items()
    ] or [f"<p>{escape(what)}</p>"]


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    return (
        f'<details id="schema-{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"<pre>{_json(schema)}</pre></details>"
    )


def _json(value: object, indent: int | None = 2) -> str:
    """JSON as HTML; references lead to their schema."""
    text = escape(json.dumps(value, indent=indent, ensure_ascii=False))
    return _REF.sub(r'<a href="#schema-\1">&quot;\1&quot;</a>', text)


@get("/docs", opt=Route(None, also={HTML: None}).opt)
async def docs(request: HttpRequest) -> Response[str]:
    """The API, to read."""
    return _answer(request)


@get("/", opt=Route(None, also={HTML: None}).opt)
async def root(request: HttpRequest) -> Response[str]:
    """The same page: where the gateway's own address leads."""
    return _answer(request)


def _answer(request: HttpRequest) -> Response[str]:
    found: str = request.app.state.docs
    return Response(found, media_type=HTML, headers={"content-security-policy": POLICY})
