"""Reads the machine and changes nothing."""
