"""Stands for verl in processes that import it by this folder; the drop-in takes its place."""

from phalanx.compat.verl import install_here

install_here(strict=False)
