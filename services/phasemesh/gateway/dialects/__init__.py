"""One module per REST dialect."""
