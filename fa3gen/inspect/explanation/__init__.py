"""What a spec decides, why that is legal, and what it costs: an explanation as data, as text and as JSON."""

from fa3gen.inspect.explanation.facts import Explanation, explain
from fa3gen.inspect.explanation.legality import Limit

__all__ = ["Explanation", "Limit", "explain"]
