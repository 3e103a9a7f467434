"""Composition root: commands that start roles and talk to them."""
