"""What `selftest` runs inside: a package of its own, copied into the throw-away world."""
