"""Random input for everything that reads text from others."""
