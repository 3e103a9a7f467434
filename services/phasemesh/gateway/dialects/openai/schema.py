"""Bodies of OpenAI's dialect as the OpenAPI page shows them.

They document; `openai.parse_embeddings` reads. A test holds the two together.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
TokenList = Annotated[list[TokenId], Field(min_length=1)]


class EmbeddingsRequest(BaseModel):
    """What to embed. Unknown fields are ignored; null is as good as absent."""

    model: str = Field(description="Name or alias of a model.", min_length=1, examples=["all-MiniLM-L6-v2"])
    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=2048)]
        | TokenList
        | Annotated[list[TokenList], Field(min_length=1, max_length=2048)]
    ) = Field(
        description="A text, a list of texts, the token ids of one input, or a list of such lists. Ids are "
        "of the model's own vocabulary, special tokens included.",
        examples=[["Water boils at 100 degrees Celsius.", "The river froze overnight."]],
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="`base64` is little-endian float32; default `float`."
    )
    dimensions: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = Field(
        None, description="Cut vectors to this size, where the model was trained for it."
    )
    user: str | None = Field(None, description="Ignored.")


class Embedding(BaseModel):
    """One vector."""

    object: Literal["embedding"]
    index: int = Field(description="Position of its input.")
    embedding: list[float] | str = Field(description="Numbers, or base64 of little-endian float32.")


class Usage(BaseModel):
    """Tokens computed, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """Vectors in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str = Field(description="Model that answered.")
    usage: Usage


class Model(BaseModel):
    """One model."""

    id: str
    object: Literal["model"]
    created: int = Field(description="Unix time at which this gateway started.")
    owned_by: str


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"]
    data: list[Model]


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = Field(description="Path of the field at fault.")
    code: str | None = Field(description="Stable reason.")


class ErrorResponse(BaseModel):
    """An error."""

    error: ErrorDetail
