"""The HTTP layer: its parsers by tables, its server on loopback with clients that are not ours."""
