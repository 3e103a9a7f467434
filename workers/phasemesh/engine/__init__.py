"""The torch side: loading, forward pass, pooling and heads; the only importer of torch."""
