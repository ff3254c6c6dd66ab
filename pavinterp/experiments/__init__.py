"""Questions put to a model that are more than one measure: one module a question, each with a function to call."""

from pavinterp.experiments.associations import Needed, needed_associations
from pavinterp.experiments.budgets import AssociationBudget, association_budget
from pavinterp.experiments.conditioning import Conditioning, condition
from pavinterp.experiments.own_capacity import Capacity, memory_capacity
from pavinterp.experiments.propagation import ErrorPropagation, error_propagation
from pavinterp.experiments.pruning import HeadImportance, head_importance
from pavinterp.experiments.redundancy import HeadRedundancy, head_redundancy
from pavinterp.experiments.rule_swap import Swapped, linearisation_cost
from pavinterp.experiments.rules import Explanation, explain

__all__ = [
    "AssociationBudget",
    "Capacity",
    "Conditioning",
    "ErrorPropagation",
    "Explanation",
    "HeadImportance",
    "HeadRedundancy",
    "Needed",
    "Swapped",
    "association_budget",
    "condition",
    "error_propagation",
    "explain",
    "head_importance",
    "head_redundancy",
    "linearisation_cost",
    "memory_capacity",
    "needed_associations",
]
