"""Tests of agent_sandbox.sandbox."""
