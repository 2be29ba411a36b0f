"""Build the C++ extension, or install pure Python where ``ISTHMUS_NATIVE=0`` is set."""

import os

from setuptools import setup

if os.environ.get("ISTHMUS_NATIVE", "1") == "0":
    setup()
else:
    setup(cmake_source_dir=".")
