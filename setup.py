"""Build the C++ extension, or install pure Python where ``ISTHMUS_NATIVE=0`` is set."""

import os

from setuptools import find_packages, setup

packages = [*find_packages("src"), "isthmus.kernels"]  # the Triton kernels stand at the top level of the repository

if os.environ.get("ISTHMUS_NATIVE", "1") == "0":
    setup(packages=packages)
else:
    setup(packages=packages, cmake_source_dir=".")
