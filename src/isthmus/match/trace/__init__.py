"""Specs by tracing: every axis of a model's tensors followed through the operators of its forward pass."""

from .graph import Outputs, arguments_of, as_evaluated, tensors_of, trace
from .written import written

__all__ = ["Outputs", "arguments_of", "as_evaluated", "tensors_of", "trace", "written"]
