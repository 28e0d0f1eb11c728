"""What is packaged and what it needs. Tools are configured in pyproject.toml, tested versions in constraints.txt."""

import os
import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "xcore/__init__.py").read_text(encoding="utf-8"))[1]

PACKAGES = "exegpt xcore xmulti xprofiler xrunner xscheduler xserver xsimulator".split()

REQUIRED = [
    "torch>=2.8",  # the layers
    "numpy>=1.26",  # tables, distributions, replay
    "scipy>=1.11",  # fitting the distributions of lengths
    "numba>=0.61",  # kernels for the CPU
    "safetensors>=0.4.3",  # weights
    "tokenizers>=0.20",  # text to ids and back
    "pydantic>=2.8",  # reading documents strictly
    "pyyaml>=6.0",  # cluster files
    "pyarrow>=15",  # Parquet traces
    "optuna>=4.0",  # the black-box search beside branch and bound
    "typer>=0.15",  # the command line
    "rich>=13.7",  # its tables and progress bars
]

# The same figures on every machine: no fused multiply-add.
FLAGS = [] if os.name == "nt" else ["-O3", "-ffp-contract=off"]
HEADERS = [
    "xcore/interpolation.h",
    "xsimulator/cost/iteration_costs.h",
    "xsimulator/replay/event_adjustment.h",
    "xsimulator/replay/event_ledger.h",
    "xsimulator/replay/event_pipeline.h",
    "xsimulator/replay/event_policies.h",
    "xsimulator/replay/event_pool.h",
]
# Optional: without a C compiler, the Python versions beside them do the same, more slowly (xcore/compiled_parts.py).
COMPILED = [
    Extension(name, [name.replace(".", "/") + ".c"], depends=HEADERS, extra_compile_args=FLAGS, optional=True)
    for name in (
        "xcore.interpolation",
        "xsimulator.replay.event_loop",
        "xsimulator.cost.recurrences",
        "xmulti.stages.batching_run",
    )
]

GPU = [
    "triton>=3.4; platform_system == 'Linux'",
    "cuda-bindings>=12.8; platform_system == 'Linux'",  # shares of a GPU's multiprocessors
]
# fastapi and uvicorn: the API; httptools: parsing its requests, and in `bench serve` its
# answers; prometheus-client: its metrics; jinja2: chat templates; llguidance: grammars
SERVE = [
    "fastapi>=0.115",
    "uvicorn>=0.30",
    "httptools>=0.6",
    "prometheus-client>=0.20",
    "jinja2>=3.1",
    "llguidance>=1.9",
]
OTEL = ["opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-http>=1.30"]  # traces of a server's requests
# operator tables of GPUs: where they are published for the platform
TABLES = ["aiconfigurator-core==0.12.0; platform_system == 'Linux' and platform_machine == 'x86_64'"]
MPI = ["mpi4py>=4.0", "openmpi>=5.0; platform_system != 'Windows'"]

EXTRAS = {
    "mpi": MPI,  # profiling a cluster; where there is an MPI already, mpi4py alone
    "gpu": GPU,  # what builds of torch for GPUs bring themselves
    "gpu-fast": [*GPU, "flashinfer-python>=0.7.2; platform_system == 'Linux'"],  # --attention flashinfer
    "serve": SERVE,
    "otel": OTEL,
    "gpu-data": TABLES,
    "dev": [
        *GPU,  # its interpreter runs the kernels in tests
        *MPI,
        *SERVE,
        *OTEL,
        *TABLES,  # the importer is tested on all of them
        "openai>=2",  # the client that the server is tested with
        "kubernetes-validate>=1.30",  # checks the files of deploy/
        "schemathesis>=4.32",  # makes requests of what /openapi.json says
        "transformers>=5.6",  # the oracle of the tests and a peer of the benchmarks
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",  # two tests at a time
        "hypothesis>=6.100",
        "mypy>=1.11",
        "ruff>=0.8",
    ],
    "coverage": ["coverage>=7.6"],  # `make coverage`
    "mutants": ["cosmic-ray>=8.7", "coverage>=7.6"],  # `make mutants`: makes the changes that tests should notice
}

setup(
    name="exegpt",
    version=VERSION,
    description="Finds and runs the LLM-serving schedule with the highest throughput under a latency bound",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="LLM inference serving scheduling simulation latency throughput",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10,<3.14",
    packages=[
        *find_packages(include=[f"{name}*" for name in PACKAGES]),
    ],
    # The kernels stand at the root, without an __init__.py: transformers must not take them for a package it looks for.
    package_dir={"exegpt.kernels": "kernels"},
    package_data={
        **{name: ["py.typed"] for name in PACKAGES},
        "xcore": ["*.pyi", "py.typed"],
        "xserver.http": ["*.html"],
        "xsimulator.cost": ["*.pyi"],
        "xmulti.stages": ["*.pyi"],
        "xsimulator.replay": ["*.pyi"],
    },
    ext_modules=COMPILED,
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["exegpt = exegpt.cli:main"]},
)
