"""A service that is killed at random moments, under load."""
