"""`sandboxctl net`: which run is meant, and what is shown. Nothing is running here."""

from __future__ import annotations

import pytest

from agent_sandbox.cli import net
from agent_sandbox.errors import HostError, SandboxError, UsageError

A = net.Run("aa11", "/s/run/aa11", {"project": "/p"})
B = net.Run("ab22", "/s/run/ab22", {"project": "/q"})
C = net.Run("cc33", "/s/run/cc33", {"project": "/q"})


@pytest.mark.parametrize(
    ("runs", "wanted", "project", "meant"),
    [
        ([A], "", "/elsewhere", A),
        ([A, B], "", "/q", B),
        ([A, B], "", "/p", A),
        ([A, B, C], "cc33", "/p", C),
        ([A, B, C], "ab", "/p", B),
    ],
)
def test_the_run_that_is_meant(
    runs: list[net.Run], wanted: str, project: str, meant: net.Run
) -> None:
    assert net.choose(runs, wanted, project) is meant


@pytest.mark.parametrize(
    ("runs", "wanted", "project", "error"),
    [
        ([], "", "/p", HostError),
        ([], "aa11", "/p", HostError),
        ([A, B], "", "/elsewhere", UsageError),
        ([B, C], "", "/q", UsageError),
        ([A, B], "a", "/p", UsageError),
        ([A, B], "zz", "/p", UsageError),
        ([A], "zz", "/p", UsageError),
    ],
)
def test_no_run_is_guessed(
    runs: list[net.Run], wanted: str, project: str, error: type[SandboxError]
) -> None:
    """The error lists those that there are."""
    with pytest.raises(error) as caught:
        net.choose(runs, wanted, project)
    assert all(run.name in caught.value.message for run in runs)


def test_what_is_shown_cannot_drive_a_terminal() -> None:
    host = {
        "host": "a\x1b[2J.example", "port": 443, "allowed": False, "count": 2, "sent": 0,
        "received": 0, "reason": "b\x1b[2J",
    }  # fmt: skip
    answer = {
        "mode": "allow", "project": "/p\x1b[2J", "allow": [["a.example", "flag --allow"]],
        "deny": [["*", "c\x1b"]], "hosts": [host, {**host, "host": "fd00::1", "allowed": True}],
    }  # fmt: skip
    text = net.table("aa11", answer)
    assert "\x1b" not in text
    assert "  allow  a.example  [flag --allow]\n" in text
    assert ".example:443  refused 2 times" in text
    assert "  [fd00::1]:443  allowed 2 times" in text
