"""Compose files: read as Compose reads them, judged, and rewritten. Pure: files come in as text."""
