"""Errors in words: what a failed connection or a refusal means, and what helps. Pure."""

from __future__ import annotations

import json
import socket
import ssl

from .address import CA_NAME, HOW_TO_GET_ONE, TOKEN_FILE_NAME, TOKEN_NAME, URL_NAMES
from .errors import ApiError, BadAnswer, Unreachable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .address import Settings
    from .errors import ClientError
    from .wire import Head

START = f"'sandboxctl serve' starts one; {URL_NAMES[0]} says where it is"
MAY_RUN = "the service may have done what was asked: look before you ask again"
MAX_SHOWN = 2000


def is_final(error: OSError) -> bool:
    """Whether trying again cannot help."""
    return isinstance(error, (ssl.SSLCertVerificationError, PermissionError))


# What a failed connection means, the special before the general, and what helps.
CAUSES: tuple[tuple[type[OSError], str, str], ...] = (
    (
        ssl.SSLCertVerificationError, "the certificate of {where} is not trusted: {words}",
        f"{CA_NAME}=FILE names the certificate of the authority that signed it",
    ),
    (ssl.SSLError, "no TLS with {where}: {words}", f"is it http? look at {URL_NAMES[0]}"),
    (socket.gaierror, "the host of {where} is not known", f"look at {URL_NAMES[0]}"),
    (FileNotFoundError, "there is no service at {where}: no such socket", START),
    (ConnectionRefusedError, "there is no service at {where}: nobody listens", START),
    (
        PermissionError, "may not connect to {where}: permission denied",
        "the socket is its owner's; others use a token over TCP",
    ),
    (OSError, "cannot reach {where}: {words}", START),
)  # fmt: skip


def unreachable(error: OSError, settings: Settings, *, sent: bool) -> Unreachable:
    """What a failed connection means. `sent`: the request had gone out already."""
    if sent:
        message = f"the connection to {settings.address} broke: {_words(error)}"
        return Unreachable(message, hint=MAY_RUN)
    message, hint = next((m, h) for kind, m, h in CAUSES if isinstance(error, kind))
    return Unreachable(message.format(where=settings.address, words=_words(error)), hint=hint)


def cut_off(error: OSError, settings: Settings) -> Unreachable:
    """A download that broke."""
    return Unreachable(
        f"the connection to {settings.address} broke: {_words(error)}", hint="ask again"
    )


def _words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    # OpenSSL's own words; only errors that it made have them.
    told = getattr(error, "verify_message", "") or getattr(error, "reason", "")
    text = told or error.strerror or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]


# --- refusals


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds; None if there is no such header, or a date."""
    text = headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _members(body: bytes) -> dict[str, object]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def code(body: bytes) -> str:
    """The code of a refusal, or ""."""
    found = _members(body).get("code")
    return found if isinstance(found, str) else ""


def problem(head: Head, body: bytes, settings: Settings) -> ClientError:
    """The error of an answer that is one."""
    status = head.status
    if status < 400:
        # The token goes to the address that was given, and nowhere else.
        return BadAnswer(
            f"{settings.address} answers with a redirect ({status}), which is not followed",
            hint=f"set {URL_NAMES[0]} to where the service really is",
        )
    found = _members(body)

    def text(name: str) -> str:
        value = found.get(name)
        return value[:MAX_SHOWN] if isinstance(value, str) else ""

    if not text("code"):
        return BadAnswer(
            f"{settings.address} answers {status}, but not as the service does",
            hint=f"a proxy in between, or another program? look at {URL_NAMES[0]}",
        )
    return ApiError(
        status, text("code"), text("message"), rule=text("rule"), field=text("field"),
        hint=unauthenticated(settings) if status == 401 else text("hint"),
        request_id=text("requestId"), retry_after=retry_after(head.headers),
    )  # fmt: skip


def unauthenticated(settings: Settings) -> str:
    """What helps against a 401: the service cannot know where our token came from."""
    if not settings.token:
        return f"no token is configured: set {TOKEN_NAME} or {TOKEN_FILE_NAME}; {HOW_TO_GET_ONE}"
    return f"the token from {settings.token_source} is wrong, expired or revoked; {HOW_TO_GET_ONE}"
