"""Compare variants of a training recipe at an equal budget, with several seeds each."""

from workhorse.compare.plan import QUICK, quick, with_settings
from workhorse.compare.run import Comparison, compare, dry_run
from workhorse.compare.study import BudgetConfig, QuickConfig, Study, read_study

__all__ = [
    "QUICK",
    "BudgetConfig",
    "Comparison",
    "QuickConfig",
    "Study",
    "compare",
    "dry_run",
    "quick",
    "read_study",
    "with_settings",
]
