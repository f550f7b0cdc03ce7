"""Access to pages and actions: a token, the address that the browser asked for, and headers that keep a page
from loading or sending anything elsewhere."""

import hmac
import ipaddress
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.errors import UsageError
from phalanx.serve.pages import PageFrame, PageResponse, relative_root, render_problem

TOKEN_VARIABLE = "PHALANX_SERVE_TOKEN"
MIN_TOKEN_CHARS = 16
MAX_FORM_BYTES = 1 << 14
Form = Mapping[str, str]
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'self'; form-action 'self'; frame-ancestors 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Access:
    """What the server demands. `token`: what a browser must know, for any page where `protects_pages`, else to act
    (`allows_actions`). `hosts`: names under which the server may be asked; empty for any. `proxy_names`: names of
    proxies, with pages from which a browser may act."""

    token: str | None = None
    protects_pages: bool = False
    allows_actions: bool = False
    hosts: tuple[str, ...] = ()
    proxy_names: tuple[str, ...] = ()


def make_access(
    host: str,
    allows_actions: bool,
    given_token: str | None,
    demands_token: bool = True,
    proxy_names: Sequence[str] = (),
) -> Access:
    """What a server on `host` demands. UsageError for a weak token, and for pages that others reach without one."""
    if given_token is not None and len(given_token) < MIN_TOKEN_CHARS:
        raise UsageError(
            f"{TOKEN_VARIABLE}: has {len(given_token)} characters, expected {MIN_TOKEN_CHARS} or more; without the "
            "variable a token is made"
        )
    is_local = _is_loopback(host)
    if not demands_token and not is_local:
        raise UsageError(f"--no-token: other machines reach {host}; leave out --no-token, or --host")
    needs_token = allows_actions or demands_token
    token = (given_token or secrets.token_urlsafe(24)) if needs_token else None
    # a name that someone else's DNS points at this machine must not open its pages in a browser on it
    hosts = ("127.0.0.1", "localhost", "[::1]", host, *proxy_names) if is_local else ()
    return Access(token, demands_token, allows_actions, hosts, tuple(proxy_names))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def cookie_name(request: Request) -> str:
    """The name of the cookie with the token. Browsers send a cookie to every port of a host."""
    server = request.scope.get("server")
    return f"phalanx-token-{server[1] if server else ''}"


def knows_token(access: Access, request: Request) -> bool:
    """Whether a request shows the token: in its cookie, or as `Authorization: Bearer TOKEN`."""
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    shown = request.cookies.get(cookie_name(request)) or bearer
    return access.token is not None and hmac.compare_digest(shown.encode(), access.token.encode())


def describe_refusal(access: Access, request: Request) -> str | None:
    """Why a request may not act; None where it may. Forms of other sites are refused, whatever cookie they carry."""
    if not access.allows_actions:
        return "This server is read-only. Start it with `phalanx serve --allow-actions` to act from the page."
    if not knows_token(access, request):
        return "Open the address with the token that `phalanx serve` has printed, then try again."
    origin = request.headers.get("origin")
    site = None if origin is None else origin.partition("://")[2]
    if site not in (None, request.headers.get("host")) and not _has_name(str(site), access.proxy_names):
        return "The request comes from a page of another site."
    return None


def _has_name(host: str, names: Sequence[str]) -> bool:
    """Whether a host, with its port or without, is one of `names`."""
    return host in names or host.rpartition(":")[0] in names


class AccessMiddleware:
    """Lets a request through to the pages, and adds the headers to each response."""

    def __init__(self, app: ASGIApp, access: Access):
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                added = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
                message["headers"] = [*message["headers"], *(each for each in added if each[0] not in present)]
            await send(message)

        request = Request(scope)
        answer = self._refuse(request)
        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _refuse(self, request: Request) -> Response | None:
        """What is answered instead of the page; None where the page is."""
        host = request.headers.get("host", "")
        if self._access.hosts and not _has_name(host, self._access.hosts):
            name = host.rpartition(":")[0] or host
            text = (
                f"This server answers to {self._access.hosts[0]}, not to {name}. If {name} is the name of your proxy, "
            )
            return _problem(400, "Wrong address", f"{text}start `phalanx serve` with --proxy-name {name}.")
        if (token := request.query_params.get("token")) is not None and self._access.token is not None:
            if hmac.compare_digest(token.encode(), self._access.token.encode()):
                return self._set_cookie(request, token)
            return _problem(403, "Wrong token", "Open the address that `phalanx serve` has printed.")
        if self._access.protects_pages and not knows_token(self._access, request):
            return _problem(403, "Token needed", "Open the address with the token that `phalanx serve` has printed.")
        return None

    def _set_cookie(self, request: Request, token: str) -> Response:
        """To the same page, without the token in its address. The first page sets the cookie, so that browsers send it
        with every page of this server, and to no other path of a proxy."""
        root, page = relative_root(request.scope), request.url.remove_query_params("token")
        here = page.path[1:] + (f"?{page.query}" if page.query else "")
        if root != "./":
            return RedirectResponse(f"{root}?{urlencode({'token': token, 'to': here})}", status_code=303)
        response = RedirectResponse(f"./{request.query_params.get('to', here)}", status_code=303)
        response.set_cookie(cookie_name(request), token, path=None, httponly=True, samesite="strict")
        return response


def _problem(status: int, title: str, text: str) -> Response:
    return PageResponse(PageFrame(title, ""), render_problem(title, text), status)


async def answer_form(access: Access, request: Request, act: Callable[[Form], str]) -> Response:
    """Do what a form asks for, if its browser may, and answer with the sentence that `act` returns."""
    if (refusal := describe_refusal(access, request)) is not None:
        return PlainTextResponse(refusal, 403)
    if (body := await read_body(request, MAX_FORM_BYTES)) is None:
        return PlainTextResponse("The request is too long.", 413)
    form = {name: values[0] for name, values in parse_qs(body.decode(errors="replace")).items()}
    try:
        return PlainTextResponse(await run_in_threadpool(act, form))
    except UsageError as error:
        return PlainTextResponse(str(error), 409)


async def read_body(request: Request, max_bytes: int) -> bytes | None:
    """The body of a request; None where it is longer than `max_bytes`."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            return None
    return body
