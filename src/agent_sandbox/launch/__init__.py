"""Turns a Plan into a running process, and cleans up after it."""
