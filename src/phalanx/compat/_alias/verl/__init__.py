"""Stand-in for verl in processes with this folder on their path: it installs the tutorial's names."""

from phalanx.compat.verl import install_here

install_here(strict=False)
