"""Model-level merging: state dicts, modules and files in, a merged model out."""

from .diff import Diff, TensorDiff, diff
from .fisher import fisher_diagonal
from .merge import SeedMerges, merge, merge_into
from .regmean import collect_grams
from .report import EntryReport, MergeReport, Norms, Spread
from .soup import SoupReport, greedy_soup
from .states import lerp_states, weighted_sum_states
from .task_vector import TaskVector

__all__ = [
    "Diff",
    "EntryReport",
    "MergeReport",
    "Norms",
    "SeedMerges",
    "SoupReport",
    "Spread",
    "TaskVector",
    "TensorDiff",
    "collect_grams",
    "diff",
    "fisher_diagonal",
    "greedy_soup",
    "lerp_states",
    "merge",
    "merge_into",
    "weighted_sum_states",
]
