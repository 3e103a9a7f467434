"""The demo's second half: a collection of the passages, indexed and searched over REST."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from phasemesh.cli.demo_passages import Passage
from phasemesh.errors import FailedPrecondition, Unavailable

COLLECTION = "phasemesh-demo"
_BATCH = 64
_SHOWN_HITS = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply of the gateway.

    Attributes:
        status: of HTTP.
        body: its JSON.
        timing: its `Server-Timing` header.
    """

    status: int
    body: dict[str, Any]
    timing: str


def call_rest(
    gateway: str, verb: str, path: str, body: object = None, *, key: str | None, timeout_s: float = 120
) -> Answer:
    """One request; a status of an error is an answer too.

    Raises:
        Unavailable: nobody answers there.
    """
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(  # noqa: S310 -- the URL is the user's own
        f"{gateway}{path}", data=data, headers=headers, method=verb
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:  # noqa: S310 -- as above
            return Answer(reply.status, json.load(reply), reply.headers.get("Server-Timing", ""))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, json.load(error), "")
    except (urllib.error.URLError, OSError) as error:
        raise Unavailable(f"{gateway}{path}: {error}") from None


def search_demo(
    gateway: str,
    model: str,
    passages: Sequence[Passage],
    questions: Sequence[tuple[str, set[str]]],
    console: Console,
    *,
    key: str | None,
    shown: int,
) -> None:
    """Index the passages into a fresh collection, ask it every question, and show the first ones.

    Args:
        gateway: its base URL.
        model: that gives token vectors.
        passages: to index.
        questions: each with the ids of passages that answer it.
        console: to print on.
        key: of the gateway.
        shown: questions whose hits are shown.

    Raises:
        FailedPrecondition: the gateway refuses a step.
        Unavailable: nobody answers.
    """
    collections = "/v1/collections"

    def send(verb: str, path: str, body: object = None, *also: int) -> Answer:
        answer = call_rest(gateway, verb, f"{collections}{path}", body, key=key)
        if answer.status != 200 and answer.status not in also:
            error = answer.body.get("error", {})
            raise FailedPrecondition(
                f"{verb} {collections}{path}: {answer.status}: {error.get('message', '')}"
            )
        return answer

    console.print(f"[bold]4. Index[/] the passages into a collection of token vectors of {model}, over REST")
    send("DELETE", f"/{COLLECTION}", None, 404)
    send(
        "POST", "",
        {"name": COLLECTION, "model": model, "fields": [{"name": "title", "type": "string"}]},
    )  # fmt: skip
    began = time.monotonic()
    columns = (TextColumn("   {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("indexing", total=len(passages))
        for start in range(0, len(passages), _BATCH):
            batch = passages[start : start + _BATCH]
            documents = [
                {"id": passage.id, "text": passage.text, "fields": {"title": passage.title}}
                for passage in batch
            ]
            body = {"documents": documents, "truncation": {"enabled": True}}
            answer = send("POST", f"/{COLLECTION}/documents", body)
            _raise_if_refused(answer)
            progress.advance(task, len(batch))
    seconds = time.monotonic() - began
    held = send("GET", f"/{COLLECTION}").body["collection"]
    console.print(
        f"   {held['documents']} documents, {held['tokens']} token vectors, "
        f"{held['documents'] / seconds:.0f} docs/s"
    )
    console.print(f"   last commit: {answer.timing}\n", soft_wrap=True)

    console.print(f"[bold]5. Search[/] by late interaction ({gateway}{collections}/{COLLECTION}/search)")
    found = 0
    for position, (question, relevant) in enumerate(questions):
        wanted = {
            "query": question,
            "k": _SHOWN_HITS,
            "projection": {"text": True, "fields": ["title"]},
            "truncation": {"enabled": True},
        }
        answer = send("POST", f"/{COLLECTION}/search", wanted)
        hits = answer.body["hits"]
        found += any(hit["id"] in relevant for hit in hits)
        if position < shown:
            table = Table("score", "passage", title=question, title_justify="left", title_style="italic")
            for hit in hits:
                document = hit["document"]
                title = document.get("fields", {}).get("title", "")
                table.add_row(f"{hit['score']:.3f}", f"[bold]{title}[/] {document['text'][:90]}…")
            console.print(table)
            console.print(f"   {answer.timing}\n", soft_wrap=True)
    console.print(f"   {found} of {len(questions)} questions have their passage in the best {_SHOWN_HITS}")


def _raise_if_refused(answer: Answer) -> None:
    for status in answer.body["documents"]:
        if "error" in status:
            raise FailedPrecondition(f"{status['id']}: {status['error']['message']}")
