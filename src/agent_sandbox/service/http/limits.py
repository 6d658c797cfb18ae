"""What a connection may take, and for how long. Every number has a test that goes over it."""

from __future__ import annotations

from ...record import Record


class Limits(Record):
    """Bounds of the HTTP layer. Seconds and bytes."""

    # --- a head
    head_bytes: int = 32 * 1024
    target_bytes: int = 8 * 1024
    fields: int = 100
    # From its first byte (of a new connection: from the beginning) to its last.
    head_seconds: float = 15.0
    # Between two requests.
    idle_seconds: float = 75.0

    # --- a body
    # A client may be silent for so long while it is waited for; it earns that time with bytes.
    body_seconds: float = 20.0
    body_bytes_per_second: int = 1024
    # What waits for a handler that does not read.
    body_held_bytes: int = 256 * 1024
    # What is read and dropped of a body that a handler did not want, to keep the connection.
    body_skip_bytes: int = 64 * 1024

    # --- an answer
    # Bytes that wait for a client that does not read; a stream then waits too.
    send_held_bytes: int = 64 * 1024
    # A client that takes not one byte for so long is cut off.
    send_seconds: float = 60.0
    # How long an answer may take after the client has closed its side: `nc -N` still reads.
    half_closed_seconds: float = 60.0
    # After a refusal what the client still sends is dropped, so that it can read the refusal.
    linger_seconds: float = 5.0
    linger_bytes: int = 16 * 1024 * 1024

    # --- connections
    connections: int = 1024
    # One address, one /64 of IPv6, one uid of a unix socket.
    connections_per_peer: int = 512
    backlog: int = 512

    # --- WebSocket
    message_bytes: int = 1024 * 1024
    # Messages and their bytes that wait for a handler that does not receive.
    messages_held: int = 256
    messages_held_bytes: int = 1024 * 1024
    # A silent client is asked whether it is there; after twice the time it is gone.
    ping_seconds: float = 20.0
    close_seconds: float = 5.0
