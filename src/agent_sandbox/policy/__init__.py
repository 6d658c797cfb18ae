"""Pure decisions: what the layers of configuration mean and what the command will see.

Nothing in this package touches the file system, the environment or the clock; the machine comes in
as `HostFacts`. A test asserts it.
"""
