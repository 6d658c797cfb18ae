"""The document says what the service checks: both are made of the same tables, and agree."""

from __future__ import annotations

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.service.api import inputs, openapi
from agent_sandbox.service.api.call import Route
from agent_sandbox.service.api.routes import ROUTES, find
from agent_sandbox.service.api.schema import Kind, Shape
from agent_sandbox.service.problems import STATUS, Problem
from service.api.asking import name

DOCUMENT: dict[str, Any] = json.loads(openapi.text())
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
BODIES = {row.body.name: row.body for row in ROUTES if row.body is not None and row.body.name}


def validator(schema: dict[str, Any]) -> Any:
    whole = {**schema, "components": DOCUMENT["components"]}
    return jsonschema.Draft202012Validator(whole)


def accepts(kind: Kind, value: object) -> bool:
    try:
        kind.read(value, "")
    except Problem:
        return False
    return True


def test_every_route_that_is_not_hidden_is_in_the_document() -> None:
    said = {f"{m.upper()} {path}" for path, ms in DOCUMENT["paths"].items() for m in ms}
    assert said == {name(route) for route in ROUTES if not route.hidden}
    names = [op["operationId"] for ms in DOCUMENT["paths"].values() for op in ms.values()]
    assert len(names) == len(set(names))


def test_every_reference_leads_somewhere() -> None:
    found: set[str] = set()

    def walk(value: object) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                found.add(value["$ref"])
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(DOCUMENT)
    assert found
    assert found <= {f"#/components/schemas/{known}" for known in SCHEMAS}
    assert {ref.rpartition("/")[2] for ref in found} == set(SCHEMAS)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_schema_is_one(schema: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[schema])
    for example in SCHEMAS[schema].get("examples", ()):
        validator(SCHEMAS[schema]).validate(example)


@pytest.mark.parametrize("body", BODIES)
def test_every_example_is_accepted(body: str) -> None:
    kind = BODIES[body]
    if isinstance(kind, Shape) and kind.example is not None:
        assert accepts(kind, dict(kind.example))


@pytest.mark.parametrize("route", [r for r in ROUTES if not r.hidden], ids=name)
def test_every_refusal_has_a_status_in_the_document(route: Route) -> None:
    operation = DOCUMENT["paths"][route.path][route.method.lower()]
    for code in openapi.codes_of(route):
        assert str(STATUS[code]) in operation["responses"]
    assert ("security" in operation) == route.public
    for status in operation["responses"]:
        assert 100 < int(status) < 600


# Values near those that requests have: known names, and whatever else.
NAMES = sorted({n for kind in BODIES.values() if isinstance(kind, Shape) for n in kind.fields})
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["off", "public", "512Mi", "1.5G", "500m", "YQ==", "644", "SIGTERM", "TERM",
                       "2030-01-02T03:04:05Z", "admin", "0", "x y", "x\0y", "a/b:c@d"])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("body", BODIES)
def test_the_reader_refuses_what_the_document_does_not_allow(body: str) -> None:
    kind = BODIES[body]
    check = validator(SCHEMAS[body])
    fields = sorted(kind.fields) if isinstance(kind, Shape) else ["a", "b/c"]

    @settings(max_examples=150, deadline=None)
    @given(st.dictionaries(st.sampled_from(fields) | st.text(max_size=4), VALUES, max_size=4))
    def agree(value: dict[str, Any]) -> None:
        if accepts(kind, value):
            check.validate(value)

    agree()


# What a schema cannot tell: numbers of zero as text, bytes instead of characters.
@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        (inputs.SIZE_OR_BYTES, "512Mi", 512 << 20), (inputs.SIZE_OR_BYTES, "512m", 512 << 20),
        (inputs.SIZE_OR_BYTES, "1.5G", 3 << 29), (inputs.SIZE_OR_BYTES, "10", 10),
        (inputs.SIZE_OR_BYTES, "2KiB", 2048), (inputs.SIZE_OR_BYTES, 7, 7),
        (inputs.SIZE_OR_BYTES, 7.0, 7), (inputs.SIZE_OR_BYTES, "0", None),
        (inputs.SIZE_OR_BYTES, "999999999999999T", None), (inputs.SIZE_OR_BYTES, "1e3", None),
        (inputs.SIZE_OR_BYTES, " 1", None), (inputs.SIZE_OR_BYTES, True, None),
        (inputs.RESOURCES.fields["cpu"], "500m", 0.5), (inputs.RESOURCES.fields["cpu"], "2", 2.0),
        (inputs.RESOURCES.fields["cpu"], 1, 1.0), (inputs.RESOURCES.fields["cpu"], "0m", None),
        (inputs.RESOURCES.fields["cpu"], 0, None), (inputs.RESOURCES.fields["cpu"], 10**400, None),
        (inputs.PATH, "é" * 2047, "é" * 2047), (inputs.PATH, "é" * 2048, None),
    ],
)  # fmt: skip
def test_amounts_are_read(kind: Kind, value: object, wanted: object) -> None:
    if wanted is None:
        assert not accepts(kind, value)
    else:
        assert kind.read(value, "") == wanted


@pytest.mark.parametrize("route", ROUTES, ids=name)
def test_every_route_is_found_by_its_path(route: Route) -> None:
    found = find(route.path.replace("{", "").replace("}", ""))
    assert found is not None
    assert found[0][route.method] is route


@pytest.mark.parametrize(
    "path", ["/v2", "/v1", "/v1/sandboxes/a/b", "/healthz/x", "/x", "/v1/run/x"]
)
def test_nothing_else_is_found(path: str) -> None:
    assert find(path) is None
