"""The native dialect: collections of documents, and late-interaction search over them."""
