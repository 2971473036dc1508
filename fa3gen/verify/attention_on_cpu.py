"""Run a module of attention on the CPU model of sm_90a, under several schedules, and hold it against a reference.

Pass criteria, per case, measured against float64 attention of the very 16-bit inputs:

- O, every element: |O - ref| <= its limit, half an output ulp plus the rounding of P (`fa3gen.verify.accuracy`), to 16
  bits or to 8.
- LSE: |LSE - ref| <= 1e-5 max(1, |ref|) plus the rounding of scores, its slack there, for every row; -inf exactly
  where, and only where, a row sees no key (and has no sink).
- No hazard, and the same bits, under every schedule.
- No NaN in O or LSE, nothing written outside `out`, inputs unchanged, zeros left for the next launch.

The model rounds tanh correctly, so that these limits have no room for the error of tanh.approx on a GPU.

And over all cases together: the mean of (O - ref)^2 over its variance is at most 1.25. P rounded to one bit less, or
anything else that makes every element somewhat worse, stays under the limits and fails here.

This is a model, not a GPU: what needs one is listed as not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fa3gen.cpu.schedule import schedules
from fa3gen.design import footprint
from fa3gen.hardware.hopper import WARP
from fa3gen.spec.model import Forward, ScalarProduct
from fa3gen.verify import accuracy, inputs
from fa3gen.verify.attention_on_gpu import Runner, compare_lse, wrote_outside
from fa3gen.verify.inputs import Case, Inputs, poison
from fa3gen.verify.on_model import CPU, SPREAD_LIMIT, ScheduledRunner
from fa3gen.verify.reference import Attention
from fa3gen.verify.results import Check, CpuCaseResult
from fa3gen.verify.runner import errors


class CpuRunner(ScheduledRunner, Runner):
    """One module on the model: calls it under each schedule, measures it, checks it."""

    def __init__(self, module: Any, spec: Forward, seed: int, count: int) -> None:
        """`count` schedules for each case, the fast one first."""
        super().__init__(module, spec, CPU, seed)
        self.schedules = schedules(count, footprint.threads(spec) // WARP, seed)
        self._squares, self._elements = 0.0, 0

    @property
    def spread(self) -> float | None:
        """Mean of (O - ref)^2 over its variance, in all cases so far and all rows that see a key."""
        return self._squares / self._elements if self._elements else None

    def run_case(self, case: Case) -> CpuCaseResult:
        """Run under every schedule, compare the first with the reference and the others with the first."""
        case = inputs.served(case, self.spec)
        made = self._make(case)
        wanted = self._expected(made, case.scale)
        outputs, failures = self._run_all(case, made)
        if outputs is None:
            return CpuCaseResult(case.name, case.shape, None, None, None, None, tuple(failures))
        first = Attention(*outputs)
        used, spread, wrong = self._compare(made, first.out, wanted)
        failures += wrong
        lse_error = None
        if self.spec.outputs.lse:
            lse_error, wrong_lse = compare_lse(first.lse, wanted.lse, slack=wanted.lse_slack)
            failures += wrong_lse
        return CpuCaseResult(
            case.name, case.shape, errors(first.out, wanted.out), used, spread, lse_error, tuple(failures)
        )

    def _expected(self, made: Inputs, scale: float | None = None) -> accuracy.Expected:
        # P of scalar products stays in float32, in memory as well.
        p_dtype = self.dtype if not isinstance(self.spec.pv, ScalarProduct) else None
        facts: dict[str, Any] = {"scale": scale, "mask": made.mask, **made.keywords}
        facts |= {"p_dtype": p_dtype, "p_factor": self.p_factor, "out_dtype": self.out_dtype}
        return accuracy.joined([accuracy.expected(*part, **facts) for part in made.parts])

    def _run_all(self, case: Case, made: Inputs) -> tuple[tuple[torch.Tensor, ...] | None, list[str]]:
        """O and LSE, of the rows to be written, under the first schedule, and what went wrong beside their values."""
        lse: torch.Tensor | None = None

        def call() -> tuple[torch.Tensor, ...]:
            nonlocal lse
            poison(made.out_storage)
            returned = self._call(made, scale=case.scale)
            lse = returned.lse if self.spec.outputs.lse else None
            return self._rows(made, returned)

        return self._under_schedules(made.given, call, lambda: (*wrote_outside(made, lse), *self._left_over()))

    def _left_over(self) -> tuple[str, ...]:
        """What is wrong with scratch that the next launch of a stream would find."""
        kept = ((name, getattr(self.module.cpu, name, None)) for name in ("counter", "flags"))
        return tuple(
            f"the launch left {int(words.count_nonzero())} words of the {name} that are not 0; the next one needs zeros"
            for name, words in kept
            if words is not None and words.any()
        )

    def _compare(
        self, made: Inputs, out: torch.Tensor, wanted: accuracy.Expected
    ) -> tuple[float | None, float | None, tuple[str, ...]]:
        """Share of the limits that O uses, its spread, and what is wrong; both None when O is not finite."""
        if not out.numel():
            return 0.0, None, ()
        if not torch.isfinite(out).all():
            wrong = int((~torch.isfinite(out)).any(-1).sum())
            text = f"O has NaN or infinity in {wrong} of {out[..., 0].numel()} rows (written nowhere, or computed so)"
            return None, None, (text,)
        error = (out.double() - wanted.out).abs()
        used, spread = accuracy.used(error, wanted), None
        rows = wanted.limit > 0
        if rows.any():
            ratios = (error.square() / wanted.variance)[rows]
            spread = ratios.mean().item()
            self._squares += ratios.sum().item()
            self._elements += ratios.numel()
        worst = used.max().item()
        if worst <= 1:
            return worst, spread, ()
        batch, row, head, element = (int(index) for index in torch.unravel_index(used.argmax(), used.shape))
        at = f"{made.place(batch, row)}, head {head}, element {element}"
        count = int((used > 1).any(-1).sum())
        text = f"O is off by {worst:.3g} times what is allowed at {at}; {count} of {used[..., 0].numel()} rows are off"
        return worst, spread, (text,)

    # -- checks

    def of_all_cases(self) -> Iterator[Check]:
        """Whether O is rounded as planned."""
        if self.spread is not None:
            passed = self.spread <= SPREAD_LIMIT
            text = f"mean squared error of O over what rounding explains: {self.spread:.3g}; {SPREAD_LIMIT} is allowed"
            yield Check("O is rounded as planned", passed, text)

    def _smallest(self) -> Inputs:
        return self._small(batch=1, seq_q=5, seq_k=9, heads_q=1, heads_kv=1)

    def _wrong_o(self, made: Inputs, out: torch.Tensor) -> str:
        return "; ".join(self._compare(made, made.rows_of(out), self._expected(made))[2])
