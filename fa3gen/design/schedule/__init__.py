"""The schedule of a kernel as data: roles, rings, named barriers, and what each role does in which order.

The header of a module prints it, the simulator runs it, the expectation counts it, a test holds the code against it.
"""

from fa3gen.design.schedule.building import full_tiles, schedule_of
from fa3gen.design.schedule.model import PLACES, NamedBarrier, Place, Ring, Role, Schedule, Step

__all__ = ["PLACES", "NamedBarrier", "Place", "Ring", "Role", "Schedule", "Step", "full_tiles", "schedule_of"]
