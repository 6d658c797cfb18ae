"""Tests of agent_sandbox.cli."""
