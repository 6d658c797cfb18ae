"""What can go wrong between a client and the service. No error carries the token."""

from __future__ import annotations

from ..errors import SandboxError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .values import Result


class ClientError(SandboxError):
    """Anything that the client raises."""


class NotConfigured(ClientError):
    """An address, a token or a certificate file that cannot be used."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, code="service-not-configured")


class Unreachable(ClientError):
    """No connection, or one that broke and could not be made again."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, code="service-unreachable")


class BadAnswer(ClientError):
    """Something answered, but not as the service does."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, code="service-bad-answer")


class ApiError(ClientError):
    """The service refused. `code` is stable; `rule` names what decided, `field` what is wrong."""

    def __init__(
        self, status: int, code: str, message: str, *, hint: str = "", rule: str = "",
        field: str = "", request_id: str = "", retry_after: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message, hint=hint, code=code)
        self.status = status
        self.rule = rule
        self.field = field
        self.request_id = request_id
        self.retry_after = retry_after

    def __str__(self) -> str:
        """Who reads a traceback wants the code, too."""
        return f"{self.message} ({self.code}, {self.status})"


class CommandFailed(ClientError):
    """With check=True: the command ran and did not succeed."""

    def __init__(self, result: Result) -> None:
        how = f"the command exited with {result.code}"
        if result.lost:
            how = f"the command was lost: {result.error}"
        elif result.timed_out:
            how = "the command took too long and was ended"
        elif result.exceeded:
            how = f"the command was ended by the limit '{result.exceeded}'"
        super().__init__(how, hint=result.stderr[-500:].strip(), code="command-failed")
        self.result = result
        self.exit_code = result.code
