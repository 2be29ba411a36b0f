"""Files in and out: whole or not at all."""

from .atomic import atomic_write, read_json, write_json
from .safetensors import load_metadata, load_state, save_state

__all__ = ["atomic_write", "load_metadata", "load_state", "read_json", "save_state", "write_json"]
