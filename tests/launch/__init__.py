"""Tests of agent_sandbox.launch."""
