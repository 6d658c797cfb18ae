"""The proxy: its parsers by tables, the process between two namespaces of the test's own."""
