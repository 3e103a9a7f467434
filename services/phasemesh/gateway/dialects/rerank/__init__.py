"""Reranking in the shape that Cohere and Jina share."""
