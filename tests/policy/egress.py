"""Egress values from texts, for tests."""

from __future__ import annotations

from agent_sandbox.policy.network import Egress, parse


def egress(mode: str, *texts: str) -> Egress:
    """Allow rules, and deny rules with a '-' in front."""
    return Egress(
        mode=mode,
        allow=tuple(parse(t, "allow") for t in texts if not t.startswith("-")),
        deny=tuple(parse(t[1:], "deny", deny=True) for t in texts if t.startswith("-")),
    )
