"""Attacks on real sandboxes: each is refused, and succeeds once a single protection is gone."""
