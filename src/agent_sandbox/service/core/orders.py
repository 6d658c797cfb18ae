"""A command that was admitted, and its lines in the audit."""

from __future__ import annotations

from .. import limits as bounds
from .sandboxes import bounds_of, described
from .wishes import check_arguments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..limits import Limits
    from ..values import Agent, Execution, Sandbox
    from .context import Context
    from .wishes import ExecWish, Wish


class Order:
    """A command that was admitted: who wants it, and what it may have."""

    __slots__ = ("again", "agent", "limits", "request_id", "timeout", "wish")

    def __init__(self, agent: Agent, wish: ExecWish, limits: Limits, request_id: str) -> None:
        self.agent = agent
        # The sandbox to make for a second time, when the first is lost.
        self.again: Wish | None = None
        self.wish = wish
        self.limits = limits
        self.request_id = request_id
        self.timeout = bounds.check_timeout(limits, wish.timeout)
        bounds.check_upload(limits, len(wish.stdin or b""))
        check_arguments(wish.argv, wish.env)


def target(execution: Execution) -> dict[str, str]:
    """What a line of the audit is about."""
    return {"type": "execution", "id": execution.id, "sandbox": execution.sandbox}


def note_start(context: Context, order: Order, sandbox: Sandbox, execution: Execution) -> None:
    """It is about to start. The line of a sandbox for one command is this one, too."""
    wish, one_shot = order.wish, sandbox if sandbox.one_shot else None
    again = {"attempt": execution.attempts} if execution.attempts > 1 else {}
    context.note(
        order.agent, "exec.start", target(execution), request_id=order.request_id,
        request={
            **(described(one_shot) if one_shot else {}), **again,
            "cmd": wish.argv, "cwd": wish.cwd, "env": [*sandbox.env, *wish.env],
            "tty": execution.tty, "background": wish.background,
        },
        limits={
            **(bounds_of(one_shot) if one_shot else {}),
            "timeout": order.timeout, "output": order.limits.max_output_bytes,
        },
    )  # fmt: skip


def result_of(execution: Execution) -> dict[str, object]:
    """How it ended, for the audit."""
    fields: dict[str, object] = {
        "state": execution.state, "exitCode": execution.exit_code, "signal": execution.signal,
        "timedOut": execution.timed_out, "exceeded": execution.exceeded,
        "durationMs": round((execution.ended - execution.started) * 1000),
        "bytesOut": execution.stdout_bytes + execution.stderr_bytes,
        "truncated": execution.truncated, "error": execution.error,
        "attempt": execution.attempts if execution.attempts > 1 else "",
    }  # fmt: skip
    # A lost one has no exit code.
    return {n: v for n, v in fields.items() if v is not False and v is not None and v != ""}
