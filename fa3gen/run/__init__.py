"""Calling kernels on a GPU: `fa3gen.attention`, the table it chooses by, and launching."""
