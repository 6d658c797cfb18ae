"""Whose things are whose. What is not one's own does not exist."""

from __future__ import annotations

from ..problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..values import Agent


def may_see(agent: Agent, owner: str) -> bool:
    """Whether something of `owner` exists for an agent."""
    return agent.is_admin or agent.name == owner


def absent(kind: str) -> Problem:
    """The one answer for what does not exist and for what is another's: no word of the id."""
    return Problem("NOT_FOUND", f"there is no such {kind}", rule="access.owner",
                   hint="it may have expired, or belong to another agent")  # fmt: skip


def narrowed(agent: Agent, owner: str | None) -> str | None:
    """The owner to list: one's own, or for an admin anybody's."""
    return owner if agent.is_admin else agent.name
