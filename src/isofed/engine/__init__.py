"""Training clients: the one local step and the executors that run it."""
