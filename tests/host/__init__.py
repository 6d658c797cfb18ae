"""Tests of agent_sandbox.host."""
