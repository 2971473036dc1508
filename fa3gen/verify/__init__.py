"""Whether a module computes attention: inputs, the reference, and runs on a GPU and on the CPU model."""
