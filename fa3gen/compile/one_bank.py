"""Multiply-adds of a step whose operands all lie in one bank of registers, from compiled code."""

from __future__ import annotations

from dataclasses import dataclass

from fa3gen.base.errors import UserError
from fa3gen.compile.census import Census
from fa3gen.design.footprint import SCALAR_LANES, SCALAR_VECTOR, computing_threads
from fa3gen.spec.model import Forward, ScalarProduct


@dataclass(frozen=True)
class OneBank:
    """Such multiply-adds of a warp in a step, of Q K^T and of P V.

    ptxas chooses registers, and no spec says which: two kernels that differ in their stages alone may have hundreds and
    none. See `fa3gen.compile.census.sass.one_bank`.
    """

    qk: int = 0
    pv: int = 0


NO_CONFLICTS = OneBank()


def one_bank_of(spec: Forward, census: Census) -> OneBank:
    """Those in the loops of its products on scalars; none in products on WGMMA.

    Raises UserError when the code has no such loops, or others: of K2 and later rungs a turn of Q K^T takes 16 bytes of
    each row, and one of P V the keys that a thread has of a row of S.
    """
    threads, turns = computing_threads(spec), {}
    if isinstance(spec.qk, ScalarProduct):
        turns["qk"] = (spec.problem.head_dim // SCALAR_VECTOR, spec.tile.q * spec.tile.kv * SCALAR_VECTOR // threads)
    if isinstance(spec.pv, ScalarProduct):
        turns["pv"] = (SCALAR_LANES, spec.tile.q * spec.tile.kv * spec.problem.v_dim // threads // SCALAR_LANES)
    loops = [loop for loop in census.sass.loops if loop.innermost and not loop.waits and not loop.gmma and loop.ffma]
    if [loop.ffma for loop in loops] != [multiply_adds for _, multiply_adds in turns.values()]:
        found = ", ".join(f"{loop.ffma} at 0x{loop.address:x}" for loop in loops) or "none"
        wanted = " and ".join(str(multiply_adds) for _, multiply_adds in turns.values()) or "no"
        raise UserError(
            f"loops with {wanted} multiply-adds a turn are expected in the compiled code, in this order, and found "
            f"are: {found}; look at them with fa3gen compile --keep, and change fa3gen/compile/one_bank.py"
        )
    each = zip(turns.items(), loops, strict=True)
    return OneBank(**{product: count * loop.one_bank for (product, (count, _)), loop in each})
