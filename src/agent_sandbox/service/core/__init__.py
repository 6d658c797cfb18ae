"""The service without its wire: who may do what, and doing it, over any backend."""
