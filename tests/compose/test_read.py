"""Files are put together as Compose does it, and every value keeps its file and line."""

# ruff: noqa: E501 - a compose file reads better in one piece
from __future__ import annotations

import pytest

from agent_sandbox.compose import variables
from agent_sandbox.compose.nodes import parse
from agent_sandbox.compose.read import override_name, project_name
from agent_sandbox.errors import SandboxError
from compose.conftest import found, load

SOCK = "/var/run/docker.sock:/var/run/docker.sock"


def sockets(files: str | dict[str, str], *names: str, **env: str) -> set[tuple[str, str]]:
    """(service, file:line) of each socket."""
    return {
        (f.service, str(f.place).removeprefix("/p/"))
        for f in found(files, *names, **env)
        if f.rule.id == "docker-socket"
    }


def test_through_an_anchor() -> None:
    text = f"x-v: &v\n  - {SOCK}\nservices:\n  a:\n    volumes: *v\n  b:\n    volumes: *v\n"
    assert sockets(text) == {("a", "c.yml:2"), ("b", "c.yml:2")}


def test_through_an_aliased_text() -> None:
    text = f"x-s: &s {SOCK}\nservices:\n  a:\n    volumes: [./x:/x, *s]\n"
    assert sockets(text) == {("a", "c.yml:1")}


@pytest.mark.parametrize("merge", ["<<: *w", "<<: [*w]", '"<<": *w', "<<: [*o, *w]"])
def test_through_a_merge_key(merge: str) -> None:
    text = (
        f"x-o: &o {{image: y}}\nx-w: &w\n  volumes:\n    - {SOCK}\nservices:\n  a:\n    {merge}\n"
    )
    assert sockets(text) == {("a", "c.yml:4")}


def test_a_services_own_key_wins_over_a_merged_one() -> None:
    text = f"x-w: &w\n  volumes: ['{SOCK}']\nservices:\n  a:\n    volumes: []\n    <<: *w\n"
    assert sockets(text) == set()


def test_through_extends_in_the_same_file() -> None:
    text = f"services:\n  b:\n    volumes: ['{SOCK}']\n  a:\n    extends: b\n  c:\n    extends: {{service: a}}\n"
    assert sockets(text) == {(name, "c.yml:3") for name in "abc"}


def test_through_extends_of_another_file() -> None:
    files = {
        "c.yml": "services:\n  a:\n    extends: {file: sub/b.yml, service: base}\n",
        "sub/b.yml": "services:\n  base:\n    extends: {file: ../d.yml, service: deep}\n    volumes: ['./x:/x']\n",
        "d.yml": f"services:\n  deep:\n    volumes:\n      - {SOCK}\n",
    }
    assert sockets(files) == {("a", "d.yml:4")}
    mounts = load(files).services[0].mounts
    assert {m.source for m in mounts} == {"/p/sub/x", "/var/run/docker.sock"}


@pytest.mark.parametrize(
    "include",
    ["[i/i.yml]", "[{path: i/i.yml}]", "[{path: [i/i.yml, i/o.yml], project_directory: i}]"],
)
def test_through_include(include: str) -> None:
    files = {
        "c.yml": f"include: {include}\nservices:\n  a: {{image: x}}\n",
        "i/i.yml": f"services:\n  b:\n    volumes: ['{SOCK}', './d:/d']\n",
        "i/o.yml": "services:\n  b:\n    image: y\n",
    }
    assert sockets(files) == {("b", "i/i.yml:3")}
    service = next(s for s in load(files).services if s.name == "b")
    assert "/p/i/d" in {m.source for m in service.mounts}


def test_through_an_override_file() -> None:
    files = {
        "c.yml": "services:\n  a:\n    image: x\n    volumes: ['./x:/x']\n",
        "o.yml": f"services:\n  a:\n    volumes:\n      - {SOCK}\n    privileged: true\n",
    }
    assert sockets(files, "c.yml", "o.yml") == {("a", "o.yml:4")}
    assert sockets(files) == set()


@pytest.mark.parametrize(
    ("volumes", "left"),
    [
        (f"['./s:{SOCK.split(':')[1]}']", 1),
        ("!override ['./x:/x']", 0),
        ("!reset []", 0),
        ("[./x:/x]", 1),
    ],
)
def test_overrides_take_away_as_compose_does(volumes: str, left: int) -> None:
    """One mount per target; !override and !reset drop what was there. A fake target still shows."""
    files = {
        "c.yml": f"services:\n  a:\n    volumes:\n      - {SOCK}\n",
        "o.yml": f"services:\n  a:\n    volumes: {volumes}\n",
    }
    assert len(sockets(files, "c.yml", "o.yml")) == left


def test_every_profile_counts() -> None:
    text = f"services:\n  a:\n    profiles: [debug]\n    volumes: ['{SOCK}']\n"
    assert sockets(text) == {("a", "c.yml:4")}
    assert found(text)[0].profiles == ("debug",)


def test_variables_of_the_environment_and_of_dotenv() -> None:
    text = "services:\n  a:\n    volumes: ['${S:-./x}:/x', '${T-./y}:/y']\n"
    assert sockets(text) == set()
    assert sockets({"c.yml": text, ".env": "S=/run/docker.sock\n"}) == {("a", "c.yml:3")}
    assert sockets({"c.yml": text, ".env": "S=/run/docker.sock\n"}, S="./z") == set()
    assert sockets(text, T="/run") == {("a", "c.yml:3")}


def test_volumes_from_another_service() -> None:
    text = f"services:\n  b:\n    volumes: ['{SOCK}']\n  a:\n    volumes_from: ['b:ro']\n"
    assert sockets(text) == {("a", "c.yml:3"), ("b", "c.yml:3")}


def test_env_files_with_their_own_lines() -> None:
    files = {
        "c.yml": "services:\n  a:\n    env_file: [e.env, {path: no.env, required: false}]\n"
        "    environment: {API_KEY: ''}\n",
        "e.env": "# x\nexport API_KEY='abc'\nB_TOKEN=\"a\nb\" # y\nDOCKER_HOST=tcp://h:2375\n",
    }
    hits = {(f.rule.id, str(f.place), f.severity) for f in found(files)}
    assert ("secret", "/p/e.env:3", "medium") in hits
    assert ("engine-address", "/p/e.env:5", "critical") in hits
    assert ("unread", "/p/c.yml:3", "low") in hits
    # The service's own empty value wins.
    assert not [h for h in hits if h[0] == "secret" and h[1].endswith(":2")]


@pytest.mark.parametrize("include", ["[https://x.example/c.yml]", "['oci://x/y']", "['${WHERE}']"])
def test_what_cannot_be_read_is_a_finding(include: str) -> None:
    hits = [f for f in found(f"include: {include}\nservices: {{}}\n") if f.rule.id == "unread"]
    assert [f.severity for f in hits] == ["high"]


BROKEN = [
    "", "- a\n", "a: [\n", "services: []\n", "services:\n  a: 5\n", "a: 1\na: 2\n",
    "services:\n  a:\n    extends: b\n", "services:\n  a:\n    extends: a\n", "include: [c.yml]\n",
    "include: [missing.yml]\n", "x: &x [*x]\n", "services: {a: {image: '${'}}\n", "? [a]\n: b\n",
    "services: {a: {image: 'x$'}}\n", "a: *b\n", "a: 1\n---\nb: 2\n", "<<: 5\n",
    "services:\n  a:\n    extends: {file: missing.yml, service: a}\n", "services: {a: {image: '${1}'}}\n",
    "x-a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"x-{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n"
        for a, b in zip("abcdef", "bcdefg", strict=True)
    ),
    "a: " + "[" * 200 + "]" * 200, "a: " + "[" * 20000, "\0", "a: \x07",
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_an_error_of_ours(text: str) -> None:
    with pytest.raises(SandboxError) as caught:
        found(text)
    assert caught.value.code in ("compose-broken", "compose-missing")


FILLED = [
    ("a$$b", "a$b", []), ("$A-$B", "1-", ["B"]), ("${A}${B}", "1", ["B"]), ("${A:-x}", "1", []),
    ("${B:-x}", "x", []), ("${E:-x}", "x", []), ("${E-x}", "", []), ("${B-x}", "x", []),
    ("${B:?gone}", "", ["B"]), ("${A:?gone}", "1", []), ("${A:+x}", "x", []), ("${B:+x}", "", []),
    ("${E:+x}", "", []), ("${E+x}", "x", []), ("${B:-${A}}", "1", []), ("${B:-${C:-d}}", "d", []),
    ("${B:-${C}}", "", ["C"]), ("${B:-a}b}", "ab}", []), ("$A_x", "", ["A_x"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "result", "unset"), FILLED)
def test_variables_are_filled_in(text: str, result: str, unset: list[str]) -> None:
    done = variables.fill(text, {"A": "1", "E": ""}, "here")
    assert ("".join(done.parts), done.unset) == (result, unset)


def test_the_predecessors_words_for_true() -> None:
    node = parse("a: yes\nb: 'true'\nc: On\nd: no\ne: 0\nf:\n", "f", "/")
    assert [node.truth(key) for key in "abcdef"] == [True, True, True, False, False, False]


def test_names_as_compose_makes_them() -> None:
    assert project_name("/srv/My Team.v2") == "myteamv2"
    assert override_name("compose.yaml")[0] == "compose.override.yaml"
    assert override_name("other.yml") == ()
