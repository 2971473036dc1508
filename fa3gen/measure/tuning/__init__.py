"""Tuning: search the legal specs for the fastest module at given shapes, on the GPUs of this host.

`space` enumerates and prunes, `candidates` renders and compiles, `heats` decides who stays and who wins, `session`
runs the heats in processes of their own (`worker`, reached through `client`) and writes the `journal`, `writeback`
turns a winner into a spec file, `report` shows it all. `fa3gen.records.tuning_records` is what remains of it.
"""
