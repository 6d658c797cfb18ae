"""The tables in PostgreSQL, and how they come to this version: by one at a time.

Times are seconds since the epoch. Texts compare byte by byte (COLLATE "C"), as in SQLite: another
order would make pages of a list skip or repeat. The audit is written by functions that run as the
owner of the tables, so that a service with less rights can add a line but not change one.
"""

from __future__ import annotations

import psycopg

from ..errors import HostError
from .replicas import tables
from .store_postgres_link import SCHEMA, words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .store_address import Database
    from .store_postgres_link import Connection, Patience

# Any number that nobody else uses: "agent-sa" in ASCII.
MIGRATING = 0x6167656E742D7361

TABLES = """
CREATE TABLE sandboxes (
    id TEXT COLLATE "C" PRIMARY KEY, owner TEXT COLLATE "C" NOT NULL, state TEXT NOT NULL,
    created DOUBLE PRECISION NOT NULL, body TEXT NOT NULL,
    -- Hashes of its metadata, one per pair: clients choose any text, also such as JSON functions
    -- of the server stumble over.
    labels TEXT[] NOT NULL,
    -- The replica that has it.
    home TEXT COLLATE "C" NOT NULL,
    -- Why it failed: what a client says in its body must not be taken for that.
    reason TEXT NOT NULL DEFAULT '');
CREATE INDEX sandboxes_in_order ON sandboxes (created, id);
CREATE INDEX sandboxes_of_owner ON sandboxes (owner, created, id);
CREATE INDEX sandboxes_of_home ON sandboxes (home);
CREATE TABLE executions (
    id TEXT COLLATE "C" PRIMARY KEY, sandbox TEXT COLLATE "C" NOT NULL,
    owner TEXT COLLATE "C" NOT NULL, state TEXT NOT NULL, started DOUBLE PRECISION NOT NULL,
    ended DOUBLE PRECISION NOT NULL, body TEXT NOT NULL,
    -- Bytes of its output.
    size BIGINT NOT NULL,
    home TEXT COLLATE "C" NOT NULL);
CREATE INDEX executions_in_order ON executions (started, id);
CREATE INDEX executions_of_owner ON executions (owner, started, id);
CREATE INDEX executions_of_sandbox ON executions (sandbox, started, id);
CREATE INDEX executions_by_end ON executions (ended) WHERE ended > 0;
CREATE INDEX executions_under_way ON executions (home) WHERE ended = 0;
CREATE TABLE keys (
    owner TEXT COLLATE "C" NOT NULL, key TEXT COLLATE "C" NOT NULL, body_hash TEXT NOT NULL,
    made DOUBLE PRECISION NOT NULL, status INTEGER, body TEXT,
    home TEXT COLLATE "C" NOT NULL DEFAULT '', PRIMARY KEY (owner, key));
CREATE INDEX keys_by_age ON keys (made);
CREATE INDEX keys_under_way ON keys (home) WHERE status = 0;
CREATE TABLE tokens (
    id TEXT COLLATE "C" PRIMARY KEY, hash BYTEA NOT NULL, name TEXT COLLATE "C" NOT NULL,
    source TEXT NOT NULL, uid BIGINT, created DOUBLE PRECISION NOT NULL,
    expires DOUBLE PRECISION, revoked DOUBLE PRECISION, body TEXT NOT NULL);
CREATE INDEX tokens_by_name ON tokens (name);
CREATE INDEX tokens_by_uid ON tokens (uid) WHERE uid IS NOT NULL;
CREATE TABLE kept (name TEXT COLLATE "C" PRIMARY KEY, value BYTEA NOT NULL);
CREATE TABLE replicas (
    id TEXT COLLATE "C" PRIMARY KEY, address TEXT NOT NULL, fingerprint TEXT NOT NULL,
    beat DOUBLE PRECISION NOT NULL, ends DOUBLE PRECISION NOT NULL);
CREATE TABLE rates (
    key TEXT COLLATE "C" PRIMARY KEY, level DOUBLE PRECISION NOT NULL,
    at DOUBLE PRECISION NOT NULL);
CREATE TABLE outputs (execution TEXT COLLATE "C" PRIMARY KEY, data BYTEA NOT NULL);
"""

AUDIT = """
CREATE TABLE audit_lines (
    seq BIGINT PRIMARY KEY, file INTEGER NOT NULL, ends BIGINT NOT NULL, line TEXT NOT NULL);
CREATE INDEX audit_lines_of_file ON audit_lines (file, ends);
CREATE TABLE audit_head (
    one BOOLEAN PRIMARY KEY CHECK (one), seq BIGINT NOT NULL, hash TEXT NOT NULL,
    file INTEGER NOT NULL, ends BIGINT NOT NULL);
INSERT INTO audit_head VALUES (true, 0, repeat('0', 64), 1, 0);

CREATE FUNCTION audit_append(stamp TEXT, rest TEXT, rotate BIGINT,
    OUT seq BIGINT, OUT hash TEXT) LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = agent_sandbox, pg_temp AS $$
DECLARE
    head agent_sandbox.audit_head;
    body TEXT;
    line TEXT;
BEGIN
    -- One line, and a whole one: what is no line would stay for good, and end every `verify`.
    IF stamp !~ '^[0-9TZ:.+-]+$' OR left(rest, 2) <> ',"' OR right(rest, 1) <> '}'
        OR rest ~ ('[' || chr(1) || '-' || chr(31) || ']') THEN
        RAISE EXCEPTION 'no line of an audit trail' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- The lock on this row is what makes the chain one: whoever comes next waits for our commit.
    SELECT * INTO STRICT head FROM audit_head FOR UPDATE;
    seq := head.seq + 1;
    body := '{"v":1,"ts":"' || stamp || '","seq":' || seq || ',"prev":"' || head.hash || '"'
        || rest;
    hash := encode(sha256(convert_to(body, 'UTF8')), 'hex');
    line := left(body, -1) || ',"hash":"' || hash || '"}' || chr(10);
    IF head.ends > 0 AND head.ends + length(line) > rotate THEN
        head.file := head.file + 1;
        head.ends := 0;
    END IF;
    head.ends := head.ends + length(line);
    INSERT INTO audit_lines VALUES (seq, head.file, head.ends, line);
    UPDATE audit_head SET seq = audit_append.seq, hash = audit_append.hash, file = head.file,
        ends = head.ends;
END $$;

CREATE FUNCTION audit_prune(number INTEGER) RETURNS BIGINT LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = agent_sandbox, pg_temp AS $$
DECLARE
    removed BIGINT;
BEGIN
    -- From the oldest on, and never the newest: what stays is one chain.
    DELETE FROM audit_lines WHERE file = number
        AND number < (SELECT file FROM audit_head)
        AND number = (SELECT min(file) FROM audit_lines);
    GET DIAGNOSTICS removed = ROW_COUNT;
    RETURN removed;
END $$;

-- By whom it is called is what lets a change through, not a setting that anybody may set. Who owns
-- the tables can still switch the triggers off: that takes a service that does not own them.
CREATE FUNCTION audit_refuse() RETURNS trigger LANGUAGE plpgsql
    SET search_path = agent_sandbox, pg_temp AS $$
DECLARE
    calls TEXT;
BEGIN
    -- In the server's language, but for the names.
    GET DIAGNOSTICS calls = PG_CONTEXT;
    IF TG_OP || ' ' || TG_TABLE_NAME = 'DELETE audit_lines'
        AND position('audit_prune(integer)' IN calls) > 0
    THEN
        RETURN OLD;
    ELSIF TG_OP || ' ' || TG_TABLE_NAME = 'UPDATE audit_head'
        AND position('audit_append(text,text,bigint)' IN calls) > 0
    THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'the audit trail is only added to' USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE TRIGGER audit_only_added BEFORE UPDATE OR DELETE ON audit_lines
    FOR EACH ROW EXECUTE FUNCTION audit_refuse();
CREATE TRIGGER audit_not_emptied BEFORE TRUNCATE ON audit_lines
    FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse();
CREATE TRIGGER audit_head_only_moved BEFORE INSERT OR UPDATE OR DELETE ON audit_head
    FOR EACH ROW EXECUTE FUNCTION audit_refuse();
CREATE TRIGGER audit_head_not_emptied BEFORE TRUNCATE ON audit_head
    FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse();
REVOKE ALL ON FUNCTION audit_append(TEXT, TEXT, BIGINT) FROM PUBLIC;
REVOKE ALL ON FUNCTION audit_prune(INTEGER) FROM PUBLIC;
"""

# Each entry moves the database from its index to the next version. Entries are never changed.
MIGRATIONS: tuple[str, ...] = (TABLES + AUDIT, tables.MIGRATION)


def migrate(connection: Connection, database: Database, patience: Patience) -> None:
    """Bring the tables to this version; a later one is not touched."""
    try:
        version = _version(connection)
        if version < len(MIGRATIONS):
            # Every replica may come here at once: the first does it, the others look again. In a
            # transaction that begins behind the lock: one from before would not see new names.
            with patience(connection):
                connection.execute(f"SELECT pg_advisory_lock({MIGRATING})")
                try:
                    with connection.transaction():
                        version = _step(connection)
                finally:
                    connection.execute(f"SELECT pg_advisory_unlock({MIGRATING})")
    except psycopg.Error as error:
        raise HostError(
            f"cannot prepare {database.shown}: {words(error)}",
            hint="the first start needs a user that may create a schema in this database",
            code="data-broken",
        ) from error
    _refuse_later(version, database)


def begin(connection: Connection, database: Database, patience: Patience) -> None:
    """Make the tables where there are none; those of an earlier version are the service's."""
    if _found(connection, database):
        look(connection, database, patience)
    else:
        migrate(connection, database, patience)


def look(connection: Connection, database: Database, _patience: Patience) -> None:
    """See that the tables are of this version. Nothing is changed, whosever the database is."""
    version = _found(connection, database)
    if version == 0:
        raise HostError(
            f"no service has its state in {database.shown}",
            hint="start 'sandboxctl serve' with this database first, or name another one",
            code="no-data",
        )
    if version < len(MIGRATIONS):
        raise HostError(
            f"cannot use {database.shown}: an earlier version of agent-sandbox has written it",
            hint="use that version; or start the service of this one, which changes the tables",
            code="data-older",
        )
    _refuse_later(version, database)


# What is to be done with the tables before they are used, by the names of `store_address`.
PREPARE = {"migrate": migrate, "begin": begin, "look": look}


def _refuse_later(version: int, database: Database) -> None:
    if version > len(MIGRATIONS):
        raise HostError(
            f"cannot use {database.shown}: a later version of agent-sandbox has written it",
            hint="use that version, or another database",
            code="data-newer",
        )


def _found(connection: Connection, database: Database) -> int:
    try:
        return _version(connection)
    except psycopg.Error as error:
        raise HostError(
            f"cannot use {database.shown}: {words(error)}",
            hint="see that this user may use the tables of the service",
            code="database-away",
        ) from error


def _step(connection: Connection) -> int:
    version = _version(connection)
    if version == 0:
        row = connection.execute("SELECT to_regnamespace(%s)", (SCHEMA,)).fetchone()
        if row is None or row[0] is None:
            connection.execute(f"CREATE SCHEMA {SCHEMA}")
        connection.execute("CREATE TABLE version (number INTEGER NOT NULL)")
        connection.execute("INSERT INTO version VALUES (0)")
    for step in MIGRATIONS[version:]:
        connection.execute(step)
    if version < len(MIGRATIONS):
        connection.execute("UPDATE version SET number = %s", (len(MIGRATIONS),))
        version = len(MIGRATIONS)
    return version


def _version(connection: Connection) -> int:
    found = connection.execute("SELECT to_regclass(%s)", (f"{SCHEMA}.version",)).fetchone()
    if found is None or found[0] is None:
        return 0
    row = connection.execute(f"SELECT number FROM {SCHEMA}.version").fetchone()  # noqa: S608
    return int(row[0]) if row else 0
