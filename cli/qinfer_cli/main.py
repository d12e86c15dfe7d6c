"""The command group."""

import os

import click

from qinfer_cli.bench import bench
from qinfer_cli.convert import convert
from qinfer_cli.doctor import doctor
from qinfer_cli.errors import ErrorHandlingGroup
from qinfer_cli.evaluate import evaluate
from qinfer_cli.generate import generate
from qinfer_cli.inspect import inspect

# torch's threads sleep between two of its operations instead of spinning on the cores that the
# compiled kernels' own threads need. OpenMP reads this once, when torch is loaded, which is later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@click.group(cls=ErrorHandlingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="qinfer")
def cli() -> None:
    """Shrink a language model to 8 or 4 bits, and run it on modest hardware.

    \b
    qinfer convert HuggingFaceTB/SmolLM2-135M-Instruct smol-int4
    qinfer generate smol-int4 "What is the capital of France?"
    """


cli.add_command(convert)
cli.add_command(generate)
cli.add_command(inspect)
cli.add_command(evaluate)
cli.add_command(bench)
cli.add_command(doctor)
