"""The late-interaction index: the durable store, the segments derived from it, and search over them."""
