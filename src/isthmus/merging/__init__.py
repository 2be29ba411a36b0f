"""Model-level merging: state dicts, modules and files in, a merged model out."""

from .states import lerp_states

__all__ = ["lerp_states"]
