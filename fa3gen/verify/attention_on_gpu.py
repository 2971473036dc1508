"""Run a module of attention on a GPU and say how far it is off, beside what PyTorch itself is off.

Pass criteria, per case, all of them measured against float64 attention of the very 16-bit inputs:

- O, maximum: max|O - ref| <= 2 max|O_torch - ref| + half an ulp (of the 16-bit dtype) at max|ref|.
- O, worst block: in every block of 64 query rows of one head, ||O - ref|| <= 2 ||O_torch - ref|| + ||half ulp of ref||
  (Frobenius). The maximum alone would let rows of small outputs be wrong by half their size.
- O in float32 has no rounding of its own, so 2^-16 |ref| stands for half an ulp: what sums and exponentials in float32
  may come to. Nor has O_torch then, in which only P is rounded to 16 bits. In a block of a few rows and keys all of its
  roundings may be tiny by chance (in 27 of 65,792 blocks of two rows and nine keys so tiny that a kernel which rounds P
  and nothing else is over the limit). So the error of O_torch in a block is then the root mean square of four, in which
  P lies elsewhere between two powers of two.
- LSE: |LSE - ref| <= 1e-5 max(1, |ref|) for every row; -inf exactly where, and only where, a row sees no key
  (and has no sink).
- Where scores are capped, tanh.approx may be off by 2^-11 of itself (PTX ISA). What that can move O and LSE by is added
  to these limits, element by element: `reference.tanh_slack`, which derives it.
- Where q, k and v have 8 bits, they stand for as much as their factors make of them, and O_torch is
  `reference.eight_bit_precision`: P alone is rounded, to 8 bits, as 2^8 times itself. As with O in float32 the error
  of O_torch in a block is that of four; and its maximum is the largest of the four: by where P lies between two
  powers of two that of one differs by up to six times (case `ramp`, head dim 128). The tensor core cuts sums of
  products of 8 bits off: what that can move LSE by is added to its limit, `reference.sum_slack`; twice the error of
  O_torch has room for what it moves O by.
- No NaN in O or LSE, nothing written outside `out`, inputs unchanged, every launch bitwise like the first.

O_torch is `reference.same_precision`. Beside the cases a few checks look at arguments, empty batches, streams and
allocations. Everything that cannot be done on the device at hand is listed as not run, never as passed.

`fa3gen.verify.attention_on_cpu` does the same on the CPU model of sm_90a, with cases and criteria of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fa3gen.design import footprint
from fa3gen.design.masks import reach
from fa3gen.design.operation import operation_of
from fa3gen.hardware.dtypes import FP32
from fa3gen.spec.model import Forward
from fa3gen.verify import inputs, reference
from fa3gen.verify.inputs import Case, Inputs, poison, untouched
from fa3gen.verify.reference import Attention, joined
from fa3gen.verify.results import CaseResult, Errors
from fa3gen.verify.runner import (
    LAUNCHES,
    ModuleRunner,
    changed_inputs,
    errors,
    essence,
    half_ulp,
    raise_if_lost,
    same_bits,
    snapshots,
)

FACTOR = 2.0  # times the error of PyTorch in the same precision
LSE_TOLERANCE = 1e-5  # relative, with |ref| taken as at least 1
BLOCK_ROWS = 64
# Of |ref|, for O in float32: an exponential is off by the rounding of its score, 2^-24 of what the score sums, and the
# largest of those sums over all cases are about 60 (`fa3gen.cpu.accuracy` has the formula).
FLOAT32_SHARE = 2.0**-16
P_SCALES = tuple(2.0 ** (i / 4) for i in range(4))  # of the yardsticks of O in float32


def unavoidable(expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what O in `dtype` may be off beside the yardstick: see this module's docstring."""
    if dtype != torch.float32:
        return half_ulp(expected, dtype)
    return FLOAT32_SHARE * expected.double().abs().clamp(min=torch.finfo(dtype).tiny)


def lse_errors(lse: torch.Tensor, expected: torch.Tensor) -> Errors:
    """Like `errors`, but relative is the largest |lse - expected| / max(1, |expected|) over the finite rows."""
    finite = torch.isfinite(expected)
    difference = (lse.double() - expected)[finite].abs()
    if difference.numel() == 0:
        return Errors(0.0, 0.0)
    if not torch.isfinite(difference).all():
        return Errors(None, None)
    return Errors(difference.max().item(), (difference / expected[finite].abs().clamp(min=1)).max().item())


def block_norms(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return the Frobenius norm of each block of BLOCK_ROWS query rows of one head: (batch, blocks, heads).

    `lengths` are the rows of each part: a block has rows of one.
    """
    squares = values.double().square().sum(-1)  # (batch, seq, heads)
    parts = torch.split(squares, list(lengths), dim=1)
    padded = [torch.nn.functional.pad(part, (0, 0, 0, -part.shape[1] % BLOCK_ROWS)) for part in parts]
    batch, _, heads = squares.shape
    return torch.cat(padded, dim=1).reshape(batch, -1, BLOCK_ROWS, heads).sum(2).sqrt()


@dataclass(frozen=True)
class _Measured:
    """Errors of O and what they may be."""

    error: Errors
    yardstick: Errors
    max_abs_limit: float
    block_ratio: float | None
    failures: tuple[str, ...]


def compare_o(
    out: torch.Tensor,
    expected: torch.Tensor,
    yardsticks: Sequence[torch.Tensor],
    lengths: Sequence[int],
    *,
    slack: torch.Tensor | None = None,
) -> _Measured:
    """Hold O (batch, rows, heads, d) against the criteria of this module's docstring; `lengths` as in `block_norms`.

    The first of the yardsticks is O_torch. `slack` is how far each element may be off beside these, where the kernel's
    tanh is approximate.
    """
    if not out.numel():
        return _Measured(Errors(0.0, 0.0), Errors(0.0, 0.0), 0.0, 0.0, ())
    slack = torch.zeros_like(expected) if slack is None else slack
    yardstick, norms = yardsticks[0], partial(block_norms, lengths=lengths)
    dtype = yardstick.dtype
    error, torch_error = errors(out, expected), errors(yardstick, expected)
    rounding = unavoidable(expected, dtype)
    of_8_bits = yardsticks if dtype != torch.float32 else yardsticks[:1]
    largest = max(errors(each, expected).max_abs or 0.0 for each in of_8_bits)
    limit = FACTOR * largest + unavoidable(expected.abs().max(), dtype).item()
    limit += slack.max().item()
    if error.max_abs is None:
        wrong = int((~torch.isfinite(out)).any(-1).sum())
        text = f"O has NaN or infinity in {wrong} of {out[..., 0].numel()} rows (written nowhere, or computed so)"
        return _Measured(error, torch_error, limit, None, (text,))
    squares = torch.stack([norms(each.double() - expected).square() for each in yardsticks])
    limits = FACTOR * squares.mean(0).sqrt() + norms(rounding) + norms(slack)
    ratio = (norms(out.double() - expected) / limits).max().item()
    failures = []
    if error.max_abs > limit:
        failures.append(f"O is off by {error.max_abs:.3g}; {limit:.3g} is allowed (PyTorch: {torch_error.max_abs:.3g})")
    if not ratio <= 1:  # a NaN fails, too
        failures.append(f"O in the worst block of {BLOCK_ROWS} rows is off by {ratio:.3g} times what is allowed")
    return _Measured(error, torch_error, limit, ratio, tuple(failures))


def compare_lse(
    lse: torch.Tensor, expected: torch.Tensor, *, slack: torch.Tensor | None = None
) -> tuple[Errors, tuple[str, ...]]:
    """Hold LSE (batch, heads, seq_q) against the criteria of this module's docstring; `slack` as in `compare_o`."""
    if lse.shape != expected.shape or lse.dtype != torch.float32:
        text = f"LSE is {tuple(lse.shape)} {lse.dtype}; it should be {tuple(expected.shape)} torch.float32"
        return Errors(None, None), (text,)
    error = lse_errors(lse, expected)
    failures = []
    if torch.isnan(lse).any():
        failures.append(f"LSE has {int(torch.isnan(lse).sum())} NaN")
    if not torch.equal(torch.isneginf(lse), torch.isneginf(expected)):
        failures.append("LSE is not -inf in exactly the rows that see no key and have no sink")
    beyond = error if slack is None else lse_errors(_nearer(lse, expected, slack), expected)
    if beyond.relative is None or beyond.relative > LSE_TOLERANCE:
        found = "not a number" if error.relative is None else f"off by {error.relative:.3g} relative"
        failures.append(f"LSE is {found}; {LSE_TOLERANCE:g} is allowed")
    return error, tuple(failures)


def _nearer(values: torch.Tensor, expected: torch.Tensor, slack: torch.Tensor) -> torch.Tensor:
    """Values moved towards what is expected by as much as they may be off."""
    difference = values.double() - expected
    return torch.where(difference.abs() <= slack, expected, values.double() - difference.sign() * slack)


def wrote_outside(made: Inputs, lse: torch.Tensor | None) -> tuple[str, ...]:
    """What is wrong with what is not to be written: the poison in `out_storage` is gone; `lse`, if given, was NaN."""
    failures = [] if untouched(made.out_storage, made.written) else ["wrote outside `out`, or rows that are not used"]
    if lse is not None and not made.unwritten_lse(lse).isnan().all():
        failures.append("wrote rows of LSE that are not used")
    return tuple(failures)


class Runner(ModuleRunner):
    """One module of attention on one device: calls it, measures it, checks it."""

    def __init__(self, module: Any, spec: Forward, device: torch.device, seed: int) -> None:
        """`seed` decides all inputs."""
        super().__init__(module, operation_of(spec), device, seed)
        self.spec = spec
        self.dtype, self.out_dtype = (self.operation.tensor(name).dtype.in_torch() for name in ("q", "out"))
        self.p_factor = 2.0 ** footprint.P_EXPONENT if footprint.eight_bits(spec) else 1.0

    # -- cases

    def run_case(self, case: Case) -> Any:
        """Launch a few times on fresh poison, compare the first with the reference and the others with the first.

        Returns a CaseResult.
        """
        case = inputs.served(case, self.spec)
        made = self._make(case)
        expected, slack = self._expected_with_slack(made, case.scale)
        yardsticks = self._yardsticks(made, case.scale)
        try:
            result, failures = self._launch_all(case, made)
        except Exception as error:  # whatever a module raises is that module's failure
            raise_if_lost(self.device, error)
            nothing = dict.fromkeys(["o_error", "o_yardstick", "o_max_abs_limit", "o_block_ratio"])
            return CaseResult(
                name=case.name,
                shape=case.shape,
                **nothing,
                lse_error=None,
                lse_yardstick=None,
                failures=(f"raised {essence(error)}",),
            )
        o = compare_o(result.out, expected.out, [each.out for each in yardsticks], made.lengths, slack=slack.out)
        failures += o.failures
        lse_error = lse_yardstick = None
        if self.spec.outputs.lse:
            lse_error, lse_failures = compare_lse(result.lse, expected.lse, slack=slack.lse)
            lse_yardstick = lse_errors(yardsticks[0].lse, expected.lse)
            failures += lse_failures
        return CaseResult(
            name=case.name,
            shape=case.shape,
            o_error=o.error,
            o_yardstick=o.yardstick,
            o_max_abs_limit=o.max_abs_limit,
            o_block_ratio=o.block_ratio,
            lse_error=lse_error,
            lse_yardstick=lse_yardstick,
            failures=tuple(failures),
        )

    def _make(self, case: Case) -> Inputs:
        return inputs.make_for(self.spec, case, device=self.device, seed=self.seed)

    def _expected_with_slack(self, made: Inputs, scale: float | None = None) -> tuple[Attention, Attention]:
        """Attention in float64, and how far a kernel may be from it where tanh, or a sum of 8 bits, is approximate.

        Of all parts one behind the other.
        """
        facts: dict[str, Any] = {"scale": scale, "reach": reach(made.mask), **made.keywords}
        expected = joined([reference.attention(*part, **facts) for part in made.parts])
        slack = Attention(torch.zeros_like(expected.out), torch.zeros_like(expected.lse))
        if made.softcap is not None:
            slack = joined([reference.tanh_slack(*part, **facts) for part in made.parts])
        if footprint.eight_bits(self.spec):
            of_sums = torch.cat([reference.sum_slack(q, k, **facts) for q, k, _ in made.parts], dim=2)
            slack = Attention(slack.out, slack.lse + of_sums)
        return expected, slack

    def _yardsticks(self, made: Inputs, scale: float | None = None) -> list[Attention]:
        """What PyTorch computes in the module's dtypes; where only P is rounded, four times with other roundings."""
        facts: dict[str, Any] = {"scale": scale, "reach": reach(made.mask), **made.keywords}
        facts["out_dtype"] = self.out_dtype
        if footprint.eight_bits(self.spec):
            facts["p_dtype"] = self.dtype
            return [
                joined([reference.eight_bit_precision(*part, **facts, p_scale=each) for part in made.parts])
                for each in (self.p_factor * p_scale for p_scale in P_SCALES)
            ]
        return [
            joined([reference.same_precision(*part, **facts, p_scale=p_scale) for part in made.parts])
            for p_scale in (P_SCALES if self.out_dtype != self.dtype else P_SCALES[:1])
        ]

    def _launch_all(self, case: Case, made: Inputs) -> tuple[Attention, tuple[str, ...]]:
        """Return the first launch's outputs and what the launches did wrong beside their values."""
        failures: list[str] = []
        before = snapshots(made.given)
        first: Attention | None = None
        for launch in range(LAUNCHES):
            poison(made.out_storage)
            poisoned = self._poison_next_lse(made)
            returned = self._call(made, scale=case.scale)
            result = self._rows(made, returned)
            if first is None:
                first = result
                failures += wrote_outside(made, returned.lse if returned.lse.data_ptr() == poisoned else None)
            elif not (same_bits(result.out, first.out) and same_bits(result.lse, first.lse)):
                failures.append(f"launch {launch + 1} differs from the first on the same inputs")
                break
        assert first is not None
        return first, (*failures, *changed_inputs(made.given, before))

    def _poison_next_lse(self, made: Inputs) -> int:
        """Leave NaN in the block of memory that the allocator will hand out next for an LSE; returns its address."""
        return torch.full(made.out.shape[:-1], math.nan, device=self.device).data_ptr()

    def _rows(self, made: Inputs, returned: Attention) -> Attention:
        """A copy of the rows that a call had to write."""
        lse = made.rows_of_lse(returned.lse) if self.spec.outputs.lse else returned.lse
        return Attention(made.rows_of(returned.out).clone(), lse.clone())

    def _told(self, made: Inputs) -> dict[str, Any]:
        """What else a caller would say of a case, since memory is made by it."""
        return {}

    def _call(self, made: Inputs, *, scale: float | None = None) -> Attention:
        """Call with `out` given; without an LSE output the result's LSE is empty."""
        if self.spec.outputs.lse:
            told = {**made.named, **self._told(made)}
            returned = self.entry(**made.given, **told, scale=scale, out=made.out, return_lse=True)
            if not (isinstance(returned, tuple) and len(returned) == 2):
                raise TypeError(f"return_lse=True should return (O, LSE), not {type(returned).__name__}")
            out, lse = returned
        else:
            out = self.entry(**made.given, **made.named, scale=scale, out=made.out)
            lse = torch.empty(0, device=self.device)
        self._same_out(out, made.out)
        return Attention(made.out, lse)

    # -- checks

    def _tries(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("allocates O when not given one", self._allocates_out),
            ("empty batch", self._empty_batch),
            ("bad arguments are refused", self._refuses),
        ]

    def _small(self, **changes: Any) -> Inputs:
        """Inputs for the checks: two batch entries, four query heads on two kv heads."""
        facts = {"batch": 2, "seq_q": 70, "seq_k": 140, "heads_q": 4, "heads_kv": 2, "layout": "contiguous"}
        return self._make(inputs.served(Case("checks", "inputs of the checks", **{**facts, **changes}), self.spec))

    def _wrong_o(self, made: Inputs, out: torch.Tensor) -> str:
        """What is wrong with an O of the shape of `made.out`."""
        expected, slack = self._expected_with_slack(made)
        yardsticks = [each.out for each in self._yardsticks(made)]
        measured = compare_o(made.rows_of(out), expected.out, yardsticks, made.lengths, slack=slack.out)
        return "; ".join(measured.failures)

    def _smallest(self) -> Inputs:
        """Inputs for the one check that only has to launch."""
        return self._small()

    def _allocates_out(self) -> str:
        made = self._smallest()
        out = self.entry(**made.given, **made.named)
        if not isinstance(out, torch.Tensor):
            return f"without return_lse it should return one tensor, not {type(out).__name__}"
        if (out.shape, out.dtype, out.device) != (made.out.shape, self.out_dtype, made.q.device):
            wanted = f"{tuple(made.out.shape)} {self.out_dtype} on q's device"
            return f"O is {tuple(out.shape)} {out.dtype} {out.device} instead of {wanted}"
        if out.dtype == torch.float32 and torch.equal(out, out.to(self.dtype).float()):
            return f"O is float32 in name only: every element is a {self.dtype} number"
        return self._wrong_o(made, out)

    def _empty_batch(self) -> str:
        made = self._small()
        asked = {"return_lse": True} if self.spec.outputs.lse else {}
        returned = self.entry(made.q[:0], made.k[:0], made.v[:0], **made.named, **asked)
        out, lse = returned if self.spec.outputs.lse else (returned, None)
        if out.shape != made.out[:0].shape or out.dtype != self.out_dtype:
            return f"O is {tuple(out.shape)} {out.dtype} instead of {tuple(made.out[:0].shape)} {self.out_dtype}"
        expected = (0, made.q.shape[2], made.q.shape[1])
        if lse is not None and (tuple(lse.shape) != expected or lse.dtype != torch.float32):
            return f"LSE is {tuple(lse.shape)} {lse.dtype} instead of {expected} torch.float32"
        return ""

    def _bad_calls(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield what is wrong, a pattern of the name that the message must hold, and the arguments."""
        made = self._small()
        good: dict[str, Any] = {**made.given, **made.keywords}
        q, k, v = made.q, made.k, made.v
        elsewhere = "cpu" if self.device.type == "cuda" else "meta"
        other = torch.float16 if self.dtype == torch.bfloat16 else torch.bfloat16
        inner = self.operation.tensor("v").contiguous
        lines = v.movedim(inner, -1)
        every_second = torch.cat([lines, lines], dim=-1)[..., ::2].movedim(-1, inner)
        shifted = k.new_zeros(k.untyped_storage().size() + 1).as_strided(k.shape, k.stride(), 1)
        odd = torch.nn.functional.pad(lines, (0, (4 - lines.shape[-1]) % 8)).contiguous()
        odd_rows = odd[..., : lines.shape[-1]].movedim(-1, inner)
        last = "last mode" if inner == v.ndim - 1 else "sequence"
        yield "float32 q", "q", {**good, "q": q.float()}
        yield f"{other} k", "k", {**good, "k": k.to(other)}
        yield f"v on {elsewhere}", "v", {**good, "v": v.to(elsewhere)}
        yield "q that is not a tensor", "q", {**good, "q": [1.0]}
        yield "q with a mode less", "q", {**good, "q": q[0]}
        yield "half the head dim in k", "[qk]", {**good, "k": k[..., : k.shape[-1] // 2]}
        yield "fewer keys in v than in k", "[kv]", {**good, "v": v[..., :-1, :, :]}
        yield "three query heads on two kv heads", "[qkv]", {**good, "q": q[..., :3, :]}
        yield f"v whose {last} is not contiguous", "v", {**good, "v": every_second}
        yield "k that starts off a 16-byte boundary", "k", {**good, "k": shifted}
        yield "v whose rows are no multiple of 16 bytes apart", "v", {**good, "v": odd_rows}
        if made.options:
            yield "a window of one number", "window", {**good, "window": (3,)}
            yield "a negative reach", "window", {**good, "window": (-2, 0)}
        yield "out of another shape", "out", {**good, "out": torch.empty_like(made.out)[..., :-1, :, :]}
        wrong = torch.float32 if self.out_dtype == self.dtype else self.dtype
        yield "out of another dtype", "out", {**good, "out": torch.empty_like(made.out, dtype=wrong)}
        yield from self._bad_scores(good)
        yield from self._bad_batches(good)

    def _bad_scores(self, good: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Like `_bad_calls`, of what changes scores and sums, where the module takes it."""
        if (sinks := good.get("sinks")) is not None:
            elsewhere = "cpu" if self.device.type == "cuda" else "meta"
            yield "sinks in float16", "sinks", {**good, "sinks": sinks.half()}
            yield "a sink too few", "sinks", {**good, "sinks": sinks[:-1].clone()}
            yield f"sinks on {elsewhere}", "sinks", {**good, "sinks": sinks.to(elsewhere)}
            yield "sinks that are not contiguous", "sinks", {**good, "sinks": sinks.repeat_interleave(2)[::2]}
            yield "sinks that are no tensor", "sinks", {**good, "sinks": sinks.tolist()}
        if "softcap" in good:
            yield "a softcap of zero", "softcap", {**good, "softcap": 0.0}
            yield "a softcap without a bound", "softcap", {**good, "softcap": math.inf}
            yield "a softcap that is no number", "softcap", {**good, "softcap": None}
        for tensor in self.operation.optional_inputs:
            if (factors := good.get(tensor.name)) is not None and tensor.dtype is FP32:
                yield f"{tensor} of one head fewer", tensor.name, {**good, tensor.name: factors[:, :-1]}
                yield f"{tensor} in float64", tensor.name, {**good, tensor.name: factors.double()}
                if factors.ndim == 3:
                    yield f"{tensor} of one block fewer", tensor.name, {**good, tensor.name: factors[..., :-1]}
                if factors.ndim == 3 and tensor.name != "v_descale":  # which may be of heads
                    yield f"{tensor} of heads", tensor.name, {**good, tensor.name: factors[..., 0]}

    def _bad_batches(self, good: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Like `_bad_calls`, of what says which queries attend to which keys."""
        yield "another batch size in k", "[qkv]", {**good, "k": good["k"][:1]}

    def _current_stream(self) -> str:
        """Fill q late on a side stream; a kernel on any other stream would read what was there before."""
        made = self._small()
        late = torch.empty_strided(made.q.shape, made.q.stride(), dtype=self.dtype, device=self.device)
        late.fill_(math.nan)
        made.out.fill_(math.nan)
        torch.cuda.synchronize(self.device)
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]  # cycles: about 20 ms
            late.copy_(made.q)
            self.entry(**{**made.given, "q": late}, **made.named, out=made.out)
            copy = made.out.clone()
        side.synchronize()
        return self._wrong_o(made, copy)

    def _call_given_out(self) -> tuple[Callable[[], Any], int]:
        made = self._small()
        made_anew = self.operation.bytes_made(made.shape)
        allowed = made_anew + 1024  # the allocator rounds up to 512 bytes
        return partial(self.entry, **made.given, **made.named, out=made.out), allowed
