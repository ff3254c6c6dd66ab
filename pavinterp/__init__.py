"""The public names of pavinterp and nothing else; each is imported when first used.

`import pavinterp as pi` therefore costs milliseconds: torch, transformers, pandas and matplotlib arrive with the
first `pi.load`, `pi.measure` or `pi.plots`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # for type checkers and editors: the same names as _HOME below, which is what runs
    from pavinterp import plots as plots
    from pavinterp.corpora import corpus as corpus
    from pavinterp.errors import UserError as UserError
    from pavinterp.experiments import AssociationBudget as AssociationBudget
    from pavinterp.experiments import Capacity as Capacity
    from pavinterp.experiments import Conditioning as Conditioning
    from pavinterp.experiments import ErrorPropagation as ErrorPropagation
    from pavinterp.experiments import Explanation as Explanation
    from pavinterp.experiments import HeadImportance as HeadImportance
    from pavinterp.experiments import HeadRedundancy as HeadRedundancy
    from pavinterp.experiments import Needed as Needed
    from pavinterp.experiments import Swapped as Swapped
    from pavinterp.experiments import association_budget as association_budget
    from pavinterp.experiments import condition as condition
    from pavinterp.experiments import error_propagation as error_propagation
    from pavinterp.experiments import explain as explain
    from pavinterp.experiments import head_importance as head_importance
    from pavinterp.experiments import head_redundancy as head_redundancy
    from pavinterp.experiments import linearisation_cost as linearisation_cost
    from pavinterp.experiments import memory_capacity as memory_capacity
    from pavinterp.experiments import needed_associations as needed_associations
    from pavinterp.measuring import measure as measure
    from pavinterp.measuring import measure_shard as measure_shard
    from pavinterp.models import load as load
    from pavinterp.planner import Plan as Plan
    from pavinterp.planner import plan as plan
    from pavinterp.run import Run as Run
    from pavinterp.stimuli import repeated_random_tokens as repeated_random_tokens
    from pavinterp.stimuli import tokenise as tokenise
    from pavinterp.tables import describe as describe
    from pavinterp.verification import verify as verify

_HOME = {
    "AssociationBudget": "experiments",
    "Capacity": "experiments",
    "Conditioning": "experiments",
    "ErrorPropagation": "experiments",
    "Explanation": "experiments",
    "HeadImportance": "experiments",
    "HeadRedundancy": "experiments",
    "Needed": "experiments",
    "Plan": "planner",
    "Run": "run",
    "Swapped": "experiments",
    "UserError": "errors",
    "association_budget": "experiments",
    "condition": "experiments",
    "corpus": "corpora",
    "describe": "tables",
    "error_propagation": "experiments",
    "explain": "experiments",
    "head_importance": "experiments",
    "head_redundancy": "experiments",
    "linearisation_cost": "experiments",
    "load": "models",
    "measure": "measuring",
    "measure_shard": "measuring",
    "memory_capacity": "experiments",
    "needed_associations": "experiments",
    "plan": "planner",
    "plots": "plots",
    "repeated_random_tokens": "stimuli",
    "tokenise": "stimuli",
    "verify": "verification",
}  # public name: the module it lives in (`plots` is the module itself)

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pavinterp' has no attribute {name!r}")
    module = import_module(f"pavinterp.{_HOME[name]}")
    value = module if name == _HOME[name] else getattr(module, name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
