"""What the service answers when it refuses: a stable code, a status, and words with a remedy."""

from __future__ import annotations

from ..errors import SandboxError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Every code that an answer may carry, with its status. Codes are stable; words may change.
STATUS: dict[str, int] = {
    "BAD_REQUEST": 400,
    "UNAUTHENTICATED": 401,
    "FORBIDDEN": 403,
    "SCOPE_MISSING": 403,
    "IMAGE_NOT_ALLOWED": 403,
    "RUNTIME_NOT_ALLOWED": 403,
    "NETWORK_NOT_ALLOWED": 403,
    "TEMPLATE_NOT_ALLOWED": 403,
    "CSRF": 403,
    "NOT_FOUND": 404,
    "METHOD_NOT_ALLOWED": 405,
    "NOT_ACCEPTABLE": 406,
    "REQUEST_TIMEOUT": 408,
    "CONFLICT": 409,
    "WRONG_STATE": 409,
    "IDEMPOTENCY_CONFLICT": 409,
    "LENGTH_REQUIRED": 411,
    "TOO_LARGE": 413,
    "URI_TOO_LONG": 414,
    "UNSUPPORTED_MEDIA_TYPE": 415,
    "INVALID": 422,
    "LIMIT_EXCEEDED": 422,
    "LIMIT_NOT_ENFORCEABLE": 422,
    "UNSUPPORTED": 422,
    "UPGRADE_REQUIRED": 426,
    "QUOTA_EXCEEDED": 429,
    "RATE_LIMITED": 429,
    "BUSY": 429,
    "HEADERS_TOO_LARGE": 431,
    "INTERNAL": 500,
    "NOT_INSTALLED": 501,
    "AUDIT_UNAVAILABLE": 503,
    "BACKEND_UNAVAILABLE": 503,
    "DRAINING": 503,
    "REPLICA_UNAVAILABLE": 503,
    "STATE_UNAVAILABLE": 503,
    "DISK_FULL": 507,
}


class Problem(SandboxError):
    """A refusal. `rule` names what decided; `field` the part of the request that is wrong."""

    def __init__(
        self, code: str, message: str, *, hint: str = "", rule: str = "", field: str = "",
        retry_after: float | None = None, headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message, hint=hint, code=code)
        self.status = STATUS[code]
        self.rule = rule
        self.field = field
        self.retry_after = retry_after
        self.headers = dict(headers or {})

    def body(self, request_id: str) -> dict[str, object]:
        """The JSON answer; empty members are left out."""
        members = {
            "code": self.code, "message": self.message, "hint": self.hint,
            "rule": self.rule, "field": self.field, "requestId": request_id,
        }  # fmt: skip
        return {name: value for name, value in members.items() if value}
