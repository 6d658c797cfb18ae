"""The library, and the steps that it shares with the command line and the service."""
