"""The server as an ASGI application: paths, answers, streams and errors."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offplan.checkpoint.jsontext import quote
from offplan.runtime.joined import Added, Continued
from offplan.runtime.masks import Matcher
from offplan.serve import anthropic_api, ollama_api
from offplan.serve.answers import Answer, Choice, TokenNames, make_answer
from offplan.serve.anthropic_api import Messages
from offplan.serve.api import CappedChat, OpenAi, Translate, Translation
from offplan.serve.errors import ApiError
from offplan.serve.grammars import has_grammar
from offplan.serve.guard import Guard, finish_before
from offplan.serve.metrics import Metrics
from offplan.serve.ollama_api import Ollama
from offplan.serve.reading import Reader, read_drawing
from offplan.serve.requests import ChatRequest, CompletionRequest, parse_request
from offplan.serve.requests import Request as Asked
from offplan.serve.responses_api import NO_STATE, Responses
from offplan.serve.tokens_api import Detokenize, Tokenize
from offplan.serve.worker import Event, Job, WatchedThread, Worker, identify

_QUIET_S = 10.0
"""Seconds without a token after which a stream sends a comment: a long prompt takes minutes, and
proxies close what is silent."""
_SEND_S = 60.0
"""Seconds that a client may take to read what is sent, before it counts as gone."""
_PIECE_BYTES = 2**20
"""Bytes that are sent at a time of a whole answer, which may have many for each token."""
_STUCK_S = 30.0
"""Seconds after which what is at one request counts as stuck: a million tokens take a few."""
_SMALL_BODY_BYTES = 2**14
"""Bytes of a body that is parsed on the event loop, within a millisecond."""
_MOST_IGNORED = 64
"""Unknown fields that the log names; clients may make up any number."""
_MOST_NAMED = 16
"""Unknown fields that the header of an answer names."""
_LATER = {"retry-after": "1"}
_GENERATING: dict[str, Translate] = {
    "/v1/chat/completions": OpenAi.read_chat,
    "/v1/completions": OpenAi.read_completion,
    "/v1/responses": Responses.read,
    "/v1/messages": Messages.read,
    "/api/chat": Ollama.read_chat,
    "/api/generate": Ollama.read_generate,
}
"""Paths whose answers are made text, each with what reads its requests."""
_AT_ONCE = {
    "/health": ("health", "GET"),
    "/metrics": ("metrics", "GET"),
    "/v1/models": ("models", "GET"),
    "/v1/models/{name:path}": ("model", "GET"),
    "/v1/messages/count_tokens": ("count", "POST"),
    "/tokenize": ("tokenize", "POST"),
    "/detokenize": ("detokenize", "POST"),
    "/api/version": ("version", "GET"),
    "/api/tags": ("tags", "GET"),
    "/api/show": ("show", "POST"),
}
"""Other paths, each with its endpoint and method."""
PATHS = (*_GENERATING, *_AT_ONCE)
_NO_VECTORS = "this server continues texts and makes no embeddings"
_ABSENT = {
    **dict.fromkeys(("/v1/embeddings", "/api/embed", "/api/embeddings"), _NO_VECTORS),
    "/v1/responses/input_tokens": "/tokenize and /v1/messages/count_tokens count tokens",
    "/v1/responses/{id:path}": NO_STATE,
}
"""Paths that clients know, and that are not here, each with the reason."""
_ERRORS = {"/v1/messages": anthropic_api.make_error, "/api/": ollama_api.make_error}
"""Objects of errors by what a path begins with; all others are OpenAI's."""

T = TypeVar("T")
Make = Callable[..., Awaitable[Any]]
"""Makes a part of an answer by a call with arguments."""


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


@dataclass
class Service:
    """The parts and the state of the server."""

    name: str
    """The model's name, as clients have it."""
    created_s: int
    """Time at which the server began, in seconds since 1970."""
    reader: Reader
    worker: Worker
    metrics: Metrics
    guard: Guard
    on_fault: Callable[[BaseException], None]
    """Hears of each mistake of the server itself."""
    on_note: Callable[[str], None] = lambda text: None
    """Hears of what the log has of requests."""
    shares_prefixes: bool = False
    """True if a client's text may reuse prefixes that other clients sent."""
    num_open: int = 0
    """Requests that are being answered."""
    is_draining: bool = False
    _ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once no request waits for a thread any more."""

    def __post_init__(self) -> None:
        """Make threads that the event loop hands requests to, and what names tokens."""
        self.tokenizing = WatchedThread("offplan-tokenizer", "the tokenizer")
        """A long prompt takes its time, and the event loop goes on."""
        self.rendering = WatchedThread("offplan-templates", "the chat template")
        """A thread of its own: no completion waits for a template."""
        self.parsing = WatchedThread("offplan-parser", "the parser of bodies")
        """One thread: the objects of one large body after the other are in memory."""
        self.compiling = WatchedThread("offplan-grammars", "the compiler of grammars")
        """A grammar may take a second, and only those with one wait for it."""
        self.dividing = WatchedThread("offplan-answers", "the response template")
        """Its patterns came with a model, and what a model says may take them for ever."""
        self.names = TokenNames(self.reader.tokenizer)
        self._ignored: set[str] = set()

    def note_ignored(self, asked: Asked) -> str:
        """Log each unknown field once; return a header's value that names those of a request."""
        names = [quote(name)[1:-1] for name in sorted(asked.list_ignored())]
        for name in names:
            if name not in self._ignored and len(self._ignored) < _MOST_IGNORED:
                self._ignored.add(name)
                self.on_note(f"requests have the unknown field {name}, which is ignored")
        shown = names[:_MOST_NAMED]
        return ", ".join([*shown, *(["..."] if len(names) > len(shown) else [])])

    async def parse(self, read: Callable[[bytes], T], body: bytes) -> T:
        """Read a request from a body, off the event loop if it is large; raises ApiError."""
        if len(body) <= _SMALL_BODY_BYTES:
            return read(body)
        return await self.call(self.parsing, read, body)

    async def call(self, thread: WatchedThread, call: Callable[..., T], *arguments: Any) -> T:
        """Have a thread make a call; raises ApiError if the server ends before it is made."""
        made = asyncio.get_running_loop().run_in_executor(thread, call, *arguments)
        return await finish_before(self._ending, made)

    async def make(self, asked: Asked, call: Callable[..., T], *arguments: Any) -> T:
        """Make a part of an answer; off the event loop where the model's patterns divide it."""
        if self.reader.divides(asked) and self.reader.divider.is_foreign:
            return await self.call(self.dividing, call, *arguments)
        return call(*arguments)

    def drain(self) -> None:
        """Take no more requests; texts that are here are finished."""
        self.is_draining = True
        self.guard.ending.set()
        self.worker.drain()

    @property
    def threads(self) -> tuple[WatchedThread, ...]:
        """Threads that the event loop hands requests to."""
        return self.parsing, self.tokenizing, self.rendering, self.compiling, self.dividing

    def end(self) -> None:
        """End all texts behind the pass at hand, and the requests that wait for a thread."""
        self._ending.set()
        self.worker.stop()

    def stop(self, within_s: float) -> str | None:
        """End all threads behind what each is at; return what one is at after so many seconds.

        The event loop must have ended, which gives them work.
        """
        self.worker.stop()
        for thread in self.threads:
            thread.shutdown(wait=False, cancel_futures=True)
        until_s = time.monotonic() + within_s
        if not self.worker.join(within_s):
            return "the pass at hand"
        left = (t for t in self.threads if not t.join(max(0, until_s - time.monotonic())))
        return next((thread.what for thread in left), None)


def make_app(service: Service, origins: Sequence[str] = ()) -> ASGIApp:
    """Return the application; pages of ``origins`` may call it, ``*`` for all."""
    endpoints = _Endpoints(service)
    routes = [
        Route(path, getattr(endpoints, name), methods=[method])
        for path, (name, method) in _AT_ONCE.items()
    ]
    for path, read in _GENERATING.items():
        routes.append(Route(path, _Generating(service, read), methods=["POST"]))
    # those that clients make up are counted together
    counted = {route.path for route in routes}
    for path, why in _ABSENT.items():
        methods = ["GET", "POST", "DELETE"]
        routes.append(Route(path, partial(_refuse_path, path, why), methods=methods))
    middleware = list[Middleware]()
    if origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-api-key", "anthropic-version"],
        )
        middleware.append(cors)
    middleware.append(Middleware(_Watched, service=service, counted=counted))
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: partial(_answer_http_error, sorted(counted))},
    )


class _Watched:
    """Lets in whom the guard lets in, counts requests, and answers for what goes wrong."""

    def __init__(self, app: ASGIApp, service: Service, counted: Set[str]) -> None:
        self._app, self._service, self._counted = app, service, counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, status = self._service, 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await _send_in_time(send, message)

        service.num_open += 1
        try:
            service.guard.check(Request(scope))
            await self._app(scope, receive, watch)
        except ClientGoneError:
            pass
        except Exception as error:
            if not isinstance(error, ApiError):
                service.on_fault(error)
                error = ApiError(500, "the server made a mistake, and its log has it")
            if not status:
                await _answer_error(Request(scope), error)(scope, receive, watch)
        finally:
            service.num_open -= 1
            # 499, where the client did not wait for an answer, is nginx's
            path = scope["path"] if scope["path"] in self._counted else "other"
            service.metrics.requests.labels(path, str(status or 499)).inc()


async def _send_in_time(send: Send, message: Message) -> None:
    """Send a part of an answer; raises ClientGoneError if the client does not read it.

    ``wait_for`` would make a task for each token.
    """
    task, is_late = asyncio.current_task(), False
    assert task is not None, "there is one inside of a coroutine"

    def give_up() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(_SEND_S, give_up)
    try:
        await send(message)
    except asyncio.CancelledError:
        if is_late:
            raise ClientGoneError from None
        raise
    finally:
        timer.cancel()


async def _send_with(send: Send, header: tuple[bytes, bytes], message: Message) -> None:
    """Send a part of an answer, whose headers get one more."""
    if message["type"] == "http.response.start":
        message = {**message, "headers": [*message["headers"], header]}
    await send(message)


class _Endpoints:
    """The endpoints that answer at once."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        if self._service.is_draining:
            return JSONResponse({"status": "shutting down"}, 503)
        for thread in self._service.threads:
            if thread.busy_s > _STUCK_S:
                why = f"{thread.what} has been at one request for {thread.busy_s:.0f} s"
                return JSONResponse({"status": "stuck", "reason": why}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(
            self._service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe()]})

    async def model(self, request: Request) -> Response:
        _check_name(self._service, request.path_params["name"])
        return JSONResponse(self._describe())

    def _describe(self) -> dict[str, Any]:
        return {
            "id": self._service.name,
            "object": "model",
            "created": self._service.created_s,
            "owned_by": "offplan",
            "max_model_len": self._service.reader.context,
        }

    async def count(self, request: Request) -> Response:
        asked = await self._read(request, anthropic_api.read_counted)
        return JSONResponse({"input_tokens": len(await self._tokenize_chat(asked))})

    async def tokenize(self, request: Request) -> Response:
        asked = await self._read(request, partial(parse_request, Tokenize))
        service = self._service
        _check_name(service, asked.model)
        if (chat := asked.chat) is not None:
            tokens = await self._tokenize_chat(chat)
        else:
            text = asked.prompt if asked.content is None else asked.content
            tokens = await service.call(
                service.tokenizing, service.reader.tokenize, text, asked.adds_special
            )
        told = await service.call(service.tokenizing, self._tell_tokens, asked, tokens)
        return Response(told, media_type="application/json")

    def _tell_tokens(self, asked: Tokenize, tokens: list[int]) -> bytes:
        """Write an answer, which may have a million tokens; not for the event loop."""
        service = self._service
        names = [service.names.find_bytes(token) for token in tokens] if asked.names else []
        return json.dumps(asked.answer(tokens, names, service.reader.context)).encode()

    async def detokenize(self, request: Request) -> Response:
        asked = await self._read(request, partial(parse_request, Detokenize))
        service = self._service
        _check_name(service, asked.model)
        asked.check(service.reader.model.architecture.vocabulary_size)
        decode = service.reader.tokenizer.decode
        text = await service.call(service.tokenizing, decode, asked.tokens)
        # by the names that vLLM and llama.cpp have for it
        return JSONResponse({"prompt": text, "content": text})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": ollama_api.VERSION})

    async def tags(self, request: Request) -> Response:
        service = self._service
        model = service.reader.model
        described = ollama_api.describe_model(
            service.name, model.model_type, model.total_bytes, service.created_s
        )
        return JSONResponse({"models": [described]})

    async def show(self, request: Request) -> Response:
        service = self._service
        asked = await self._read(request, partial(parse_request, ollama_api.Shown))
        _check_name(service, asked.asked)
        reader = service.reader
        shown = ollama_api.show_model(
            reader.model.model_type,
            reader.showing.template,
            reader.context,
            service.created_s,
            reader.capabilities,
        )
        return JSONResponse(shown)

    async def _read(self, request: Request, read: Callable[[bytes], T]) -> T:
        guard = self._service.guard
        body = await guard.read_body(request)
        with guard.admit(request):
            return await self._service.parse(read, body)

    async def _tokenize_chat(self, asked: CappedChat) -> list[int]:
        service = self._service
        _check_name(service, asked.model)
        rendered = await service.call(service.rendering, service.reader.render, asked)
        return await service.call(service.tokenizing, service.reader.tokenize, rendered, False)


async def _refuse_path(path: str, why: str, request: Request) -> Response:
    served = path.partition("{")[0]  # what stands behind it is the client's
    raise ApiError(404, f"{request.method} {served} is not served here: {why}", code="not_found")


class _Generating:
    """Answers requests of one kind by texts that the worker continues."""

    def __init__(self, service: Service, read: Translate) -> None:
        self._service, self._read = service, read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, guard = Request(scope, receive), self._service.guard
        body = await guard.read_body(request)
        with guard.admit(request):
            await self._generate(request, body, send)

    async def _generate(self, request: Request, body: bytes, send: Send) -> None:
        service = self._service
        translated = await service.parse(self._read, body)
        asked = translated.asked
        _check_name(service, asked.model)
        if translated.at_once is not None:
            await _send_whole(send, 200, translated.at_once)
            return
        if ignored := service.note_ignored(asked):
            send = partial(_send_with, send, (b"x-offplan-ignored", ignored.encode()))
        drawing = read_drawing(asked, service.reader.drawing)
        if asked.n > (most := service.worker.num_rows):
            raise ApiError(
                400, f"n is {asked.n}: this server continues {most} texts at a time", param="n"
            )
        num_prompts = len(asked.prompt) if isinstance(asked, CompletionRequest) else 1
        num_texts = num_prompts * asked.n
        address = request.client.host if request.client else ""
        client = identify(asked, service.guard, address, shares_prefixes=service.shares_prefixes)
        service.worker.reserve(num_texts, client.turn)
        num_left = num_texts
        jobs: list[Job] = []
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        try:
            rendered = ""
            if isinstance(asked, ChatRequest):
                rendered = await service.call(service.rendering, service.reader.render, asked)
            texts = await service.call(service.tokenizing, service.reader.read, asked, rendered)
            matchers = list[Matcher]()
            if has_grammar(asked):
                list_matchers = service.reader.grammars.list_matchers
                matchers = await service.call(
                    service.compiling, list_matchers, asked, rendered, len(texts)
                )
            for index, text in enumerate(texts):
                tell = partial(_tell, loop, events, index)
                continued = Continued(
                    text,
                    drawing,
                    asked.num_logprobs,
                    scores_prompt=asked.echoes and asked.num_logprobs is not None,
                    owner=client.owner,
                    matcher=matchers[index] if matchers else None,
                )
                jobs.append(Job(continued, tell, client.turn))
                num_left -= 1
                service.worker.submit(jobs[-1])
            running = _Running(jobs, events)
            make: Make = partial(service.make, asked)
            read_echo = service.reader.read_echo
            choices = [
                Choice(
                    len(text.prompt),
                    makes_nothing=asked.num_tokens == 0,
                    prompt=text.prompt,
                    echo=await service.call(service.tokenizing, read_echo, asked, text)
                    if asked.echoes
                    else None,
                    calls=await make(service.reader.make_call_parser, asked, text),
                )
                for text in texts
            ]
            answer = make_answer(asked, choices, service.name, service.names)
            respond = _stream if asked.stream else _respond
            responding = respond(translated, answer, running, make, send)
            await _until_gone(request.receive, responding)
        finally:
            service.worker.give_up(num_left, client.turn)
            for job in jobs:
                service.worker.cancel(job)


def _tell(
    loop: asyncio.AbstractEventLoop,
    events: "asyncio.Queue[tuple[int, Event]]",
    index: int,
    event: Event,
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
        loop.call_soon_threadsafe(events.put_nowait, (index, event))


@dataclass
class _Running:
    """The texts of one request, on their way."""

    jobs: Sequence[Job]
    events: "asyncio.Queue[tuple[int, Event]]"

    async def tokens(self, answer: Answer) -> AsyncIterator[tuple[int, Added]]:
        """Yield each token with its text's index, until all texts have ended; raises ApiError."""
        num_left = len(self.jobs)
        while num_left:
            index, event = await self.events.get()
            if not isinstance(event, Added):
                raise event.error
            choice = answer.choices[index]
            choice.num_read = self.jobs[index].continued.num_read
            choice.made.append(event)
            # the worker may be further by now: a text's own finish is of its last token
            if event.finish is not None:
                choice.finish = event.finish
                num_left -= 1
            yield index, event


async def _respond(
    translated: Translation, answer: Answer, running: _Running, make: Make, send: Send
) -> None:
    async for _ in running.tokens(answer):
        pass
    await _send_whole(send, 200, await make(translated.whole, answer))


async def _send_whole(send: Send, status: int, payload: dict[str, Any]) -> None:
    body = json.dumps(payload).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for begin in range(0, len(body), _PIECE_BYTES):
        piece, more = body[begin : begin + _PIECE_BYTES], begin + _PIECE_BYTES < len(body)
        await send({"type": "http.response.body", "body": piece, "more_body": more})


async def _stream(
    translated: Translation, answer: Answer, running: _Running, make: Make, send: Send
) -> None:
    """Send a chunk for each token; what fails before the first one still gets its status."""
    tokens = running.tokens(answer).__aiter__()
    has_begun = False

    async def write(text: str, *, more: bool = True) -> None:
        nonlocal has_begun
        if not has_begun:
            said = translated.headers.items()
            headers = [(name.encode(), value.encode()) for name, value in said]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            has_begun = True
        await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

    next_token = asyncio.ensure_future(tokens.__anext__())
    try:
        while True:
            done, _ = await asyncio.wait({next_token}, timeout=_QUIET_S)
            if not done:
                waiting = translated.waiting()
                await write(waiting if has_begun else translated.opening(answer) + waiting)
                continue
            try:
                index, added = next_token.result()
            except StopAsyncIteration:
                break
            except ApiError as error:
                if not has_begun:
                    raise
                await write(translated.failed(error), more=False)
                return
            # before the next token, which changes the choice that this one belongs to
            opening = "" if has_begun else translated.opening(answer)
            chunk = opening + await make(translated.chunk, answer, index, added)
            next_token = asyncio.ensure_future(tokens.__anext__())
            if chunk:
                await write(chunk)
        await write(translated.closing(answer), more=False)
    finally:
        next_token.cancel()


async def _until_gone(receive: Receive, answering: Awaitable[None]) -> None:
    """Answer, or stop answering when the client has gone; raises ClientGoneError then."""
    task, gone = asyncio.ensure_future(answering), asyncio.ensure_future(_wait_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        await task
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_name(service: Service, name: str | None) -> None:
    """Raise ApiError with 404 for the name of another model; None is for whichever there is."""
    if name not in (None, service.name):
        raise ApiError(
            404,
            f"there is no such model here; the one that is served is {service.name}",
            param="model",
            code="model_not_found",
        )


def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "it is registered for these alone"
    headers = _LATER if error.status in (429, 503) else {}
    if error.status == 401:
        headers = {"www-authenticate": "Bearer"}
    return JSONResponse(_write_error(request, error), error.status, headers)


def _write_error(request: Request, error: ApiError) -> dict[str, Any]:
    """Return an error's object in the words of the API that the path is of."""
    path = request.scope["path"]
    make = next((make for begin, make in _ERRORS.items() if path.startswith(begin)), None)
    return error.payload if make is None else make(error)


def _answer_http_error(paths: Sequence[str], request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is registered for these alone"
    path = quote(request.scope["path"])[1:-1]
    served = f"{', '.join(paths[:-1])} and {paths[-1]}"
    told = ApiError(
        error.status_code,
        f"{request.method} {path} is not served here: this server continues texts, at {served}",
    )
    if f"/v1{path}" in paths:
        told = ApiError(404, f"{path} is not served here: the base URL ends with /v1")
    elif path.removeprefix("/v1") in paths and path.startswith("/v1"):
        told = ApiError(404, f"{path} is not served here: the base URL ends before /v1")
    return JSONResponse(_write_error(request, told), error.status_code, error.headers)
