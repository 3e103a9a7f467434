"""Replicas that run batches: Ray actors, and the in-process pool; the only importer of ray."""
