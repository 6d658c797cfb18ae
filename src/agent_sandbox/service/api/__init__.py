"""The HTTP interface of the service: one table of routes, made into dispatch and OpenAPI."""
