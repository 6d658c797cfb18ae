"""Agent A against agent B, through the real API, each attack with its control."""
