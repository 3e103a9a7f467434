"""The retrieval service: collections, ingest, search planning and merging."""
