"""The process outside that carries a sandbox's network: it decides, looks up, dials and relays."""
