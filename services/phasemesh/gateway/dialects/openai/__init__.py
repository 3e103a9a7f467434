"""The OpenAI dialect: embeddings and models."""
