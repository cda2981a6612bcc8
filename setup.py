"""Builds the C++ extension; everything else is in pyproject.toml."""

import os
from glob import glob

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

flags = ["-O3", "-Wall", "-Wextra"]
if os.environ.get("CI"):
    flags.append("-Werror")

setup(
    ext_modules=[
        Pybind11Extension(
            "megatron_hbp._C",
            sorted(glob("csrc/*.cpp")),
            depends=sorted(glob("csrc/*.h")),
            cxx_std=17,
            extra_compile_args=flags,
        )
    ]
)
