"""What replicas need in the database beyond the state itself."""

from __future__ import annotations

# `rates` and `places` are worth nothing after a crash of the server: it need not write them to the
# disk for each request. Places are then written anew by those who hold them (`places.heal`).
# The clock is the server's: replicas need not agree on theirs.
MIGRATION = """
CREATE FUNCTION seconds() RETURNS DOUBLE PRECISION LANGUAGE sql VOLATILE
    AS $$ SELECT extract(epoch FROM clock_timestamp())::double precision $$;
ALTER TABLE replicas ADD COLUMN term TEXT NOT NULL DEFAULT '';
ALTER TABLE replicas ADD COLUMN place TEXT NOT NULL DEFAULT '';
ALTER TABLE rates SET UNLOGGED;
CREATE SEQUENCE turns;
CREATE UNLOGGED TABLE places (
    -- Chosen by the replica, at random: a sequence is set back by a failover, and by a table that
    -- begins anew after a crash of the server, and would give out numbers that others still hold.
    number BIGINT PRIMARY KEY,
    owner TEXT COLLATE "C" NOT NULL, replica TEXT COLLATE "C" NOT NULL,
    -- Whether it is taken, or waited for.
    taken BOOLEAN NOT NULL,
    -- How many its owner may have at once, and when it is its owner's turn.
    most INTEGER NOT NULL, turn BIGINT NOT NULL DEFAULT 0,
    came BIGINT NOT NULL DEFAULT nextval('turns'));
CREATE INDEX places_of_owner ON places (owner);
-- Each step with places is one statement, and so one round trip, and nobody holds the lock while a
-- client thinks. A function that may change something sees what was committed before its lock.
CREATE FUNCTION places_given(total BIGINT) RETURNS SETOF BIGINT LANGUAGE plpgsql AS $$
DECLARE
    next RECORD;
BEGIN
    LOOP
        EXIT WHEN (SELECT count(*) FROM places WHERE taken) >= total;
        -- Its owner has not got its share, and has waited for its turn the longest. Shares are
        -- counted once, not for each of those who wait: there may be thousands.
        SELECT p.number, p.owner INTO next FROM places p LEFT JOIN
            (SELECT owner, count(*) AS own FROM places WHERE taken GROUP BY owner) t
            ON t.owner = p.owner
            WHERE NOT p.taken AND coalesce(t.own, 0) < p.most ORDER BY p.turn, p.came LIMIT 1;
        EXIT WHEN NOT FOUND;
        UPDATE places SET taken = true WHERE number = next.number;
        -- Its owner's others are behind everybody else's now.
        UPDATE places SET turn = (SELECT nextval('turns')) WHERE owner = next.owner AND NOT taken;
        RETURN NEXT next.number;
    END LOOP;
END $$;
CREATE FUNCTION place_taken(lock BIGINT, chosen BIGINT, agent TEXT, home TEXT, total BIGINT,
    running BIGINT, queued BIGINT, OUT place BIGINT, OUT free BOOLEAN) LANGUAGE plpgsql AS $$
DECLARE
    every BIGINT;
    own BIGINT;
    waiting BIGINT;
BEGIN
    PERFORM pg_advisory_xact_lock(lock);
    SELECT count(*) FILTER (WHERE taken), count(*) FILTER (WHERE taken AND owner = agent),
        count(*) FILTER (WHERE NOT taken AND owner = agent) INTO every, own, waiting FROM places;
    -- Its own earlier requests go first.
    free := every < total AND own < running AND waiting = 0;
    IF free OR waiting < queued THEN
        INSERT INTO places (number, owner, replica, taken, most, turn)
            VALUES (chosen, agent, home, free, running, nextval('turns'));
        place := chosen;
    END IF;
END $$;
CREATE FUNCTION place_left(lock BIGINT, place BIGINT, home TEXT, total BIGINT)
    RETURNS SETOF BIGINT LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(lock);
    DELETE FROM places WHERE number = place AND replica = home;
    RETURN QUERY SELECT places_given(total);
END $$;
DROP TABLE outputs;
CREATE TABLE outputs (
    execution TEXT COLLATE "C" NOT NULL REFERENCES executions (id) ON DELETE CASCADE,
    part INTEGER NOT NULL, data BYTEA NOT NULL, PRIMARY KEY (execution, part));
-- It is read in pieces, and compressing it would take longer than writing it.
ALTER TABLE outputs ALTER COLUMN data SET STORAGE EXTERNAL;
"""
