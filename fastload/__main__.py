"""`python -m fastload` is the `fastload` command."""

from fastload.cli import main

main(prog_name="python -m fastload")
