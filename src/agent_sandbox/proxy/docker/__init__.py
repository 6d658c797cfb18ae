"""The Docker filter's process: sockets, streams, audit and clean-up around `policy.docker`."""
