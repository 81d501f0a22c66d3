"""Which samples come when: samplers, epochs, their batches in order, and the state to resume from."""
