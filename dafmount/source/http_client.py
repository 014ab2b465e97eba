"""Requests to web servers: sessions, retries, redirects, time limits, and who gets to see a secret.

The only module that knows `requests`. Owns at most `connections` sessions, each used by one thread at a time, and turns
whatever happens on the wire into errors of `dafmount.errors` whose texts hold no secret: the messages of requests and
urllib3 quote whole URLs, so they are never passed on, and their tracebacks are cut off. Knows nothing of ranges that
belong together, of caches or of Daf. Threads may share a client.

Facts: RFC 9110 (its section numbers are given).
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import logging
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import requests
import requests.adapters
import urllib3
import urllib3.connection
import urllib3.connectionpool
import urllib3.exceptions

from dafmount import __version__
from dafmount.errors import (
    DafmountError,
    NotFound,
    SourceDenied,
    SourceTimeout,
    SourceUnavailable,
    UsageError,
)
from dafmount.source.base import Range
from dafmount.source.http_settings import HttpSettings, parse_header
from dafmount.source.http_url import Url, redirected
from dafmount.source.traffic import TRAFFIC

_log = logging.getLogger(__name__)

# It logs URLs with their queries, which may be what lets one in.
logging.getLogger("urllib3").setLevel(logging.CRITICAL)

T = TypeVar("T")

PIECE_BYTES = 1024 * 1024
"""How much of a body is read at a time; what was read before a connection broke is not fetched again."""

_MAX_REDIRECTS = 10
_CONNECT_S = 20.0
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 10.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that another try may not meet again."""

_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)", re.IGNORECASE)  # 14.4


class Validators(NamedTuple):
    """What a server says of a file's version (8.8); empty strings for what it does not say."""

    etag: str
    last_modified: str


class Passing(Exception):
    """A fault that may pass. `final` is what is raised once there is no try left."""

    def __init__(self, final: DafmountError, retry_after_s: float | None = None) -> None:
        super().__init__(str(final))
        self.final = final
        self.retry_after_s = retry_after_s


class Place:
    """A URL, where it was redirected to the last time, and how many may be asked for it at the same time."""

    __slots__ = ("moved", "name", "slots", "url")

    def __init__(self, url: Url, name: str, parallel: int | None = None) -> None:
        self.url = url
        self.name = name
        self.moved: Url | None = None
        self.slots = None if parallel is None else threading.BoundedSemaphore(parallel)


class Answer:
    """A successful answer whose body is still to be read, by the thread that asked."""

    def __init__(self, response: requests.Response, watched: _Watched, name: str, timeout_s: float) -> None:
        self._response = response
        self._watched = watched
        self._name = name
        self._timeout_s = timeout_s
        TRAFFIC.n_requests += 1
        headers = response.headers
        self.status = response.status_code
        self.validators = Validators(headers.get("ETag", ""), headers.get("Last-Modified", ""))
        encoding = headers.get("Content-Encoding", "identity").strip().lower()
        self.is_encoded = encoding not in ("", "identity")
        """Whether lengths and ranges are those of something else than the file's own bytes (8.4)."""
        self.is_multipart = headers.get("Content-Type", "").lower().startswith("multipart/byteranges")
        length = headers.get("Content-Length", "")
        self.length = int(length) if re.fullmatch(r"\d{1,19}", length) else None
        match = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
        self.range = Range(int(match[1]), int(match[2]) + 1) if match and match[1] else None
        self.total = int(match[3]) if match and match[3] != "*" else None
        """The file's length according to Content-Range."""

    @property
    def mtime_ns(self) -> int | None:
        """Last-Modified in nanoseconds since 1970."""
        seconds = _date_s(self.validators.last_modified)
        return None if seconds is None else int(seconds) * 1_000_000_000

    def pieces(self, *, is_stream: bool = False) -> Iterator[bytes]:
        """The body as sent. A stream's time limit is renewed by each piece, that of other bodies is not."""
        while piece := self._read(PIECE_BYTES, decode=False):
            if is_stream:
                self._watched.deadline = time.monotonic() + self._timeout_s
            yield piece

    def read_into(self, view: memoryview) -> int:
        """Fills `view` with what comes next of the body as sent; fewer bytes, perhaps none, only at its end."""
        raw = self._response.raw
        body = getattr(raw, "_fp", None)
        if not isinstance(body, http.client.HTTPResponse):
            data = self._read(len(view), decode=False)
            view[: len(data)] = data
            return len(data)
        try:
            n_bytes = body.readinto(view)  # urllib3 would copy, and hold up other threads doing so
            if body.isclosed():
                raw.release_conn()  # the body was read to its end
        except Exception as error:
            raise _translated(error, self._watched, self._name) from None
        self._count(n_bytes)
        return n_bytes

    def decoded(self) -> Iterator[bytes]:
        """The body without its Content-Encoding; a stream."""
        while piece := self._read(PIECE_BYTES, decode=True):
            self._watched.deadline = time.monotonic() + self._timeout_s
            yield piece

    def _read(self, limit: int, *, decode: bool) -> bytes:
        try:
            data: bytes = self._response.raw.read(limit, decode_content=decode)
        except Exception as error:
            raise _translated(error, self._watched, self._name) from None
        self._count(len(data))
        return data

    def _count(self, n_bytes: int) -> None:
        TRAFFIC.n_bytes += n_bytes
        if not n_bytes and self._watched.is_late:
            raise _too_late(self._watched, self._name)


class HttpClient:
    """Asks web servers, some requests at a time."""

    def __init__(self, settings: HttpSettings, secrets_for: Url) -> None:
        """Headers, user and password are for the server of `secrets_for`. Raises UsageError for a file of these that
        cannot be read."""
        self.settings = settings
        self._secrets_for = secrets_for
        self._headers = [*settings.headers, *_read_headers(settings)]
        self._login = _login(settings, secrets_for)
        self._free: list[requests.Session] = []
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(settings.connections)
        self._watch = _Watch()
        self._closed = threading.Event()
        self._complained: set[str] = set()

    def try_often(self, name: str, attempt: Callable[[float], T]) -> T:
        """What `attempt` returns; it gets the time (monotonic) by which it must end, and may raise Passing."""
        settings = self.settings
        deadline = time.monotonic() + settings.timeout_s
        for count in range(settings.retries + 1):
            try:
                TRAFFIC.n_retries += count > 0
                return attempt(deadline)
            except Passing as fault:
                self._give_up_or_wait(fault, count, deadline, name)
        raise AssertionError("the last fault ends the loop")

    @contextmanager
    def get(self, place: Place, wanted: Range | None, deadline: float) -> Iterator[Answer]:
        """One GET of a file, or of a range of it; answers with status 200, 206 or 416 are given, others raised.

        Raises Passing, NotFound, SourceDenied, SourceTimeout or SourceUnavailable.
        """
        session = self._borrow(deadline, place)
        try:
            watched = self._watch.start(deadline)
            try:
                with contextlib.closing(self._followed(session, place, wanted, watched)) as response:
                    yield Answer(response, watched, place.name, self.settings.timeout_s)
            finally:
                self._watch.end(watched)
        finally:
            self._give_back(session, place)

    def complain_once(self, what: str, message: str) -> None:
        """Logs a warning the first time that `what` happens."""
        with self._lock:
            if what in self._complained:
                return
            self._complained.add(what)
        _log.warning("%s", message)

    def close(self) -> None:
        """Ends requests under way, which raise SourceUnavailable."""
        self._closed.set()
        self._watch.close()
        with self._lock:
            free, self._free = self._free, []
        for session in free:
            session.close()

    # Sessions.

    def _borrow(self, deadline: float, place: Place) -> requests.Session:
        slots = [self._slots] if place.slots is None else [place.slots, self._slots]
        for at, some in enumerate(slots):
            if not some.acquire(timeout=max(0.0, deadline - time.monotonic())):
                for taken in slots[:at]:
                    taken.release()
                raise SourceTimeout(f"{place.name}: all connections were busy until the time was up")
        with self._lock:
            session = self._free.pop() if self._free else None
        if self._closed.is_set():
            self._give_back(session, place)
            raise SourceUnavailable(f"{place.name}: read after it was closed")
        return _new_session() if session is None else session

    def _give_back(self, session: requests.Session | None, place: Place) -> None:
        if session is not None:
            with self._lock:
                # The one used last is used next: its connection is the least likely to have been closed by the server.
                self._free.append(session)
        self._slots.release()
        if place.slots is not None:
            place.slots.release()

    # One request.

    def _followed(
        self, session: requests.Session, place: Place, wanted: Range | None, watched: _Watched
    ) -> requests.Response:
        """The answer after all redirects (15.4). Where they led is remembered until it fails there."""
        url = place.moved or place.url
        for _ in range(_MAX_REDIRECTS + 1):
            response = self._send(session, url, wanted, watched, place.name)
            location = response.headers.get("Location")
            if response.status_code in _REDIRECTS and location:
                response.close()
                try:
                    url = redirected(url, location)
                except UsageError:
                    raise SourceUnavailable(
                        f"{place.name}: redirected to what is no http or https URL, which is not followed"
                    ) from None
                continue
            if response.status_code in (200, 206, 416):
                place.moved = url if url != place.url else None
                return response
            response.close()
            if place.moved is not None and url == place.moved:
                place.moved = None  # what it was redirected to may have been for a limited time
                url = place.url
                continue
            raise self._refused(response, place.name)
        raise SourceUnavailable(f"{place.name}: more than {_MAX_REDIRECTS} redirects")

    def _send(
        self, session: requests.Session, url: Url, wanted: Range | None, watched: _Watched, name: str
    ) -> requests.Response:
        headers: dict[str, str] = {}
        auth: Any = None
        if url.may_have_secrets_of(self._secrets_for):
            headers.update(self._headers)
            if self._login is not None:
                auth = self._login
            elif any(key.lower() == "authorization" for key, _ in self._headers):
                auth = _unchanged  # else .netrc would replace it
        # Last, so that no header of the user's changes what the rest relies on.
        headers["Accept-Encoding"] = "identity"
        if wanted is not None:
            headers["Range"] = f"bytes={wanted.start}-{wanted.stop - 1}"
        patience_s = self.settings.timeout_s / 3
        _this_thread.watched = watched
        try:
            response = session.get(
                url.requested,
                headers=headers,
                auth=auth,
                stream=True,
                allow_redirects=False,
                timeout=(min(_CONNECT_S, patience_s), patience_s),
                verify=str(self.settings.ca_file) if self.settings.ca_file is not None else None,
            )
        except Exception as error:
            raise _translated(error, watched, name) from None
        finally:
            _this_thread.watched = None
        if watched.is_late:  # what was cut off can look like complete headers
            response.close()
            raise _too_late(watched, name)
        return response

    def _refused(self, response: requests.Response, name: str) -> Exception:
        status = response.status_code
        what = f"{name}: the server answered {status} {_plain(response.reason)}".rstrip()
        if status in (401, 403, 407):
            return SourceDenied(what)
        if status in (404, 410):
            return NotFound(what)
        if status in _PASSING:
            return Passing(SourceUnavailable(what), _retry_after_s(response.headers.get("Retry-After")))
        return SourceUnavailable(what)

    def _give_up_or_wait(self, fault: Passing, count: int, deadline: float, name: str) -> None:
        left_s = deadline - time.monotonic()
        delay_s = random.uniform(0.5, 1.0) * min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**count)
        if fault.retry_after_s is not None:
            delay_s = fault.retry_after_s + random.uniform(0.0, 0.1)
        if count >= self.settings.retries or self._closed.is_set():
            raise fault.final from None
        if delay_s >= left_s:
            if fault.retry_after_s is not None:
                raise SourceUnavailable(f"{fault.final}; it asks to wait for {fault.retry_after_s:.0f} s") from None
            raise fault.final from None
        _log.debug("%s: trying again in %.1f s", fault.final, delay_s)
        if self._closed.wait(delay_s):
            raise SourceUnavailable(f"{name}: read after it was closed")


# Time limits. A socket's timeout bounds each wait for some bytes, so that a server that sends one now and then could
# hold a thread for ever, in the headers as well as in the body. A connection whose time is up is therefore shut down
# by another thread, which ends whatever waits for it.


class _Watched:
    """A request under way."""

    __slots__ = ("connection", "deadline", "is_late")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.connection: urllib3.connection.HTTPConnection | None = None
        self.is_late = False


class _Watch:
    """Shuts down connections whose time is up."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way: set[_Watched] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self, deadline: float) -> _Watched:
        watched = _Watched(deadline)
        with self._changed:
            self._under_way.add(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="http-watch", daemon=True)
                self._thread.start()
            elif len(self._under_way) == 1:
                self._changed.notify()
        return watched

    def end(self, watched: _Watched) -> None:
        with self._changed:
            self._under_way.discard(watched)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for watched in self._under_way:
                watched.deadline = 0.0
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for watched in self._under_way:
                    if watched.deadline <= now:
                        watched.is_late = True
                        _shut_down(watched.connection)
                if self._is_closed and not self._under_way:
                    return
                self._changed.wait(self._pause_s(now))

    def _pause_s(self, now: float) -> float | None:
        """Until something can be late; None where nothing is under way."""
        if not self._under_way:
            return None
        # A connection that was shut down before it was made is shut down again.
        return min(1.0, max(0.05, min(watched.deadline for watched in self._under_way) - now))


def _shut_down(connection: urllib3.connection.HTTPConnection | None) -> None:
    sock = getattr(connection, "sock", None)
    if sock is not None:
        with contextlib.suppress(OSError):
            # Not the method of ssl.SSLSocket, which would change it under the thread that reads.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


_this_thread = threading.local()


class _WholeLines:
    """A connection's stream, of which a head that ends before its blank line is not taken for a whole one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readline(self, limit: int = -1) -> bytes:
        line: bytes = self._stream.readline(limit)
        if not line:
            raise http.client.RemoteDisconnected("the head of the answer was cut short")
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Response(http.client.HTTPResponse):
    """Python's own takes what has come when the connection ends for the whole head, and nothing for the body."""

    def begin(self) -> None:
        stream: Any = self.fp
        whole: Any = _WholeLines(stream)
        self.fp = whole
        super().begin()
        if self.fp is whole:
            self.fp = stream


class _Connection(urllib3.connection.HTTPConnection):
    """Tells the watch which connection a request uses."""

    response_class = _Response

    def connect(self) -> None:
        _note(self)
        super().connect()

    def request(self, *args: Any, **kwargs: Any) -> None:
        _note(self)
        super().request(*args, **kwargs)


class _TlsConnection(urllib3.connection.HTTPSConnection):
    """Tells the watch which connection a request uses."""

    response_class = _Response

    def connect(self) -> None:
        _note(self)
        super().connect()

    def request(self, *args: Any, **kwargs: Any) -> None:
        _note(self)
        super().request(*args, **kwargs)


def _note(connection: urllib3.connection.HTTPConnection) -> None:
    watched = getattr(_this_thread, "watched", None)
    if watched is not None:
        watched.connection = connection


class _Pool(urllib3.connectionpool.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.connectionpool.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


_POOLS = {"http": _Pool, "https": _TlsPool}


class _Adapter(requests.adapters.HTTPAdapter):
    """Makes connections that the watch knows."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> urllib3.ProxyManager:
        manager: urllib3.ProxyManager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = _POOLS
        return manager


def _new_session() -> requests.Session:
    session = requests.Session()
    session.headers.clear()
    session.headers.update({"User-Agent": f"dafmount/{__version__}", "Accept": "*/*"})
    for prefix in ("http://", "https://"):
        session.mount(prefix, _Adapter(pool_connections=4, pool_maxsize=1, max_retries=0))
    return session


def _unchanged(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


# Credentials.


def _login(settings: HttpSettings, url: Url) -> tuple[bytes, bytes] | None:
    """User and password; as bytes, because requests sends text as Latin-1."""
    user = settings.user if settings.user is not None else url.user
    if user is None:
        return None
    password = settings.password if settings.password is not None else url.password or ""
    if settings.password_file is not None:
        lines = _secret_lines(settings.password_file, "password-file")
        password = lines[0] if lines else ""
    return user.encode(), password.encode()


def _read_headers(settings: HttpSettings) -> list[tuple[str, str]]:
    if settings.header_file is None:
        return []
    lines = _secret_lines(settings.header_file, "header-file")
    return [parse_header("header-file", line) for line in lines if line.strip()]


def _secret_lines(path: Path, option: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"option {option!r}: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"option {option!r}: {path}: no UTF-8 text") from None


# Errors.


def _translated(error: Exception, watched: _Watched, name: str) -> Exception:
    """What an error of requests, urllib3 or the socket means."""
    if watched.is_late:
        return _too_late(watched, name)
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return SourceUnavailable(f"{name}: the server's certificate is not trusted: {_plain(cause.verify_message)}")
    # A connection that was refused is one of urllib3's timeouts too.
    is_refused = any(isinstance(cause, urllib3.exceptions.NewConnectionError) for cause in causes)
    timeouts = requests.Timeout | urllib3.exceptions.TimeoutError | TimeoutError
    if not is_refused and any(isinstance(cause, timeouts) for cause in causes):
        return Passing(SourceTimeout(f"{name}: the server did not answer in time"))
    if isinstance(error, requests.exceptions.InvalidURL | requests.exceptions.InvalidHeader | UnicodeError):
        return SourceUnavailable(f"{name}: the request cannot be sent: {type(error).__name__}")
    known = (requests.RequestException, urllib3.exceptions.HTTPError, OSError)
    if not isinstance(error, known):
        # http.client raises some of its own, and AttributeError where a connection ends while it is read.
        return Passing(SourceUnavailable(f"{name}: the connection failed: {type(error).__name__}"))
    return Passing(SourceUnavailable(f"{name}: {_reason(causes)}"))


def _too_late(watched: _Watched, name: str) -> Exception:
    if watched.deadline == 0.0:
        return SourceUnavailable(f"{name}: read after it was closed")
    return SourceTimeout(f"{name}: the server did not answer completely in time")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and all that it came from, in every way in which the two libraries say so."""
    pending: list[object] = [error]
    seen: set[int] = set()
    while pending:
        cause = pending.pop(0)
        if isinstance(cause, BaseException) and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            pending += [*cause.args, getattr(cause, "reason", None), cause.__cause__, cause.__context__]


def _reason(causes: list[BaseException]) -> str:
    """Why a connection failed, without anything that quotes a URL."""
    for cause in causes:
        if isinstance(cause, socket.gaierror):
            return f"the name of the server was not found: {cause.strerror}"
        if isinstance(cause, ssl.SSLError):
            return f"TLS failed: {_plain(cause.reason or type(cause).__name__)}"
    for cause in causes:
        if isinstance(cause, urllib3.exceptions.IncompleteRead):
            return "the answer was cut short"
        if isinstance(cause, OSError) and cause.errno and cause.strerror:
            return f"the connection failed: {cause.strerror}"
    for cause in causes:
        if isinstance(cause, requests.exceptions.ProxyError | urllib3.exceptions.ProxyError):
            return "the proxy refused"
        if isinstance(cause, urllib3.exceptions.DecodeError):
            return "the answer's Content-Encoding is broken"
    return "the server ended the connection"


def _plain(text: object) -> str:
    """Text of a server as a message may hold it."""
    shortened = str(text or "")[:100]
    return shortened if shortened.isprintable() else ascii(shortened)


def _retry_after_s(value: str | None) -> float | None:
    """Seconds to wait according to Retry-After in either of its forms (10.2.3)."""
    if value is None:
        return None
    if re.fullmatch(r"\d{1,19}", value.strip()):
        return float(value)
    date_s = _date_s(value)
    return None if date_s is None else max(0.0, date_s - time.time())


def _date_s(value: str) -> float | None:
    """Seconds since 1970 of an HTTP date (5.6.7)."""
    try:
        return email.utils.parsedate_to_datetime(value).timestamp() if value else None
    except (ValueError, TypeError, OverflowError):
        return None
