"""Sequences that are all of one length: where they begin, and dense tensors as packed sequences.

A dense tensor whose batch and sequence are rows of one tensor is packed sequences, with offsets that follow from its
shape. Such offsets are kept in memory of their own, for all streams and graphs: docs/architecture.md says how.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch.compiler import is_dynamo_compiling

from fa3gen.run.dispatch import FEW_QUERIES, ArgumentError

LENGTHS = 64  # whose offsets are made at once: those of keys that grow from call to call follow one another
NUMBERS = 2**16  # that are made at once, where sequences are so many that this is fewer lengths

# Of what modules of packed sequences with even shares count up to, in 32 bits; see `MOST_STEPS` in these.
MOST_STEPS = 2**30
LEAST_POSITIONS, LEAST_KEYS = 1, 64  # of their tiles


# Dense tensors


def in_rows(x: Tensor) -> bool:
    """Whether (batch, seq, heads, d) is rows of one tensor, sequence behind sequence, all equally far apart."""
    batch, seq, _, _ = x.shape
    of_batch, of_row, _, _ = x.stride()
    return batch < 2 or seq < 2 or of_batch == seq * of_row


def can_be_packed(q: Tensor, k: Tensor, v: Tensor, out: Any, parts: int) -> bool:
    """Whether a module of packed sequences can read q, k and v and write `out` as they lie, and count what it does.

    Tensors of a wrong shape are left to `of_dense` to refuse. Few queries may lie anywhere: they are copied. Only
    modules that split keys count their tiles: for few queries, or where a call asks for `parts`.
    """
    (batch, seq_q, _, _), (sequences, seq_k, heads_kv, _) = q.shape, k.shape
    few = seq_q <= FEW_QUERIES
    if not (in_rows(k) and in_rows(v) and (few or in_rows(q)) and (out is None or out.dim() != 4 or in_rows(out))):
        return False
    if not few and parts <= 1:
        return True
    steps = batch * (seq_q // LEAST_POSITIONS + 1) * heads_kv * (sequences * seq_k // LEAST_KEYS + 1)
    return steps <= MOST_STEPS


def of_dense(
    attention: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out: Tensor | None = None,
    **options: Any,
) -> Any:
    """Call the `attention` of a module of packed sequences with dense tensors that `can_be_packed`; it returns theirs.

    The LSE is (batch, heads_q, seq_q) as for a dense module, and a view of (heads_q, batch, seq_q). Raises
    ArgumentError for shapes that do not go together, which nobody would notice once they are packed.
    """
    (batch, seq_q, heads_q, _), (sequences, seq_k, heads_kv, dim), v_dim = q.shape, k.shape, v.shape[3]
    if sequences != batch:
        raise ArgumentError(f"k has shape {tuple(k.shape)}, q {tuple(q.shape)}; they need the same batch")
    if v.shape != (batch, seq_k, heads_kv, v_dim):
        raise ArgumentError(f"v has shape {tuple(v.shape)}, k {tuple(k.shape)}; they may only differ in the head dim")
    if out is not None and out.shape != (batch, seq_q, heads_q, v_dim):
        needed = (batch, seq_q, heads_q, v_dim)
        raise ArgumentError(f"out has shape {tuple(out.shape)}; it needs to be {needed}")
    rows = batch * seq_k
    keys = k.view(rows, heads_kv, dim), v.view(rows, heads_kv, v_dim)
    options["cu_seqlens_k"] = even_offsets(batch, seq_k, k)
    return of_equal_queries(attention, q, keys, out, options)


def of_equal_queries(
    attention: Callable[..., Any],
    q: Tensor,
    keys: tuple[Tensor, Tensor],
    out: Tensor | None,
    options: dict[str, Any],
) -> Any:
    """Call an `attention` of packed queries with q (batch, seq_q, heads_q, d); it returns O, or O and LSE, like q.

    k and v are as it takes them, and so are `options`, which say where their sequences lie.
    """
    batch, seq_q, heads_q, _ = q.shape
    into = None if out is None else out.view(batch * seq_q, *out.shape[2:])
    begins = even_offsets(batch, seq_q, q)
    returned = attention(q.flatten(0, 1), *keys, begins, out=into, **options)
    packed, lse = returned if options.get("return_lse") else (returned, None)
    found = packed.view(batch, seq_q, heads_q, packed.shape[2]) if out is None else out
    return found if lse is None else (found, lse.view(heads_q, batch, seq_q).transpose(0, 1))


# Offsets


def even_offsets(batch: int, rows: int, beside: Tensor) -> Tensor:
    """Where sequences begin that are so many rows apart, and where the last one ends; on the device of `beside`."""
    # What is traced or watched is made anew: a graph has its own, and a mode's tensors may have no memory.
    if not is_dynamo_compiling() and type(beside) is Tensor and not dispatch_modes():
        gpu = beside.get_device()
        if gpu >= 0:
            return _kept_offsets(batch, rows, gpu)
    return torch.arange(batch + 1, dtype=torch.int32, device=beside.device) * rows


@functools.lru_cache(maxsize=4096)
def _kept_offsets(batch: int, rows: int, gpu: int) -> Tensor:
    """The same, made once; where they lie is never used for anything else, whatever becomes of the tensor."""
    at_once = min(LENGTHS, NUMBERS // (batch + 1)) or 1
    return _made(batch, rows // at_once * at_once, at_once, gpu)[rows % at_once]


@functools.cache
def _made(batch: int, first: int, lengths: int, gpu: int) -> Tensor:
    """Offsets of `first` rows, and of so many lengths in all that follow it: (lengths, batch + 1) int32."""
    return _keeper.submit(_make, batch, first, lengths, gpu).result()


_keeper = ThreadPoolExecutor(max_workers=1)  # the thread that makes them


def _make(batch: int, first: int, lengths: int, gpu: int) -> Tensor:
    """The same; run by `_keeper`, past torch's allocator and streams, as modules make the zeros that they keep.

    The thread that wants them may be capturing a graph, which would replay the copy; or torch.compile may be preparing
    one there, and have what torch allocates go to a pool that it takes back. Nobody waits but for this copy.
    """
    from cuda.bindings import driver as cuda

    # In 64 bits, since the last of these lengths may be more than any tensor has.
    rows, sequences = torch.arange(first, first + lengths, device="cpu"), torch.arange(batch + 1, device="cpu")
    offsets = (rows[:, None] * sequences).to(torch.int32)
    size = offsets.numel() * offsets.element_size()
    # Relaxed: this thread may allocate even while another one captures.
    _checked(*cuda.cuThreadExchangeStreamCaptureMode(cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    (device,) = _checked(*cuda.cuDeviceGet(gpu))
    (context,) = _checked(*cuda.cuDevicePrimaryCtxRetain(device))
    _checked(*cuda.cuCtxSetCurrent(context))
    (memory,) = _checked(*cuda.cuMemAlloc(size))
    (stream,) = _checked(*cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
    _checked(*cuda.cuMemcpyHtoDAsync(memory, offsets.data_ptr(), size, stream))
    _checked(*cuda.cuStreamSynchronize(stream))  # there for all streams
    _checked(*cuda.cuStreamDestroy(stream))
    array = {"shape": tuple(offsets.shape), "typestr": "<i4", "data": (int(memory), False), "version": 2}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device=gpu)


def _checked(error: Any, *results: Any) -> tuple[Any, ...]:
    """What a call of the CUDA driver returned."""
    if error:
        raise RuntimeError(f"the CUDA driver returned {error!r}")
    return results
