"""An onlooker asks a few questions, and no answer holds content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_sandbox.policy.docker import routes, watching
from agent_sandbox.policy.docker.answers import filter_answer
from agent_sandbox.policy.docker.decision import decide, provision, rebuild
from agent_sandbox.policy.docker.values import (
    Decision,
    Found,
    Grants,
    Reference,
    Request,
    Upstream,
)

ALL = Grants(owner="looker", read_only=True, watches=True)
PROJECT = "com.docker.compose.project=shop"
SHOP = ALL.replace(labels=(PROJECT,))
SECRET = "hunter2"
OWN = {"com.docker.compose.project": "shop", "com.docker.compose.project.working_dir": "/srv/shop"}
FOREIGN = {"com.docker.compose.project": "other"}
C = "c" * 64


def asked(target: str, grants: Grants = ALL, method: str = "GET") -> Decision:
    return decide(Request(method=method, target=target), grants)


ANSWERED = (
    "/_ping", "/version", "/info", "/events", "/containers/json?all=1", "/containers/x/json",
    "/containers/x/stats?stream=0", "/images/json", "/networks", "/networks/x", "/volumes",
)  # fmt: skip
CONTENT = (
    "/containers/x/logs?stdout=1", "/containers/x/archive?path=/etc/passwd", "/containers/x/top",
    "/containers/x/changes", "/containers/x/export", "/containers/x/attach/ws", "/exec/x/json",
    "/images/alpine/json", "/images/alpine/history", "/images/alpine/get", "/volumes/x",
    "/system/df", "/swarm", "/secrets", "/configs", "/plugins", "/distribution/alpine/json",
)  # fmt: skip


@pytest.mark.parametrize("grants", [ALL, SHOP], ids=["all", "shop"])
@pytest.mark.parametrize("target", ANSWERED)
def test_questions_are_answered(target: str, grants: Grants) -> None:
    assert asked(target, grants).allowed, asked(target, grants)


@pytest.mark.parametrize("target", CONTENT)
def test_cannot_ask_for_content(target: str) -> None:
    assert not asked(target).allowed


@pytest.mark.parametrize("route", routes.ROUTES, ids=lambda r: f"{r.method} {r.path}")
def test_cannot_change_anything_by_any_route(route: routes.Route) -> None:
    """The control is the table itself: the same request without read-only is another verdict."""
    target = "/" + _filled(route.path)
    decided = asked(target, method=route.method)
    if route.method not in ("GET", "HEAD"):
        assert (decided.allowed, decided.rule) == (False, "read-only")
        other = decide(Request(method=route.method, target=target), Grants(owner="run1"))
        assert other.rule != "read-only"
    else:
        assert decided.allowed == (route.name in watching.ROUTES)


def _filled(path: str) -> str:
    return "/".join("x" if part.startswith("{") else part for part in path.split("/"))


def test_every_question_has_a_filter_for_its_answer() -> None:
    """Without one, an answer would go through as it is: only these may."""
    plain = {"ping", "version", "info", ""}
    for route in routes.ROUTES:
        if route.method == "GET" and route.name in watching.ROUTES:
            assert route.answer in watching.ANSWERS or route.answer in plain
            assert route.answer or route.name == "stats"


def _filters(target: str, grants: Grants) -> Any:
    made = rebuild(asked(target, grants), grants, {})
    assert isinstance(made, Upstream)
    from urllib.parse import parse_qs

    return json.loads(parse_qs(made.query).get("filters", ["null"])[0])


@pytest.mark.parametrize("place", ["/containers/json", "/events", "/networks", "/volumes"])
def test_lists_are_narrowed_to_the_labels(place: str) -> None:
    assert _filters(place, SHOP) == {"label": [PROJECT]}
    assert _filters(place, ALL) is None
    wanted = _filters(f'{place}?filters={{"label":["com.docker.compose.project=other"]}}', SHOP)
    # The engine joins them: nothing has both.
    assert PROJECT in wanted["label"]


@pytest.mark.parametrize("name", ["volume", "before", "since"])
def test_cannot_ask_by_a_filter_for_what_is_not_shown(name: str) -> None:
    target = f'/containers/json?filters={{"{name}":["/etc"]}}'
    assert not asked(target).allowed
    assert decide(Request(method="GET", target=target), Grants(owner="run1")).allowed


@pytest.mark.parametrize(("labels", "seen"), [(OWN, True), (FOREIGN, False), ({}, False)])
def test_an_object_without_the_label_is_not_there(labels: dict[str, str], seen: bool) -> None:
    reference = Reference(kind="container", name="x")
    found = {reference: Found(id=C, owner="", extra={"labels": labels})}
    made = rebuild(asked("/containers/x/json", SHOP), SHOP, found)
    assert isinstance(made, Upstream) == seen
    if isinstance(made, Decision):
        assert made.status == 404
    # The control: without labels everything is seen.
    assert isinstance(rebuild(asked("/containers/x/json"), ALL, found), Upstream)


def test_looking_makes_nothing() -> None:
    """A run's own network is made when it is first needed, but not because somebody looks."""
    reference = Reference(kind="network", name="agent-sandbox-looker")
    assert provision(reference, ALL) is None
    assert provision(reference, Grants(owner="looker")) is not None


INSPECTED = {
    "Id": C, "Name": "/shop_web_1", "Path": f"/bin/{SECRET}", "Args": ["--token", SECRET],
    "LogPath": f"/var/{SECRET}", "GraphDriver": {"Data": {"UpperDir": SECRET}}, "ExecIDs": [SECRET],
    "State": {
        "Status": "running", "Running": True, "Error": f"exec {SECRET}",
        "Health": {"Status": "healthy", "Log": [{"Output": SECRET}]},
    },
    "Config": {
        "Env": [f"PASSWORD={SECRET}"], "Cmd": [SECRET], "Entrypoint": [SECRET],
        "Healthcheck": {"Test": [SECRET]}, "Labels": {**OWN, "role": "web", "x": f"/srv/{SECRET}"},
    },
    "HostConfig": {
        "Binds": [f"/srv/{SECRET}:/x"], "NetworkMode": "shop", "LogConfig": {"Config": SECRET},
    },
    "Mounts": [{"Source": f"/srv/{SECRET}"}],
    "NetworkSettings": {
        "Networks": {"shop": {"IPAddress": "10.0.0.2", "DriverOpts": {"a": SECRET}}}
    },
}  # fmt: skip
LISTED = {
    "Id": C, "Names": ["/shop_web_1"], "Command": f"web --token {SECRET}", "State": "running",
    "Labels": INSPECTED["Config"]["Labels"], "Mounts": INSPECTED["Mounts"],  # type: ignore[index]
    "HostConfig": {"NetworkMode": "shop", "Annotations": {"a": SECRET}},
}  # fmt: skip
EXEC = {
    "Type": "container", "status": f"exec_create: sh -c {SECRET}", "id": C, "from": "web",
    "Action": f"exec_create: sh -c {SECRET}", "time": 1,
    "Actor": {"ID": C, "Attributes": {**OWN, "name": "shop_web_1", "x": f"/srv/{SECRET}"}},
}  # fmt: skip
VOLUME = {
    "Name": "data", "Labels": OWN, "Mountpoint": f"/var/{SECRET}",
    "Options": {"o": f"password={SECRET}"}, "Status": {"a": SECRET},
}  # fmt: skip
NETWORK = {
    "Name": "shop", "Labels": OWN, "Options": {"a": SECRET}, "Containers": {SECRET: {}},
    "IPAM": {"Options": {"a": SECRET}, "Config": [{"Subnet": "10.0.0.0/24"}]},
}  # fmt: skip
ANSWERS: list[tuple[str, Any]] = [
    ("inspect", INSPECTED), ("containers", [LISTED]), ("events", EXEC), ("network", NETWORK),
    ("networks", [NETWORK]), ("volumes", {"Volumes": [VOLUME]}),
    ("images", [{"Id": C, "Labels": {**OWN, "x": f"/{SECRET}"}, "Comment": SECRET}]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "document"), ANSWERS, ids=[name for name, _ in ANSWERS])
def test_answers_hold_no_content(name: str, document: Any) -> None:
    assert SECRET in json.dumps(document)
    for grants in (ALL, SHOP):
        shown = filter_answer(name, grants, document)
        assert shown
        assert C in json.dumps(shown) or "shop" in json.dumps(shown)
        assert SECRET not in json.dumps(shown)
        assert "/srv" not in json.dumps(shown)
        assert '"com.docker.compose.project": "shop"' in json.dumps(shown)


@pytest.mark.parametrize(("name", "document"), ANSWERS, ids=[name for name, _ in ANSWERS])
def test_answers_leave_out_what_lacks_the_label(name: str, document: Any) -> None:
    text = json.dumps(document).replace('project": "shop"', 'project": "other"')
    foreign = json.loads(text)
    assert filter_answer(name, SHOP, foreign) in (None, [], {"Volumes": [], "Warnings": None})
    assert filter_answer(name, ALL, foreign)


def test_the_state_of_a_health_check_is_shown() -> None:
    event = {**EXEC, "Action": "health_status: healthy", "status": "health_status: healthy"}
    shown = filter_answer("events", ALL, event)
    assert isinstance(shown, dict)
    assert shown["Action"] == "health_status: healthy"


def test_events_of_the_engine_itself_are_not_shown() -> None:
    event = {"Type": "daemon", "Action": "reload", "Actor": {"Attributes": {"hosts": "x"}}}
    assert filter_answer("events", ALL, event) is None
