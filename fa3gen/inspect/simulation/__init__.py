"""A simulator of the pipeline of loads, products and softmax on one SM: times, event model, results and picture.

It knows the order in which the warps of a generated kernel do things and what they wait for, and takes the time that
each thing needs from the rates of the chip. `docs/simulator.md` holds it against measurements.
"""

from fa3gen.inspect.simulation.picture import svg
from fa3gen.inspect.simulation.results import Simulation, Span, Stall
from fa3gen.inspect.simulation.run import Dealt, Settings, StageRow, deal, predict, settings_of, simulate, sweep
from fa3gen.inspect.simulation.times import Times, times_of

__all__ = [
    "Dealt",
    "Settings",
    "Simulation",
    "Span",
    "StageRow",
    "Stall",
    "Times",
    "deal",
    "predict",
    "settings_of",
    "simulate",
    "svg",
    "sweep",
    "times_of",
]
