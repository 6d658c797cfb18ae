"""Limits: read from the environment, per agent, refused by name, never clamped."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.service import limits, limits_units
from agent_sandbox.service.limits import Limits
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import ADMIN, EXEC, Agent, Network, Resources


def agent(**changes: object) -> Agent:
    return Agent(name="worker", key="sbx_x", scopes=frozenset({EXEC})).replace(**changes)


def problem(code: str, check: object, *given: object) -> Problem:
    with pytest.raises(Problem) as caught:
        check(*given)  # type: ignore[operator]
    assert caught.value.code == code
    return caught.value


# --- the table


def test_the_table_has_every_limit_once() -> None:
    assert [row.name for row in limits.TABLE] == list(Limits.__fields__)
    for row in limits.TABLE:
        assert row.help
        assert row.kind in limits_units.READERS
        if row.most:
            assert getattr(Limits(), row.name) <= getattr(Limits(), row.most)


def test_what_is_shown_of_a_default_can_be_read_back() -> None:
    for row in limits.TABLE:
        text = limits_units.shown(row.kind, row.default).removesuffix(" s")
        if text not in ("", "none"):
            assert limits_units.READERS[row.kind](text) == row.default


def test_the_defaults_are_the_documented_ones() -> None:
    found = limits.load({})
    assert found == Limits()
    assert found.allowed_images == ()
    assert found.allowed_networks == ("off", "allow", "public")
    assert (found.max_execution_time, found.default_execution_time) == (300.0, 60.0)
    assert (found.max_memory, found.default_memory) == (2 << 30, 512 << 20)


def test_limits_come_from_the_environment() -> None:
    found = limits.load({
        "ALLOWED_IMAGES": "python:3.*, ghcr.io/me/*", "MAX_EXECUTION_TIME": "10m",
        "MAX_MEMORY": "4Gi", "MAX_CPU": "1.5", "MAX_PIDS": "", "RATE_CREATE_PER_MIN": "7",
        "ALLOWED_NETWORKS": "off", "REQUIRED_RUNTIME": "sysbox-runc", "PATH": "/bin",
    })  # fmt: skip
    assert found.allowed_images == ("python:3.*", "ghcr.io/me/*")
    assert found.max_execution_time == 600.0
    assert found.max_memory == 4 << 30
    assert found.max_cpus == 1.5
    assert found.max_pids == 512
    assert found.rate_create_per_min == 7
    assert found.allowed_networks == ("off",)
    assert found.required_runtime == "sysbox-runc"


@pytest.mark.parametrize("row", limits.TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("text", ["-1", "0", "nan", "inf", "1e9", "$(id)", "x y z", "9" * 30, "é"])
def test_a_bad_value_is_an_error_with_the_name_of_the_variable(row: limits.Row, text: str) -> None:
    if row.kind in (limits_units.IMAGES, limits_units.NAME) and text.isascii():
        return
    with pytest.raises(PolicyError, match=row.variable) as caught:
        limits.load({row.variable: text})
    assert caught.value.code == "bad-limit"


def test_a_default_follows_its_maximum_unless_somebody_has_set_both() -> None:
    assert limits.load({"MAX_MEMORY": "256M"}).default_memory == 256 << 20
    assert limits.load({"MAX_EXECUTION_TIME": "30"}).default_execution_time == 30.0
    assert limits.load({"MAX_LIFETIME": "5m"}).idle_timeout == 300.0
    with pytest.raises(PolicyError, match="DEFAULT_MEMORY is above MAX_MEMORY"):
        limits.load({"MAX_MEMORY": "256M", "DEFAULT_MEMORY": "512M"})


# --- texts


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("512M", 512 << 20), ("512Mi", 512 << 20), ("512MiB", 512 << 20), ("1.5g", 3 << 29),
     ("10 MB", 10 << 20), ("1k", 1024), ("2T", 2 << 40)],
)  # fmt: skip
def test_sizes(text: str, value: int) -> None:
    assert limits_units.size(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("90", 90), ("1.5", 1.5), ("10m", 600), ("24h", 86400), ("30d", 2592000), ("500ms", 0.5)],
)
def test_times(text: str, value: float) -> None:
    assert limits_units.seconds(text) == value


@given(st.text(max_size=30), st.sampled_from(sorted(limits_units.READERS)))
def test_any_text_is_a_value_or_a_value_error(text: str, kind: str) -> None:
    try:
        value = limits_units.READERS[kind](text)
    except ValueError:
        return
    assert not isinstance(value, float) or math.isfinite(value)


# --- quotas of a token


def test_a_token_may_have_its_own_limits() -> None:
    quotas = dict([limits.quota("MAX_MEMORY", "128M"), limits.quota("max-pids", "5000")])
    assert quotas == {"max_memory": 128 << 20, "max_pids": 5000}
    found = limits.for_agent(Limits(), agent(quotas=quotas))
    assert (found.max_memory, found.default_memory) == (128 << 20, 128 << 20)
    assert found.max_pids == 5000
    assert found.max_disk == Limits().max_disk
    assert limits.for_agent(Limits(), agent()) is not None


def test_lists_survive_the_database() -> None:
    """A quota is kept as JSON, where a tuple becomes a list."""
    name, value = limits.quota("ALLOWED_NETWORKS", "off")
    assert limits.for_agent(Limits(), agent(quotas={name: value})).allowed_networks == ("off",)


@pytest.mark.parametrize(
    ("name", "text"),
    [("MAX_SANDBOXES", "5"), ("MAX_CONCURRENT_EXECS", "5"), ("REQUIRED_RUNTIME", "runc"),
     ("NO_SUCH", "5"), ("MAX_MEMORY", "x"), ("__class__", "1")],
)  # fmt: skip
def test_a_token_cannot_lift_what_is_one_for_all(name: str, text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        limits.quota(name, text)
    assert caught.value.code == "bad-limit"


# --- checks


def test_what_is_not_wished_gets_the_default_and_what_is_stays() -> None:
    found = limits.check_resources(Limits(), Resources(memory=1 << 20))
    assert found == Resources(memory=1 << 20, cpus=1.0, pids=256, disk=256 << 20)
    assert limits.check_timeout(Limits(), None) == 60.0
    assert limits.check_timeout(Limits(), 300) == 300.0
    assert limits.check_lifetime(Limits(), None) == 3600.0


@pytest.mark.parametrize(
    ("wish", "field", "rule"),
    [({"memory": (2 << 30) + 1}, "resources.memory", "limits.max_memory"),
     ({"cpus": 2.1}, "resources.cpu", "limits.max_cpus"),
     ({"pids": 513}, "resources.pids", "limits.max_pids"),
     ({"disk": 1 << 70}, "resources.disk", "limits.max_disk")],
)  # fmt: skip
def test_a_wish_beyond_a_limit_is_refused_by_name(
    wish: dict[str, float], field: str, rule: str
) -> None:
    found = problem("LIMIT_EXCEEDED", limits.check_resources, Limits(), Resources().replace(**wish))
    assert (found.field, found.rule) == (field, rule)
    assert rule.removeprefix("limits.").upper() in found.hint


@pytest.mark.parametrize("wish", [0, -1, math.nan, -math.inf])
def test_nonsense_is_invalid(wish: float) -> None:
    assert problem("INVALID", limits.check_timeout, Limits(), wish).field == "timeout"
    problem("INVALID", limits.check_resources, Limits(), Resources(cpus=wish))


@given(st.floats(allow_nan=True) | st.integers(-10, 1 << 80))
def test_nothing_above_a_limit_passes(wish: float) -> None:
    try:
        assert 0 < limits.check_timeout(Limits(), wish) <= 300
    except Problem:
        assert not 0 < wish <= 300


def test_infinity_is_beyond_every_limit() -> None:
    problem("LIMIT_EXCEEDED", limits.check_timeout, Limits(), math.inf)
    problem("LIMIT_EXCEEDED", limits.check_lifetime, Limits(), 1e300)


def test_counts() -> None:
    limits.check_count(Limits(), "max_sandboxes_per_agent", 49)
    found = problem("QUOTA_EXCEEDED", limits.check_count, Limits(), "max_sandboxes_per_agent", 50)
    assert found.rule == "limits.max_sandboxes_per_agent"
    limits.check_upload(Limits(), 100 << 20)
    problem("TOO_LARGE", limits.check_upload, Limits(), (100 << 20) + 1)


def test_networks() -> None:
    limits.check_network(Limits(), Network(mode="public"))
    only_off = Limits(allowed_networks=("off",))
    problem("NETWORK_NOT_ALLOWED", limits.check_network, only_off, Network(mode="public"))
    problem("NETWORK_NOT_ALLOWED", limits.check_network, Limits(), Network(mode="host"))


@pytest.mark.parametrize(
    ("image", "allowed"),
    [("python:3.12", True), ("docker.io/library/python:3.12", True), ("python", False),
     ("python:4", False), ("evil/python:3.12", False), ("python.evil.com/x:3.12", False),
     ("ghcr.io/me/tool", True), ("ghcr.io/me/deep/tool", False), ("ghcr.io/you/tool", False)],
)  # fmt: skip
def test_images(image: str, allowed: bool) -> None:
    given = Limits(allowed_images=("python:3.*", "ghcr.io/me/*"))
    if allowed:
        limits.check_image(given, agent(), image)
    else:
        problem("IMAGE_NOT_ALLOWED", limits.check_image, given, agent(), image)


def test_an_image_needs_both_lists() -> None:
    given = Limits(allowed_images=("python:*", "node:*"))
    limits.check_image(given, agent(images=("python:*",)), "python:3")
    found = problem(
        "IMAGE_NOT_ALLOWED", limits.check_image, given, agent(images=("python:*",)), "node:1"
    )
    assert found.rule == "token.images"
    # A token cannot have more than the service.
    problem("IMAGE_NOT_ALLOWED", limits.check_image, given, agent(images=("*",)), "alpine:3")
    # By default none is allowed; and no name is allowed that is none.
    problem("IMAGE_NOT_ALLOWED", limits.check_image, Limits(), agent(), "python")
    everything = Limits(allowed_images=("*",))
    for bad in ("", "UPPER", "a b", "x" * 300, "a:b:c", "--privileged", "a@sha256:1"):
        problem("INVALID", limits.check_image, everything, agent(), bad)


def test_runtimes_templates_and_scopes() -> None:
    assert limits.check_runtime(Limits(), "runsc") == "runsc"
    needed = Limits(required_runtime="runsc")
    assert limits.check_runtime(needed, "") == limits.check_runtime(needed, "runsc") == "runsc"
    problem("RUNTIME_NOT_ALLOWED", limits.check_runtime, needed, "runc")
    limits.check_template(agent(), "any")
    limits.check_template(agent(templates=("small",)), "small")
    problem("TEMPLATE_NOT_ALLOWED", limits.check_template, agent(templates=("small",)), "big")
    problem("TEMPLATE_NOT_ALLOWED", limits.check_template, agent(templates=()), "default")
    limits.check_scope(agent(), EXEC)
    problem("SCOPE_MISSING", limits.check_scope, agent(), "files")
    limits.check_scope(agent(scopes=frozenset({ADMIN})), "files")


def test_limits_are_described_for_clients() -> None:
    found = limits.describe(Limits())
    assert found["maxExecutionTime"] == 300.0
    assert found["allowedNetworks"] == ["off", "allow", "public"]
    assert len(found) == len(limits.TABLE)
