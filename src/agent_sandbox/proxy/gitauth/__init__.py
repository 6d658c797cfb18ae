"""The process outside that answers for keys and credentials: an ssh agent's filter, a helper."""
