"""Sandboxes whose processes are killed at random moments."""
