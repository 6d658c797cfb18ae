#!/usr/bin/env python3
"""Write docs/api.md from the service's table of routes, and the limits into docs/service.md.

`--check` ends with 1 when one of them is stale.
"""

from __future__ import annotations

import json
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "src"))

from agent_sandbox.service import limits, problems  # noqa: E402
from agent_sandbox.service import limits_units as units  # noqa: E402
from agent_sandbox.service.api import openapi  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

API, SERVICE = os.path.join(HERE, "api.md"), os.path.join(HERE, "service.md")
BEGIN, END = "<!-- limits -->\n", "<!-- /limits -->\n"
CODE = re.compile(r"`([A-Z_]+)`")
# What any request may be answered with.
COMMON = (
    "BAD_REQUEST", "UNAUTHENTICATED", "FORBIDDEN", "SCOPE_MISSING", "CSRF", "REQUEST_TIMEOUT",
    "TOO_LARGE", "URI_TOO_LONG", "UNSUPPORTED_MEDIA_TYPE", "INVALID", "RATE_LIMITED",
    "HEADERS_TOO_LARGE", "INTERNAL", "DRAINING", "METHOD_NOT_ALLOWED", "LENGTH_REQUIRED",
    "STATE_UNAVAILABLE",
)  # fmt: skip
HEAD = """# API of the sandbox service

<!-- Made by docs/make_api.py from the table of routes. Do not edit. -->

What it is for and how to begin: [service.md](service.md). The same as a document for programs:
`GET /openapi.json`.

- Every request but `/healthz`, `/readyz` and `/openapi.json` needs a token:
  `Authorization: Bearer TOKEN` or `X-API-Key: TOKEN`. On the unix socket the kernel says who calls.
- Bodies and answers are JSON. A member that is not in the table is an error, so that a typing
  mistake is not a wish that nobody heard.
- A refusal is `{"code", "message", "hint", "rule", "field", "requestId"}`. Codes are stable.
  Those that any request may get are listed only [at the end](#codes-of-refusals).
- 429 and 503 carry `Retry-After`. Lists carry `next`; give it back as `after`.

"""


def main() -> int:
    """Write both, or tell whether they are stale."""
    pages = {API: api(), SERVICE: service()}
    if "--check" in sys.argv:
        return int(any(read(path) != text for path, text in pages.items()))
    for path, text in pages.items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return 0


def read(path: str) -> str:
    """A page as it is; nothing if it is not there yet."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def service() -> str:
    """The page of the service with its limits."""
    before, _, rest = read(SERVICE).partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| variable | default | whose | meaning |", "|---|---|---|---|"]
    for row in limits.TABLE:
        default = f"`{units.shown(row.kind, row.default)}`" if row.default else "none"
        lines.append(f"| `{row.variable}` | {default} | {row.scope} | {row.help} |")
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}{after}"


def api() -> str:
    """The page of the routes."""
    document: Json = json.loads(openapi.text())
    tags: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            part = route(method.upper(), path, operation)
            tags.setdefault(operation["tags"][0], []).append(part)
    parts = [HEAD]
    for tag, routes in tags.items():
        parts += [f"## {tag.capitalize()}\n\n", *routes]
    parts.append("## Shapes\n\n")
    schemas = document["components"]["schemas"]
    parts += [shape(name, schemas[name]) for name in sorted(schemas)]
    parts.append("## Codes of refusals\n\n| code | status |\n|---|---|\n")
    parts += [f"| `{code}` | {status} |\n" for code, status in problems.STATUS.items()]
    return "".join(parts)


def route(method: str, path: str, operation: Json) -> str:
    """One route."""
    lines = [f"### {method} {path}\n", operation["summary"] + "."]
    if operation.get("description"):
        lines += ["", operation["description"]]
    rows = [
        f"| `{p['name']}` | {p['in']} | {kind(p['schema'])} | {p.get('description', '')} |"
        for p in operation.get("parameters", ())
        if p["in"] != "path"
    ]
    if rows:
        lines += ["", "| parameter | in | type | meaning |", "|---|---|---|---|", *rows]
    content = operation.get("requestBody", {}).get("content", {})
    if content:
        lines += ["", "Body: " + ", ".join(f"{media(m, c)}" for m, c in content.items()) + "."]
    lines.append("")
    refused: list[str] = []
    for status, answer in operation["responses"].items():
        if int(status) >= 400:
            refused += [code for code in CODE.findall(answer["description"]) if code not in COMMON]
            continue
        held = ", ".join(media(m, c) for m, c in answer.get("content", {}).items())
        lines.append(f"- {status}: {answer['description']} {held}".rstrip())
    if refused:
        lines.append("- refusals: " + ", ".join(f"`{code}`" for code in refused))
    return "\n".join(lines) + "\n\n"


def media(name: str, content: Json) -> str:
    """A media type with its shape."""
    shown = kind(content.get("schema", {}))
    return shown if name == "application/json" and shown else f"`{name}`"


def shape(name: str, schema: Json) -> str:
    """One named shape."""
    lines = [f"### {name}\n"]
    if schema.get("description"):
        lines.append(schema["description"] + "\n")
    fields = schema.get("properties", {})
    if not fields:
        return "\n".join([*lines, kind(schema)]) + "\n\n"
    needed = schema.get("required", ())
    lines += ["| member | type | meaning |", "|---|---|---|"]
    for field, inner in fields.items():
        star = "" if field in needed else " (optional)"
        lines.append(f"| `{field}` | {kind(inner)}{star} | {inner.get('description', '')} |")
    return "\n".join(lines) + "\n\n"


def kind(schema: Json) -> str:
    """A type in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(kind(one) for one in schema[key])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    found = schema.get("type", "any")
    words = [found] if isinstance(found, str) else list(found)
    if "array" in words:
        words[words.index("array")] = f"list of {kind(schema.get('items', {}))}"
    if "object" in words and schema.get("properties"):
        words[words.index("object")] = "{" + ", ".join(f"`{n}`" for n in schema["properties"]) + "}"
    return " or ".join(words)


if __name__ == "__main__":
    sys.exit(main())
