"""Files on web servers as servers are: each fault of a server is one behaviour of the tests' own server."""

from __future__ import annotations

import email.utils
import gzip
import os
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from web import Behaviour, Handler, Web, first_requests, serving

from dafmount.errors import (
    Corrupt,
    DafmountError,
    NotFound,
    ShortRead,
    SourceChanged,
    SourceDenied,
    SourceTimeout,
    SourceUnavailable,
    SpoolFull,
)
from dafmount.source.base import Range
from dafmount.source.http import HttpDirectory, HttpFile, HttpSite
from dafmount.source.http_settings import HttpSettings
from dafmount.source.http_url import parse_url
from dafmount.source.spool import Spool

DATA = os.urandom(300_000)
BIG = os.urandom(3_000_000)
FILES = {
    "data": DATA,
    "big": BIG,
    "empty": b"",
    "small": b"0123456789",
    "a b#c?d%e+f\N{LATIN SMALL LETTER E WITH ACUTE}.data": b"odd",
}
QUICK = HttpSettings(timeout_s=30, retries=2)
IMPATIENT = HttpSettings(timeout_s=1.5, retries=1)

Open = Callable[..., HttpFile]


@pytest.fixture
def open_url(spool: Spool) -> Iterator[Open]:
    """Opens a file of a server, and closes it after the test."""
    opened: list[HttpFile] = []

    def open_one(url: str, settings: HttpSettings = QUICK, **more: int) -> HttpFile:
        parsed = parse_url(url)
        file = HttpFile(HttpSite(parsed, settings, spool), parsed, parsed.shown, is_all=True, **more)  # type: ignore[arg-type]
        opened.append(file)
        return file

    yield open_one
    for file in opened:
        file.close()


def behaving(behave: Behaviour) -> Web:
    return Web(FILES, behave)


def test_any_range_is_what_lies_there(open_url: Open) -> None:
    with serving(FILES) as web:
        file = open_url(web.url + "/data")
        assert file.size == len(DATA)
        for offset, length in ((0, 1), (0, len(DATA)), (299_999, 1), (100, 50_000), (20_000, 0), (len(DATA), 0)):
            assert file.read(offset, length) == DATA[offset : offset + length]


def test_a_buffer_is_filled_step_by_step(open_url: Open) -> None:
    with serving({"big": BIG}) as web:
        file = open_url(web.url + "/big")
        assert file.size == len(BIG)
        for offset, length in ((0, len(BIG)), (0, 10), (5, 0), (100_000, 1_000_000)):
            buffer, steps = bytearray(length), [0]
            file.read_into(offset, memoryview(buffer), steps.append)
            assert buffer == BIG[offset : offset + length]
            assert steps[-1] == length
            assert steps == sorted(steps)
        with pytest.raises(ShortRead):
            file.read_into(len(BIG) - 1, memoryview(bytearray(2)), steps.append)


def test_the_first_bytes_come_with_the_size(open_url: Open) -> None:
    with serving(FILES) as web:
        file = open_url(web.url + "/small")
        assert file.known_size is None
        assert file.size == file.known_size == 10
        assert file.read_nowait(0, 10) == file.read(0, 10) == b"0123456789"
        assert len(web.requests) == 1


def test_only_get_with_plain_ranges_is_asked(open_url: Open) -> None:
    with serving(FILES) as web:
        file = open_url(web.url + "/data")
        file.read(file.size - 98, 98)
        file.stamp()
        assert {request.method for request in web.requests} == {"GET"}
        assert all(request.range is not None for request in web.requests)
        assert {request.headers["accept-encoding"] for request in web.requests} == {"identity"}


def test_near_ranges_are_one_request_and_far_ones_come_at_the_same_time(open_url: Open) -> None:
    together = threading.Barrier(3, timeout=30)

    def meet(handler: Handler) -> bool:
        if handler.request_record.range != (0, 16 * 1024 - 1):
            together.wait()  # passes only when all three requests are there
        return False

    wanted = [Range(20_000, 21_000), Range(25_000, 26_000), Range(100_000, 100_001), Range(200_000, 200_100)]
    with behaving(meet) as web:
        file = open_url(web.url + "/data")
        assert file.size
        assert file.read_ranges(wanted) == [DATA[start:stop] for start, stop in wanted]
        asked = sorted(request.range or (0, 0) for request in web.requests[1:])
        assert asked == [(20_000, 25_999), (100_000, 100_000), (200_000, 200_099)]


def test_no_more_requests_at_a_time_than_connections(open_url: Open) -> None:
    lock, now, most = threading.Lock(), 0, 0

    def count(handler: Handler) -> bool:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        handler.send_content()
        with lock:
            now -= 1
        return True

    with behaving(count) as web:
        file = open_url(web.url + "/big", HttpSettings(connections=2))
        file.read_ranges([Range(at, at + 10) for at in range(0, 1_000_000, 50_000)])
    assert most <= 2


def test_a_connection_is_used_again(open_url: Open) -> None:
    ports = set()

    def note(handler: Handler) -> bool:
        ports.add(handler.client_address[1])
        return False

    with behaving(note) as web:
        file = open_url(web.url + "/big")
        for at in range(5):
            file.read(at * 100_000 + 20_000, 100_000)
    assert len(ports) == 1


def test_names_that_need_encoding(spool: Spool) -> None:
    with serving({f"x y.daf/{name}": data for name, data in FILES.items()}) as web:
        site = HttpSite(parse_url(web.url), QUICK, spool)
        directory = HttpDirectory(site, parse_url(web.url + "/x y.daf"))
        for name, data in FILES.items():
            assert directory.read_small(name, 10_000_000) == data
            file = directory.open(name)
            assert file.read(0, file.size) == data
        directory.close()


def test_empty_files(open_url: Open, spool: Spool) -> None:
    with serving(FILES) as web:
        file = open_url(web.url + "/empty")
        assert file.size == 0
        assert file.read(0, 0) == b""
        with pytest.raises(ShortRead):
            file.read(0, 1)
    without_range = behaving(lambda handler: handler.send_content(ranges=False) is None)
    with without_range as web:
        assert open_url(web.url + "/empty").size == 0


def test_reading_beyond_the_end(open_url: Open) -> None:
    with serving(FILES) as web:
        file = open_url(web.url + "/small")
        for offset, length in ((0, 11), (10, 1), (11, 1), (-1, 1), (20_000, 5)):
            with pytest.raises(ShortRead):
                file.read(offset, length)
        unasked = open_url(web.url + "/small")
        for offset, length in ((20_000, 5), (5, 20)):
            with pytest.raises(ShortRead):
                unasked.read(offset, length)


def test_a_size_that_is_known_saves_asking_for_it(open_url: Open) -> None:
    with serving(FILES) as web:
        file = open_url(web.url + "/data", expected_size=len(DATA))
        assert file.size == len(DATA)
        assert file.read(100_000, 10) == DATA[100_000:100_010]
        assert len(web.requests) == 1


def test_a_size_that_is_not_the_files(open_url: Open) -> None:
    with serving(FILES) as web, pytest.raises(Corrupt, match=r"has 300000 bytes, metadata\.json speaks of 7"):
        open_url(web.url + "/data", expected_size=7).read(0, 5)


def test_a_closed_file(open_url: Open) -> None:
    with serving(FILES) as web:
        file = open_url(web.url + "/data")
        file.close()
        with pytest.raises(SourceUnavailable, match="after it was closed"):
            file.read(0, 5)


# ---------------------------------------------------------------------------------------------------------------------
# Servers without ranges, or with what looks like them


def whole(handler: Handler) -> bool:
    handler.send_content(ranges=False)
    return True


def test_a_server_without_ranges_fills_buffers_too(open_url: Open) -> None:
    with behaving(whole) as web:
        file = open_url(web.url + "/data")
        buffer, steps = bytearray(1000), [0]
        file.read_into(299_000, memoryview(buffer), steps.append)
        assert buffer == DATA[299_000:]
        assert steps[-1] == 1000


def test_a_server_without_ranges_is_read_once_as_a_whole(
    open_url: Open, spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    with behaving(whole) as web:
        file = open_url(web.url + "/big")
        assert file.size == len(BIG)
        for at in (2_999_000, 5, 1_000_000):
            assert file.read(at, 1000) == BIG[at : at + 1000]
        assert file.read_nowait(7, 70) is not None
        assert [request.range is None for request in web.requests] == [False, True]
    assert spool.used_bytes == len(BIG)
    assert len([record for record in caplog.records if "sends no ranges" in record.message]) == 1


def test_small_files_of_such_a_server_stay_in_memory(open_url: Open, spool: Spool) -> None:
    with behaving(whole) as web:
        file = open_url(web.url + "/data")
        assert file.read(200_000, 10) == DATA[200_000:200_010]
        assert file.read(100_000, 10) == DATA[100_000:100_010]
        assert [request.range is None for request in web.requests] == [False, True]
    assert spool.used_bytes == 0


def test_a_file_that_the_spool_does_not_hold(open_url: Open, tmp_path: Path) -> None:
    with behaving(whole) as web:
        parsed = parse_url(web.url + "/big")
        file = HttpFile(HttpSite(parsed, QUICK, Spool(tmp_path, 2_000_000)), parsed, "big", is_all=True)
        with pytest.raises(SpoolFull):
            file.read(20_000, 10)
        file.close()


def test_many_readers_share_one_download(open_url: Open) -> None:
    with behaving(whole) as web:
        file = open_url(web.url + "/big")
        assert file.size
        web.requests.clear()
        found: list[bytes] = []
        readers = [threading.Thread(target=lambda: found.append(file.read(2_000_000, 100))) for _ in range(6)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(30)
        assert found == [BIG[2_000_000:2_000_100]] * 6
        assert [request.range for request in web.requests] == [None]


def chunked(handler: Handler) -> bool:
    data = handler.server_files.content(handler.path)
    assert data is not None
    handler.send_head(200, Transfer_Encoding="chunked")
    for at in range(0, len(data), 100_000):
        piece = data[at : at + 100_000]
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
    handler.wfile.write(b"0\r\n\r\n")
    return True


def test_a_server_that_does_not_tell_lengths(open_url: Open, spool: Spool) -> None:
    with behaving(chunked) as web:
        file = open_url(web.url + "/big")
        assert file.read(2_999_000, 1000) == BIG[2_999_000:]
        assert file.size == len(BIG)
        assert open_url(web.url + "/small").size == 10
    assert spool.used_bytes == len(BIG)


def encoded(handler: Handler) -> bool:
    """Ranges of the encoded bytes, as some servers send them whatever was asked for."""
    data = handler.server_files.content(handler.path)
    assert data is not None
    body = gzip.compress(bytes(data))
    wanted = handler.request_record.range
    if wanted is None:
        handler.send_whole(200, body, Content_Encoding="gzip")
    else:
        part = body[wanted[0] : wanted[1] + 1]
        place = f"bytes {wanted[0]}-{wanted[0] + len(part) - 1}/{len(body)}"
        handler.send_whole(206, part, Content_Encoding="gzip", Content_Range=place)
    return True


def test_lengths_and_ranges_of_encoded_bytes_are_not_believed(open_url: Open, spool: Spool) -> None:
    with serving({"text": b"many times the same\n" * 100_000}, encoded) as web:
        file = open_url(web.url + "/text")
        assert file.size == 2_000_000
        assert file.read(1_999_980, 20) == b"many times the same\n"
        directory = HttpDirectory(HttpSite(parse_url(web.url), QUICK, spool), parse_url(web.url))
        assert directory.read_small("text", 3_000_000) == b"many times the same\n" * 100_000
        with pytest.raises(Corrupt, match="more than 1000 bytes"):
            directory.read_small("text", 1000)
        directory.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"Content_Range": "bytes 7-16/300000"},
        {"Content_Range": "bytes 0-9/300000", "Content_Type": "multipart/byteranges; boundary=x"},
        {"Content_Range": "bytes 0-9/*"},
        {"Content_Range": "lines 0-9/10"},
        {"Content_Range": "bytes 9-0/300000"},
        {"Content_Range": f"bytes 0-9/{'9' * 5000}"},
        {},
    ],
)
def test_an_answer_that_is_none_to_the_question(open_url: Open, headers: dict[str, str]) -> None:
    def answer(handler: Handler) -> bool:
        if handler.request_record.range is None:
            return False
        handler.send_whole(206, b"x" * 10, **headers)
        return True

    with behaving(answer) as web:
        file = open_url(web.url + "/data")
        if headers.get("Content_Range") == "bytes 7-16/300000" or headers.get("Content_Range") == "bytes 9-0/300000":
            with pytest.raises(SourceUnavailable, match="asked for 0 to 10"):
                file.read(0, 10)
        else:
            assert file.read(0, 10) == DATA[:10]  # from a request for the whole


def test_a_server_that_sends_less_of_a_range_than_asked_for(open_url: Open) -> None:
    def stingy(handler: Handler) -> bool:
        wanted = handler.request_record.range
        assert wanted is not None
        handler.request_record.headers["range"] = f"bytes={wanted[0]}-{min(wanted[1], wanted[0] + 9999)}"
        return False

    with behaving(stingy) as web:
        assert open_url(web.url + "/data").read(50_000, 120_000) == DATA[50_000:170_000]


# ---------------------------------------------------------------------------------------------------------------------
# Faults that pass


def status(code: int, **headers: str) -> Behaviour:
    def answer(handler: Handler) -> bool:
        handler.send_whole(code, b"go away", **headers)
        return True

    return answer


def reset_half_way(handler: Handler) -> bool:
    data = handler.server_files.content(handler.path)
    wanted = handler.request_record.range
    assert data is not None
    first, last = wanted or (0, len(data) - 1)
    last = min(last, len(data) - 1)
    handler.send_head(206, Content_Length=str(last - first + 1), Content_Range=f"bytes {first}-{last}/{len(data)}")
    handler.send_body(data[first : (first + last) // 2])
    handler.cut_off()
    return True


def short_body(handler: Handler) -> bool:
    data = handler.server_files.content(handler.path)
    wanted = handler.request_record.range
    assert data is not None
    assert wanted is not None
    last = min(wanted[1], len(data) - 1)
    place = f"bytes {wanted[0]}-{last}/{len(data)}"
    handler.send_head(206, Content_Length=str(last + 1 - wanted[0]), Content_Range=place)
    handler.send_body(data[wanted[0] : last - 2])
    handler.close_connection = True
    return True


def cut_off(handler: Handler) -> bool:
    handler.cut_off()
    return True


@pytest.mark.parametrize(
    "fault",
    [status(code) for code in (408, 429, 500, 502, 503, 504)]
    + [status(503, Retry_After="0"), status(429, Retry_After="Mon, 01 Jan 2024 00:00:00 GMT")]
    + [status(503, Retry_After="soon"), cut_off],
)
def test_a_fault_that_passes_is_not_noticed(open_url: Open, fault: Behaviour) -> None:
    with behaving(first_requests(2, fault)) as web:
        assert open_url(web.url + "/data").read(100_000, 5) == DATA[100_000:100_005]
        assert len(web.requests) == 3


@pytest.mark.parametrize("fault", [reset_half_way, short_body])
def test_an_answer_that_ends_half_way_is_continued(open_url: Open, fault: Behaviour) -> None:
    def answer(handler: Handler) -> bool:
        handler.send_content(etag=False, modified=False)
        return True

    faulty = first_requests(1, fault)
    with serving({"big": BIG}, lambda handler: faulty(handler) or answer(handler)) as web:
        assert open_url(web.url + "/big").read(0, len(BIG)) == BIG
        first, second = web.requests[:2]
        assert first.range is not None
        assert second.range is not None
        if fault is short_body:  # a reset takes along what has arrived but was not read yet
            assert first.range[0] < second.range[0]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_head_that_ends_half_way_is_no_answer(open_url: Open, ranges: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\nX: y\r\nContent-Length: 10\r\n\r\n"
    if ranges:
        head = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-9/10\r\nContent-Length: 10\r\n\r\n"

    def cut(handler: Handler) -> bool:
        handler.wfile.write(head[: next(places)])
        handler.close_connection = True
        return True

    places = iter(range(1, len(head)))
    for _ in range(1, len(head)):
        with behaving(first_requests(1, cut)) as web:
            assert open_url(web.url + "/small").read(0, 10) == b"0123456789"


def test_the_time_to_wait_is_the_servers(open_url: Open) -> None:
    for value in ("1", ""):
        value = value or email.utils.formatdate(time.time() + 2, usegmt=True)
        with behaving(first_requests(1, status(503, Retry_After=value))) as web:
            start = time.monotonic()
            assert open_url(web.url + "/small").size == 10
            assert time.monotonic() - start > 0.5


def test_a_server_that_asks_to_wait_for_longer_than_there_is_time(open_url: Open) -> None:
    with (
        behaving(status(429, Retry_After="3600")) as web,
        pytest.raises(SourceUnavailable, match=r"answered 429 Too Many Requests; it asks to wait for 3600 s$"),
    ):
        open_url(web.url + "/data").read(0, 5)
    assert len(web.requests) == 1


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (status(503), SourceUnavailable, "answered 503 Service Unavailable"),
        (cut_off, SourceUnavailable, "the connection failed|the server ended the connection"),
        (short_body, SourceUnavailable, "the answer was cut short"),
    ],
)
def test_a_fault_that_stays_ends_after_the_retries(
    open_url: Open, fault: Behaviour, error: type[Exception], message: str
) -> None:
    with behaving(fault) as web:
        with pytest.raises(error, match=message):
            open_url(web.url + "/data").read(100_000, 2)
        assert len(web.requests) == 1 + QUICK.retries


@pytest.mark.parametrize(
    ("code", "error"),
    [(401, SourceDenied), (403, SourceDenied), (404, NotFound), (410, NotFound), (400, SourceUnavailable)],
)
def test_refusals_are_not_repeated(open_url: Open, code: int, error: type[Exception]) -> None:
    with behaving(status(code)) as web:
        with pytest.raises(error, match=rf"/data: the server answered {code} "):
            open_url(web.url + "/data").read(0, 5)
        assert len(web.requests) == 1


def test_a_server_that_is_not_there(open_url: Open) -> None:
    with serving(FILES) as web:
        url = web.url + "/data"
    with pytest.raises(SourceUnavailable, match=r"/data: the connection failed: Connection refused$"):
        open_url(url).read(0, 5)


def test_a_file_works_again_once_its_server_does(open_url: Open) -> None:
    broken = True
    with behaving(lambda handler: broken and status(503)(handler)) as web:
        file = open_url(web.url + "/data")
        with pytest.raises(SourceUnavailable):
            file.read(0, 5)
        broken = False
        assert file.read(0, 5) == DATA[:5]


# ---------------------------------------------------------------------------------------------------------------------
# Silence


@pytest.fixture
def end() -> Iterator[threading.Event]:
    """Set at the end of the test, for servers that wait for ever."""
    event = threading.Event()
    yield event
    event.set()


def test_a_server_that_says_nothing(open_url: Open, end: threading.Event) -> None:
    def silent(handler: Handler) -> bool:
        handler.close_connection = True
        return end.wait(60)

    with behaving(silent) as web, pytest.raises(SourceTimeout, match="/data: the server did not answer"):
        open_url(web.url + "/data", IMPATIENT).read(0, 5)


def dribble(handler: Handler, end: threading.Event, data: bytes) -> bool:
    for at in range(len(data)):
        handler.wfile.write(data[at : at + 1])
        handler.wfile.flush()
        if end.wait(0.1):
            break
    handler.close_connection = True
    return True


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-4/300000\r\nX-Long: " + b"x" * 1000,
        b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-999/300000\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000,
    ],
)
def test_a_server_that_sends_a_byte_now_and_then(open_url: Open, end: threading.Event, answer: bytes) -> None:
    quick = 100 if answer.endswith(b"x" * 1000) and b"\r\n\r\n" in answer else 0

    def slow(handler: Handler) -> bool:
        handler.wfile.write(answer[:quick])
        return dribble(handler, end, answer[quick:])

    with behaving(slow) as web, pytest.raises(SourceTimeout, match="did not answer completely in time"):
        open_url(web.url + "/data", IMPATIENT).read(0, 1000)


def test_one_file_that_hangs_does_not_stop_the_others(spool: Spool, end: threading.Event) -> None:
    def hang(handler: Handler) -> bool:
        return "big" in handler.path and end.wait(60)

    with behaving(hang) as web:
        directory = HttpDirectory(HttpSite(parse_url(web.url), QUICK, spool), parse_url(web.url))
        hanging = directory.open("big", len(BIG))
        for at in range(20):
            hanging.prefetch(Range(at * 100_000, at * 100_000 + 10), is_needed=True)
        assert directory.open("data").read(200_000, 5) == DATA[200_000:200_005]
        directory.close()


# ---------------------------------------------------------------------------------------------------------------------
# Changes


def test_a_file_that_changes_is_never_mixed(open_url: Open) -> None:
    with serving(FILES) as web:
        file = open_url(web.url + "/data")
        assert file.read(0, 5) == DATA[:5]
        web.version = "2"
        with pytest.raises(SourceChanged, match="its ETag or Last-Modified is another"):
            file.read(100_000, 5)
        assert open_url(web.url + "/data").read(100_000, 5) == DATA[100_000:100_005]


@pytest.mark.parametrize(
    "header", [{"Last_Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}, {"ETag": '"another"'}, {"ETag": ""}]
)
def test_each_validator_counts(open_url: Open, header: dict[str, str]) -> None:
    sent: dict[str, str] = {"ETag": '"one"', "Last_Modified": "Sun, 31 Dec 2023 00:00:00 GMT"}

    def answer(handler: Handler) -> bool:
        data = handler.server_files.content(handler.path)
        wanted = handler.request_record.range
        assert data is not None
        assert wanted is not None
        place = f"bytes {wanted[0]}-{wanted[1]}/{len(data)}"
        handler.send_whole(206, data[wanted[0] : wanted[1] + 1], Content_Range=place, **sent)
        return True

    with behaving(answer) as web:
        file = open_url(web.url + "/data")
        file.read(0, 5)
        sent["ETag"] = 'W/"one"'  # as proxies make it
        file.read(5, 5)
        sent.update(header)
        with pytest.raises(SourceChanged):
            file.read(10, 5)


def test_a_file_that_grew_or_shrank(open_url: Open) -> None:
    files = {"x": DATA}
    with serving(files, lambda handler: handler.send_content(etag=False) is None) as web:
        for now in (DATA + b"more", DATA[:200_000], b""):
            files["x"] = DATA
            file = open_url(web.url + "/x")
            file.read(0, 5)
            files["x"] = now
            with pytest.raises(SourceChanged, match="its length was 300000 and is"):
                file.read(250_000, 5)


def test_a_file_of_a_server_without_ranges_that_changes(open_url: Open) -> None:
    with behaving(whole) as web:
        file = open_url(web.url + "/big")
        assert file.size
        web.version = "2"
        with pytest.raises(SourceChanged):
            file.read(1_000_000, 5)


def test_the_stamp_is_asked_anew(open_url: Open) -> None:
    with serving(FILES) as web:
        file = open_url(web.url + "/data")
        before = file.stamp()
        assert before.size == len(DATA)
        assert before.mtime_ns == 1_700_000_000 * 10**9 == file.mtime_ns
        assert file.stamp() == before
        web.version = "2"
        assert file.stamp() != before


@pytest.mark.parametrize("coding", ["chunked", "gzip", "gzip with ranges"])
def test_the_stamp_is_that_of_what_is_read_where_lengths_are_not_told(open_url: Open, coding: str) -> None:
    """Else whoever follows the file would download it again each time it looks."""

    def answer(handler: Handler) -> bool:
        tag = f'"{handler.server_files.version}"'
        if coding == "chunked":
            handler.send_head(200, Transfer_Encoding="chunked", ETag=tag)
            handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(DATA), DATA))
            return True
        body, wanted = gzip.compress(DATA), handler.request_record.range
        if wanted is None or coding == "gzip":
            handler.send_whole(200, body, Content_Encoding="gzip", ETag=tag)
        else:
            part = body[wanted[0] : wanted[1] + 1]
            place = f"bytes {wanted[0]}-{wanted[0] + len(part) - 1}/{len(body)}"
            handler.send_whole(206, part, Content_Encoding="gzip", Content_Range=place, ETag=tag)
        return True

    with behaving(answer) as web:
        file = open_url(web.url + "/data")
        assert file.first_stamp == file.stamp()
        assert file.first_stamp.size == len(DATA)
        web.version = "2"
        assert file.first_stamp != file.stamp()


def test_an_answer_without_validators_is_no_version(open_url: Open) -> None:
    """Servers answer 416 without them."""
    with serving(FILES) as web:
        file = open_url(web.url + "/data", expected_size=len(DATA))
        web.behave = first_requests(
            1, lambda handler: handler.send_whole(416, b"", Content_Range="bytes */300000") is None
        )
        with pytest.raises(ShortRead):
            file.read(100, 5)
        assert file.read(100, 5) == DATA[100:105]
        empty = open_url(web.url + "/empty")
        assert empty.size == 0
        assert empty.first_stamp.identity[:1] != ("",)


# ---------------------------------------------------------------------------------------------------------------------
# Redirects and secrets


def redirect(place: str, code: int = 302) -> Behaviour:
    def answer(handler: Handler) -> bool:
        handler.send_whole(code, b"", Location=place)
        return True

    return answer


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_followed_and_remembered(open_url: Open, code: int) -> None:
    with serving(FILES) as there, behaving(redirect(there.url + "/data?signature=1", code)) as web:
        file = open_url(web.url + "/other")
        for at in (0, 100_000, 200_000):
            assert file.read(at, 5) == DATA[at : at + 5]
        assert (len(web.requests), len(there.requests)) == (1, 3)
        assert {request.path for request in there.requests} == {"/data?signature=1"}


def test_a_remembered_redirect_that_ran_out_is_asked_for_again(open_url: Open) -> None:
    valid = "1"

    def check(handler: Handler) -> bool:
        return not handler.path.endswith(valid) and status(403)(handler)

    with (
        serving(FILES, lambda handler: check(handler) or handler.send_content(etag=False) is None) as there,
        behaving(lambda handler: redirect(f"{there.url}/data?{valid}")(handler)) as web,
    ):
        file = open_url(web.url + "/other")
        assert file.read(0, 5) == DATA[:5]
        valid = "2"
        assert file.read(100_000, 5) == DATA[100_000:100_005]


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://x"])
def test_redirects_to_other_schemes_are_not_followed(open_url: Open, place: str) -> None:
    with (
        behaving(redirect(place)) as web,
        pytest.raises(SourceUnavailable, match="no http or https URL, which is not followed"),
    ):
        open_url(web.url + "/data").read(0, 5)


def test_redirects_in_a_circle(open_url: Open) -> None:
    with behaving(redirect("/data")) as web, pytest.raises(SourceUnavailable, match="more than 10 redirects"):
        open_url(web.url + "/data").read(0, 5)


SECRETS = ("pa55word", "t0ken", "k3y", "c00kie")


def with_secrets(tmp_path: Path) -> HttpSettings:
    (tmp_path / "password").write_text("pa55word\n")
    (tmp_path / "headers").write_text("X-Key: k3y\n\nCookie: id=c00kie\n")
    return HttpSettings(
        timeout_s=30,
        retries=0,
        user="me",
        password_file=tmp_path / "password",
        header_file=tmp_path / "headers",
        headers=(("X-Token", "t0ken"),),
    )


def test_the_server_gets_the_secrets(open_url: Open, tmp_path: Path) -> None:
    with serving(FILES) as web:
        open_url(web.url + "/small", with_secrets(tmp_path)).read(0, 5)
        headers = web.requests[0].headers
        assert headers["authorization"] == "Basic bWU6cGE1NXdvcmQ="
        assert (headers["x-key"], headers["x-token"], headers["cookie"]) == ("k3y", "t0ken", "id=c00kie")


def test_another_host_gets_no_secret(open_url: Open, tmp_path: Path) -> None:
    with serving(FILES) as there:
        for place in (f"http://localhost:{there.port}/small", f"http://127.0.0.1:{there.port}/small"):
            with behaving(redirect(place)) as web:
                assert open_url(web.url + "/x", with_secrets(tmp_path)).read(0, 5) == b"01234"
        for request in there.requests:
            assert not {"authorization", "cookie", "x-key", "x-token"} & set(request.headers)


def test_the_same_host_gets_them_after_a_redirect(open_url: Open, tmp_path: Path) -> None:
    with behaving(first_requests(1, redirect("/small"))) as web:
        open_url(web.url + "/x", with_secrets(tmp_path)).read(0, 5)
        assert web.requests[1].headers["x-key"] == "k3y"


@pytest.mark.parametrize(
    "fault", [status(401), status(404), status(503), status(400), cut_off, redirect("ftp://x/t0ken"), short_body]
)
def test_no_message_holds_a_secret(
    open_url: Open, tmp_path: Path, fault: Behaviour, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    with behaving(fault) as web:
        url = web.url.replace("127", "me:pa55word@127") + "/data?token=t0ken"
        with pytest.raises(DafmountError) as caught:
            open_url(url, with_secrets(tmp_path)).read(100_000, 1000)
    with pytest.raises(DafmountError) as refused:
        open_url(url, with_secrets(tmp_path)).read(100_000, 1000)
    for error in (caught.value, refused.value):
        assert error.__suppress_context__ or error.__context__ is None
        assert not any(secret in str(error) for secret in SECRETS)
    assert not any(secret in caplog.text for secret in SECRETS)
    assert not any(secret in repr(with_secrets(tmp_path)) for secret in SECRETS)


def test_netrc(open_url: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password pa55word\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serving(FILES) as web:
        open_url(web.url + "/small").read(0, 5)
        assert web.requests[0].headers["authorization"] == "Basic bWU6cGE1NXdvcmQ="
        bearer = HttpSettings(headers=(("Authorization", "Bearer x"),))
        open_url(web.url + "/small", bearer).read(0, 5)
        assert web.requests[1].headers["authorization"] == "Bearer x"


def test_a_proxy_and_hosts_that_need_none(open_url: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"http://example.invalid/small": b"by proxy"}) as proxy, serving(FILES) as web:
        proxy.files = {"//example.invalid/small": b"by proxy", "/example.invalid/small": b"by proxy"}
        proxy.behave = lambda handler: handler.send_whole(200, b"by proxy") is None
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert open_url("http://example.invalid/small").read(0, 8) == b"by proxy"
        assert open_url(web.url + "/small").read(0, 5) == b"01234"
        assert [request.path for request in proxy.requests] == ["http://example.invalid/small"] * len(proxy.requests)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for 127.0.0.1, signed by itself."""
    place = tmp_path_factory.mktemp("tls") / "both.pem"
    key = place.with_name("key.pem")
    kind = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    names = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run(["openssl", "req", *kind, "-keyout", key, "-out", place, *names], check=True, capture_output=True)
    return place


def test_certificates(open_url: Open, certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    with serving(FILES) as web:
        web.use_tls(context)
        url = web.url.replace("http:", "https:") + "/data"
        with pytest.raises(SourceUnavailable, match=r"certificate is not trusted: self.signed certificate"):
            open_url(url).read(0, 5)
        trusting = HttpSettings(ca_file=certificate, timeout_s=30)
        assert open_url(url, trusting).read(100_000, 5) == DATA[100_000:100_005]
