"""Real agents, a scripted model: `make test-agents`."""
