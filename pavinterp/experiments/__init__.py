"""Questions put to a model that are more than one measure: one module a question, each with a function to call."""

from pavinterp.experiments.rules import Explanation, explain

__all__ = ["Explanation", "explain"]
