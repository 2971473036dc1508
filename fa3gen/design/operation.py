"""What an operation works on: tensors, scalars and scratch, with dtypes, dims and layouts, in the order of a launch.

From this one description follow the Python entry point of a module (what is checked, the stand-ins that it is compiled
for, the call), the call on the CPU model, the tensors that `fa3gen verify` makes and measures, and the bytes that count
as work. The reference that results are held against does not: it is written by hand for each operation.

Packed sequences and pages are dense tensors, too: what says where a sequence lies are tensors of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from fa3gen.design import boxes, combining, footprint, gemm, quantizing
from fa3gen.design.family import PackedShape, Shape
from fa3gen.design.gemm import GemmShape
from fa3gen.design.masks import given_with_calls
from fa3gen.design.splits import kept_parts, share_words, whole_parts
from fa3gen.design.tiles import sequence_contiguous
from fa3gen.hardware import hopper
from fa3gen.hardware.chips import H200
from fa3gen.hardware.dtypes import BF16, FP32, INT32, VECTOR_BYTES, Dtype
from fa3gen.spec.model import Combine, Copy, Forward, Gemm, GlobalHandoff, Quantize, Spec, WgmmaProduct

Role = Literal["input", "optional input", "named input", "output", "optional output"]
Initial = Literal["zero", "anything"]
Mover = Literal["tma", "cp_async", "threads"]
AnyShape = Shape | PackedShape | GemmShape


@dataclass(frozen=True)
class Extent:
    """One dimension of a tensor: compiled in where it has a `size`, else given with each call.

    Written as the generated module writes it: `seq_q` is a variable there, `HEAD_DIM` a constant.
    """

    name: str
    size: int | None = None

    def __str__(self) -> str:
        """The name in the generated module."""
        return self.name if self.size is None else self.name.upper()


@dataclass(frozen=True)
class Dense:
    """Any order and any strides of the dimensions but one, `contiguous`: the last, if nothing else is said.

    `align`: bytes that the first element's address and all other strides are multiples of. A layout without a
    contiguous dimension (None) has any strides in all of them.
    """

    align: int = VECTOR_BYTES
    contiguous: int | None = -1


Layout = Dense


@dataclass(frozen=True)
class Tensor:
    """A tensor that a call is given or returns; an optional one has no elements where nobody gives it or asks for it.

    Inputs are positional arguments of an entry point, a named input is a keyword.

    `moved` says how the kernel loads or stores it.
    """

    name: str
    role: Role
    dtype: Dtype
    dims: tuple[Extent, ...]
    moved: Mover
    layout: Layout = Dense()

    def __str__(self) -> str:
        """The name, as the generated module writes it."""
        return self.name

    def sizes(self, shape: AnyShape) -> tuple[int, ...]:
        """Its shape in a call of this shape."""
        return _sizes(self.dims, _extents(shape))

    @property
    def row(self) -> int:
        """Elements along the last dimension, which is compiled in. ValueError where it is not."""
        if self.dims[-1].size is None:
            raise ValueError(f"{self.name} has as many elements in a row as a call says")
        return self.dims[-1].size

    @property
    def contiguous(self) -> int:
        """Which dimension is contiguous, or may be: the last one where the layout asks for none."""
        where = self.layout.contiguous
        return (-1 if where is None else where) % len(self.dims)

    def strides(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Strides of a tensor of these sizes that its layout allows, with as little padding as that takes.

        The contiguous dimension comes first in memory, then the others, the last one of `dims` first.
        """
        order = [self.contiguous, *(axis for axis in reversed(range(len(sizes))) if axis != self.contiguous)]
        strides, stride = [0] * len(sizes), 1
        for axis in order:
            strides[axis] = stride
            stride *= sizes[axis]
            if axis == self.contiguous:
                stride = -(-stride // self.vector) * self.vector
        return tuple(strides)

    @property
    def vector(self) -> int:
        """Elements that its layout keeps aligned: strides are multiples of as many."""
        return self.layout.align // self.dtype.bytes

    def bytes(self, shape: AnyShape) -> int:
        """Bytes of all its elements."""
        return math.prod(self.sizes(shape)) * self.dtype.bytes


@dataclass(frozen=True)
class Scratch:
    """Device memory of a launch that the caller does not see; row-major without gaps.

    `initial` is what stands in it before the launch. `kept`: it outlives the launch, which leaves zeros where it found
    zeros, so that nothing is filled but once: launches that follow one another share it, on one stream or in one CUDA
    graph. Of what may hold anything only the default stream's is kept; elsewhere torch's allocator gives it and takes
    it back. What is not `kept` is made for each launch.
    `passes`: how often each element goes to or comes from memory, where that is work to be counted.
    `parts`: how many parts of the keys a call on so many SMs has, for scratch that has a place for each.
    """

    name: str
    dtype: Dtype
    dims: tuple[Extent, ...]
    initial: Initial
    kept: bool = False
    passes: int = 0
    parts: Callable[[Any, int], int] | None = None
    ctas_per_sm: int = 1

    def __str__(self) -> str:
        """The name, as the generated module writes it."""
        return self.name

    def sizes(self, shape: AnyShape, num_sms: int) -> tuple[int, ...]:
        """Its shape in a call of this shape on so many SMs."""
        extents = {**_extents(shape), "num_sms": num_sms, "num_ctas": num_sms * self.ctas_per_sm}
        if self.parts is not None:
            extents["num_parts"] = self.parts(shape, num_sms)
        return _sizes(self.dims, extents)


@dataclass(frozen=True)
class Scalar:
    """A number that a launch is given. Written as its stand-in when the module is compiled: any value of its type."""

    name: str
    dtype: Dtype

    def __str__(self) -> str:
        """A value of its type in the CuTe DSL: `cutlass.Int32(1)`."""
        return f"cutlass.{self.dtype.cutlass_name}({'1.0' if self.dtype is FP32 else '1'})"


Argument = Tensor | Scratch | Scalar


@dataclass(frozen=True)
class Operation:
    """One operation as one spec wants it: the arguments of a launch in order, and how many kernels it starts.

    `entry` is the function of the generated module that a caller calls: with the inputs in order, and with keywords.
    """

    name: str
    entry: str
    arguments: tuple[Argument, ...]
    kernels: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Inputs, then outputs."""
        return tuple(argument for argument in self.arguments if isinstance(argument, Tensor))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What a call has to be given, in order."""
        return tuple(tensor for tensor in self.tensors if tensor.role == "input")

    @property
    def first(self) -> Tensor:
        """The first input: a call runs on its device."""
        return self.inputs[0]

    @property
    def given(self) -> tuple[Tensor, ...]:
        """What a caller may give of one layout: the inputs, and outputs that are not optional."""
        return tuple(tensor for tensor in self.tensors if tensor.role in ("input", "output"))

    @property
    def optional_inputs(self) -> tuple[Tensor, ...]:
        """What a call may be given by keyword."""
        return tuple(tensor for tensor in self.tensors if tensor.role == "optional input")

    @property
    def optional_lengths(self) -> tuple[Tensor, ...]:
        """Those of them that say how long sequences are."""
        return tuple(tensor for tensor in self.optional_inputs if tensor.dtype is INT32)

    @property
    def output(self) -> Tensor:
        """The output that every call has."""
        return next(tensor for tensor in self.tensors if tensor.role == "output")

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """What a launch needs beside its tensors."""
        return tuple(argument for argument in self.arguments if isinstance(argument, Scratch))

    def entry_of(self, module: Any) -> Callable[..., Any]:
        """The entry point of a loaded module. AttributeError for a module of another operation."""
        return getattr(module, self.entry)  # type: ignore[no-any-return]

    def like(self, tensor: Tensor) -> Tensor:
        """The first input with the same sizes but for the row, which `tensor` has to match in a call: may be itself."""
        return next(each for each in self.inputs if each.dims[:-1] == tensor.dims[:-1])

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name; KeyError where there is none."""
        return {tensor.name: tensor for tensor in self.tensors}[name]

    def bytes(self, shape: AnyShape) -> int:
        """Bytes of all tensors, each once, and of scratch as often as it goes to or comes from memory."""
        moved = sum(tensor.bytes(shape) for tensor in self.tensors)
        return moved + sum(each.passes * math.prod(each.sizes(shape, 0)) * each.dtype.bytes for each in self.scratch)

    def bytes_made(self, shape: AnyShape) -> int:
        """Bytes of the scratch that every launch takes anew, on a GPU with as many SMs as an H200."""
        made = [each for each in self.scratch if not each.kept]
        return sum(math.prod(each.sizes(shape, H200.sms)) * each.dtype.bytes for each in made)


def _extents(shape: AnyShape) -> dict[str, int]:
    return asdict(shape) if isinstance(shape, GemmShape) else shape.extents


def _sizes(dims: tuple[Extent, ...], given: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(given[extent.name] if extent.size is None else extent.size for extent in dims)


BATCH, SEQ_Q, SEQ_K = Extent("batch"), Extent("seq_q"), Extent("seq_k")
SEQ_V = Extent("seq_v")  # seq_k in whole units of keys, of a v whose keys are permuted
HEADS_Q, HEADS_KV = Extent("heads_q"), Extent("heads_kv")
BLOCKS_Q, BLOCKS_K = Extent("blocks_q"), Extent("blocks_k")
TOTAL_Q, TOTAL_K, OFFSETS = Extent("total_q"), Extent("total_k"), Extent("offsets")
PAGES, PAGE, MOST_PAGES = Extent("pages"), Extent("page"), Extent("most_pages")
NUM_SMS, NUM_CTAS, NUM_PARTS = Extent("num_sms"), Extent("num_ctas"), Extent("num_parts")


def forward(spec: Forward) -> Operation:
    """O = softmax(scale Q K^T) V, and LSE where the spec has it."""
    head_dim = Extent("head_dim", spec.problem.head_dim)
    v_dim = head_dim if spec.problem.v_dim == head_dim.size else Extent("head_dim_v", spec.problem.v_dim)
    engine: Mover = "threads" if spec.load.engine == "sync" else spec.load.engine
    stored: Mover = "tma" if isinstance(spec.pv, WgmmaProduct) and spec.outputs.o != "direct" else "threads"
    by_sequence = sequence_contiguous(spec)
    packed = footprint.packed_sequences(spec)
    of_q, of_k = ((TOTAL_Q,), (TOTAL_K,)) if packed else ((BATCH, SEQ_Q), (BATCH, SEQ_K))
    if footprint.paged(spec):
        of_k = PAGES, PAGE

    def given(name: str, *dims: Extent) -> Tensor:
        layout = Dense(contiguous=1 if name in by_sequence else -1)
        moved: Mover = "cp_async" if footprint.gathered(spec) and name != "q" else engine
        return Tensor(name, "input", spec.element if name == "q" else spec.kv_element, dims, moved, layout)

    arguments: list[Argument] = [
        given("q", *of_q, HEADS_Q, head_dim),
        given("k", *of_k, HEADS_KV, head_dim),
        given("v", *((BATCH, SEQ_V) if footprint.permuted_keys(spec) else of_k), HEADS_KV, v_dim),
    ]
    if footprint.paged(spec):
        arguments += _offsets_and_pages()
    elif packed:
        arguments += _offsets_and_lengths()
    if footprint.eight_bits(spec) or footprint.eight_bit_cache(spec):
        anywhere = Dense(align=FP32.bytes, contiguous=None)
        of_blocks: dict[str, tuple[Extent, ...]] = {}
        if footprint.block_scales(spec):
            of_blocks = {name: (BATCH, HEADS_KV, BLOCKS_K) for name in ("k_descale", "v_descale")}
            of_blocks["q_descale"] = BATCH, HEADS_Q, BLOCKS_Q
        for name in (*["q_descale"] * footprint.eight_bits(spec), "k_descale", "v_descale"):
            factors = of_blocks.get(name, (BATCH, HEADS_KV))
            arguments.append(Tensor(name, "optional input", FP32, factors, "threads", anywhere))
    arguments.append(Tensor("out", "output", spec.o_element, (*of_q, HEADS_Q, v_dim), stored))
    if spec.outputs.lse:
        lse, rows = Dense(align=FP32.bytes), (HEADS_Q, TOTAL_Q) if packed else (BATCH, HEADS_Q, SEQ_Q)
        arguments.append(Tensor("lse", "optional output", FP32, rows, "threads", lse))
    if given_with_calls(spec.mask):
        arguments += [Scalar("window_left", INT32), Scalar("window_right", INT32)]
    if isinstance(spec.handoff, GlobalHandoff):
        # S is written, read twice (maximum, sum) and written as P, and P is read.
        dims = BATCH, HEADS_Q, SEQ_Q, SEQ_K
        arguments.append(Scratch("scores", FP32, dims, "anything", passes=5))
    if spec.softmax.sink:
        # Or in bfloat16: the launch takes 16-bit words, one or two of each head.
        arguments.append(Tensor("sinks", "named input", FP32, (HEADS_Q,), "threads", Dense(align=BF16.bytes)))
    if spec.softmax.softcap:
        arguments.append(Scalar("softcap", FP32))
    if footprint.persistent(spec):
        arguments.append(Scalar("num_sms", INT32))
    if footprint.draws_tiles(spec):
        arguments.append(Scratch("counter", INT32, (Extent("one", 1),), "zero", kept=True))
    if footprint.splits_tail(spec):
        part = zip(("vectors", "threads", "vector"), footprint.part_shape(spec), strict=True)
        warps = Extent("consumer_warps", footprint.computing_threads(spec) // hopper.WARP)
        arguments.append(Scratch("flags", INT32, (NUM_SMS, warps), "zero", kept=True))
        arguments.append(Scratch("parts", FP32, (NUM_SMS, *(Extent(*named) for named in part)), "anything", kept=True))
    if whole_parts(spec):
        # Of a part O of each row, not divided by anything, and what it is relative to: maximum and sum of exponentials.
        each = partial(Scratch, dtype=FP32, initial="anything", parts=partial(kept_parts, spec))
        arguments.append(each("parts", dims=(NUM_PARTS, TOTAL_Q, HEADS_Q, v_dim)))
        arguments += [each(name, dims=(NUM_PARTS, HEADS_Q, TOTAL_Q)) for name in ("parts_max", "parts_sum")]
    elif spec.scheduler == "even":
        # Of a CTA two parts at most, with LSE, and where the tile lies that it begins and another one ends.
        ctas = NUM_SMS if spec.tile.ctas_per_sm == 1 else NUM_CTAS
        words = 2 * spec.tile.q * (spec.problem.v_dim + 1) + share_words(spec)
        left = ctas, Extent("cta_words", words)
        arguments.append(Scratch("workspace", FP32, left, "anything", ctas_per_sm=spec.tile.ctas_per_sm))
    elif spec.split is not None:
        # Of a part O, divided by the part's sums of exponentials, and LSE.
        each = partial(Scratch, dtype=FP32, initial="anything", parts=partial(kept_parts, spec))
        arguments.append(each("parts", dims=(NUM_PARTS, BATCH, SEQ_Q, HEADS_Q, v_dim)))
        arguments.append(each("parts_lse", dims=(NUM_PARTS, BATCH, HEADS_Q, SEQ_Q)))
    if spec.scheduler == "grid":
        arguments.append(Scalar("enable_pdl", INT32))
    arguments.append(Scalar("scale", FP32))
    kernels = 3 if isinstance(spec.handoff, GlobalHandoff) else 1 + (spec.split is not None)
    return Operation("forward", "attention", tuple(arguments), kernels=kernels)


def _offsets_and_lengths() -> list[Argument]:
    """Where packed sequences begin, and behind the last one's end; where given, how many rows of each are in use."""
    words = Dense(align=INT32.bytes)
    return [
        Tensor("cu_seqlens_q", "input", INT32, (OFFSETS,), "threads", words),
        Tensor("cu_seqlens_k", "input", INT32, (OFFSETS,), "threads", words),
        Tensor("seqused_q", "optional input", INT32, (BATCH,), "threads", words),
        Tensor("seqused_k", "optional input", INT32, (BATCH,), "threads", words),
    ]


def _offsets_and_pages() -> list[Argument]:
    """Where packed queries begin, in which pages the keys of each sequence lie, and how many of them there are."""
    words = Dense(align=INT32.bytes)
    return [
        Tensor("cu_seqlens_q", "input", INT32, (OFFSETS,), "threads", words),
        Tensor("page_table", "input", INT32, (BATCH, MOST_PAGES), "threads", words),
        Tensor("seqused_k", "input", INT32, (BATCH,), "threads", words),
        Tensor("seqused_q", "optional input", INT32, (BATCH,), "threads", words),
    ]


M, N, K = Extent("m"), Extent("n"), Extent("k")


def matmul(spec: Gemm) -> Operation:
    """D = A B, or D = A B + C."""
    a_major, b_major = gemm.majors(spec)
    stored: Mover = "tma" if isinstance(spec.product, WgmmaProduct) else "threads"
    arguments: list[Argument] = [
        Tensor("a", "input", spec.element, (M, K), spec.load.engine, Dense(contiguous=1 if a_major == "k" else 0)),
        Tensor("b", "input", spec.element, (K, N), spec.load.engine, Dense(contiguous=0 if b_major == "k" else 1)),
    ]
    if spec.d.add_c:
        anywhere = Dense(align=spec.d_element.bytes, contiguous=None)
        arguments.append(Tensor("c", "input", spec.d_element, (M, N), "threads", anywhere))
    arguments.append(Tensor("out", "output", spec.d_element, (M, N), stored, Dense(contiguous=1)))
    if gemm.specialized(spec):
        arguments.append(Scalar("num_sms", INT32))
    return Operation("gemm", "matmul", tuple(arguments), kernels=1)


def copy(spec: Copy) -> Operation:
    """out = x; of packed rows only those of the sequences that the offsets name."""
    if boxes.packed(spec):
        dims = [Extent("total")]
    else:
        dims = [Extent(f"d{number}") for number in range(len(spec.box.extents) - 1)]
    shape = (*dims, Extent("row", spec.problem.row))
    arguments: list[Argument] = [Tensor("x", "input", spec.element, shape, "tma")]
    if boxes.packed(spec):
        arguments.append(Tensor("offsets", "input", INT32, (Extent("sequences"),), "threads", Dense(align=INT32.bytes)))
    arguments.append(Tensor("out", "output", spec.element, shape, "tma"))
    if spec.ring is not None:
        arguments.append(Scalar("num_sms", INT32))
    return Operation("copy", "copy", tuple(arguments), kernels=1)


def combine(spec: Combine) -> Operation:
    """O and LSE of all keys, from those of parts of them; any head dim, which each call says."""
    rows = BATCH, Extent("seq"), Extent("heads")
    dim, anywhere = Extent("dim"), Dense(align=FP32.bytes, contiguous=None)
    arguments: list[Argument] = [
        Tensor("out_partial", "input", FP32, (NUM_PARTS, *rows, dim), "threads"),
        Tensor("lse_partial", "input", FP32, (NUM_PARTS, *rows), "threads", anywhere),
        Tensor("out", "output", spec.element, (*rows, dim), "threads", Dense(combining.VECTOR * spec.element.bytes)),
        Tensor("lse", "output", FP32, rows, "threads", anywhere),
        Scalar("shares", INT32),
    ]
    return Operation("combine", "combine", tuple(arguments), kernels=1)


def quantize(spec: Quantize) -> Operation:
    """x in 8 bits, and the factors that make x of it; the scale of a head of k is an input where a call gives it."""
    problem = spec.problem
    rows = BATCH, Extent("seq"), Extent("heads"), Extent("head_dim", problem.head_dim)
    anywhere = Dense(align=FP32.bytes, contiguous=None)
    stored = Dense(contiguous=1) if problem.transpose else Dense(align=quantizing.VECTOR * spec.out_element.bytes)
    written = (BATCH, Extent("seq_out"), *rows[2:]) if problem.permute_keys else rows
    arguments: list[Argument] = [Tensor("x", "input", spec.element, rows, "threads")]
    if problem.rotate:
        arguments.append(Tensor("signs", "input", FP32, rows[-1:], "threads"))
    arguments.append(Tensor("out", "output", spec.out_element, written, "threads", stored))
    scaled = {"head": (HEADS_KV,), "block": (Extent("heads"), Extent("blocks")), "token": (Extent("heads"), rows[1])}
    dims = BATCH, *scaled[problem.scale]
    arguments.append(Tensor("descale", "output", FP32, dims, "threads", anywhere))
    if problem.scale == "head":
        arguments.append(Scratch("partial", FP32, (BATCH, HEADS_KV, NUM_PARTS), "anything", passes=2))
    return Operation("quantize", "quantize", tuple(arguments), kernels=1 + (problem.scale == "head"))


def operation_of(spec: Spec) -> Operation:
    """What the module of a spec works on."""
    match spec:
        case Forward():
            return forward(spec)
        case Gemm():
            return matmul(spec)
        case Copy():
            return copy(spec)
        case Combine():
            return combine(spec)
        case Quantize():
            return quantize(spec)
