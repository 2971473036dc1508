"""Executes the PTX of generated modules on the CPU: a functional model of sm_90a with asynchronous copies and products.

The host code that the DSL compiled runs as it is (`host`, `driver`, `dsl`); the kernels that it launches are
interpreted. Results come from a model and say nothing about time.
"""
