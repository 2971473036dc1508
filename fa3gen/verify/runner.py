"""What runs of all operations have in common: calling a module, comparing with a reference, refused arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fa3gen.design.operation import Operation
from fa3gen.verify.results import Check, Errors

LAUNCHES = 3
UNSPLIT = 2**20  # bytes of a block of memory that the allocator does not split off, and counts as taken


class DeviceLost(Exception):
    """The CUDA context is unusable after a failed launch; nothing more can be run in this process."""


def half_ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return half the distance between neighbours of `dtype` at each of `values`: the rounding nobody can avoid."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.double().abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(values, info.eps / 2, dtype=torch.float64), exponent)


def errors(values: torch.Tensor, expected: torch.Tensor) -> Errors:
    """Compare where `expected` is finite; a NaN or an infinity in `values` alone makes both numbers None."""
    finite = torch.isfinite(expected)
    difference = (values.double() - expected)[finite]
    if difference.numel() == 0:
        return Errors(0.0, 0.0)
    norm = expected[finite].norm().item()
    distance = difference.norm().item()
    if not math.isfinite(distance):
        return Errors(None, None)
    return Errors(difference.abs().max().item(), distance / norm if norm else (0.0 if distance == 0 else None))


def raise_if_lost(device: torch.device, error: BaseException) -> None:
    """Raise DeviceLost when a CUDA error outlives its launch: every call after it would fail as well."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except RuntimeError as lost:
        raise DeviceLost(essence(error)) from lost


def blamed(message: str) -> str:
    """The part of a message that names the argument at fault.

    A compiled function gives its number and then the whole signature, in which every argument is named.
    """
    found = re.match(r"(.*) on argument #(\d+) when calling: `\w+\((.*)\)`", message, re.DOTALL)
    if found is None:
        return message
    names = re.findall(r"(\w+): ", found[3])
    return f"{found[1]} {names[int(found[2])]}"


def essence(error: BaseException) -> str:
    """Return an error's type and first lines, short enough for a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bit by bit, so that NaN equals itself and -0 differs from 0."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def snapshots(given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of a call's inputs by name, to compare with after a run, see `changed_inputs`."""
    return {name: tensor.clone() for name, tensor in given.items()}


def changed_inputs(given: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """What is wrong with inputs that are not what they were, see `snapshots`."""
    return tuple(f"changed its input {name}" for name, now in given.items() if not same_bits(now, before[name]))


class ModuleRunner:
    """One module on one device: what cases and checks of all operations have in common."""

    # What ends the run; whatever else a module raises is that module's failure.
    fatal: tuple[type[Exception], ...] = (DeviceLost,)

    def __init__(self, module: Any, operation: Operation, device: torch.device, seed: int) -> None:
        """`seed` decides all inputs."""
        self.module, self.operation, self.device, self.seed = module, operation, device, seed

    @property
    def entry(self) -> Callable[..., Any]:
        """The module's entry point."""
        return self.operation.entry_of(self.module)

    def run_case(self, case: Any) -> Any:
        """Run one case of the operation and compare it with the reference; returns its result."""
        raise NotImplementedError

    def checks(self) -> Iterator[Check]:
        """Try everything that is not a matter of error."""
        for name, attempt in self._tries():
            yield self._try(name, attempt)
        for name, attempt in self._tries_on_cuda():
            if self.device.type == "cuda":
                yield self._try(name, attempt)
            else:
                yield Check(name, None, "not run: needs a CUDA device")

    def _tries(self) -> list[tuple[str, Callable[[], str]]]:
        """Checks by name; each says what went wrong, or nothing."""
        raise NotImplementedError

    def _tries_on_cuda(self) -> list[tuple[str, Callable[[], str]]]:
        """Those that mean nothing elsewhere."""
        return [
            ("runs on the current stream", self._current_stream),
            ("allocates only its outputs", self._allocates_only_outputs),
        ]

    def _current_stream(self) -> str:
        """Fill an input late on a side stream; a kernel on any other stream would read what was there before."""
        raise NotImplementedError

    def _allocates_only_outputs(self) -> str:
        """Watch the allocator during a call that is given `out`: nothing more than its scratch may be taken."""
        call, allowed = self._call_given_out()
        call()  # what the first call makes for all is no output
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        torch.cuda.synchronize(self.device)
        taken = torch.cuda.max_memory_allocated(self.device) - before
        allowed += UNSPLIT * (allowed > UNSPLIT)
        return f"took {taken} bytes of device memory; {allowed} are allowed" if taken > allowed else ""

    def _call_given_out(self) -> tuple[Callable[[], Any], int]:
        """A small call that is given `out`, and how many bytes of scratch it may take."""
        raise NotImplementedError

    @staticmethod
    def _same_out(returned: torch.Tensor, out: torch.Tensor) -> None:
        """Raise ValueError when a call returned another tensor than the `out` that it was given."""
        if returned.data_ptr() != out.data_ptr() or returned.shape != out.shape:
            raise ValueError("the tensor returned is not the `out` that was given")

    def _bad_calls(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield what is wrong, a pattern of the name that the message must hold, and the arguments."""
        raise NotImplementedError

    def _try(self, name: str, attempt: Callable[[], str]) -> Check:
        """Run one check; it returns what went wrong, or nothing."""
        try:
            wrong = attempt()
        except self.fatal:
            raise
        except Exception as error:
            raise_if_lost(self.device, error)
            wrong = f"raised {essence(error)}"
        return Check(name, not wrong, wrong)

    def _refuses(self) -> str:
        wrong = [text for what, name, arguments in self._bad_calls() if (text := self._accepts(what, name, arguments))]
        return "; ".join(wrong)

    def _accepts(self, what: str, name: str, arguments: dict[str, Any]) -> str:
        """Return what is wrong with how the module takes a bad argument."""
        try:
            self.entry(**arguments)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except self.fatal:
            raise
        except (ValueError, TypeError) as error:
            named = re.search(rf"\b(?:{name})\b", blamed(str(error)))
            return "" if named else f"{what}: the message names no argument {name}: {essence(error)}"
        except Exception as error:  # a crash inside is no refusal
            raise_if_lost(self.device, error)
            return f"{what}: raised {essence(error)} where a ValueError or TypeError is due"
        return f"{what}: accepted"
