"""Real sandboxes on a real kernel. A package, so that its file names may repeat those of others."""
