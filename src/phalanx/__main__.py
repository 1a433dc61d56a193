"""`python -m phalanx`, the same as the command `phalanx`."""

from phalanx.cli.main import app

app(prog_name="phalanx")
