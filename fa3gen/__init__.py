"""fa3gen: attention kernels for Hopper (sm_90a). A YAML spec in, one readable CuTe DSL module out.

import fa3gen

out = fa3gen.attention(q, k, v, causal=True)        # by the module that is fastest for these shapes
print(fa3gen.attention.explain(q, k, v, causal=True))

out = fa3gen.attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True)   # packed sequences (varlen)

q8, q_descale = fa3gen.quantize(q, rotate=signs)    # to 8 bits, for attention of these

module = fa3gen.load("k4_2_d128_causal")            # or by one of your choice
out, lse = module.attention(q, k, v, return_lse=True)

Without a GPU, `fa3gen.load("k4_2_d128_causal", on="cpu")` takes CPU tensors and runs the same compiled kernel on a
model of sm_90a.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fa3gen.run.ops import attention as attention
    from fa3gen.run.packed_ops import attention_packed as attention_packed
    from fa3gen.run.quantize_ops import quantize as quantize

__all__ = ["attention", "attention_packed", "load", "quantize"]

_NEED_TORCH = {
    "attention": "fa3gen.run.ops",
    "attention_packed": "fa3gen.run.packed_ops",
    "quantize": "fa3gen.run.quantize_ops",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for: the rest of the package does not need it."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'fa3gen' has no attribute '{name}'")
    function = globals()[name] = getattr(importlib.import_module(_NEED_TORCH[name]), name)
    return function


def __dir__() -> list[str]:
    """What is imported when it is asked for, too: for `dir` and completion."""
    return sorted({*globals(), *_NEED_TORCH})


def load(stem: str, *, on: Literal["gpu", "cpu"] = "gpu") -> ModuleType:
    """Import a generated module by its stem, such as `k4_2_d128_causal`, from the workspace or else from the package.

    Modules that this process rendered for calls with render=True have a stem, too.

    Importing needs torch and nvidia-cutlass-dsl, but no GPU. The first call of `attention` takes the compiled kernel
    from the compile cache, or else compiles it in a process of its own (with $FA3GEN_NO_JIT=1 it raises instead).
    With `on="cpu"`, `attention` takes CPU tensors and executes the kernel's PTX on a model of sm_90a; it raises
    `fa3gen.cpu.findings.Hazard` for a mistake that the model sees. Each such call gives a module of its own, whose
    `cpu` (`fa3gen.cpu.module.CpuModel`) holds the settings: schedule and trace.

    Raises:
        UserError: There is no such module; the message names the nearest ones or the command that renders it. With
            `on="cpu"`, also where the model does not support the installed nvidia-cutlass-dsl.
    """
    from fa3gen.base.errors import UserError
    from fa3gen.design.workspace import Workspace
    from fa3gen.run import dispatch

    if on not in ("gpu", "cpu"):
        raise UserError(f"on={on!r}; it needs to be 'gpu' (the default) or 'cpu'")
    workspace = Workspace.find()
    rendered = {variant.stem: file for variant, file in dispatch.rendered_here}
    path = rendered.get(stem) or workspace.rendered_path(stem)
    if not path.is_file():
        variant = next((variant for variant in workspace.resolve(stem) if variant.stem == stem), None)
        if variant is None:
            stems = ", ".join(variant.stem for variant in workspace.resolve(stem))
            raise UserError(f"{stem} is a spec with several modules; load one of {stems}")
        raise UserError(f"{workspace.module_path(stem)} does not exist; run `fa3gen render {variant.source}`")
    if on == "cpu":
        from fa3gen.cpu.module import load_on_cpu

        return load_on_cpu(path)
    from fa3gen.run.launch import module_at

    return module_at(path)
