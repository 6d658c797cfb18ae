"""HTTP/1.1 for the service: strict parsing, streaming, Server-Sent Events, WebSocket."""
