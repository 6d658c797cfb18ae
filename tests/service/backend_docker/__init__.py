"""The docker backend without an engine."""
