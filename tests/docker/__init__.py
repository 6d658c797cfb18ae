"""The Docker filter: before a recording engine, and before a real one."""
