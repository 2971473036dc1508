"""Executes the PTX of generated modules on the CPU: a functional model of sm_90a that also checks the rules.

The host code that the DSL compiled runs as it is; each launch that it makes is interpreted. Results come from a model
and say nothing about time. In reading order:

- from a module to launches: `module` (load a generated file), `kernel` (a compiled module as a function), `host`,
  `driver` and `dsl` (its host code, on stand-ins for the CUDA runtime);
- from PTX to Python: `ptx` (parser), `flow` (blocks), `forms` and `isa` (the instructions that exist, by family),
  `emitter` and `translate` (a function for each block), `lanes` (arithmetic on vectors of lanes), `types`;
- one launch: `launch`, `cta` (state of a CTA and the loop that runs it), `warps` (groups of warps, divergence),
  `schedule` (who runs when), `findings` (what is reported), `trace`;
- memory and asynchrony: `shared_memory`, `clocks` (what happens before what), `global_memory`, `lane_memory`,
  `barriers`, `tensor_map` and `bulk_copy` (TMA), `cp_async`, `commit_groups`, `wgmma`.

Sources: PTX ISA 8.8; CUDA Programming Guide, compute capability 9.0; CUDA Driver API, tensor map objects.
"""
