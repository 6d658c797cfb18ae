"""Wishes, templates and the decision about them: pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.errors import UsageError
from agent_sandbox.service.backend.interface import Support, Terminal
from agent_sandbox.service.core import templates
from agent_sandbox.service.core.policy import World, consider, decide
from agent_sandbox.service.core.templates import Template
from agent_sandbox.service.core.wishes import ExecWish, FilePut, RunWish, Wish, fingerprint, shell
from agent_sandbox.service.limits import Limits
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import Network, Resources

from .lab import ALICE

# --- fingerprints

BASE = Wish(env={"A": "1", "B": "2"}, files=(FilePut(path="x", data=b"1"),))
GOLDEN = {
    "BASE": "6eea24cc8a6b04d42e56bc61550fea883f1629f8dea9eb697030fe6ce1a32c56",
    "RUN": "2a83fc901cb004944adfe9841176970cbaf600143cc8c6795baca998c4d68f53",
    "BARE": "b34a4cb5997077b6e5bd3c5e804f4afca61daebf6cfaca22834573428d13324a",
}


def test_the_order_of_fields_does_not_change_a_fingerprint() -> None:
    assert fingerprint(BASE) == fingerprint(BASE.replace(env={"B": "2", "A": "1"}))


@pytest.mark.parametrize(
    "other",
    [
        BASE.replace(env={"A": "1", "B": "3"}),
        BASE.replace(template="x"),
        BASE.replace(timeout=5.0),
        BASE.replace(network=Network()),
        BASE.replace(resources=Resources(memory=1)),
        BASE.replace(files=(FilePut(path="x", data=b"2"),)),
        BASE.replace(files=(FilePut(path="x", data=b"1", mode=0o755),)),
        BASE.replace(files=()),
        RunWish(sandbox=BASE, command=ExecWish(argv=("true",))),
    ],
)
def test_any_difference_changes_a_fingerprint(other: Wish | RunWish) -> None:
    assert fingerprint(other) != fingerprint(BASE)


def test_a_fingerprint_is_of_all_of_a_command() -> None:
    seen = set()
    for fields in (
        {}, {"stdin": b""}, {"stdin": b"x"}, {"cwd": "/workspace"}, {"terminal": Terminal()},
        {"keep_input": True}, {"env": {"A": "\udc80"}}, {"timeout": 1.0}, {"background": True},
    ):  # fmt: skip
        wish = RunWish(command=ExecWish(argv=shell("true")).replace(**fields))
        seen.add(fingerprint(wish))
    assert len(seen) == 9


def test_keys_from_before_an_update_are_still_those_of_the_same_request() -> None:
    """Hashes from before there was `retry`: a key lives for a day, and updates come in between."""
    run = RunWish(sandbox=BASE, command=ExecWish(argv=("true",), env={"A": "1"}))
    known = {
        "BASE": fingerprint(BASE),
        "RUN": fingerprint(run),
        "BARE": fingerprint(RunWish(command=ExecWish(argv=shell("true")))),
    }
    assert known == GOLDEN
    assert fingerprint(run.replace(retry=True)) != fingerprint(run)


# --- templates


def test_the_default_template_always_exists(tmp_path: Path) -> None:
    assert templates.load(str(tmp_path)) == {"default": Template(name="default")}


def test_a_template_says_how_many_to_have_ready_and_what_must_be_inside() -> None:
    for count in (0, 1, 10_000):
        assert templates.decode("x", {"t": {"warm": count}})["t"].warm == count
    for inner in ("preferred", "required", "off"):
        assert templates.decode("x", {"t": {"inner": inner}})["t"].inner == inner
    plain = templates.decode("x", {"t": {}})["t"]
    assert (plain.warm, plain.inner) == (0, "preferred")


def test_templates_are_read(tmp_path: Path) -> None:
    (tmp_path / "templates.toml").write_text("""
[python]
description = "Python"
backend = "docker"
image = "python:3.13"
env = { A = "1" }
timeout = 60
network = "public"
[python.resources]
memory = "1G"
cpu = 1.5
pids = 10
disk = 4096
[default]
[default.network]
mode = "allow"
allow = ["example.org"]
deny = ["10.0.0.0/8"]
""")
    found = templates.load(str(tmp_path))
    assert found["python"] == Template(
        name="python", description="Python", backend="docker", image="python:3.13",
        env={"A": "1"}, timeout=60.0, network=Network(mode="public"),
        resources=Resources(memory=1 << 30, cpus=1.5, pids=10, disk=4096),
    )  # fmt: skip
    expected = Network(mode="allow", allow=("example.org",), deny=("10.0.0.0/8",))
    assert found["default"].network == expected
    assert templates.load("/nowhere", str(tmp_path / "templates.toml")) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "not a table"),
        ("[x]\nimages = 'a'", "unknown key 'images'"),
        ("[x]\nimage = 5", "image: 5 is not a text"),
        ("[x]\ntimeout = -1", "timeout"),
        ("[x]\ntimeout = true", "timeout"),
        ("[x]\nnetwork = 'host'", "mode 'host'"),
        ("[x]\nnetwork = {allow = 'x'}", "not a list"),
        ("[x]\nenv = {'A=B' = 'c'}", "name of a variable"),
        ("[x]\nresources = 5", "not a table"),
        ("[x.resources]\nmemory = 'much'", "memory"),
        ("[x.resources]\nmemory = -5", "memory"),
        ("[x.resources]\nram = 5", "unknown key 'ram'"),
        ("[x]\nwarm = -1", "warm"),
        ("[x]\nwarm = true", "warm"),
        ("[x]\nwarm = 1.5", "warm"),
        ("[x]\nwarm = 10001", "warm"),
        ('[x]\ninner = "on"', "inner"),
        ("[x]\ninner = true", "inner"),
        ("[x", "templates.toml"),
    ],
)
def test_a_wrong_template_is_an_error_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "templates.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        templates.load(str(tmp_path))
    assert caught.value.code == "templates-invalid"
    assert words in caught.value.message


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        templates.load(str(tmp_path), str(tmp_path / "missing"))


# --- the decision

KEPT = {"memory": "cgroup", "pids": "cgroup", "disk": "server"}
WORLD = World(
    limits=Limits(allowed_images=("python:*",)),
    templates={
        "default": Template(name="default"),
        "big": Template(
            name="big", env={"A": "template", "B": "template"}, timeout=100.0,
            resources=Resources(memory=1 << 30, pids=99), network=Network(mode="public"),
        ),
        "py": Template(name="py", backend="box", image="python:3.13"),
    },
    supports={
        "bare": Support(ok=True, enforced=KEPT, networks=("off", "public")),
        "box": Support(ok=True, enforced=KEPT, images=True, runtimes=("runc", "runsc")),
        "down": Support(ok=False, reason="no engine at /run/secret.sock"),
    },
    default_backend="bare",
)  # fmt: skip


def test_a_wish_wins_over_its_template_and_the_template_over_the_defaults() -> None:
    wish = Wish(template="big", env={"A": "wish"}, resources=Resources(pids=5))
    decision = decide(ALICE, wish, WORLD)
    assert decision.env == {"A": "wish", "B": "template"}
    assert decision.resources == Resources(
        memory=1 << 30, pids=5, cpus=WORLD.limits.default_cpus, disk=WORLD.limits.default_disk
    )
    assert decision.timeout == 100.0
    assert decision.network.mode == "public"
    assert decide(ALICE, Wish(), WORLD).network.mode == "off"


def test_a_default_that_nothing_keeps_is_reported_as_such() -> None:
    decision = decide(ALICE, Wish(), WORLD)
    assert decision.enforced == {**KEPT, "cpus": ""}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"template": "none"}, "INVALID", "template"),
    ({"backend": "none"}, "INVALID", "backend"),
    ({"backend": "down"}, "BACKEND_UNAVAILABLE", "backend"),
    ({"image": "python:3"}, "UNSUPPORTED", "image"),
    ({"backend": "box"}, "INVALID", "image"),
    ({"backend": "box", "image": "evil:1"}, "IMAGE_NOT_ALLOWED", "image"),
    ({"backend": "bare", "image": "evil:1"}, "IMAGE_NOT_ALLOWED", "image"),
    ({"template": "py", "image": "evil:1"}, "IMAGE_NOT_ALLOWED", "image"),
    ({"runtime": "runsc"}, "UNSUPPORTED", "runtime"),
    ({"template": "py", "runtime": "kata"}, "UNSUPPORTED", "runtime"),
    ({"network": Network(mode="host")}, "NETWORK_NOT_ALLOWED", "network"),
    ({"network": Network(mode="allow")}, "UNSUPPORTED", "network"),
    ({"resources": Resources(memory=1 << 40)}, "LIMIT_EXCEEDED", "resources.memory"),
    ({"resources": Resources(cpus=1.0)}, "LIMIT_NOT_ENFORCEABLE", "resources.cpu"),
    ({"timeout": 1e9}, "LIMIT_EXCEEDED", "timeout"),
    ({"timeout": float("nan")}, "INVALID", "timeout"),
]


@pytest.mark.parametrize(("fields", "code", "field"), REFUSED)
def test_a_refusal_has_a_code_a_field_and_a_rule(
    fields: dict[str, Any], code: str, field: str
) -> None:
    with pytest.raises(Problem) as caught:
        decide(ALICE, Wish(**fields), WORLD)
    problem = caught.value
    assert (problem.code, problem.field) == (code, field)
    assert problem.rule
    assert "secret" not in problem.message + problem.hint
    decision, problems = consider(ALICE, Wish(**fields), WORLD)
    assert decision is None
    assert (problems[0].code, problems[0].field) == (code, field)


def test_a_dry_run_tells_all_refusals_at_once() -> None:
    wish = Wish(image="x", runtime="y", network=Network(mode="host"), timeout=1e9,
                resources=Resources(memory=1 << 40))  # fmt: skip
    _, problems = consider(ALICE, wish, WORLD)
    assert [p.field for p in problems] == [
        "image", "runtime", "network", "resources.memory", "timeout",
    ]  # fmt: skip


def test_a_dry_run_without_refusals_is_what_would_be_made() -> None:
    assert consider(ALICE, Wish(), WORLD) == (decide(ALICE, Wish(), WORLD), [])


def test_a_required_runtime_is_used_and_cannot_be_avoided_by_another_backend() -> None:
    world = WORLD.replace(limits=WORLD.limits.replace(required_runtime="runsc"))
    assert decide(ALICE, Wish(template="py"), world).runtime == "runsc"
    for wish in (Wish(), Wish(template="py", runtime="runc")):
        with pytest.raises(Problem) as caught:
            decide(ALICE, wish, world)
        assert caught.value.code == "RUNTIME_NOT_ALLOWED"
    # The control: without the rule both are fine.
    assert decide(ALICE, Wish(), WORLD).runtime == ""
    assert decide(ALICE, Wish(template="py", runtime="runc"), WORLD).runtime == "runc"


def test_a_token_may_narrow_templates_and_images() -> None:
    narrow = ALICE.replace(templates=("py",), images=("python:3.13",))
    assert decide(narrow, Wish(template="py"), WORLD).image == "python:3.13"
    for wish, code in (
        (Wish(), "TEMPLATE_NOT_ALLOWED"),
        # A template that it may not use and one that there is not look the same.
        (Wish(template="secret"), "TEMPLATE_NOT_ALLOWED"),
        (Wish(template="py", image="python:3.12"), "IMAGE_NOT_ALLOWED"),
    ):
        with pytest.raises(Problem) as caught:
            decide(narrow, wish, WORLD)
        assert caught.value.code == code
