"""Where the service's sandboxes run: one module per kind, behind `interface`."""
