"""Builds the C++ extension; everything else is in pyproject.toml."""

import os
from glob import glob

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

# -ffp-contract=off: the same plan on machines that could fuse a multiplication and an addition
flags = ["-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-pthread"]
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
            extra_link_args=["-pthread"],
        )
    ]
)
