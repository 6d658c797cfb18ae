"""Every request of the corpus: refused by the rule that is named, or harmless."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.policy.docker.decision import decide
from agent_sandbox.policy.docker.values import Decision, Request, Upstream

from .world import CLOSED, GRANTS, SUBPATH, again, ask, host, request

CORPUS = json.loads((Path(__file__).parent / "corpus.json").read_text(encoding="utf-8"))["requests"]
# An engine with another version of the API, or without one of the grants, refuses no less.
WORLDS = {
    "docker-20.10": GRANTS,
    "docker-27": SUBPATH,
    "offline": CLOSED,
    "podman": GRANTS.replace(engine=GRANTS.engine.replace(name="podman")),
    "read-only": GRANTS.replace(read_only=True),
}


def as_request(entry: dict[str, Any]) -> Request:
    return request(
        entry["method"], entry["target"], entry.get("json"),
        headers=entry.get("headers"), raw=entry.get("text", "").encode(),
    )  # fmt: skip


@pytest.mark.parametrize("entry", CORPUS, ids=lambda e: e["name"])
def test_the_verdict_and_its_rule(entry: dict[str, Any]) -> None:
    answer = ask(as_request(entry))
    if entry["verdict"] == "refused":
        assert isinstance(answer, Decision)
        assert answer.rule == entry["rule"]
        assert answer.status in (400, 403, 404, 409)
    else:
        assert isinstance(answer, Upstream), answer


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("entry", CORPUS, ids=lambda e: e["name"])
def test_no_engine_gets_what_is_refused(entry: dict[str, Any], world: str) -> None:
    answer = ask(as_request(entry), WORLDS[world])
    if entry["verdict"] == "refused":
        assert isinstance(answer, Decision)
        assert not answer.allowed


@pytest.mark.parametrize(
    "entry", [e for e in CORPUS if e["verdict"] != "refused"], ids=lambda e: e["name"]
)
def test_what_passes_is_the_same_the_second_time(entry: dict[str, Any]) -> None:
    first = ask(as_request(entry))
    assert isinstance(first, Upstream)
    assert ask(again(first)) == first


def test_a_restart_policy_is_not_sent() -> None:
    entry = next(e for e in CORPUS if e["name"] == "hc.restart")
    answer = ask(as_request(entry))
    assert host(answer)["RestartPolicy"] == {"Name": "no", "MaximumRetryCount": 0}
    assert "restart.no" in decide(as_request(entry), GRANTS).mutations


def test_a_tag_that_others_run_is_not_written() -> None:
    entry = next(e for e in CORPUS if e["name"] == "build.tag")
    answer = ask(as_request(entry))
    assert isinstance(answer, Upstream)
    assert "t=agent-sandbox-run1%2Fpython%3A3.11" in answer.query
    assert "t=python" not in answer.query


def test_the_corpus_has_every_class_of_request() -> None:
    verdicts = [entry["verdict"] for entry in CORPUS]
    assert verdicts.count("refused") >= 95
    assert verdicts.count("allowed") >= 7
    assert len({entry["name"] for entry in CORPUS}) == len(CORPUS)
