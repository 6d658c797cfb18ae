"""The sandbox service: HTTP over the library, for many agents on one machine."""
