"""Who asks: tokens of agents, kept as hashes, checked in the same time whether known or not.

A token has 256 random bits, so one SHA-256 is enough: scrypt and its like make guessing slow where
people choose the secret, and nobody guesses this one. They would only make each request slow.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
import time

from ..errors import PolicyError, UsageError
from ..record import Record
from .values import DEFAULT_SCOPES, SCOPES, Agent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from .state import State

PREFIX = "sbx_"
ID_BYTES, SECRET_BYTES = 5, 32
OURS = re.compile(r"sbx_([a-z2-7]{8})_[A-Za-z0-9_-]{43}")
# One that was made elsewhere, for TOKENS_DIR.
OUTSIDE = re.compile(r"[A-Za-z0-9_-]{32,256}")
MOST_TOKEN = 256
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# The owner of the service on its unix socket has this name.
RESERVED = frozenset({"owner"})
# Where a token is from; one whose file is gone may come back with it.
CLI, FILE, GONE = "cli", "file", "file-gone"
# What an unknown token is compared with. Nothing hashes to it.
DUMMY = bytes(32)
LIVE = "revoked IS NULL AND (expires IS NULL OR expires > ?)"
READ = "SELECT id, name, source, uid, created, expires, revoked, body, hash FROM tokens"
END = "UPDATE tokens SET revoked = ?, uid = NULL, hash = ?, source = coalesce(?, source)"
FADE = "UPDATE tokens SET uid = NULL, expires = CASE WHEN expires < ? THEN expires ELSE ? END"


class TokenInfo(Record):
    """All that is known of a token, but for its secret."""

    id: str
    name: str
    scopes: tuple[str, ...]
    images: tuple[str, ...] | None = None
    templates: tuple[str, ...] | None = None
    quotas: Mapping[str, object] = {}
    uid: int | None = None
    source: str = CLI
    # Seconds since the epoch.
    created: float = 0.0
    expires: float | None = None
    revoked: float | None = None

    @property
    def key(self) -> str:
        """The part that may be shown."""
        return PREFIX + self.id

    def state(self, now: float) -> str:
        """Whether it is "live", "expired" or "revoked"."""
        if self.revoked is not None:
            return "revoked"
        return "live" if self.expires is None or self.expires > now else "expired"


class Tokens:
    """The tokens of a store. Others may change them beside us: each check reads the database."""

    def __init__(self, store: State, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    # --- who it is

    def check(self, token: str) -> Agent | None:
        """The agent of a token. Unknown, wrong, expired and revoked ones all take this path."""
        given = token[: MOST_TOKEN + 1]
        row = self._store.one(f"{READ} WHERE id = ?", _id_of(given))
        # One comparison, of the same length, whatever was found.
        same = hmac.compare_digest(row[-1] if row else DUMMY, _hash(given))
        if not same or row is None:
            return None
        info = _info(row)
        return agent_of(info) if info.state(self._clock()) == "live" else None

    def by_uid(self, uid: int) -> Agent | None:
        """The agent of a caller on the unix socket."""
        row = self._store.one(
            f"{READ} WHERE uid = ? AND {LIVE} ORDER BY created DESC LIMIT 1", uid, self._clock()
        )
        return agent_of(_info(row)).replace(key=f"uid:{uid}") if row else None

    def any(self) -> bool:
        """Whether anybody could come in with a token."""
        return self._store.one(f"{READ} WHERE {LIVE} LIMIT 1", self._clock()) is not None

    # --- changes

    def new(
        self, name: str, *, scopes: Iterable[str] = DEFAULT_SCOPES,
        images: Sequence[str] | None = None, templates: Sequence[str] | None = None,
        quotas: Mapping[str, object] | None = None, expires: float | None = None,
        uid: int | None = None,
    ) -> tuple[str, TokenInfo]:  # fmt: skip
        """A new token and what is kept of it. The token is shown now or never."""
        now = self._clock()
        info = TokenInfo(
            id=self._new_id(), name=check_name(name), scopes=check_scopes(scopes),
            images=None if images is None else tuple(images),
            templates=None if templates is None else tuple(templates),
            quotas=dict(quotas or {}), uid=uid, created=now, expires=expires,
        )  # fmt: skip
        with self._store.transaction("tokens"):
            self._refuse_taken(info, now)
            return self._add(info), info

    def rotate(self, name: str, grace: float = 0.0) -> tuple[str, TokenInfo]:
        """A new secret for an agent; the old one is dead, or dies after `grace` seconds."""
        now = self._clock()
        with self._store.transaction("tokens"):
            old = self._live(name, now)
            if not old:
                raise unknown(name)
            newest = max(old, key=lambda info: info.created)
            if newest.source == FILE:
                raise PolicyError(
                    f"the token of '{name}' comes from a file",
                    hint="put another token into that file and restart the service",
                    code="token-from-file",
                )
            if grace > 0:
                self._store.change(
                    f"{FADE} WHERE name = ? AND {LIVE}",
                    (now + grace, now + grace, name, now),
                )
            else:
                self._end(f"name = ? AND {LIVE}", (name, now))
            # It lives as long from now as the old one was meant to.
            life = None if newest.expires is None else newest.expires - newest.created
            fresh = newest.replace(
                id=self._new_id(), created=now, expires=None if life is None else now + life
            )
            return self._add(fresh), fresh

    def revoke(self, name: str) -> tuple[TokenInfo, ...]:
        """End the tokens of an agent, or the one with this id; those that were ended.

        A whole token is taken too: whoever finds one somewhere has nothing else in hand.
        """
        now = self._clock()
        if whole := OURS.fullmatch(name):
            name = whole[1]
        with self._store.transaction("tokens"):
            found = self._live(name, now)
            if not found:
                info = self.get(name)
                found = (info,) if info is not None and info.state(now) == "live" else ()
            for info in found:
                self._end("id = ?", (info.id,))
        if not found:
            raise unknown(name)
        return tuple(info.replace(revoked=now) for info in found)

    # --- what there is

    def get(self, id: str) -> TokenInfo | None:
        """One by its id, with or without the prefix."""
        row = self._store.one(f"{READ} WHERE id = ?", id.removeprefix(PREFIX))
        return _info(row) if row else None

    def list(self) -> tuple[TokenInfo, ...]:
        """All, dead ones too, in the order they were made."""
        return tuple(_info(row) for row in self._store.rows(f"{READ} ORDER BY created, id"))

    # --- tokens that were made elsewhere

    def adopt(self, given: Mapping[str, str]) -> tuple[tuple[str, TokenInfo], ...]:
        """Make tokens from files (name → token) the only ones of files; what has changed.

        Each change is "new", "revoked" (its file is gone) or "refused" (somebody has revoked this
        very token: a file that is still there must not bring it back). A known token stays as it
        is, so that a restart changes nothing.
        """
        wanted = {_id_of(token): (check_name(name), token) for name, token in given.items()}
        if len(wanted) != len(given):
            raise PolicyError(
                "two agents have the same token", hint="give each its own", code="bad-token"
            )
        changes: list[tuple[str, TokenInfo]] = []
        with self._store.transaction("tokens"):
            for info in self.list():
                name, token = wanted.get(info.id, ("", ""))
                if info.source == FILE and info.revoked is None:
                    if name == info.name and self.check(token) is not None:
                        del wanted[info.id]
                    else:
                        self._end("id = ?", (info.id,), source=GONE)
                        changes.append(("revoked", info))
                elif token and info.source != GONE:
                    del wanted[info.id]
                    changes.append(("refused", info))
            changes += [("new", self._adopt(id_, *one)) for id_, one in wanted.items()]
        return tuple(changes)

    def _adopt(self, id: str, name: str, token: str) -> TokenInfo:
        now = self._clock()
        info = TokenInfo(id=id, name=name, scopes=tuple(DEFAULT_SCOPES), source=FILE, created=now)
        self._refuse_taken(info, now)
        self._store.change("DELETE FROM tokens WHERE id = ? AND source = ?", (id, GONE))
        self._insert(info, token)
        return info

    # --- inside

    def _live(self, name: str, now: float) -> tuple[TokenInfo, ...]:
        if not NAME.fullmatch(name):
            return ()
        found = self._store.rows(f"{READ} WHERE name = ? AND {LIVE}", name, now)
        return tuple(_info(row) for row in found)

    def _refuse_taken(self, info: TokenInfo, now: float) -> None:
        if self._live(info.name, now):
            raise PolicyError(
                f"there is a token for '{info.name}' already",
                hint=f"sandboxctl token rotate {info.name}, or revoke it first",
                code="token-taken",
            )
        if info.uid is not None and self.by_uid(info.uid) is not None:
            raise PolicyError(
                f"uid {info.uid} belongs to another token already", code="token-taken"
            )

    def _new_id(self) -> str:
        """40 bits that no token has, nor has had: ids stand in the audit trail."""
        while True:
            made = base64.b32encode(secrets.token_bytes(ID_BYTES)).decode().lower()
            if self.get(made) is None:
                return made

    def _add(self, info: TokenInfo) -> str:
        secret = base64.urlsafe_b64encode(secrets.token_bytes(SECRET_BYTES)).decode().rstrip("=")
        token = f"{info.key}_{secret}"
        self._insert(info, token)
        return token

    def _insert(self, info: TokenInfo, token: str) -> None:
        body = {
            "scopes": info.scopes, "images": info.images, "templates": info.templates,
            "quotas": dict(info.quotas),
        }  # fmt: skip
        self._store.change(
            "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?, NULL, ?)",
            (info.id, _hash(token), info.name, info.source, info.uid, info.created, info.expires,
             json.dumps(body)),
        )  # fmt: skip

    def _end(self, where: str, values: tuple[object, ...], source: str | None = None) -> None:
        """Revoke. The hash goes too: nothing can ever fit this row again."""
        self._store.change(
            f"{END} WHERE {where}",
            (self._clock(), DUMMY, source, *values),
        )


# --- pure


def agent_of(info: TokenInfo) -> Agent:
    """Who a token stands for."""
    return Agent(
        name=info.name, key=info.key, scopes=frozenset(info.scopes), images=info.images,
        templates=info.templates, quotas=info.quotas, uid=info.uid,
    )  # fmt: skip


def check_name(name: str) -> str:
    """A name that an agent may have. One that looks like a token would be printed in clear."""
    if not NAME.fullmatch(name) or name in RESERVED or name.startswith(PREFIX):
        raise UsageError(
            f"'{name[:64]}' cannot be the name of an agent",
            hint="letters, digits, '.', '_' and '-', at most 63; 'owner' and 'sbx_…' are reserved",
            code="bad-token-name",
        )
    return name


def check_scopes(scopes: Iterable[str]) -> tuple[str, ...]:
    """Scopes in the order of the table."""
    wanted = set(scopes)
    if strange := sorted(wanted - set(SCOPES)):
        raise UsageError(
            f"there is no scope '{strange[0]}'", hint="one of: " + ", ".join(SCOPES),
            code="bad-scope",
        )  # fmt: skip
    return tuple(scope for scope in SCOPES if scope in wanted)


def unknown(name: str) -> UsageError:
    """No live token of this name or id. A whole token is not repeated."""
    return UsageError(
        f"there is no live token '{name[:12] + '…' if name.startswith(PREFIX) else name[:64]}'",
        hint="see 'sandboxctl token list'",
        code="no-token",
    )


def _id_of(token: str) -> str:
    """Where a token is looked up: its public part, or for one made elsewhere a part of a hash."""
    if found := OURS.fullmatch(token):
        return found[1]
    digest = hashlib.sha256(b"agent-sandbox token id\0" + _bytes(token)).digest()
    return base64.b32encode(digest[:ID_BYTES]).decode().lower()


def _hash(token: str) -> bytes:
    return hashlib.sha256(_bytes(token)).digest()


def _bytes(token: str) -> bytes:
    return token.encode("utf-8", "surrogatepass")


def _info(row: Sequence[Any]) -> TokenInfo:
    id_, name, source, uid, created, expires, revoked, text, _ = row
    body = json.loads(text)
    return TokenInfo(
        id=id_, name=name, source=source, uid=uid, created=created, expires=expires,
        revoked=revoked, scopes=tuple(body["scopes"]), quotas=body["quotas"],
        images=None if body["images"] is None else tuple(body["images"]),
        templates=None if body["templates"] is None else tuple(body["templates"]),
    )  # fmt: skip
