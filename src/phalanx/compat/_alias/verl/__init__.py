"""Stand-in for verl in processes that import it by this folder: it installs the tutorial's names."""

from phalanx.compat.verl import install_here

install_here(strict=False)
