"""Bodies of the rerank dialect as the OpenAPI page shows them.

They document; `rerank.parse_rerank` reads. A test holds the two together.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field


class RerankDocument(BaseModel):
    """A document as an object; other fields are ignored."""

    text: str


class RerankRequest(BaseModel):
    """What to rank. Unknown fields are ignored; null is as good as absent."""

    model: str = Field(description="Name or alias of a model.", min_length=1, examples=["all-MiniLM-L6-v2"])
    query: str = Field(min_length=1, examples=["When does water boil?"])
    documents: list[str | RerankDocument] = Field(
        min_length=1,
        max_length=2048,
        examples=[["Water boils at 100 degrees Celsius.", "The river froze overnight."]],
    )
    top_n: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = Field(
        None, description="Results wanted; default: all."
    )
    return_documents: bool | None = Field(None, description="Repeat each result's text; default: false.")


class RerankResultDocument(BaseModel):
    """A result's text."""

    text: str


class RerankResult(BaseModel):
    """One document."""

    index: int = Field(description="Position in the request.")
    relevance_score: float
    document: RerankResultDocument | None = Field(None, description="Only if asked for.")


class RerankUsage(BaseModel):
    """Tokens computed, special tokens and the query's included."""

    total_tokens: int


class ApiVersion(BaseModel):
    """Version of Cohere's API that the shape follows."""

    version: str


class BilledUnits(BaseModel):
    """Cohere's unit: one search per request."""

    search_units: int


class RerankMeta(BaseModel):
    """What Cohere's client expects beside the results."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankResponse(BaseModel):
    """Documents, best first; equal scores in the order of the request."""

    id: str = Field(description="The request's id.")
    object: Literal["list"]
    model: str = Field(description="Model that answered.")
    results: list[RerankResult]
    usage: RerankUsage
    meta: RerankMeta


class RerankErrorResponse(BaseModel):
    """An error; `message` and `detail` are the same text for two families of clients."""

    id: str
    message: str
    detail: str
    code: str = Field(description="Stable reason.")
