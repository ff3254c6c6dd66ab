"""Questions put to a model that are more than one measure: one module a question, each with a function to call."""

from pavinterp.experiments.associations import Needed, needed_associations
from pavinterp.experiments.budgets import AssociationBudget, association_budget
from pavinterp.experiments.rules import Explanation, explain

__all__ = ["AssociationBudget", "Explanation", "Needed", "association_budget", "explain", "needed_associations"]
