"""Tracing, metrics, logs and the phase clock."""
