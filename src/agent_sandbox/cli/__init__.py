"""The two commands: thin shells around the library."""
