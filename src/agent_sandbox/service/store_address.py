"""Which database the service uses, and how it is told: a flag, a variable, or a file.

A password on a command line can be read by every user of the machine, so it is refused there. And
without TLS whoever is on the way to the server reads hashes of tokens, commands and variables, so
a server that is not on this machine needs a word about it.
"""

from __future__ import annotations

import ipaddress
import os
import sys

from ..errors import HostError, UsageError, reason
from ..record import Record
from .store_private import read_mounted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from .audit.trail import AuditTrail
    from .state import State

VARIABLE, FILE_VARIABLE = "SANDBOX_DATABASE", "SANDBOX_DATABASE_FILE"
SCHEMES = ("postgresql://", "postgres://")
MOST_FILE = 16 << 10
# What may be done about tables that are missing or old: all of it, by the service; to make them in
# an empty database, with the first token; nothing, by who reads. A wrong address must not leave
# tables in somebody's database, nor a newer tool change those of a service that runs.
MIGRATE, BEGIN, LOOK = "migrate", "begin", "look"
# What libpq takes as a secret.
SECRETS = ("password", "sslpassword")
# libpq reads a name with one of these as a whole address of its own: with a password, with another
# server, whatever the rest says. No name of a database needs them.
ADDRESS_SIGNS = ("=", "://")
EXTRA = "pip install 'agent-sandbox[postgres]' (or your system's python3-psycopg)"


class Database(Record):
    """A PostgreSQL database: the parameters of libpq, the password among them."""

    parameters: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Database({self.shown})"

    @property
    def shown(self) -> str:
        """For messages and logs: never the password."""
        host = self.parameters.get("host") or self.parameters.get("hostaddr") or "local"
        return f"{self.parameters.get('dbname') or 'the default database'} on {host}"


def variable(environ: Mapping[str, str]) -> str:
    """The variable that names a database; "": none does."""
    return next((name for name in (FILE_VARIABLE, VARIABLE) if environ.get(name)), "")


def of(flag: str, environ: Mapping[str, str]) -> Database | None:
    """The database that is meant; None: SQLite in the data directory."""
    path = environ.get(FILE_VARIABLE, "")
    if flag:
        found, where = read(flag, "--database"), "--database"
        if any(name in found.parameters for name in SECRETS):
            raise UsageError(
                "refusing a password on the command line: every user of this machine can read it",
                hint=f"put the address into a file and name it in {FILE_VARIABLE}",
                code="database-password",
            )
    elif path:
        found, where = read(_file(path), FILE_VARIABLE), FILE_VARIABLE
    elif text := environ.get(VARIABLE, ""):
        found, where = read(text, VARIABLE), VARIABLE
    else:
        return None
    _refuse_open(found, where, environ)
    return found


def read(text: str, where: str) -> Database:
    """An address as people write it. What is wrong with it is not repeated: it may be a secret."""
    psycopg = driver()
    text = text.strip()
    if not text.startswith(SCHEMES):
        raise UsageError(
            f"{where} takes the address of a PostgreSQL database",
            hint="postgresql://USER@HOST/NAME?sslmode=verify-full", code="bad-database",
        )  # fmt: skip
    try:
        found = psycopg.conninfo.conninfo_to_dict(text)
    except psycopg.Error:
        raise UsageError(
            f"cannot read the address in {where}",
            hint="postgresql://USER@HOST/NAME?sslmode=verify-full, special characters as %XX",
            code="bad-database",
        ) from None
    if any(sign in str(found.get("dbname", "")) for sign in ADDRESS_SIGNS):
        raise UsageError(
            f"the address in {where} has another address in the place of a name",
            hint="postgresql://USER@HOST/NAME", code="bad-database",
        )  # fmt: skip
    return Database(parameters={name: str(value) for name, value in found.items()})


def driver() -> ModuleType:
    """The module psycopg, or what to do about it."""
    if sys.flags.no_site:
        # A checkout's command starts without site-packages, where it lies.
        import site

        site.main()
    try:
        import psycopg
    except ImportError as error:
        raise HostError(
            f"a PostgreSQL database needs psycopg: {error}", hint=EXTRA, code="database-driver"
        ) from error
    return psycopg


def _file(path: str) -> str:
    """The address in a file. Whoever may change it makes the service use a database of theirs."""
    try:
        text = read_mounted(path, MOST_FILE, _bad_file)
    except OSError as error:
        raise _bad_file(path, reason(error)) from error
    return text.decode("utf-8", "replace")


def _bad_file(path: str, what: str, hint: str = "") -> HostError:
    return HostError(
        f"cannot use '{path}' of {FILE_VARIABLE}: {what}", hint=hint, code="bad-database-file"
    )


def _refuse_open(database: Database, where: str, environ: Mapping[str, str]) -> None:
    given = database.parameters
    # In the order of libpq. What a service file names is not known here.
    named = [given.get(name) or environ.get(f"PG{name.upper()}")
             for name in ("service", "hostaddr", "host")]  # fmt: skip
    hosts = next(filter(None, named), "")
    here = not named[0] and all(map(_is_here, hosts.split(",")))
    if here or "sslmode" in given or environ.get("PGSSLMODE"):
        return
    raise UsageError(
        f"refusing the database of {where} on '{hosts}' without a word about TLS",
        hint="add ?sslmode=verify-full&sslrootcert=FILE; or, where the network is private, "
        "?sslmode=disable",
        code="database-no-tls",
    )


def _is_here(host: str) -> bool:
    """Whether a server is on this machine: a socket, or loopback."""
    if host in ("", "localhost") or host.startswith(("/", "@")):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# --- what is in it


def open_state(
    data: str, database: Database | None, *, own: bool = True, tables: str = MIGRATE
) -> State:
    """The state: in a database that others share, or in the data directory."""
    if database is None:
        from .store import Store

        return Store(data, own=own)
    from .store_postgres import PgStore

    return PgStore(database, data=data if own else "", tables=tables)


def open_audit(data: str, database: Database | None, *, tables: str = MIGRATE) -> AuditTrail:
    """The audit trail that belongs to the state."""
    if database is None:
        from .audit import Audit
        from .store_private import AUDIT

        return Audit(os.path.join(data, AUDIT))
    from .audit.postgres import PgAudit

    return PgAudit(database, tables=tables)
