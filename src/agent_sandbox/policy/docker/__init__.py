"""What a sandbox may ask of a Docker engine, as pure decisions.

No socket, no file, no clock: the proxy in `agent_sandbox.proxy.docker` reads and sends.
"""
