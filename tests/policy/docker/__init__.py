"""Tests of agent_sandbox.policy.docker."""
