"""The agent in a pod: runs as its first process and serves commands and files to the service."""
