"""The encoder service: tokenize, admit, batch, answer."""
