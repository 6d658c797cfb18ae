"""Several processes of the service over one state: who has what, and how a request gets there."""
